"""The processes that have started this one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PARENT, _START = 1, 19  # fields of /proc/PID/stat after the name of the program


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
