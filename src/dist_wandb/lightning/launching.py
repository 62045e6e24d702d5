"""What a logger knows before the ranks are known, while Lightning may still start processes of the script.

Each process knows itself and related ones (`LaunchState`). The main process passes base ids to the further processes
that the ddp strategy starts (`ScriptIds`), and config and metadata of a run that is open already, because scripts may
read them before `fit`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import get_spawning_popen  # undocumented, but what torch.multiprocessing relies on too
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_only

from dist_wandb.errors import TopologyError
from dist_wandb.job.launch import Launch
from dist_wandb.job.topology import Topology
from dist_wandb.runs import run_metadata, wandb_private
from dist_wandb.session import inherited_rank
from dist_wandb.settings.config_values import given_values

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun, Run


@dataclass
class LaunchState:
    """What a logger knows about the process that created it, and about the children of that process."""

    parents_run: bytes | None = None  # the pickled run of the process that pickled this logger, if it had a run
    location: str | None = None  # address or directory of that run, which this process cannot determine
    other_axis: str | None = None  # the x axis of the script's session with that run, if it is not the logger's
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

    def for_copy(self, run: Run | None, other_axis: str | None) -> LaunchState:
        """Return the state for a copy of the logger, such as in a spawned process; `run` is open in this process."""
        location = run_metadata.location(run) if run is not None else self.location
        copied = LaunchState(
            wandb_private.pickled_run(run) or self.parents_run, location, other_axis, self.is_announced, home=self.home
        )
        self.is_announced = self.is_announced or is_spawning()  # rank 0, which is spawned first, prints the line
        return copied


def is_spawning() -> bool:
    """Whether this process is pickling objects for a process that it starts."""
    return get_spawning_popen() is not None


def known_topology() -> Topology | None:
    """The topology of this rank; `None` while the Trainer may still start processes, or has not numbered them."""
    group = inherited_rank.in_group()
    if group is not None:
        return group
    with suppress(TopologyError):  # the launcher's variables are incomplete: Lightning numbers the ranks later
        topology, rank_holder = inherited_rank.known()
        return None if rank_holder is None and Launch.detect().is_lightning_child else topology
    return None


class ScriptIds:
    """Base ids that Lightning's main process passes to the further processes of the script, one per logger.

    These processes need the id before a process group exists, and know only that the main process is their parent. So
    the main process leaves its ids in a note (`inherited_rank.tell`).
    """

    def __init__(self) -> None:
        self._next = 0
        self._offered: list[str] = []  # as JSON, for each logger: its base id, perhaps with what to tell of its run
        self._written_by: int | None = None  # the process that wrote the file

    def next_id(self, proposal: str) -> tuple[int, str]:
        """Return number and base id of the next logger: the parent's id, else `proposal`, which is then passed on."""
        number, self._next = self._next, self._next + 1
        if not Launch.detect().is_lightning_child:
            self.offer(number, proposal)
            return number, proposal
        return number, self._offer_of_parent(number)[0] or proposal

    def run_of(self, number: int) -> Mapping[str, Any]:
        """Return what the main process has told of the run of logger `number`; nothing if it has not opened it."""
        run = self._offer_of_parent(number)[1] if Launch.detect().is_lightning_child else None
        return run if isinstance(run, dict) else {}

    def offer(self, number: int, base_id: str, run: Mapping[str, Any] | None = None) -> None:
        """Pass the base id of logger `number`, and what to tell of its run, to processes started from now on."""
        if self._written_by != os.getpid():
            self._offered, self._written_by = [], os.getpid()
        self._offered += ['""'] * (number + 1 - len(self._offered))
        self._offered[number] = json.dumps(base_id if run is None else [base_id, run])
        with suppress(OSError):  # without the note, further processes get the id once there is a process group
            inherited_rank.tell("ids", f"[{', '.join(self._offered)}]")

    def _offer_of_parent(self, number: int) -> tuple[str, Any]:
        """The base id and the run of a logger, in the note of the parent process."""
        offered = inherited_rank.told("ids", os.getppid()) or []
        offer = offered[number] if number < len(offered) else ""
        base_id, run = offer if isinstance(offer, list) else (offer, None)
        return base_id, run


script_ids: ScriptIds = ScriptIds()


def told_of(run: AnyRun) -> dict[str, Any]:
    """Return what further processes of the script are told of a run: its config, without secrets, and its metadata."""
    config = run_metadata.arguments_for_others({"config": given_values(getattr(run, "config", None))})
    return {**config, "metadata": run_metadata.metadata_of(run)}
