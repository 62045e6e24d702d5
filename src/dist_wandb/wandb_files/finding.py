"""Find the files of W&B runs below a directory."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from dist_wandb.errors import ReadError
from dist_wandb.wandb_files.small_files import FOLDER, Directory

_RUN_FILE = re.compile(r"run-.+\.wandb")
_MOST_ENTRIES, _DEEPEST = 10_000_000, 64
_NATURAL = 512  # characters; numbers after them are sorted as text


def files_below(directories: Sequence[Path]) -> tuple[dict[Path, Directory], list[tuple[Path, ReadError]]]:
    """Find the run files below directories, each once; and the directories that were not searched completely."""
    files: dict[tuple[int, int, str], tuple[Path, Directory]] = {}  # by directory and name
    unseen: list[tuple[Path, ReadError]] = []
    for directory in directories:
        found, errors = find_files(directory)
        for path, within in found.items():
            files[within.device, within.inode, path.name] = path, within
        unseen += [(directory, error) for error in errors]
    if not files and not unseen:
        where = " or ".join(repr(str(directory)) for directory in directories)
        raise ReadError(
            f"No W&B run was found below {where}: no run-* or offline-run-* directory there contains a run-*.wandb "
            "file. Give the directory that W&B wrote to (`dir=`, by default ./wandb)."
        )
    return dict(files.values()), unseen


def find_files(top: Path) -> tuple[dict[Path, Directory], list[ReadError]]:
    """Find the files of W&B runs below a directory, or in a run's own one; a single file stands for itself.

    These are the ``run-ID.wandb`` files within ``run-*`` and ``offline-run-*`` directories, in natural order of their
    paths (``rank-2`` before ``rank-10``). Directories, pipes and the like with such a name are included; symbolic links
    (W&B's ``latest-run``) are not followed. Returns the files with their directories, from which all of a run is to be
    read, and an error for each directory that was not searched, because it is unreadable, too deep, or follows ten
    million entries. Raises `ReadError` if `top` cannot be entered.
    """
    if top.suffix == ".wandb" and top.is_file():
        path = top.resolve() if top.is_symlink() else top  # a link given by the user stands for its target
        return {path: Directory.at(path.parent)}, []
    found: dict[Path, Directory] = {}
    errors: list[ReadError] = []
    left = _MOST_ENTRIES

    def search(folder: Path, name: str, parent: int | None, depth: int) -> None:
        """Search a folder, which is opened by its parent's descriptor, so that no link is followed below the top."""
        nonlocal left
        if depth > _DEEPEST:
            errors.append(ReadError(f"{folder}: is more than {_DEEPEST} levels below {top}."))
            return
        try:
            handle = os.open(name, FOLDER if depth else FOLDER & ~os.O_NOFOLLOW, dir_fd=parent)
            try:
                within, folders = Directory.of(folder, os.fstat(handle)), []
                with os.scandir(handle) as entries:
                    for entry in islice(entries, left + 1):
                        left -= 1
                        if _RUN_FILE.fullmatch(entry.name) and is_in_run_directory(folder / entry.name):
                            found[folder / entry.name] = within
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.name)
                for inner in folders:
                    if left >= 0:
                        search(folder / inner, inner, handle, depth + 1)
            finally:
                os.close(handle)
        except OSError as error:
            reason = error.strerror or error
            if not depth:
                raise ReadError(
                    f"Cannot look for runs in {str(top)!r}: {reason}. Give an existing directory."
                ) from None
            if not isinstance(error, FileNotFoundError):  # removed meanwhile
                errors.append(ReadError(f"{folder}: cannot be searched: {reason}."))

    search(top, str(top), None, 0)
    if left < 0:
        errors.append(ReadError(f"{top}: only {_MOST_ENTRIES} entries are searched. Give a narrower directory."))
    return {path: found[path] for path in sorted(found, key=path_order)}, errors


def natural_order(text: str) -> list[str]:
    """Return a sort key that puts ``rank-2`` before ``rank-10``."""
    start, rest = text[:_NATURAL], text[_NATURAL:]  # because a list of all parts is 50 times as large as the text
    return [*(part.zfill(20) if part.isdigit() else part for part in re.split(r"(\d+)", start)), rest]


def path_order(path: Path) -> tuple[list[str], list[str]]:
    """Return a sort key that puts the run directories ``X`` and ``X-1``, of starts within one second, in this order."""
    return natural_order(str(path.parent)), natural_order(path.name)


def is_in_run_directory(path: Path) -> bool:
    return path.parent.resolve().name.startswith(("run-", "offline-run-"))  # resolved because it may be given as "."
