"""Find and read the run files below directories, as all commands do first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from dist_wandb.errors import ReadError
from dist_wandb.wandb_files.finding import find_files
from dist_wandb.wandb_files.reading import StoredRun, read_runs
from dist_wandb.wandb_files.small_files import Directory


def files_below(directories: Sequence[Path]) -> tuple[dict[Path, Directory], list[tuple[Path, ReadError]]]:
    """Find the run files below directories, each once; and the directories that could not be searched completely.

    Raises `ReadError` if a directory does not exist, or no file was found.
    """
    files: dict[tuple[int, int, str], tuple[Path, Directory]] = {}  # by directory and name
    unseen: list[tuple[Path, ReadError]] = []
    for directory in directories:
        errors: list[ReadError] = []
        for path, within in find_files(directory, errors.append).items():
            files[within.device, within.inode, path.name] = path, within
        unseen += [(directory, error) for error in errors]
    if not files and not unseen:
        where = " or ".join(repr(str(directory)) for directory in directories)
        raise ReadError(
            f"No W&B run was found below {where}: no run-* or offline-run-* directory there contains a run-*.wandb "
            "file. Give the directory that W&B wrote to (`dir=`, by default ./wandb)."
        )
    return dict(files.values()), unseen


def runs_below(
    directories: Sequence[Path], metrics: Iterable[str] = ("*",)
) -> tuple[list[StoredRun], list[tuple[Path, ReadError]]]:
    """Read the run files below directories; return the runs and what could not be read. Raises as `files_below`."""
    files, unseen = files_below(directories)
    runs, unreadable = read_runs(files, metrics=metrics)
    return runs, [*unreadable.items(), *unseen]
