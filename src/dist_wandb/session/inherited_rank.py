"""Processes that a rank has started, with the variables of its launcher: a rank's variables do not make them that rank.

A process that opens a session as a rank announces itself by a note. A process that has the same variables, and an
announced process among its ancestors, was started by that rank: it is a job of its own. A launcher, or a script that
only starts the rank's process, announces nothing, and a rank that is restarted is started by its launcher.

A note is a file that is deleted at once, but stays open in its process: only processes of the same user find it, below
``/proc``, and it ends with its process. The environment belongs to the user: nothing is written there.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from dist_wandb.errors import DistWandbError
from dist_wandb.job.launch import ancestors, inherited_variables
from dist_wandb.job.topology import Topology

_announced: list[int] = []  # the process that has announced itself
_notes: dict[str, int] = {}  # descriptors of notes, by name


def tell(what: str, text: str) -> None:
    """Leave a note for the processes that this one starts, in place of an earlier one; `OSError` if that fails."""
    name = _name(what, os.getpid())
    note, path = tempfile.mkstemp(prefix=name)
    Path(path).unlink()
    with open(note, "w", encoding="utf-8", closefd=False) as file:  # which has no path any more
        file.write(text)
    earlier = _notes.setdefault(name, note)
    if earlier != note:
        os.dup2(note, earlier, inheritable=False)  # a reader finds either of them
        os.close(note)


def told(what: str, process: int) -> Any:
    """Return what is in a note of a process, decoded from JSON; `None` if it has left none."""
    with suppress(OSError):  # another user's process
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError, ValueError):  # it was closed in this moment, or is being written
                if descriptor.readlink().name.startswith(_name(what, process)):
                    return json.loads(descriptor.read_bytes())
    return None


def _name(what: str, process: int) -> str:
    return f"dist-wandb-{what}-of-{process}-"  # forks have descriptors of the notes of their parent


def announce() -> None:
    _announced[:] = [os.getpid()]
    if variables := inherited_variables():
        with suppress(OSError):  # then its children take themselves for ranks
            tell("rank", json.dumps(variables))


def holder() -> int | None:
    """Return the process that has started this one and holds its rank; `None` if this process may be that rank."""
    if _is_fork():
        return _announced[0]
    variables = inherited_variables()
    return next((process for process in ancestors() if variables and told("rank", process) == variables), None)


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
    return bool(_announced) and _announced[0] != os.getpid()
