"""How this process was started: by which launchers and processes, and as a part of which job and node.

The variables of all launchers in the environment may cast doubt on the topology of this process. The startup warnings
of a session and ``dist-wandb doctor`` report it.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dist_wandb.errors import TopologyError
from dist_wandb.job.launchers import LAUNCHERS, RANKS_ALONE, SLURM, Environ, Launcher, Readings, integer, started_by
from dist_wandb.job.topology import Topology

_OF_JOB = frozenset({"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "SLURM_STEP_ID", "PMIX_NAMESPACE"})

Status = Literal[
    "used",  # the ranks are taken from it
    "agrees",  # with the used one
    "contradicts",  # the used one, because it is stale or meant for another process
    # another rank of as many processes: either may be stale, such as `export RANK=$SLURM_PROCID` in a batch script
    "other rank",
    "outer",  # has probably started the used launcher, as srun or mpirun starts a torchrun on each node
    "incomplete",  # lacks the global rank or the world size
    "rank alone",  # a rank above 0 of a launcher whose variables do not give more
    "unreadable",  # a variable is malformed
    "not asked",  # would be used, but an earlier launcher is incomplete or unreadable
    "not this process",  # belongs to a batch shell, not to a process that the shell started
]


@dataclass(frozen=True)
class Launch:
    """The launcher's variables about the whole job."""

    agent_store: tuple[str, int] | None  # host and port of the store of torchrun's agent
    attempt: int  # number of restarts that the node's agent has counted: not those because of another node
    requeues: int  # number of restarts of the job by SLURM
    rendezvous: str  # a name of this start of the job's processes
    torchrun_start: str | None  # a name of this start of torchrun on this node, equal for all restarts of its processes
    # SLURM's name of the job and, within an srun, of the step; equal for all restarts of the job
    slurm_step: str | None
    node_rank: int | None  # from `NODE_RANK` or `GROUP_RANK`, which may be set before there are ranks
    is_lightning_child: bool  # whether Lightning has started this script again for another rank of the first node

    @classmethod
    def detect(cls, environ: Environ = os.environ) -> Launch:
        node_rank = next((name for name in ("NODE_RANK", "GROUP_RANK") if name in environ), None)
        has_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "MASTER_ADDR" in environ
        # torchrun's agent uses a new random directory for the error files of its workers
        errors = re.match(r"(.+)/attempt_\d+/", environ.get("TORCHELASTIC_ERROR_FILE", ""))
        port = integer("MASTER_PORT", environ.get("MASTER_PORT", "")) if has_agent else 0
        attempt = integer("TORCHELASTIC_RESTART_COUNT", environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return cls(
            agent_store=(environ["MASTER_ADDR"], port) if has_agent else None,
            attempt=attempt,
            requeues=integer("SLURM_RESTART_COUNT", environ.get("SLURM_RESTART_COUNT", "0")),
            rendezvous=f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}/{attempt}",
            torchrun_start=f"torchrun-{socket.gethostname()}-{errors[1]}" if errors else None,
            slurm_step=_slurm_step(environ),
            node_rank=None if node_rank is None else integer(node_rank, environ[node_rank]),
            is_lightning_child="RANK" not in environ
            and environ.get("NODE_RANK") == "0"
            and environ.get("LOCAL_RANK", "0") != "0",
        )


def job_name(topology: Topology, environ: Environ = os.environ) -> str | None:
    """Return the launcher's name for the job, equal on all ranks and unique to the job; `None` if there is none.

    SLURM restarts a job under the same name. TORCHELASTIC_RUN_ID is not suitable: it is "none", or chosen by the user,
    and the same for every start. A PMIx namespace that is a number is not unique: jsrun counts from 1 in each job, and
    Open MPI 4 has only 65536 of them, but it also gives each job a random key. A SLURM step with other ranks than
    `topology` belongs to another job, or to the shell that has started this one, and perhaps many more.
    """
    namespace, key = environ.get("PMIX_NAMESPACE", ""), environ.get("OMPI_MCA_orte_precondition_transports", "")
    if namespace and not namespace.startswith("slurm.") and (key or not namespace.isdigit()):
        return "-".join(filter(None, ("pmix", namespace, key)))
    ranks = Readings({"global_rank": topology.global_rank, "world_size": topology.world_size}, "")
    with suppress(TopologyError):
        if "SLURM_STEP_ID" in environ and SLURM.is_present(environ) and ranks.agrees_with(SLURM.read(environ)):
            return _slurm_step(environ)
    return None


def node_identity(environ: Environ = os.environ) -> str:
    # Equal for all processes of this node. The host name is not sufficient: containers share names, and two nodes of a
    # test may share a host. So it includes the kernel's boot id and the launcher's node rank.
    node_rank = environ.get("NODE_RANK", environ.get("GROUP_RANK", "0"))  # like Lightning's environment
    boot_id = ""
    with suppress(OSError):  # not Linux
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()}/{boot_id}/{node_rank}"


def inherited_variables() -> dict[str, str]:
    """Return the variables that name a rank and its job, which a rank's own child processes inherit."""
    names = {name for launcher in LAUNCHERS for name in (*launcher.present, *launcher.variables.values())}
    return {name: os.environ[name] for name in sorted(names | _OF_JOB) if name in os.environ}


def job_setting(variable: str) -> str | None:
    """Return the value of an environment variable that applies to all runs of the job; `None` if it is unset."""
    return os.environ.get(variable)


def _slurm_step(environ: Environ) -> str | None:
    if "SLURM_JOB_ID" not in environ:
        return None
    return f"slurm-{environ['SLURM_JOB_ID']}-{environ.get('SLURM_STEP_ID', 'batch')}"


def ancestors() -> Iterator[int]:
    """Yield the ids of the processes that have started this one, the parent first; without ``/proc`` only that."""
    process = os.getppid()
    while process > 1:
        yield process
        try:
            stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        process = int(stat.rpartition(")")[2].split()[1])  # after the name of the program


@dataclass(frozen=True)
class DetectedLauncher:
    """The variables of one launcher in the environment, and their status."""

    name: str
    variables: Environ  # those that are set
    status: Status
    reason: str = ""  # empty if there is nothing to add

    @property
    def assignments(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.variables.items())


def detected_launchers(environ: Environ = os.environ) -> list[DetectedLauncher]:
    found: list[DetectedLauncher] = []
    used: tuple[Launcher, Readings] | None = None
    with suppress(TopologyError):
        used = started_by(environ)
    seen: set[str] = set()
    for launcher in LAUNCHERS:
        names = dict.fromkeys((*launcher.present, *launcher.variables.values()))
        own = {name: environ[name] for name in names if name in environ and name not in seen}
        if own and (launcher is SLURM or launcher.is_present(environ)):
            seen.update(own)
            found.append(DetectedLauncher(launcher.name, own, *_status_of(launcher, environ, used)))
    # Launchers that give only a rank above 0, which shows that they have started other processes as well.
    for name, alone in RANKS_ALONE.items():
        if not used and name not in seen and environ.get(name, "0").strip("0"):
            reason = f"{name}={environ[name]} shows that there are other ranks"
            found.append(DetectedLauncher(alone, {name: environ[name]}, "rank alone", reason))
    return found


def doubts_of(found: Sequence[DetectedLauncher], topology: Topology) -> list[str]:
    # Warns of launchers that seem to have started this process as another rank than that of `topology`, that of their
    # variables.
    used = next((launcher for launcher in found if launcher.status == "used"), None)
    doubts: list[str] = []
    for launcher in found:
        if launcher.status == "rank alone":
            doubts.append(
                f"This process is treated as a job of its own, but {launcher.name}'s {launcher.reason}. If it is one "
                "of several ranks, open the run after init_process_group, or set RANK and WORLD_SIZE."
            )
        elif used is not None and launcher.status == "other rank":
            doubts.append(
                f"{used.name} and {launcher.name} give this process different ranks: {launcher.reason}. Unset those "
                f"that are stale: {used.assignments} (a batch script may have exported them); or {launcher.assignments}"
            )
        elif used is not None and launcher.status == "contradicts" and topology.world_size == 1:
            doubts.append(
                f"{used.name} makes this process a job of its own ({used.assignments}), but {launcher.name} seems to "
                f"have started it: {launcher.reason}. If it is one of several ranks, unset the former (an image or a "
                f"shell may have set them) or open the run after init_process_group; else unset {launcher.assignments}"
            )
    return doubts


def _status_of(launcher: Launcher, environ: Environ, used: tuple[Launcher, Readings] | None) -> tuple[Status, str]:
    if not launcher.is_present(environ):
        return (
            "not this process",
            "srun has not started this process: the variables are those of the job, or of its batch shell",
        )
    if used is not None and launcher is used[0]:
        return "used", ""
    try:
        readings = launcher.read(environ)
    except TopologyError as error:
        return "unreadable", str(error)
    if used is not None:
        return _compared(readings, used[1])
    if readings.missing:
        return "incomplete", f"the {' and '.join(readings.missing)} of this process is missing"
    return "not asked", "launchers before it have priority"


def _compared(readings: Readings, used: Readings) -> tuple[Status, str]:
    """Return the status of readings that are not used. An outer launcher may have set them: inner ones come first."""
    if readings.agrees_with(used):
        return "agrees", ""
    reason = f"it set {_ranks(readings)}, but {_ranks(used)} is used"
    if _ranks(readings) == _ranks(used):
        values = ((name, value, used.values.get(name, value)) for name, value in readings.values.items())
        reason = " and ".join(f"it set {name}={theirs}, not {ours}" for name, theirs, ours in values if theirs != ours)
    if not readings.missing:
        theirs, ours = readings.values["world_size"], used.values["world_size"]
        if theirs < ours or theirs == used.values.get("num_nodes", 1) > 1:
            return "outer", f"{reason}; it may have started the launcher that is used"
        if theirs == ours and readings.values["global_rank"] != used.values["global_rank"]:
            return "other rank", reason
    return "contradicts", reason


def _ranks(readings: Readings) -> str:
    return f"rank {readings.values.get('global_rank', '?')} of {readings.values.get('world_size', '?')}"
