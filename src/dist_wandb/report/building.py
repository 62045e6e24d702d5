"""Build a report: find and read the runs below a directory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from dist_wandb._version import __version__
from dist_wandb.errors import ReadError
from dist_wandb.reading.found import files_below
from dist_wandb.report import media, thinning
from dist_wandb.report.files import FileForReport, read_for_report
from dist_wandb.report.model import Report
from dist_wandb.report.sections import sections
from dist_wandb.settings.config_secrets import redacted
from dist_wandb.wandb_files.interruptible import read_each

_STRETCHES = 120_000  # of all curves together: about 6 MB of the page
_ROOM_FOR_MEDIA = 4 * 2**20  # bytes
_PARALLEL_READERS = 4


def build(directory: Path, metrics: Sequence[str] = ("*",), *, secrets: bool = False) -> Report:
    """Read the runs below a directory, or one ``.wandb`` file.

    Raises `ReadError` if there is no such directory or no readable run, and `UnsupportedVersionError` for an old wandb.
    """
    paths, unseen = files_below([directory])
    budget = thinning.Budget(_STRETCHES)

    def read(path: Path, stopped: threading.Event) -> FileForReport:
        file = read_for_report(path, paths[path], budget, metrics=metrics, stopped=stopped)
        config = file.stored.config  # without secrets by default: the page may be handed on
        return replace(file, stored=replace(file.stored, config=config if secrets else redacted(config)))

    found, unreadable = read_each(list(paths), read, _PARALLEL_READERS)
    problems = [str(error) for error in (*unreadable.values(), *(error for _, error in unseen))]
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
