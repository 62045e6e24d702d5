"""What is known of earlier uploads of a file."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from dist_wandb.errors import in_words
from dist_wandb.uploads.log import Sent, read_log
from dist_wandb.uploads.model import Terms, is_complete, is_online, mark_of
from dist_wandb.uploads.state import FileState
from dist_wandb.wandb_files.debug_log import log_of
from dist_wandb.wandb_files.reading import StoredRun


@dataclass(frozen=True)
class Known:
    """What is known of the uploads of a file."""

    sent: Sent = field(default_factory=Sent)
    is_marked: bool = False
    by_log: bool = False
    doubts: tuple[str, ...] = ()
    problem: str | None = None


def known_of(run: StoredRun, terms: Terms) -> Known:
    """What is known of the uploads of a file; what its directory says counts only if that is trusted.

    Of a run that was written online W&B's own log is all there is, so it is believed, and told.
    """
    if terms.again:
        return Known()
    try:
        own = FileState(run.path).sent()
        return _said_by_directory(run, terms) if own is None else Known(own)
    except Exception as error:  # noqa: BLE001  # whatever lies there: it concerns this file alone
        return Known(problem=in_words(error, run.path))


def _said_by_directory(run: StoredRun, terms: Terms) -> Known:
    mark = mark_of(run.path)
    is_marked = os.path.lexists(mark)
    logged = read_log(log_of(run.path.parent)) if is_online(run) else Sent()
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
