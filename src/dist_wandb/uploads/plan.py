"""Plan uploads: group files by run, order them, and collect reasons to refuse. Nothing is written or sent."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from dist_wandb.errors import ReadError, in_words
from dist_wandb.runs.client_settings import default_entity
from dist_wandb.uploads.copy import entries_below
from dist_wandb.uploads.log import Sent, read_log
from dist_wandb.uploads.model import (
    CAUTIOUS,
    Terms,
    UploadFile,
    UploadRun,
    files_of,
    is_complete,
    is_online,
    mark_of,
)
from dist_wandb.uploads.problems import dangers_of, left_out, notes_on, problems_of_file, problems_of_run
from dist_wandb.uploads.state import FileState, another_upload
from dist_wandb.wandb_files.debug_log import log_of
from dist_wandb.wandb_files.finding import natural_order
from dist_wandb.wandb_files.reading import StoredRun


@dataclass(frozen=True)
class Known:
    """The known state of earlier uploads of a file; the fields are those of `UploadFile`."""

    sent: Sent = field(default_factory=Sent)
    is_marked: bool = False
    by_log: bool = False
    doubts: tuple[str, ...] = ()
    problem: str | None = None


def plan_uploads(runs: Iterable[StoredRun], *, now: float | None = None, terms: Terms = CAUTIOUS) -> list[UploadRun]:
    """Plan the uploads of files, as one entry per W&B run, in the order of their first files."""
    now = time.time() if now is None else now  # to detect files that are still being written
    together: dict[tuple[str | None, str], list[StoredRun]] = defaultdict(list)
    for run in runs:
        together[run.project, run.run_id].append(run)
    return [_planned_or_refused(run_id, project, files, now, terms) for (project, run_id), files in together.items()]


def is_uploaded(run: StoredRun) -> bool:
    """Return whether a file is uploaded, according to this user's own uploads and W&B's log of an online run."""
    return _file(run, 0, [run], CAUTIOUS).is_uploaded


def known_of(run: StoredRun, terms: Terms) -> Known:
    """Return the state of earlier uploads of a file: of this user's own, else what W&B left in the directory."""
    if terms.again:
        return Known()
    try:
        own = FileState(run.path, run.directory).sent()
        return _known_by_directory(run, terms) if own is None else Known(own)
    except Exception as error:  # noqa: BLE001  # any failure affects this file only
        return Known(problem=in_words(error, run.path))


def _known_by_directory(run: StoredRun, terms: Terms) -> Known:
    mark = mark_of(run.path)
    is_marked = os.path.lexists(mark)
    logged = read_log(log_of(run.path.parent), run.directory) if is_online(run) else Sent()
    if terms.trust:
        return Known(logged, is_marked)
    known = Known(logged, by_log=bool(logged.attempts))
    if is_complete(logged, run) or not is_marked:
        return known
    doubt = (
        f"{run.path.parent} was marked as uploaded by `wandb sync` ({mark.name}), but you have not uploaded it from "
        "this account. --trust accepts the mark, if the directory is yours, and remembers it. --force uploads the run."
    )
    return replace(known, doubts=(doubt,))


def _planned_or_refused(run_id: str, project: str | None, runs: list[StoredRun], now: float, terms: Terms) -> UploadRun:
    try:
        return _planned(run_id, project, runs, now, terms)
    except Exception as error:  # noqa: BLE001  # any failure affects this run only
        problem = in_words(error, runs[0].path)
    files = tuple(
        UploadFile(run, Sent(), is_marked=False, finishes=False, resumes=False, problem=problem, terms=terms)
        for run in runs
    )
    danger = f"It is unknown what an upload would do, so it is refused: {problem}"
    return UploadRun(run_id, project, files, (), (), dangers=(danger,))


def _planned(run_id: str, project: str | None, runs: list[StoredRun], now: float, terms: Terms) -> UploadRun:
    ordered = sorted(runs, key=_upload_order)
    files = tuple(_file(run, number, ordered, terms) for number, run in enumerate(ordered))
    entity = terms.entity or files[-1].run.entity or None
    if all(file.is_uploaded for file in files):
        return UploadRun(run_id, project, files, (), (), entity=entity)
    left = [file for file in files if not file.is_uploaded]
    under_way = [f"{file.path.parent}: {another_upload(who)}" for file in left if (who := _uploader(file))]
    if under_way:  # its progress changes meanwhile
        return UploadRun(run_id, project, files, tuple(under_way), (), entity=entity)
    own = [reason for file in left for reason in problems_of_file(file, now)]
    listed = [(file, entries_below(files_of(file.path), file.run.directory)) for file in left]
    beside = [(file, [entry for entry in entries if not entry.is_file]) for file, entries in listed]
    return UploadRun(
        run_id,
        project,
        files,
        refusals=(*problems_of_run(ordered), *own),
        notes=(*notes_on(files), *(note for file, entries in beside for note in left_out(file, entries))),
        dangers=tuple(reason for file, entries in beside for reason in dangers_of(file, entries)),
        entity=entity or default_entity(),
    )


def _uploader(file: UploadFile) -> str | None:
    """Return the process that is uploading the file now."""
    with suppress(ReadError, OSError):
        return FileState(file.path, file.run.directory).uploader()
    return None


def _upload_order(run: StoredRun) -> tuple[bool, str, list[str]]:
    """Return a sort key: secondaries before primaries, then by start time."""
    is_primary = run.shared_as is not None and run.shared_as.primary
    return is_primary, run.started or "", natural_order(str(run.path))


def _file(run: StoredRun, number: int, ordered: Sequence[StoredRun], terms: Terms) -> UploadFile:
    role = run.shared_as
    return UploadFile(
        run,
        finishes=role is None or (role.update_finish_state and number == len(ordered) - 1),
        resumes=role is None and number > 0 and not run.branches,  # resuming would drop its branch point
        terms=terms,
        **vars(known_of(run, terms)),
    )
