"""Find the files of W&B runs below a directory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from dist_wandb.errors import ReadError
from dist_wandb.wandb_files.small_files import FOLDER, Directory

_RUN_FILE = re.compile(r"run-.+\.wandb")
_MOST_ENTRIES, _DEEPEST = 10_000_000, 64
_NATURAL = 512  # characters; numbers after them are sorted as text


def find_files(top: Path, report: Callable[[ReadError], None]) -> dict[Path, Directory]:
    """Find the files of W&B runs below a directory, or in a run's own one; a single file stands for itself.

    These are the ``run-ID.wandb`` files within ``run-*`` and ``offline-run-*`` directories, in natural order of their
    paths (``rank-2`` before ``rank-10``). Directories, pipes and the like with such a name are included; symbolic links
    (W&B's ``latest-run``) are not followed. `report` is called for each directory that was not searched, because it is
    unreadable, too deep, or follows ten million entries. Returns the files with their directories, from which all of a
    run is to be read. Raises `ReadError` if `top` cannot be entered.
    """
    if top.suffix == ".wandb" and top.is_file():
        path = top.resolve() if top.is_symlink() else top  # a link given by the user stands for its target
        return {path: Directory.at(path.parent)}
    try:
        handle = os.open(top, FOLDER & ~os.O_NOFOLLOW)
    except OSError as error:
        raise ReadError(
            f"Cannot look for runs in {str(top)!r}: {error.strerror}. Give an existing directory."
        ) from None
    search = _Search(top, report)
    search.look_in(top, handle, 0)
    return {path: search.found[path] for path in sorted(search.found, key=lambda path: natural_order(str(path)))}


class _Search:
    """A search that opens each folder by the descriptor of its parent, so that no link is followed."""

    def __init__(self, top: Path, report: Callable[[ReadError], None]) -> None:
        self.found: dict[Path, Directory] = {}
        self._top = top
        self._report = report
        self._remaining = _MOST_ENTRIES

    def look_in(self, folder: Path, handle: int, depth: int) -> None:
        """Search an open folder, and close it."""
        try:
            for name in self._folders_in(folder, handle):
                if self._remaining >= 0:
                    self._look_below(folder / name, handle, depth + 1)
        except OSError as error:
            self._report(_unsearched(folder, error))
        finally:
            os.close(handle)

    def _folders_in(self, folder: Path, handle: int) -> list[str]:
        directory = Directory.of(folder, os.fstat(handle))
        folders = []
        with os.scandir(handle) as entries:
            for entry in entries:
                self._remaining -= 1
                if self._remaining < 0:
                    self._report(
                        ReadError(f"{self._top}: only {_MOST_ENTRIES} entries are searched. Give a narrower directory.")
                    )
                    break
                if _RUN_FILE.fullmatch(entry.name) and is_in_run_directory(folder / entry.name):
                    self.found[folder / entry.name] = directory
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
        return folders

    def _look_below(self, folder: Path, parent: int, depth: int) -> None:
        if depth > _DEEPEST:
            self._report(ReadError(f"{folder}: is more than {_DEEPEST} levels below {self._top}."))
            return
        try:
            handle = os.open(folder.name, FOLDER, dir_fd=parent)
        except OSError as error:
            self._report(_unsearched(folder, error))
        else:
            self.look_in(folder, handle, depth)


def _unsearched(folder: Path, error: OSError) -> ReadError:
    return ReadError(f"{folder}: cannot be searched: {error.strerror or error}.")


def natural_order(text: str) -> list[str]:
    """Return a sort key that puts ``rank-2`` before ``rank-10``."""
    start, rest = text[:_NATURAL], text[_NATURAL:]  # because a list of all parts is 50 times as large as the text
    return [*(part.zfill(20) if part.isdigit() else part for part in re.split(r"(\d+)", start)), rest]


def is_in_run_directory(path: Path) -> bool:
    """Return whether a file is in a directory with the name of a W&B run directory."""
    return path.parent.resolve().name.startswith(("run-", "offline-run-"))  # resolved because it may be given as "."
