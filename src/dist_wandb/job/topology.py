"""Topology: the position of one process among all processes of a job.

Sources, by descending priority: a framework's own object, an initialised ``torch.distributed``, one consistent
launcher, otherwise a single process. A field without a source stays `None`. It is never guessed, because a process with
a wrong node rank would write to another node's run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from dist_wandb.errors import ConfigurationError, TopologyError
from dist_wandb.job.launchers import HINT, Environ, Readings, complete, started_by

Leader = Literal["first", "last"]


@dataclass(frozen=True)
class Topology:
    """The position of one process among all processes of a job, in torchrun's terms.

    Args:
        global_rank: Index of this process among all, 0 to `world_size` - 1.
        local_rank: Index of this process on its node, or `None` if unknown.
        node_rank: Index of this process's node, or `None` if unknown.
        world_size: Number of processes of the job.
        local_world_size: Number of processes on this node, or `None` if unknown.
        num_nodes: Number of nodes, or `None` if unknown. Not `world_size // local_world_size`: nodes may be uneven.
        sources: The source of each known field (`"RANK (torchrun)"`), for messages only.
        leader: Whether the first or the last rank of the job, and of each node, leads it. Megatron-LM has the results
            of the model on its last rank, which Accelerate therefore calls the main process.
        primary_rank: Global rank that leads the job, if the user has given one; `None` for the one by `leader`.

    Raises:
        TopologyError: A value is impossible, or two values contradict each other.

    Example:
        Rank 5 of two nodes with four processes each::

            Topology(global_rank=5, local_rank=1, node_rank=1, world_size=8, local_world_size=4, num_nodes=2)
    """

    global_rank: int
    local_rank: int | None
    node_rank: int | None
    world_size: int
    local_world_size: int | None
    num_nodes: int | None
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    leader: Leader = "first"
    primary_rank: int | None = None

    def __post_init__(self) -> None:
        # Fields that follow from others: for one process, all processes on one node, or one process per node.
        rank, size, implied = self.global_rank, self.world_size, dict[str, int]()
        if 1 in (size, self.num_nodes) or self.local_world_size == size:
            implied = {"local_rank": rank, "node_rank": 0, "local_world_size": size, "num_nodes": 1}
        elif self.num_nodes == size:
            implied = {"local_rank": 0, "node_rank": rank, "local_world_size": 1}
        for name, value in implied.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        _check(self)

    @classmethod
    def single(cls) -> Topology:
        """Return the topology of a job of one process."""
        return cls(0, 0, 0, 1, 1, 1, dict.fromkeys(_FIELDS, "no launcher was found"))

    @classmethod
    def detect(cls, environ: Environ | None = None) -> Topology:
        """Detect the topology of this process without a framework.

        Args:
            environ: The environment variables to read; those of this process if `None`.

        Returns:
            The topology of an initialised ``torch.distributed``, otherwise of one launcher's variables, otherwise of a
            single process.

        Raises:
            TopologyError: The launcher's variables are impossible, contradict each other, or are incomplete.
        """
        return cls.from_torch_distributed(environ) or cls.from_environ(environ) or cls.single()

    @classmethod
    def from_environ(cls, environ: Environ | None = None) -> Topology | None:
        """Read the variables of the first launcher that is present; `None` without any. Errors as for `detect`."""
        environ = os.environ if environ is None else environ
        found = started_by(environ)
        return None if found is None else cls._of(complete(found[1], environ))

    @classmethod
    def from_torch_distributed(cls, environ: Environ | None = None) -> Topology | None:
        """Read an initialised ``torch.distributed``, and other fields as in `from_framework`; `None` without one."""
        if "torch.distributed" not in sys.modules:  # then it is not initialised, and importing it takes long
            return None
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return None
        return cls.from_framework(dist.get_rank(), dist.get_world_size(), "torch.distributed", environ=environ)

    @classmethod
    def from_framework(
        cls,
        global_rank: int,
        world_size: int,
        source: str,
        *,
        leader: Leader = "first",
        environ: Environ | None = None,
    ) -> Topology:
        """Take the ranks from a framework (`source`); launcher variables that contradict it are stale, and ignored."""
        readings = Readings({"global_rank": global_rank, "world_size": world_size}, source)
        return replace(cls._of(complete(readings, os.environ if environ is None else environ)), leader=leader)

    @classmethod
    def _of(cls, readings: Readings) -> Topology:
        values: dict[str, Any] = {**dict.fromkeys(_LAYOUT_FIELDS), **readings.values}
        return cls(**values, sources=dict(readings.sources))

    @property
    def coordinator(self) -> int:
        """Global rank of the coordinator, whose base id and arguments apply to all ranks of the job."""
        if self.primary_rank is not None:
            return self.primary_rank
        return 0 if self.leader == "first" else self.world_size - 1

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank is the coordinator."""
        return self.global_rank == self.coordinator

    @property
    def knows_layout(self) -> bool:
        """Whether all fields of the layout over nodes are known."""
        return None not in (self.local_rank, self.node_rank, self.local_world_size, self.num_nodes)

    def led_by(self, primary_rank: int | None) -> Topology:
        """Return the same topology with another leader; raise ConfigurationError if there is no such rank.

        Negative ranks count from the end. With -1, the last rank of each node also leads its node. `None` keeps the
        current leader.
        """
        if primary_rank is None:
            return self
        if not -self.world_size <= primary_rank < self.world_size:
            raise ConfigurationError(
                f"primary_rank={primary_rank} is not a rank of this job of {self.world_size} "
                f"({self.origin('world_size')}). Pass a rank from 0 to {self.world_size - 1}, or -1 for the last."
            )
        leader: Leader = "last" if primary_rank == -1 else "first"
        return replace(self, leader=leader, primary_rank=primary_rank % self.world_size)

    def with_layout(self, nodes: Sequence[str]) -> Topology:
        """Complete the layout from the nodes of all ranks, numbered by their lowest global ranks."""
        if len(nodes) != self.world_size:
            raise TopologyError(
                f"{len(nodes)} ranks published their node, but the world size is {self.world_size} "
                f"({self.origin('world_size')}). Start every rank with the same world size."
            )
        mine = nodes[self.global_rank]
        order = list(dict.fromkeys(nodes))
        peers = [rank for rank, node in enumerate(nodes) if node == mine]
        return replace(
            self,
            local_rank=peers.index(self.global_rank),
            node_rank=order.index(mine),
            local_world_size=len(peers),
            num_nodes=len(order),
            sources={**self.sources, **dict.fromkeys(_LAYOUT_FIELDS, "what the ranks exchanged")},
        )

    @property
    def is_unconnected(self) -> bool:
        """Whether Lightning has started this process and has yet to connect the ranks, of which the first knew none."""
        return self.global_rank > 0 and self.origin("global_rank") == "LOCAL_RANK (Lightning)"

    def origin(self, name: str) -> str:
        """Return the source of a field, for messages."""
        return self.sources.get(name, "given")


_FIELDS = tuple(f.name for f in fields(Topology) if f.name not in ("sources", "leader", "primary_rank"))
_LAYOUT_FIELDS = ("local_rank", "node_rank", "local_world_size", "num_nodes")


def _check(topology: Topology) -> None:
    def named(name: str) -> str:
        return f"{name}={getattr(topology, name)} ({topology.origin(name)})"

    for name in _FIELDS:
        value, least = getattr(topology, name), int(name in ("world_size", "local_world_size", "num_nodes"))
        if value is not None and value < least:
            raise TopologyError(f"{named(name)}, but it must be at least {least}. {HINT}")
    for name, limit, is_rank in (
        ("global_rank", "world_size", True),
        ("local_rank", "local_world_size", True),
        ("node_rank", "num_nodes", True),
        ("local_world_size", "world_size", False),
        ("num_nodes", "world_size", False),
    ):
        value, bound = getattr(topology, name), getattr(topology, limit)
        if value is not None and bound is not None and value > bound - is_rank:
            if is_rank:
                raise TopologyError(f"{named(name)} must be less than {named(limit)}. {HINT}")
            raise TopologyError(f"{named(name)} must not be greater than {named(limit)}. {HINT}")
    if topology.local_world_size is None or topology.num_nodes is None:
        return
    elsewhere = topology.world_size - topology.local_world_size  # at least one rank on every other node
    if elsewhere < topology.num_nodes - 1 or (topology.num_nodes == 1 and elsewhere > 0):
        raise TopologyError(
            f"{named('num_nodes')}, {named('local_world_size')} and {named('world_size')} contradict each other. {HINT}"
        )
