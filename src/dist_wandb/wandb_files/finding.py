"""Find the files of W&B runs below a directory."""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from dist_wandb.errors import ReadError

_RUN_FILE = re.compile(r"run-.+\.wandb")
_MOST_ENTRIES, _DEEPEST = 10_000_000, 64  # of a search for runs
_NATURAL = 512  # characters whose numbers count as numbers
_log = logging.getLogger("dist_wandb")


def find_runs(directory: str | os.PathLike[str], *, report: Callable[[ReadError], None] | None = None) -> list[Path]:
    """Find the files of W&B runs below a directory.

    Args:
        directory: Where to look: any directory, a run's own directory, or a single ``.wandb`` file. Symbolic links
            below it (W&B's ``latest-run``) are not followed.
        report: Called for each directory below it in which nobody has looked: it cannot be read, or lies more than 64
            levels below, or below more than ten million other entries. Logged as warnings if `None`.

    Returns:
        The ``run-ID.wandb`` files within ``run-*`` and ``offline-run-*`` directories, in natural order of their paths
        (``rank-2`` before ``rank-10``). What has such a name and is no file is among them: it cannot be read.

    Raises:
        ReadError: `directory` does not exist, cannot be entered, or is some other file.
    """
    top = Path(directory)
    if top.suffix == ".wandb" and top.is_file():
        return [top.resolve() if top.is_symlink() else top]  # whoever names a link means the file
    try:
        os.listdir(top)  # noqa: PTH208  # the search passes over such errors
    except OSError as error:
        raise ReadError(
            f"Cannot look for runs in {str(top)!r}: {error.strerror}. Give an existing directory."
        ) from None
    found = filter(is_in_run_directory, _run_files_below(top, report or _warn))
    return sorted(found, key=lambda path: natural_order(str(path)))


def _run_files_below(top: Path, report: Callable[[ReadError], None]) -> Iterator[Path]:
    """What has the name of a run's file, at any depth."""
    folders = deque([(top, 0)])
    left = _MOST_ENTRIES
    while folders:
        folder, depth = folders.popleft()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    left -= 1
                    if left < 0:
                        report(
                            ReadError(f"{top}: only {_MOST_ENTRIES} entries are looked at. Give a narrower directory.")
                        )
                        return
                    if _RUN_FILE.fullmatch(entry.name):
                        yield folder / entry.name
                    if not entry.is_dir(follow_symlinks=False):
                        continue
                    if depth < _DEEPEST:
                        folders.append((folder / entry.name, depth + 1))
                    else:
                        report(ReadError(f"{folder / entry.name}: lies more than {_DEEPEST} levels below {top}."))
        except OSError as error:
            report(ReadError(f"{folder}: cannot be looked through: {error.strerror or error}."))


def _warn(error: ReadError) -> None:
    _log.warning("dist_wandb: %s", error)


def natural_order(text: str) -> list[str]:
    """A sort key that puts ``rank-2`` before ``rank-10``."""
    start, rest = text[:_NATURAL], text[_NATURAL:]  # a list of all parts is 50 times as large as the text
    return [*(part.zfill(20) if part.isdigit() else part for part in re.split(r"(\d+)", start)), rest]


def is_in_run_directory(path: Path) -> bool:
    """Whether a file lies in a directory that is named as W&B names those of runs."""
    return path.parent.resolve().name.startswith(("run-", "offline-run-"))  # resolved: it may have been given as "."
