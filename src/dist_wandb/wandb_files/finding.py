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
_MOST_ENTRIES, _DEEPEST = 10_000_000, 64
_NATURAL = 512  # characters; numbers after them are sorted as text
_log = logging.getLogger("dist_wandb")


def find_runs(directory: str | os.PathLike[str], *, report: Callable[[ReadError], None] | None = None) -> list[Path]:
    """Find the files of W&B runs below a directory.

    Args:
        directory: Any directory, a run's own directory, or a single ``.wandb`` file. Symbolic links below it (W&B's
            ``latest-run``) are not followed.
        report: Called for each directory that was not searched: it cannot be read, is more than 64 levels below
            `directory`, or follows ten million other entries. Logged as warnings if `None`.

    Returns:
        The ``run-ID.wandb`` files within ``run-*`` and ``offline-run-*`` directories, in natural order of their paths
        (``rank-2`` before ``rank-10``). Directories, pipes and the like with such a name are included.

    Raises:
        ReadError: `directory` does not exist, cannot be entered, or is another kind of file.
    """
    top = Path(directory)
    if top.suffix == ".wandb" and top.is_file():
        return [top.resolve() if top.is_symlink() else top]  # a link given by the user stands for its target
    try:
        os.listdir(top)  # noqa: PTH208  # the search only reports such errors
    except OSError as error:
        raise ReadError(
            f"Cannot look for runs in {str(top)!r}: {error.strerror}. Give an existing directory."
        ) from None
    found = filter(is_in_run_directory, _run_files_below(top, report or _warn))
    return sorted(found, key=lambda path: natural_order(str(path)))


def _run_files_below(top: Path, report: Callable[[ReadError], None]) -> Iterator[Path]:
    """Yield the paths with the name of a run file, at any depth."""
    folders = deque([(top, 0)])
    remaining = _MOST_ENTRIES
    while folders:
        folder, depth = folders.popleft()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    remaining -= 1
                    if remaining < 0:
                        report(
                            ReadError(f"{top}: only {_MOST_ENTRIES} entries are searched. Give a narrower directory.")
                        )
                        return
                    if _RUN_FILE.fullmatch(entry.name):
                        yield folder / entry.name
                    if not entry.is_dir(follow_symlinks=False):
                        continue
                    if depth < _DEEPEST:
                        folders.append((folder / entry.name, depth + 1))
                    else:
                        report(ReadError(f"{folder / entry.name}: is more than {_DEEPEST} levels below {top}."))
        except OSError as error:
            report(ReadError(f"{folder}: cannot be searched: {error.strerror or error}."))


def _warn(error: ReadError) -> None:
    _log.warning("dist_wandb: %s", error)


def natural_order(text: str) -> list[str]:
    """Return a sort key that puts ``rank-2`` before ``rank-10``."""
    start, rest = text[:_NATURAL], text[_NATURAL:]  # because a list of all parts is 50 times as large as the text
    return [*(part.zfill(20) if part.isdigit() else part for part in re.split(r"(\d+)", start)), rest]


def is_in_run_directory(path: Path) -> bool:
    """Return whether a file is in a directory with the name of a W&B run directory."""
    return path.parent.resolve().name.startswith(("run-", "offline-run-"))  # resolved because it may be given as "."
