"""What a logger knows about its process and related ones, before and after the Trainer has started processes."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import get_spawning_popen  # undocumented, but what torch.multiprocessing relies on too
from typing import TYPE_CHECKING

from lightning_utilities.core.rank_zero import rank_zero_only

from dist_wandb.errors import TopologyError
from dist_wandb.runs import handover, run_metadata
from dist_wandb.session import inherited_rank
from dist_wandb.topology.launch import Launch
from dist_wandb.topology.model import Topology

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import Run


@dataclass
class LaunchState:
    """What a logger knows about the process that created it, and about the children of that process."""

    parents_run: bytes | None = None  # the pickled run of the process that pickled this logger, if it had a run
    location: str | None = None  # address or directory of that run, which this process cannot determine
    is_announced: bool = False  # whether the line at the start was printed, or is left to a child process
    has_children: bool = False  # whether child processes open the runs
    home: int = field(default_factory=os.getpid)  # id of the process that created the logger

    @property
    def is_first_process(self) -> bool:
        """Whether this would be the process of a world of one, as far as is known before the Trainer starts."""
        rank: int = rank_zero_only.rank  # type: ignore[attr-defined]  # public, but set on a function
        return rank == 0 and not Launch.detect().node_rank and not self.has_children

    @property
    def is_child(self) -> bool:
        """Whether a spawn or fork strategy created this process, which ends with the Trainer's call."""
        return os.getpid() != self.home

    def for_copy(self, run: Run | None) -> LaunchState:
        """Return the state for a copy of the logger, such as in a spawned process; `run` is open in this process."""
        location = run_metadata.location(run) if run is not None else self.location
        copied = LaunchState(handover.pickled(run) or self.parents_run, location, self.is_announced, home=self.home)
        self.is_announced = self.is_announced or is_spawning()  # rank 0, which is spawned first, prints the line
        return copied


def is_spawning() -> bool:
    """Whether this process is pickling objects for a process that it starts."""
    return get_spawning_popen() is not None


def known_topology() -> Topology | None:
    """The topology of this rank; `None` while the Trainer may still start processes, or has not numbered them."""
    topology = Topology.from_torch_distributed()
    if topology is not None or Launch.detect().is_lightning_child:
        return topology
    if inherited_rank.holder() is not None:
        return Topology.single()
    with suppress(TopologyError):  # the launcher's variables are incomplete: Lightning numbers the ranks later
        return Topology.from_environ()
    return None
