"""Launchers and their environment variables: names, conditions, parsing, and detection of the launcher in use.

`LAUNCHERS` is the table. Special rules of torchrun and SLURM are in subclasses. To support another launcher, add a line
to the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from dist_wandb.errors import TopologyError

HINT = "Check how the job was launched, and unset variables that another launcher left behind."

Environ = Mapping[str, str]

_SLURM_BATCH_STEP = 4294967290  # step ids from here on are SLURM's own (batch script, extern, interactive), not an srun
_MOST_NODES = 100_000
_LONGEST_NUMBER = 30  # characters; Python cannot print a number of more than 4,300 digits
_SHOWN = 100  # characters of a value in messages


class Readings:
    """Values of topology fields, each with its source for messages."""

    def __init__(self, values: Mapping[str, int], source: str) -> None:
        self.values: dict[str, int] = dict(values)
        self.sources: dict[str, str] = dict.fromkeys(values, source)

    def add(self, name: str, value: int, source: str) -> None:
        self.values[name] = value
        self.sources[name] = source

    @property
    def missing(self) -> list[str]:  # that a process needs to know its rank
        return sorted({"global_rank", "world_size"} - self.values.keys())

    def agrees_with(self, other: Readings) -> bool:
        """Return whether both give the same ranks; otherwise one of them is stale, or from another launcher."""
        shared = self.values.keys() & other.values.keys()
        return "world_size" in shared and all(self.values[name] == other.values[name] for name in shared)


@dataclass(frozen=True)
class Launcher:
    """The variables of one launcher."""

    name: str
    present: tuple[str, ...]  # variables of which any one shows that this launcher has started the process
    variables: Mapping[str, str]  # by topology field

    def is_present(self, environ: Environ) -> bool:
        return any(name in environ for name in self.present)

    def read(self, environ: Environ) -> Readings:
        readings = Readings({}, self.name)
        for name, variable in self.variables.items():
            if variable in environ:
                readings.add(name, integer(variable, environ[variable]), f"{variable} ({self.name})")
        return readings


class _Torchrun(Launcher):
    """torchrun's variables. `--virtual-local-rank` sets LOCAL_RANK=0 in every process, which is not the local rank."""

    def read(self, environ: Environ) -> Readings:
        readings = super().read(environ)
        values = readings.values
        if values.get("local_rank") == 0 and values.get("local_world_size", 1) > 1:
            del readings.values["local_rank"], readings.sources["local_rank"]
            local_rank: int | None = 0
            rank, world, local_world = (*map(values.get, ("global_rank", "world_size")), values["local_world_size"])
            node, nodes = values.get("node_rank"), values.get("num_nodes")
            # torchrun numbers processes node by node, so the ranks of the first and the last node are certain. On
            # others, `--virtual-local-rank` leaves a single visible device; only then the local rank is unknown.
            if rank is not None and world is not None and node is not None:
                if node == 0:
                    local_rank = rank
                elif nodes is not None and node == nodes - 1:
                    local_rank = rank - (world - local_world)
                elif re.fullmatch(r"[^,]+", environ.get("CUDA_VISIBLE_DEVICES", "")):
                    local_rank = None
            if local_rank is not None:
                readings.add("local_rank", local_rank, "RANK and LOCAL_WORLD_SIZE (torchrun)")
        return readings


class _Slurm(Launcher):
    """SLURM's variables. An sbatch shell, which is a single process without a step or srun, has them as well."""

    def is_present(self, environ: Environ) -> bool:
        step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
        if step is None:
            return environ.get("SLURM_PROCID", "0") != "0"
        is_number = re.fullmatch(r"[0-9]{1,20}", step)  # other values are valid steps as well
        return "SLURM_PROCID" in environ and not (is_number and int(step) >= _SLURM_BATCH_STEP)

    def read(self, environ: Environ) -> Readings:  # with the tasks per node, which one variable lists for all nodes
        readings = super().read(environ)
        for variable in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
            if variable in environ:
                tasks, text = list[int](), environ[variable]
                for part in text.split(","):  # "4(x2),3" is 4, 4, 3
                    match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part.strip())
                    if match is None or len(tasks) + int(match[2] or 1) > _MOST_NODES:
                        raise TopologyError(f"{variable}={text[:_SHOWN]!r} is not of SLURM's form '4(x2),3'. {HINT}")
                    tasks += [int(match[1])] * int(match[2] or 1)
                readings.add("num_nodes", len(tasks), f"{variable} (SLURM)")
                node = readings.values.get("node_rank")
                if node is not None and node < len(tasks):
                    readings.add("local_world_size", tasks[node], f"{variable} (SLURM)")
                break
        return readings


def _variables(rank: str, size: str, **others: str) -> dict[str, str]:
    return {"global_rank": rank, "world_size": size, **others}


def _env_variables(**others: str) -> dict[str, str]:
    return _variables("RANK", "WORLD_SIZE", local_rank="LOCAL_RANK", **others)


def _mpi(name: str, prefix: str) -> Launcher:
    local = {"local_rank": f"{prefix}LOCAL_RANK", "local_world_size": f"{prefix}LOCAL_SIZE"}
    return Launcher(name, (f"{prefix}RANK",), _variables(f"{prefix}RANK", f"{prefix}SIZE", **local))


SLURM = _Slurm(
    "SLURM",
    ("SLURM_PROCID",),
    _variables("SLURM_PROCID", "SLURM_NTASKS", local_rank="SLURM_LOCALID", node_rank="SLURM_NODEID"),
)

# The innermost launcher comes first: torchrun under srun sets both families, and torchrun's is the right one.
LAUNCHERS: tuple[Launcher, ...] = (
    _Torchrun(
        "torchrun",
        ("TORCHELASTIC_RUN_ID",),
        _env_variables(node_rank="GROUP_RANK", local_world_size="LOCAL_WORLD_SIZE", num_nodes="GROUP_WORLD_SIZE"),
    ),
    Launcher(
        "DeepSpeed",
        ("CROSS_RANK", "LOCAL_SIZE"),
        _env_variables(node_rank="CROSS_RANK", local_world_size="LOCAL_SIZE", num_nodes="CROSS_SIZE"),
    ),
    Launcher(
        "RANK and WORLD_SIZE", ("RANK",), _env_variables(node_rank="NODE_RANK", local_world_size="LOCAL_WORLD_SIZE")
    ),
    Launcher(
        "Lightning",
        ("LOCAL_RANK", "WORLD_SIZE"),
        {"world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "node_rank": "NODE_RANK"},
    ),
    _mpi("Horovod", "HOROVOD_"),  # not HOROVOD_CROSS_RANK, which counts only nodes that have this local rank
    _mpi("Open MPI", "OMPI_COMM_WORLD_"),  # not OMPI_COMM_WORLD_NODE_RANK, which is a rank on the node, not of the node
    _mpi("jsrun", "JSM_NAMESPACE_"),
    _mpi("MVAPICH2", "MV2_COMM_WORLD_"),
    Launcher(
        "MPICH",
        ("PMI_RANK",),
        _variables("PMI_RANK", "PMI_SIZE", local_rank="MPI_LOCALRANKID", local_world_size="MPI_LOCALNRANKS"),
    ),
    SLURM,
)

RANKS_ALONE = {
    "NODE_RANK": "Lightning",
    "PET_NODE_RANK": "torchrun",
    "PMIX_RANK": "PMIx",
    "PALS_RANKID": "PALS",
    "FLUX_TASK_RANK": "Flux",
    "SUBMITIT_LOCAL_GLOBALRANK": "submitit",
}
"""Variables with a rank, by launchers whose variables do not give the ranks of a job (submitit: its local executor)."""


def started_by(environ: Environ) -> tuple[Launcher, Readings] | None:
    # Returns the first launcher that gives the ranks, and its readings; `None` if no launcher is present. Raises
    # TopologyError if variables cannot be read, or are incomplete and no later launcher agrees with them and is
    # complete. For example, a batch script that exports WORLD_SIZE for its srun leaves such an incomplete set.
    incomplete: Readings | None = None
    for launcher in LAUNCHERS:
        if not launcher.is_present(environ):
            continue
        if incomplete is None:
            readings = launcher.read(environ)
            if readings.values == {"world_size": 1}:  # also true of a process without a launcher
                continue
            values = readings.values
            if readings.missing and {"world_size", "local_rank"} <= values.keys() and values.get("node_rank") == 0:
                # Lightning's processes: on the first node, the local rank is the global rank.
                readings.add("global_rank", values["local_rank"], readings.sources["local_rank"])
            if not readings.missing:
                return launcher, readings
            incomplete = readings
            continue
        with suppress(TopologyError):
            readings = launcher.read(environ)
            if not readings.missing and readings.agrees_with(incomplete):
                return launcher, readings
    if incomplete is None:
        return None
    known = ", ".join(f"{source}={incomplete.values[name]}" for name, source in incomplete.sources.items())
    raise TopologyError(
        f"The environment gives {known}, but not the {' and '.join(incomplete.missing)} of this process. These "
        "variables are incomplete, or stale. Initialise torch.distributed first, start the script with torchrun, or "
        "unset them."
    )


def complete(readings: Readings, environ: Environ) -> Readings:
    """Complete readings from every launcher that agrees with them. Each variable counts for one launcher only."""
    taken: set[str] = set()
    for launcher in LAUNCHERS:
        if not launcher.is_present(environ) or not taken.isdisjoint(launcher.variables.values()):
            continue
        taken.update(launcher.variables.values())
        with suppress(TopologyError):  # stale variables of another launcher, which are not needed
            other = launcher.read(environ)
            if readings.agrees_with(other):
                for name, value in other.values.items():
                    if name not in readings.values:
                        readings.add(name, value, other.sources[name])
    return readings


def integer(variable: str, text: str) -> int:
    try:
        return int(text if len(text) <= _LONGEST_NUMBER else "")
    except ValueError:
        raise TopologyError(
            f"{variable}={text[:_SHOWN]!r} in the environment is not a whole number, so this process's rank is "
            f"unknown. {HINT}"
        ) from None
