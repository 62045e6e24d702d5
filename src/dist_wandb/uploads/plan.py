"""Plan uploads: which files go together, in which order, and what stands against it. Nothing is written or sent."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress

from dist_wandb.errors import ReadError, in_words
from dist_wandb.runs.client_settings import default_entity
from dist_wandb.uploads.copy import entries_below
from dist_wandb.uploads.known import known_of
from dist_wandb.uploads.log import Sent
from dist_wandb.uploads.model import CAUTIOUS, Terms, UploadFile, UploadRun, files_of
from dist_wandb.uploads.problems import dangers_of, left_out, notes_on, problems_of_file, problems_of_run
from dist_wandb.uploads.state import FileState, another_upload
from dist_wandb.wandb_files.finding import natural_order
from dist_wandb.wandb_files.reading import StoredRun


def plan_uploads(runs: Iterable[StoredRun], *, now: float | None = None, terms: Terms = CAUTIOUS) -> list[UploadRun]:
    """Say what is to be uploaded, in which order, and what speaks against it. Nothing is written or sent.

    Args:
        runs: The files, as `read_runs` reads them.
        now: Seconds since the epoch, to tell files that are still written to; the present if `None`.
        terms: What the user has said of the upload.

    Returns:
        One entry per W&B run, those of equal id together, in the order in which their first files came.

    Example:
        Of a shared run of two ranks, rank 1's file comes first, and rank 0's, the primary's, last.
    """
    now = time.time() if now is None else now
    together: dict[tuple[str | None, str], list[StoredRun]] = defaultdict(list)
    for run in runs:
        together[run.project, run.run_id].append(run)
    return [_planned_or_refused(run_id, project, files, now, terms) for (project, run_id), files in together.items()]


def is_uploaded(run: StoredRun) -> bool:
    """Whether a file is uploaded, as far as this user's own uploads and W&B's log of an online run tell."""
    return _file(run, 0, [run], CAUTIOUS).is_uploaded


def _planned_or_refused(run_id: str, project: str | None, runs: list[StoredRun], now: float, terms: Terms) -> UploadRun:
    try:
        return _planned(run_id, project, runs, now, terms)
    except Exception as error:  # noqa: BLE001  # whatever its files have brought about: it concerns this run alone
        problem = in_words(error, runs[0].path)
    files = tuple(
        UploadFile(run, Sent(), is_marked=False, finishes=False, resumes=False, problem=problem, terms=terms)
        for run in runs
    )
    danger = f"What an upload would do is not known, so it is not made: {problem}"
    return UploadRun(run_id, project, files, (), (), dangers=(danger,))


def _planned(run_id: str, project: str | None, runs: list[StoredRun], now: float, terms: Terms) -> UploadRun:
    ordered = sorted(runs, key=_place_in_order)
    files = tuple(_file(run, number, ordered, terms) for number, run in enumerate(ordered))
    entity = terms.entity or files[-1].run.entity or None
    if all(file.is_uploaded for file in files):
        return UploadRun(run_id, project, files, (), (), entity=entity)
    left = [file for file in files if not file.is_uploaded]
    under_way = [f"{file.path.parent}: {another_upload(who)}" for file in left if (who := _uploader(file))]
    if under_way:  # what it has reached changes while one looks
        return UploadRun(run_id, project, files, tuple(under_way), (), entity=entity)
    own = [reason for file in left for reason in problems_of_file(file, now)]
    beside = [(file, [e for e in entries_below(files_of(file.path)) if not e.is_file]) for file in left]
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
    """Who uploads the file at this moment."""
    with suppress(ReadError, OSError):
        return FileState(file.path).uploader()
    return None


def _place_in_order(run: StoredRun) -> tuple[bool, str, list[str]]:
    """Secondaries before primaries; of equal ones that which was started first."""
    is_primary = run.shared_as is not None and run.shared_as.primary
    return is_primary, run.started or "", natural_order(str(run.path))


def _file(run: StoredRun, number: int, ordered: Sequence[StoredRun], terms: Terms) -> UploadFile:
    role = run.shared_as
    return UploadFile(
        run,
        finishes=role is None or (role.update_finish_state and number == len(ordered) - 1),
        resumes=role is None and number > 0,
        terms=terms,
        **vars(known_of(run, terms)),
    )
