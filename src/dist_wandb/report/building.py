"""A report of the runs below directories: which files there are, and what they have."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

from dist_wandb._version import __version__
from dist_wandb.errors import ReadError, UnsupportedVersionError, in_words
from dist_wandb.reading.found import files_below
from dist_wandb.report import media, thinning
from dist_wandb.report.files import FileForReport, read_for_report
from dist_wandb.report.model import Report
from dist_wandb.report.sections import sections
from dist_wandb.wandb_files.interruptible import call_interruptibly

_STRETCHES = 120_000  # of all curves: some 6 MB of the page
_ROOM_FOR_MEDIA = 4 * 2**20  # bytes
_PARALLEL_READERS = 4


def build(directory: Path, metrics: Sequence[str] = ("*",)) -> Report:
    """Read the runs below a directory.

    Args:
        directory: Where to look, at any depth; or one ``.wandb`` file.
        metrics: Patterns of the names that are wanted.

    Raises:
        ReadError: There is no directory, or none of the runs below it can be read.
        UnsupportedVersionError: The installed wandb cannot print their files.
    """
    paths, unseen = files_below([directory])
    found, unreadable = _read(paths, metrics)
    problems = [str(error) for error in (*unreadable, *(error for _, error in unseen))]
    if not found:
        reasons = " ".join(problems[:5])
        raise ReadError(f"None of the runs below {str(directory)!r} can be read. {reasons}")
    return Report(
        directory=str(directory),
        made=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        version=__version__,
        runs=sections(found, media.Budget(_ROOM_FOR_MEDIA)),
        unreadable=problems[:100],
    )


def _read(paths: Sequence[Path], metrics: Sequence[str]) -> tuple[list[FileForReport], list[ReadError]]:
    """Read files, a few at a time; return what they have, and the errors of the others."""
    budget = thinning.Budget(_STRETCHES)
    stopped = threading.Event()

    def read(path: Path) -> FileForReport | ReadError:
        try:
            return read_for_report(path, budget, metrics=metrics, stopped=stopped)
        except UnsupportedVersionError:  # affects all files
            raise
        except ReadError as error:
            return error
        except Exception as error:  # noqa: BLE001  # any failure affects this file only
            return ReadError(in_words(error, path))

    def read_all() -> list[FileForReport | ReadError]:
        with ThreadPoolExecutor(_PARALLEL_READERS) as readers:
            return list(readers.map(read, paths))

    outcomes = call_interruptibly(read_all, stopped.set)
    errors = [outcome for outcome in outcomes if isinstance(outcome, ReadError)]
    return [outcome for outcome in outcomes if isinstance(outcome, FileForReport)], errors
