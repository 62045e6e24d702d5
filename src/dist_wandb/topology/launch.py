"""How this process was started: its ancestors, the launcher's variables about the job, and names of job and nodes."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dist_wandb.errors import TopologyError
from dist_wandb.topology.launchers import LAUNCHERS, SLURM, Environ, Readings, integer
from dist_wandb.topology.model import Topology

_OF_JOB = frozenset({"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "SLURM_STEP_ID", "PMIX_NAMESPACE"})
_PARENT, _START = 1, 19  # fields of /proc/PID/stat after the name of the program


@dataclass(frozen=True)
class Launch:
    """The launcher's variables about the whole job."""

    agent_store: tuple[str, int] | None  # host and port of the store of torchrun's agent
    attempt: int  # number of restarts of the job's processes by the launcher
    requeues: int  # number of restarts of the job by SLURM
    torchrun_start: str | None  # a name of this start of torchrun on this node, equal for all restarts of its processes
    # SLURM's name of the job and, within an srun, of the step; equal for all restarts of the job
    slurm_step: str | None
    parent_pid: int  # under Lightning, of the script that started this process
    node_rank: int | None  # from `NODE_RANK` or `GROUP_RANK`, which may be set before there are ranks
    is_lightning_child: bool  # whether Lightning has started this script again for another rank of the first node

    @classmethod
    def detect(cls, environ: Environ | None = None) -> Launch:
        """Read the environment variables."""
        environ = os.environ if environ is None else environ
        node_rank = next((name for name in ("NODE_RANK", "GROUP_RANK") if name in environ), None)
        return cls(
            agent_store=_agent_store(environ),
            attempt=integer("TORCHELASTIC_RESTART_COUNT", environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            requeues=integer("SLURM_RESTART_COUNT", environ.get("SLURM_RESTART_COUNT", "0")),
            torchrun_start=_torchrun_start(environ),
            slurm_step=_slurm_step(environ),
            parent_pid=os.getppid(),
            node_rank=None if node_rank is None else integer(node_rank, environ[node_rank]),
            is_lightning_child="RANK" not in environ
            and environ.get("NODE_RANK") == "0"
            and environ.get("LOCAL_RANK", "0") != "0",
        )


def job_name(topology: Topology, environ: Environ | None = None) -> str | None:
    """Return the launcher's name for the job, equal on all ranks and unique to the job; `None` if there is none.

    SLURM restarts a job under the same name. TORCHELASTIC_RUN_ID is not suitable: it is "none", or chosen by the user,
    and the same for every start. A PMIx namespace that is a number is not unique: jsrun counts from 1 in each job, and
    Open MPI 4 has only 65536 of them, but it also gives each job a random key. A SLURM step with other ranks than
    `topology` belongs to another job, or to the shell that has started this one, and perhaps many more.
    """
    environ = os.environ if environ is None else environ
    namespace, key = environ.get("PMIX_NAMESPACE", ""), environ.get("OMPI_MCA_orte_precondition_transports", "")
    if namespace and not namespace.startswith("slurm.") and (key or not namespace.isdigit()):
        return "-".join(filter(None, ("pmix", namespace, key)))
    ranks = Readings({"global_rank": topology.global_rank, "world_size": topology.world_size}, "")
    with suppress(TopologyError):
        if "SLURM_STEP_ID" in environ and SLURM.is_present(environ) and ranks.agrees_with(SLURM.read(environ)):
            return _slurm_step(environ)
    return None


def node_identity(environ: Environ | None = None) -> str:
    """Return a name of this node that is equal for all its processes and differs between nodes.

    The host name is not sufficient: containers share names, and two nodes of a test may share a host. So the name
    includes the kernel's boot id and the launcher's node rank.
    """
    environ = os.environ if environ is None else environ
    node_rank = environ.get("NODE_RANK", environ.get("GROUP_RANK", "0"))  # like Lightning's environment
    return f"{socket.gethostname()}/{_boot_id()}/{node_rank}"


def inherited_variables(environ: Environ | None = None) -> dict[str, str]:
    """Return the variables that name a rank and its job, which a rank's own child processes inherit."""
    environ = os.environ if environ is None else environ
    names = {name for launcher in LAUNCHERS for name in (*launcher.present, *launcher.variables.values())}
    return {name: environ[name] for name in sorted(names | _OF_JOB) if name in environ}


def job_setting(variable: str, environ: Environ | None = None) -> str | None:
    """Return the value of an environment variable that applies to all runs of the job; `None` if it is unset."""
    return (os.environ if environ is None else environ).get(variable)


def _agent_store(environ: Environ) -> tuple[str, int] | None:
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or "MASTER_ADDR" not in environ:
        return None
    return environ["MASTER_ADDR"], integer("MASTER_PORT", environ.get("MASTER_PORT", ""))


def _slurm_step(environ: Environ) -> str | None:
    if "SLURM_JOB_ID" not in environ:
        return None
    return f"slurm-{environ['SLURM_JOB_ID']}-{environ.get('SLURM_STEP_ID', 'batch')}"


def _torchrun_start(environ: Environ) -> str | None:
    # torchrun's agent uses a new random directory for the error files of its workers
    directory = re.match(r"(.+)/attempt_\d+/", environ.get("TORCHELASTIC_ERROR_FILE", ""))
    return None if directory is None else f"torchrun-{socket.gethostname()}-{directory[1]}"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return ""


def ancestors() -> Iterator[int]:
    """Yield the ids of the processes that have started this one, the parent first; without ``/proc`` only that."""
    process = os.getppid()
    while process > 1:
        yield process
        process = _field(process, _PARENT) or 0


def started_at(process: int) -> int | None:
    """Return when a process was started, in the kernel's ticks; `None` if unknown. Its id may be used again."""
    return _field(process, _START)


def _field(process: int, index: int) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[index])
    return None
