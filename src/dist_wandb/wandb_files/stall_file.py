"""The file of a stall in a run's files: its time, the verdict, an empty line, all stacks, and that it is over.

Only its beginning and its end are read, of which the contents are not trusted.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from dist_wandb.errors import ReadError, visible
from dist_wandb.wandb_files.small_files import Directory, open_ordinary, write_small

MOST_STALLS = 3
"""Largest number of stalls that are read, the last ones."""

_NAME = re.compile(r"stall-\d{8}-\d{6}-rank-\d{1,7}\.txt")
_OVER = re.compile(rb"\nThe training went on after (\d{1,9}) s\.\n\Z")
_HEAD, _TAIL = 8192, 64  # bytes
_LONGEST_TIME, _LONGEST_MESSAGE = 32, 300  # characters
_MOST_ENTRIES = 10_000  # of a directory


class StoredStall(NamedTuple):
    """A stall of a run."""

    time: str
    message: str
    lasted: int | None  # seconds; `None` if the training is not known to have gone on
    path: str

    def __str__(self) -> str:
        over = "" if self.lasted is None else f" The training went on after {self.lasted} s."
        return f"{self.time}: {self.message}{over} {self.path}"


def write(folder: Path, rank: int, message: str, stacks: Iterable[str]) -> Path:
    """Write the file at once, before the job may be killed; return its path."""
    path = folder.absolute() / f"stall-{time.strftime('%Y%m%d-%H%M%S')}-rank-{rank}.txt"
    content = "\n".join([time.strftime("%Y-%m-%d %H:%M:%S %z"), message, "", *stacks])
    write_small(path, content.encode("utf-8", "replace"), mode=0o644)
    return path


def add_end(path: str, seconds: float) -> None:
    """Add that the training went on."""
    with os.fdopen(open_ordinary(Path(path), os.O_WRONLY | os.O_APPEND), "ab") as file:
        file.write(f"\nThe training went on after {seconds:.0f} s.\n".encode())


def stalls_of(directories: Iterable[Directory]) -> tuple[list[StoredStall], int]:
    """Return the last stalls in the directories of a run's writers, the oldest first, and the number of all."""
    found: Mapping[Path, Directory] = dict(one for each in directories for one in _files_in(each).items())
    stalls = []
    for path in sorted(found, key=lambda path: path.name)[-MOST_STALLS:]:
        with suppress(OSError, ReadError):
            stalls.append(_read(path, found[path]))
    return stalls, len(found)


def _files_in(run: Directory) -> dict[Path, Directory]:
    with suppress(OSError, ReadError), run.opened("files") as folder, os.scandir(folder) as entries:
        names = [entry.name for entry in islice(entries, _MOST_ENTRIES)]
        return {run.path / "files" / name: run for name in names if _NAME.fullmatch(name)}
    return {}


def _read(path: Path, within: Directory) -> StoredStall:
    with os.fdopen(open_ordinary(path, within=within), "rb") as file:
        when, message, *_ = [*file.read(_HEAD).decode("utf-8", "replace").split("\n"), ""]
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        over = _OVER.search(file.read(_TAIL))
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[: _LONGEST_MESSAGE - 1]}…"
    return StoredStall(visible(when[:_LONGEST_TIME]), visible(message), int(over[1]) if over else None, str(path))
