"""The sessions of this process that have not ended, and what happens to them when it forks or ends."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from dist_wandb.exchange.interface import end_all
from dist_wandb.runs import wandb_private
from dist_wandb.session.process_end import ProcessEnd
from dist_wandb.settings.options import Current

if TYPE_CHECKING:
    from dist_wandb.session.session import Session

entered: Current[Session | None] = Current("entered", None)
"""The session of the enclosing decorated function."""
is_nested_on_purpose: Current[bool] = Current("is_nested_on_purpose", default=False)
"""Whether `init` is called for a decorated function, which ends the session that it opens."""

_sessions: list[Session] = []


class History:
    """What has happened in this process."""

    has_begun = False  # whether any session was opened


history: History = History()


def _set_names_anew() -> None:
    """Let the names of the current run stand for it again, whatever the script has assigned to them, as wandb does."""
    package = sys.modules["dist_wandb"]
    for name in package._OF_CURRENT:  # noqa: SLF001  # of this package
        vars(package).pop(name, None)


def add(session: Session) -> None:
    """Register a session that starts."""
    _sessions.append(session)
    _set_names_anew()
    history.has_begun = True
    process_end.register()


def remove(session: Session) -> None:
    """Remove a session that accepts no more rows."""
    with suppress(ValueError):  # another thread may do the same
        _sessions.remove(session)
        _set_names_anew()


def release_sigterm() -> None:
    """Restore SIGTERM's handler once the last session has ended."""
    if not _sessions:
        process_end.restore_sigterm()


def open_sessions() -> list[Session]:
    """Return the sessions that have not ended, the oldest first. Close those whose run the user has finished."""
    for session in [session for session in _sessions if wandb_private.is_finished(session.run)]:
        session.close_without_run()
    return _sessions.copy()


def in_scope() -> list[Session]:
    """Return the sessions of this function, the oldest first: in a decorated one, that of its call and those inside."""
    found, inside = open_sessions(), entered()
    mine = [session for session in found if inside in (session, session.opened_inside)]
    return mine if inside is not None else mine or found


def current() -> Session | None:
    """Return the session that is ``wandb.run``: the latest one that was not opened with ``reinit="create_new"``."""
    return next((session for session in reversed(in_scope()) if session.is_current), None)


def of_script() -> Session | None:
    """Return the current session if the script has opened it by `init`, not through an integration."""
    session = current()
    return None if session is None or session.opened_at is None else session


def holds(run: object) -> bool:
    """Return whether `run` is the run of a session of this process that has not ended."""
    return any(session.run is run for session in _sessions)


def _end_with_process(exit_code: int, failed: bool) -> None:
    """Finish the sessions that are still open, the newest first, and then the exchanges' threads."""
    for session in reversed(_sessions.copy()):
        session.end_with_process(exit_code, failed=failed)
    end_all(failed=failed)
    vars(sys.modules["dist_wandb"])["run"] = None  # for a `__del__` at a time when nothing can be imported any more


def _prepare_fork() -> None:
    for session in _sessions.copy():
        session.prepare_fork()


def _after_fork() -> None:
    wandb_private.disarm_exit_hooks()
    process_end.restore_sigterm()
    for session in _sessions:
        session.after_fork()


process_end: ProcessEnd = ProcessEnd(_end_with_process, wandb_private.code_of_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_prepare_fork, after_in_child=_after_fork)
