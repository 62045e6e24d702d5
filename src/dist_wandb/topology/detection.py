"""Who this process is among all ranks. The only reader of launchers' environment variables.

Sources, in the order in which they are trusted: a framework's own object, an initialised ``torch.distributed``, one
consistent family of launcher variables, else a single process. A field that no source tells stays `None`: it is never
guessed, because a wrong node rank would write into another node's run.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from dist_wandb.errors import TopologyError

Leader = Literal["first", "last"]

_SLURM_BATCH_STEP = 4294967290  # steps at or above are SLURM's own (batch script, extern, interactive), not an srun
_MOST_NODES = 100_000
_LONGEST_NUMBER = 30  # characters; Python writes no number of more than 4,300 digits
_SHOWN = 100  # characters of a value, in messages


@dataclass(frozen=True)
class Topology:
    """Where one process stands among all processes of a job, in torchrun's words.

    Args:
        global_rank: Index of this process among all, 0 to `world_size` - 1.
        local_rank: Index of this process on its node, or `None` if unknown.
        node_rank: Index of this process's node, or `None` if unknown.
        world_size: Number of processes of the job.
        local_world_size: Number of processes on this node, or `None` if unknown.
        num_nodes: Number of nodes, or `None` if unknown. Not `world_size // local_world_size`: nodes may be uneven.
        sources: For each known field, where it came from (`"RANK (torchrun)"`); used in messages only.
        leader: Whether the first or the last rank of a job, or of a node, leads it. Megatron-LM has the results of the
            model on its last rank, which Accelerate therefore calls the main process.

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

    def __post_init__(self) -> None:
        self._fill_in_what_follows()
        self._require_at_least(1, "world_size", "local_world_size", "num_nodes")
        self._require_at_least(0, "global_rank", "local_rank", "node_rank")
        self._require_below("global_rank", "world_size")
        self._require_below("local_rank", "local_world_size")
        self._require_below("node_rank", "num_nodes")
        self._require_at_most("local_world_size", "world_size")
        self._require_at_most("num_nodes", "world_size")
        self._require_room_on_every_node()

    @classmethod
    def single(cls) -> Topology:
        """The topology of a job of one process."""
        return cls(0, 0, 0, 1, 1, 1, dict.fromkeys(_FIELDS, "no launcher was found"))

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> Topology:
        """Find out who this process is, without a framework's help.

        Args:
            environ: The environment variables to read; the process's own when `None`.

        Returns:
            What an initialised ``torch.distributed`` says, else what one family of launcher variables says, else the
            topology of a single process.

        Raises:
            TopologyError: The launcher's variables are impossible, contradict each other, or are only half there.
        """
        return cls.from_torch_distributed(environ) or cls.from_environ(environ) or cls.single()

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Topology | None:
        """Read the first family of launcher variables that is present.

        Args:
            environ: The environment variables to read; the process's own when `None`.

        Returns:
            The topology, or `None` where no launcher left any variables.

        Raises:
            TopologyError: As for `detect`.
        """
        environ = os.environ if environ is None else environ
        believed = _believed(environ)
        return None if believed is None else _agreeing(believed[1], environ)

    @classmethod
    def from_torch_distributed(cls, environ: Mapping[str, str] | None = None) -> Topology | None:
        """Read an initialised ``torch.distributed``; its layout over nodes from launcher variables that agree with it.

        Args:
            environ: The environment variables to read; the process's own when `None`.

        Returns:
            The topology, or `None` where no default process group is initialised.
        """
        if "torch.distributed" not in sys.modules:  # nobody can have initialised it: do not pay for the import
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
        local_rank: int | None = None,
        leader: Leader = "first",
        environ: Mapping[str, str] | None = None,
    ) -> Topology:
        """Take the ranks a framework tells; the rest from launcher variables that agree with them.

        Args:
            global_rank: Index of this process among all.
            world_size: Number of processes of the job.
            source: Where the ranks come from, for messages.
            local_rank: Index of this process on its node, where the framework knows it.
            leader: Which rank leads a job or a node, by the framework's rule.
            environ: The environment variables to read; the process's own when `None`.

        Returns:
            The topology. Launcher variables that contradict the framework are left aside: they are stale.
        """
        readings = _Readings({"global_rank": global_rank, "world_size": world_size}, source)
        if local_rank is not None:
            readings.add("local_rank", local_rank, source)
        return replace(_agreeing(readings, os.environ if environ is None else environ), leader=leader)

    @property
    def main_rank(self) -> int:
        """Global rank of the process that leads the job: what it was given holds for all ranks."""
        return 0 if self.leader == "first" else self.world_size - 1

    @property
    def knows_layout(self) -> bool:
        """Whether the place of this process among the nodes is known completely."""
        return None not in (self.local_rank, self.node_rank, self.local_world_size, self.num_nodes)

    def with_layout(self, nodes: Sequence[str]) -> Topology:
        """Complete the layout from what every rank says about its node.

        Args:
            nodes: For each global rank, a name of its node that is equal on one node and differs between nodes
                (`node_identity`). Nodes are counted in the order of their lowest global rank.

        Returns:
            The same rank, with every field known.

        Raises:
            TopologyError: `nodes` does not have one entry per rank.
        """
        if len(nodes) != self.world_size:
            raise TopologyError(
                f"{len(nodes)} ranks told their node, but the world size is {self.world_size} "
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
            sources={**self.sources, **dict.fromkeys(_LAYOUT_FIELDS, "what the ranks told each other")},
        )

    def origin(self, name: str) -> str:
        """Where the field `name` came from, as text for a message."""
        return self.sources.get(name, "given")

    def _fill_in_what_follows(self) -> None:
        """Fields that follow from others for certain: one process, or all processes on one node."""
        if self.world_size == 1:
            follows = {"local_rank": 0, "node_rank": 0, "local_world_size": 1, "num_nodes": 1}
        elif self.num_nodes == 1:
            follows = {"local_rank": self.global_rank, "node_rank": 0, "local_world_size": self.world_size}
        elif self.local_world_size == self.world_size:
            follows = {"local_rank": self.global_rank, "node_rank": 0, "num_nodes": 1}
        elif self.num_nodes == self.world_size:
            follows = {"local_rank": 0, "node_rank": self.global_rank, "local_world_size": 1}
        else:
            return
        for name, value in follows.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def _require_at_least(self, bound: int, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value < bound:
                raise TopologyError(f"{self._named(name)}, but it must be at least {bound}. {_HINT}")

    def _require_below(self, name: str, limit: str) -> None:
        value, bound = getattr(self, name), getattr(self, limit)
        if value is not None and bound is not None and value >= bound:
            raise TopologyError(f"{self._named(name)} must be less than {self._named(limit)}. {_HINT}")

    def _require_at_most(self, name: str, limit: str) -> None:
        value, bound = getattr(self, name), getattr(self, limit)
        if value is not None and bound is not None and value > bound:
            raise TopologyError(f"{self._named(name)} must not be greater than {self._named(limit)}. {_HINT}")

    def _require_room_on_every_node(self) -> None:
        """Every other node has at least one rank, and where there is no other node, all ranks are on this one."""
        if self.local_world_size is None or self.num_nodes is None:
            return
        elsewhere = self.world_size - self.local_world_size
        if elsewhere < self.num_nodes - 1 or (self.num_nodes == 1 and elsewhere > 0):
            raise TopologyError(
                f"{self._named('num_nodes')}, {self._named('local_world_size')} and {self._named('world_size')} "
                f"contradict each other. {_HINT}"
            )

    def _named(self, name: str) -> str:
        return f"{name}={getattr(self, name)} ({self.origin(name)})"


_HINT = "Check how the job was launched, and unset variables that another launcher left behind."
_FIELDS = tuple(f.name for f in fields(Topology) if f.name not in ("sources", "leader"))
_LAYOUT_FIELDS = ("local_rank", "node_rank", "local_world_size", "num_nodes")


class _Readings:
    """Values of topology fields, each with the place it was read from."""

    def __init__(self, values: Mapping[str, int], source: str) -> None:
        self.values: dict[str, int] = dict(values)
        self.sources: dict[str, str] = dict.fromkeys(values, source)

    def add(self, name: str, value: int, source: str) -> None:
        self.values[name] = value
        self.sources[name] = source

    @property
    def is_complete(self) -> bool:
        return {"global_rank", "world_size"} <= self.values.keys()

    def complete_on_first_node(self) -> bool:
        """Fill in the global rank of Lightning's own processes on the first node, where it is the local rank."""
        is_clear = {"world_size", "local_rank"} <= self.values.keys() and self.values.get("node_rank") == 0
        if is_clear and not self.is_complete:
            self.add("global_rank", self.values["local_rank"], self.sources["local_rank"])
        return is_clear

    def agrees_with(self, other: _Readings) -> bool:
        """Whether both tell the same ranks: launcher variables that do not are another launcher's, or stale."""
        shared = self.values.keys() & other.values.keys()
        return "world_size" in shared and all(self.values[name] == other.values[name] for name in shared)

    def complete_from(self, other: _Readings) -> None:
        for name, value in other.values.items():
            if name not in self.values:
                self.add(name, value, other.sources[name])

    def topology(self) -> Topology:
        values: dict[str, int | None] = dict.fromkeys(_LAYOUT_FIELDS)
        values.update(self.values)
        return Topology(**values, sources=dict(self.sources))  # type: ignore[arg-type]  # complete: see callers


@dataclass(frozen=True)
class _Family:
    """The variables of one launcher. `present` are those of which any shows that this launcher started the process."""

    launcher: str
    present: tuple[str, ...]
    variables: Mapping[str, str]

    def is_present(self, environ: Mapping[str, str]) -> bool:
        return any(name in environ for name in self.present)

    def read(self, environ: Mapping[str, str]) -> _Readings:
        readings = _Readings({}, self.launcher)
        for name, variable in self.variables.items():
            if variable in environ:
                readings.add(name, _integer(variable, environ[variable]), f"{variable} ({self.launcher})")
        return readings


class _Torchrun(_Family):
    """torchrun's variables. `--virtual-local-rank` sets LOCAL_RANK=0 in every process, which must not be believed."""

    def read(self, environ: Mapping[str, str]) -> _Readings:
        readings = super().read(environ)
        if readings.values.get("local_rank") == 0 and readings.values.get("local_world_size", 1) > 1:
            local_rank = _local_rank_by_position(readings.values, environ)
            del readings.values["local_rank"], readings.sources["local_rank"]
            if local_rank is not None:
                readings.add("local_rank", local_rank, "RANK and LOCAL_WORLD_SIZE (torchrun)")
        return readings


class _Slurm(_Family):
    """SLURM's variables. An sbatch shell has them as well, though only one process runs there: no step, no srun."""

    def is_present(self, environ: Mapping[str, str]) -> bool:
        step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
        if step is None:
            return environ.get("SLURM_PROCID", "0") != "0"
        is_number = re.fullmatch(r"[0-9]{1,20}", step)  # others are a step's as well
        return "SLURM_PROCID" in environ and not (is_number and int(step) >= _SLURM_BATCH_STEP)

    def read(self, environ: Mapping[str, str]) -> _Readings:
        readings = super().read(environ)
        for variable in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
            if variable in environ:
                tasks = _tasks_per_node(variable, environ[variable])
                readings.add("num_nodes", len(tasks), f"{variable} (SLURM)")
                node = readings.values.get("node_rank")
                if node is not None and node < len(tasks):
                    readings.add("local_world_size", tasks[node], f"{variable} (SLURM)")
                break
        return readings


def _env_variables(**others: str) -> dict[str, str]:
    return {"global_rank": "RANK", "world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", **others}


def _mpi_variables(world: str, local: str) -> dict[str, str]:
    return {
        "global_rank": f"{world}RANK",
        "world_size": f"{world}SIZE",
        "local_rank": f"{local}RANK",
        "local_world_size": f"{local}SIZE",
    }


# The innermost launcher comes first: torchrun under srun leaves both families, and its own is the true one.
_FAMILIES: tuple[_Family, ...] = (
    _Torchrun(
        "torchrun",
        ("TORCHELASTIC_RUN_ID",),
        _env_variables(node_rank="GROUP_RANK", local_world_size="LOCAL_WORLD_SIZE", num_nodes="GROUP_WORLD_SIZE"),
    ),
    _Family(
        "DeepSpeed",
        ("CROSS_RANK", "LOCAL_SIZE"),
        _env_variables(node_rank="CROSS_RANK", local_world_size="LOCAL_SIZE", num_nodes="CROSS_SIZE"),
    ),
    _Family(
        "RANK and WORLD_SIZE",
        ("RANK",),
        _env_variables(node_rank="NODE_RANK", local_world_size="LOCAL_WORLD_SIZE"),
    ),
    _Family(
        "Lightning",
        ("LOCAL_RANK", "WORLD_SIZE"),
        {"world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "node_rank": "NODE_RANK"},
    ),
    _Family(  # HOROVOD_CROSS_RANK counts only the nodes that have this local rank: left out
        "Horovod",
        ("HOROVOD_RANK",),
        _mpi_variables("HOROVOD_", "HOROVOD_LOCAL_"),
    ),
    _Family(  # OMPI_COMM_WORLD_NODE_RANK is a rank on the node, not of the node: left out
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK",),
        _mpi_variables("OMPI_COMM_WORLD_", "OMPI_COMM_WORLD_LOCAL_"),
    ),
    _Family("jsrun", ("JSM_NAMESPACE_RANK",), _mpi_variables("JSM_NAMESPACE_", "JSM_NAMESPACE_LOCAL_")),
    _Family("MVAPICH2", ("MV2_COMM_WORLD_RANK",), _mpi_variables("MV2_COMM_WORLD_", "MV2_COMM_WORLD_LOCAL_")),
    _Family(
        "MPICH",
        ("PMI_RANK",),
        {
            "global_rank": "PMI_RANK",
            "world_size": "PMI_SIZE",
            "local_rank": "MPI_LOCALRANKID",
            "local_world_size": "MPI_LOCALNRANKS",
        },
    ),
    _Slurm(
        "SLURM",
        ("SLURM_PROCID",),
        {
            "global_rank": "SLURM_PROCID",
            "world_size": "SLURM_NTASKS",
            "local_rank": "SLURM_LOCALID",
            "node_rank": "SLURM_NODEID",
        },
    ),
)

# Ranks that tell of other processes, by variables that do not tell how many there are.
_RANKS_ALONE = {
    "NODE_RANK": "Lightning",
    "PET_NODE_RANK": "torchrun",
    "PMIX_RANK": "PMIx",
    "PALS_RANKID": "PALS",
    "FLUX_TASK_RANK": "Flux",
}


def _believed(environ: Mapping[str, str]) -> tuple[_Family, _Readings] | None:
    """The first family that tells the ranks, and what it says; `None` where no family is present.

    The half of a family counts for nothing but an error, unless a later one says the same in full: a batch script that
    exports WORLD_SIZE for its srun leaves such a half.

    Raises:
        TopologyError: What is present cannot be read, or is only half there.
    """
    half: _Readings | None = None
    for family in _FAMILIES:
        if not family.is_present(environ):
            continue
        if half is None:
            readings = family.read(environ)
            if readings.values == {"world_size": 1}:  # so much is true of any process that nobody started
                continue
            if readings.is_complete or readings.complete_on_first_node():
                return family, readings
            half = readings
            continue
        with suppress(TopologyError):
            readings = family.read(environ)
            if readings.is_complete and readings.agrees_with(half):
                return family, readings
    if half is not None:
        raise _half_there(half)
    return None


def _agreeing(readings: _Readings, environ: Mapping[str, str]) -> Topology:
    """Complete readings from every family that tells the same ranks. A variable belongs to the first that has it."""
    taken: set[str] = set()
    for family in _FAMILIES:
        if not family.is_present(environ) or not taken.isdisjoint(family.variables.values()):
            continue
        taken.update(family.variables.values())
        try:
            other = family.read(environ)
        except TopologyError:  # another launcher's leftovers: nothing depends on them
            continue
        if readings.agrees_with(other):
            readings.complete_from(other)
    return readings.topology()


Verdict = Literal[
    "used",
    "agrees",
    "contradicts",
    "other rank",
    "outer",
    "half",
    "rank alone",
    "unreadable",
    "not asked",
    "not this process",
]


@dataclass(frozen=True)
class Trace:
    """What one launcher has left in the environment, and what is made of it.

    Args:
        launcher: Its name.
        variables: Its variables that are set, with their values.
        verdict: ``"used"``: the ranks are taken from it; ``"agrees"`` with what is used; ``"contradicts"`` that: it is
            stale, or was for another process; ``"other rank"``: it contradicts that, but for as many processes, so that
            either may be stale, as an ``export RANK=$SLURM_PROCID`` in a batch script is; ``"outer"``:
            it may well have started what is used, as srun or mpirun starts a torchrun on each node;
            ``"half"``: it lacks the global rank or the world size;
            ``"rank alone"``: a rank above 0 of a launcher whose variables do not tell more; ``"unreadable"``;
            ``"not asked"``: it would be used if those before it were not half there or unreadable;
            ``"not this process"``: of a batch shell, not of one of the processes that it starts.
        reason: Why, in words; empty if there is nothing to say.
    """

    launcher: str
    variables: Mapping[str, str]
    verdict: Verdict
    reason: str = ""


def traces(environ: Mapping[str, str] | None = None) -> list[Trace]:
    """What all launchers have left in the environment, in the order in which they are asked.

    Args:
        environ: The environment variables to read; the process's own when `None`.
    """
    environ = os.environ if environ is None else environ
    found: list[Trace] = []
    used: tuple[_Family, _Readings] | None = None
    with suppress(TopologyError):
        used = _believed(environ)
    told: set[str] = set()
    for family in _FAMILIES:
        names = dict.fromkeys((*family.present, *family.variables.values()))
        variables = {name: environ[name] for name in names if name in environ}
        own = {name: value for name, value in variables.items() if name not in told}
        if not own or not (family.is_present(environ) or isinstance(family, _Slurm)):
            continue
        told.update(own)
        found.append(Trace(family.launcher, own, *_judged(family, environ, used)))
    return found if used else [*found, *_ranks_alone(environ, told)]


def _judged(family: _Family, environ: Mapping[str, str], used: tuple[_Family, _Readings] | None) -> tuple[Verdict, str]:
    if not family.is_present(environ):
        return (
            "not this process",
            "srun has not started this process: the variables are those of the job, or of its batch shell",
        )
    if used is not None and family is used[0]:
        return "used", ""
    try:
        readings = family.read(environ)
    except TopologyError as error:
        return "unreadable", str(error)
    if used is not None:
        return _beside(readings, used[1])
    if not readings.is_complete:
        return "half", f"the {_missing(readings)} of this process is not told"
    return "not asked", "those before it come first"


def _ranks_alone(environ: Mapping[str, str], told: set[str]) -> list[Trace]:
    """Ranks above 0 that nothing completes: whoever set them has started other processes too."""
    return [
        Trace(launcher, {name: environ[name]}, "rank alone", f"{name}={environ[name]} tells of others, not how many")
        for name, launcher in _RANKS_ALONE.items()
        if name not in told and environ.get(name, "0").strip("0")
    ]


def _beside(readings: _Readings, used: _Readings) -> tuple[Verdict, str]:
    """What is made of readings that are not used. Inner launchers come first, so these may be of an outer one."""
    if readings.agrees_with(used):
        return "agrees", ""
    says = f"it says {_ranks(readings)}, but {_ranks(used)} is used"
    if _ranks(readings) == _ranks(used):
        values = ((name, value, used.values.get(name, value)) for name, value in readings.values.items())
        says = " and ".join(f"it says {name}={theirs}, not {ours}" for name, theirs, ours in values if theirs != ours)
    if readings.is_complete:
        theirs, ours = readings.values["world_size"], used.values["world_size"]
        if theirs < ours or theirs == used.values.get("num_nodes", 1) > 1:
            return "outer", f"{says}; it may have started the launcher that says so"
        if theirs == ours and readings.values["global_rank"] != used.values["global_rank"]:
            return "other rank", says
    return "contradicts", says


def _ranks(readings: _Readings) -> str:
    return f"rank {readings.values.get('global_rank', '?')} of {readings.values.get('world_size', '?')}"


def _half_there(readings: _Readings) -> TopologyError:
    there = ", ".join(f"{source}={readings.values[name]}" for name, source in readings.sources.items())
    return TopologyError(
        f"The environment tells {there}, but not the {_missing(readings)} of this process. These variables are half a "
        "launcher's, or stale. Initialise torch.distributed first, start the script with torchrun, or unset them."
    )


def _missing(readings: _Readings) -> str:
    return " and ".join(sorted({"global_rank", "world_size"} - readings.values.keys()))


def _local_rank_by_position(values: Mapping[str, int], environ: Mapping[str, str]) -> int | None:
    """The local rank of a torchrun process whose LOCAL_RANK is 0, from its place in the order of global ranks.

    torchrun numbers processes node after node, so the first and the last node's ranks are certain. In between, one
    visible device is what ``--virtual-local-rank`` leaves; only there the answer stays open.
    """
    rank, world, local_world = values.get("global_rank"), values.get("world_size"), values["local_world_size"]
    node, nodes = values.get("node_rank"), values.get("num_nodes")
    if rank is None or world is None or node is None:
        return 0
    if node == 0:
        return rank
    if nodes is not None and node == nodes - 1:
        return rank - (world - local_world)
    return None if re.fullmatch(r"[^,]+", environ.get("CUDA_VISIBLE_DEVICES", "")) else 0


def _tasks_per_node(variable: str, text: str) -> list[int]:
    """Expand SLURM's ``4(x2),3`` to ``[4, 4, 3]``."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part.strip())
        if match is None or len(tasks) + int(match[2] or 1) > _MOST_NODES:
            raise TopologyError(f"{variable}={text[:_SHOWN]!r} is not of SLURM's form '4(x2),3'. {_HINT}")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _integer(variable: str, text: str) -> int:
    try:
        return int(text if len(text) <= _LONGEST_NUMBER else "")
    except ValueError:
        raise TopologyError(
            f"{variable}={text[:_SHOWN]!r} in the environment is not a whole number, so this process's rank is "
            f"unknown. {_HINT}"
        ) from None


def node_identity(environ: Mapping[str, str] | None = None) -> str:
    """A name of this machine that is equal for all processes on a node and differs between nodes.

    The host name alone is not enough: containers share names, and two nodes of a test may share a host. So the
    kernel's boot id and the launcher's node rank, where it tells one, are part of it.

    Args:
        environ: The environment variables to read; the process's own when `None`.
    """
    environ = os.environ if environ is None else environ
    node_rank = environ.get("NODE_RANK", environ.get("GROUP_RANK", "0"))  # as Lightning's environment reads it
    return f"{socket.gethostname()}/{_boot_id()}/{node_rank}"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return ""


def wish(variable: str, environ: Mapping[str, str] | None = None) -> str | None:
    """What the user says of all runs of the job by an environment variable; `None` if it is unset."""
    return (os.environ if environ is None else environ).get(variable)


@dataclass(frozen=True)
class Launch:
    """What the launcher tells about the job as a whole, beyond who is who.

    Args:
        agent_store: Address of the store that torchrun's agent keeps for the whole job, as `(host, port)`.
        attempt: How often the launcher has restarted the job's processes.
        requeues: How often SLURM has started the job again.
        torchrun_start: A name of this start of torchrun on this node, equal for all its restarts of the processes.
        slurm_step: SLURM's name of the job and, within an srun, of the step, equal at all its starts of the job.
        parent_pid: Process id of the parent, which started this process if it is one of Lightning's scripts.
        node_rank: The node rank that `NODE_RANK` or `GROUP_RANK` tells, also before there are any ranks.
        is_lightning_child: Whether Lightning started this script again for a further rank of the first node.
    """

    agent_store: tuple[str, int] | None
    attempt: int
    requeues: int
    torchrun_start: str | None
    slurm_step: str | None
    parent_pid: int
    node_rank: int | None
    is_lightning_child: bool

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> Launch:
        """Read what the launcher left in the environment (the process's own when `environ` is `None`)."""
        environ = os.environ if environ is None else environ
        node_rank = next((name for name in ("NODE_RANK", "GROUP_RANK") if name in environ), None)
        return cls(
            agent_store=_agent_store(environ),
            attempt=_integer("TORCHELASTIC_RESTART_COUNT", environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            requeues=_integer("SLURM_RESTART_COUNT", environ.get("SLURM_RESTART_COUNT", "0")),
            torchrun_start=_torchrun_start(environ),
            slurm_step=_slurm_step(environ),
            parent_pid=os.getppid(),
            node_rank=None if node_rank is None else _integer(node_rank, environ[node_rank]),
            is_lightning_child="RANK" not in environ
            and environ.get("NODE_RANK") == "0"
            and environ.get("LOCAL_RANK", "0") != "0",
        )


def _agent_store(environ: Mapping[str, str]) -> tuple[str, int] | None:
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or "MASTER_ADDR" not in environ:
        return None
    return environ["MASTER_ADDR"], _integer("MASTER_PORT", environ.get("MASTER_PORT", ""))


def job_name(topology: Topology, environ: Mapping[str, str] | None = None) -> str | None:
    """A name that the launcher gives the job: equal on all ranks, another one for each job; `None` if there is none.

    SLURM starts a job again under the same name. TORCHELASTIC_RUN_ID is no such name: it is "none", or the user's own,
    the same for every start. A PMIx namespace that is a number is none by itself: jsrun counts from 1 in each job, and
    Open MPI 4 has 65536 of them, but gives each job a random key as well.

    Args:
        topology: Who this process is. A step of SLURM with other ranks is another job's, or the shell's that started
            this one, and perhaps many more.
        environ: The environment variables to read; the process's own when `None`.
    """
    environ = os.environ if environ is None else environ
    namespace, key = environ.get("PMIX_NAMESPACE", ""), environ.get("OMPI_MCA_orte_precondition_transports", "")
    if namespace and not namespace.startswith("slurm.") and (key or not namespace.isdigit()):
        return "-".join(filter(None, ("pmix", namespace, key)))
    slurm = next(family for family in _FAMILIES if isinstance(family, _Slurm))
    ranks = _Readings({"global_rank": topology.global_rank, "world_size": topology.world_size}, "")
    with suppress(TopologyError):
        if "SLURM_STEP_ID" in environ and slurm.is_present(environ) and ranks.agrees_with(slurm.read(environ)):
            return _slurm_step(environ)
    return None


def _slurm_step(environ: Mapping[str, str]) -> str | None:
    if "SLURM_JOB_ID" not in environ:
        return None
    return f"slurm-{environ['SLURM_JOB_ID']}-{environ.get('SLURM_STEP_ID', 'batch')}"


def _torchrun_start(environ: Mapping[str, str]) -> str | None:
    """The agent gives each of its starts a directory of a random name, where workers write what made them fail."""
    place = re.match(r"(.+)/attempt_\d+/", environ.get("TORCHELASTIC_ERROR_FILE", ""))
    return None if place is None else f"torchrun-{socket.gethostname()}-{place[1]}"
