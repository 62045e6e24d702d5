"""The launcher's variables about the job as a whole; names of the job and of its nodes."""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dist_wandb.errors import TopologyError
from dist_wandb.topology.launchers import SLURM, Environ, Readings, integer
from dist_wandb.topology.model import Topology


@dataclass(frozen=True)
class Launch:
    """The launcher's variables about the job as a whole.

    Args:
        agent_store: Address of the store that torchrun's agent keeps for the whole job, as `(host, port)`.
        attempt: How often the launcher has restarted the job's processes.
        requeues: How often SLURM has started the job again.
        torchrun_start: A name of this start of torchrun on this node, equal for all its restarts of the processes.
        slurm_step: SLURM's name of the job and, within an srun, of the step, equal at all its starts of the job.
        parent_pid: Process id of the parent, which started this process if it is one of Lightning's scripts.
        node_rank: The node rank that `NODE_RANK` or `GROUP_RANK` gives, also before there are any ranks.
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
    def detect(cls, environ: Environ | None = None) -> Launch:
        """Read what the launcher left in the environment (the process's own when `environ` is `None`)."""
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
    """A name that the launcher gives the job: equal on all ranks, another one for each job; `None` if there is none.

    SLURM starts a job again under the same name. TORCHELASTIC_RUN_ID is no such name: it is "none", or the user's own,
    the same for every start. A PMIx namespace that is a number is none by itself: jsrun counts from 1 in each job, and
    Open MPI 4 has 65536 of them, but gives each job a random key as well.

    Args:
        topology: The topology of this process. A SLURM step with other ranks is another job's, or the shell's that
            started this one, and perhaps many more.
        environ: The environment variables to read; the process's own when `None`.
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
    """A name of this machine that is equal for all processes on a node and differs between nodes.

    The host name alone is not enough: containers share names, and two nodes of a test may share a host. So the
    kernel's boot id and the launcher's node rank, where there is one, are part of it.

    Args:
        environ: The environment variables to read; the process's own when `None`.
    """
    environ = os.environ if environ is None else environ
    node_rank = environ.get("NODE_RANK", environ.get("GROUP_RANK", "0"))  # as Lightning's environment reads it
    return f"{socket.gethostname()}/{_boot_id()}/{node_rank}"


def job_setting(variable: str, environ: Environ | None = None) -> str | None:
    """The value of an environment variable that holds for all runs of the job; `None` if it is unset."""
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
    """The agent gives each of its starts a directory of a random name, where workers write what made them fail."""
    directory = re.match(r"(.+)/attempt_\d+/", environ.get("TORCHELASTIC_ERROR_FILE", ""))
    return None if directory is None else f"torchrun-{socket.gethostname()}-{directory[1]}"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return ""
