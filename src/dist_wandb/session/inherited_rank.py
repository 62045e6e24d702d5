"""Processes that a rank has started, with the variables of its launcher: a rank's variables do not make them that rank.

A process that opens a session as a rank announces itself in a small file, named after its process id, in the directory
for temporary files. A process that has the same variables, and an announced process among its ancestors, was started by
that rank: it is a job of its own. A launcher, or a script that only starts the rank's process, announces nothing, and a
rank that is restarted is started by its launcher. The environment belongs to the user: nothing is written there.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from dist_wandb.errors import DistWandbError, ReadError
from dist_wandb.job.launch import ancestors, inherited_variables, node_identity, started_at
from dist_wandb.job.topology import Topology
from dist_wandb.wandb_files.small_files import parse_json, read_small, write_small

_announced: list[tuple[int, bytes]] = []  # the process that has announced itself, and what it wrote


def announce() -> None:
    process, variables = os.getpid(), inherited_variables()
    content = json.dumps([started_at(process), variables]).encode()
    if (process, content) in _announced:
        return
    if not any(announced == process for announced, _ in _announced):
        atexit.register(_withdraw)
    _announced[:] = [(process, content)]
    if variables:
        with suppress(OSError):  # then its children take themselves for ranks
            write_small(file_of(process), content)
            every = file_of("*", "*")
            for file in every.parent.glob(every.name) if started_at(process) is not None else ():
                owner = file.stem.rpartition("-")[2]
                if owner.isdigit() and started_at(int(owner)) is None:  # it was killed
                    file.unlink(missing_ok=True)


def holder() -> int | None:
    """Return the process that has started this one and holds its rank; `None` if this process may be that rank."""
    if _is_fork():
        return _announced[0][0]
    variables = inherited_variables()
    for process in ancestors() if variables else ():
        with suppress(OSError, ValueError, ReadError):
            if parse_json(read_small(file_of(process), owner=os.getuid())) == [started_at(process), variables]:
                return process
    return None


def in_group() -> Topology | None:
    """Return the topology by this process's group; `None` without one, and in a fork of a rank, which has a copy."""
    return None if _is_fork() else Topology.from_torch_distributed()


def known() -> tuple[Topology | None, int | None]:
    """Return the topology of this process, and the process that holds its rank if this one is a job of its own.

    There is no topology if neither a process group nor a launcher tells it.
    """
    group = in_group()
    rank_holder = holder() if group is None else None
    return (Topology.single() if rank_holder is not None else group or Topology.from_environ()), rank_holder


def detect_or_none() -> Topology | None:
    """Return the topology of this process; `None` where `init` raises an error."""
    try:
        return known()[0] or Topology.single()
    except DistWandbError:
        return None


def _is_fork() -> bool:
    return bool(_announced) and _announced[0][0] != os.getpid()


def file_of(process: int | str, prefix: str = "rank-", directory: Path | None = None) -> Path:
    """Return the file of one process of one user on one machine or container: several may share the directory."""
    numbered = Path("/proc/self/ns/pid")  # ids of processes are those of this name space; missing where not Linux
    space = numbered.readlink() if numbered.is_symlink() else ""
    owner = hashlib.sha256(f"{node_identity()}/{space}/{os.getuid()}".encode()).hexdigest()[:12]
    return (directory or Path(tempfile.gettempdir())) / f"dist-wandb-{prefix}{owner}-{process}.json"


def _withdraw() -> None:
    if not _is_fork():
        with suppress(OSError):
            file_of(os.getpid()).unlink()
