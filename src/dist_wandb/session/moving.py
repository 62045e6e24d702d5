"""A session moves if its primary never opens it: it continues as another session, of which another rank is the primary.

Each rank opens that session when it learns of this (`exchange.membership`), on the thread of the exchange.
The user keeps the object that `init` has returned: it gets the parts of the other session. A call that is in progress
on another thread ends with the former parts, and then does the same with the new ones (`Shutdown.successor`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from dist_wandb.errors import RendezvousError
from dist_wandb.exchange.membership.forming import Stopped
from dist_wandb.exchange.membership.generations import Presence, keys_of
from dist_wandb.exchange.membership.membership import Situation, primary_of
from dist_wandb.job.job_store import LONGEST_PAUSE
from dist_wandb.job.timed_caller import briefly, poll
from dist_wandb.session import registry

if TYPE_CHECKING:
    from dist_wandb.session.config.sync import ConfigSync
    from dist_wandb.session.intake import Intake
    from dist_wandb.session.job_link import JobLink
    from dist_wandb.session.notices import SessionNotices
    from dist_wandb.session.own_run import OwnRun
    from dist_wandb.session.relay import Children
    from dist_wandb.session.session import Session
    from dist_wandb.session.shutdown import Shutdown

_DECISION = 2.0  # seconds after `join_timeout` in which ranks notice that another one becomes the primary
_OPENING = 10.0  # seconds that reads then wait for its run
MOVED = "/moved"  # part of the name of a session that continues another one
_OWN = ("opened_at", "opened_inside", "_is_block")  # what a session keeps


class Moving:
    """Whether and how a session continues with another primary, and how long reads wait for its own until then.

    All reads together wait up to `join_timeout` and, if another rank becomes the primary then, until it has opened the
    run, but no more than some seconds.
    """

    def __init__(self, join_timeout: float, ranks: int) -> None:
        self.is_possible = False  # whether another rank may become the primary
        # Continues the session, given the rank of its new primary; `None` after its end.
        self.move: Callable[[int], None] | None = None
        self.has_happened = False  # whether the session has continued
        self.has_id = False  # whether the base id is known to be the coordinator's: reads of it do not wait
        self._join_timeout = join_timeout
        self._ranks = ranks
        self._until = math.inf  # reads wait, by the monotonic clock, once there was one

    def to(self, primary_rank: int) -> None:
        """Continue with another primary."""
        if self.move is None:
            raise RuntimeError("the session has ended")
        self.move(primary_rank)

    def begin(self) -> None:
        """Let reads wait for the other session."""
        if self._until != math.inf:
            self._until = time.monotonic() + _OPENING

    def end(self, successor: Moving) -> None:
        """Let reads continue in the other session, for which they wait no longer."""
        successor._until, self.has_happened = self._until, True

    def wait(self, is_over: Callable[[], bool], is_known: Callable[[], bool]) -> None:
        """Let a read wait until what the primary publishes `is_known`; raise `RendezvousError` if the store is gone.

        It does not wait if the session `is_over` on the coordinator: what that has published may be gone.
        """
        if self._until == math.inf:
            self._until = time.monotonic() + self._join_timeout + self.is_possible * _DECISION
        if not is_over():
            is_settled = lambda: self.has_happened or time.monotonic() > self._until or is_known() or None  # noqa: E731
            poll(is_settled, math.inf, LONGEST_PAUSE, self._ranks)


def primary_in(
    link: JobLink,
    is_opening: Callable[[], bool],
    is_due: Callable[[], bool],
    has_rows: Callable[[], bool],
    is_stopped: Callable[[], bool],
) -> int | None:
    """Wait until it is certain which rank of the unit writes its run; return its index, or `None` if it never is.

    For a session that takes part in no exchange. `is_due`: this rank ends. `has_rows`: it has logged something.
    `is_stopped`: stop waiting immediately.
    """
    store, unit, within = link.store, link.unit, link.options.limits.join_timeout
    if store is None:
        return None
    situation = Situation(is_due, link.is_over, is_opening, may_move=True, has_rows=has_rows)
    try:
        return primary_of(unit, store.beside(keys_of(unit)), within, situation, is_stopped)
    except (Stopped, RendezvousError):
        return None


def _publish_before(link: JobLink, former: JobLink) -> None:
    """Publish which ranks had the session that this one continues, and have not left it: if one died, it is missing."""
    if link.store is not None and former.store is not None:
        known = Presence(former.unit, former.store.below(keys_of(former.unit)))
        Presence(link.unit, link.store.below(keys_of(link.unit))).publish_before(known)


def move(session: Session, reopen: Callable[[int, Session], Session], primary_rank: int) -> None:
    """Continue a session as another one, made by `reopen`, to which the rows that were logged so far are passed on.

    The session is the one that the user has, also if it continues as a third one.
    """
    link, config_sync = cast("JobLink", vars(session)["_link"]), cast("ConfigSync", vars(session)["_config_sync"])
    link.moving.begin()
    former = next((one for one in registry.open_sessions() if vars(one)["_link"] is link), session)
    other = reopen(primary_rank, session)
    other.opened_at, other.opened_inside = session.opened_at, session.opened_inside or session
    parts = {name: part for name, part in vars(other).items() if name not in _OWN}
    own = cast("OwnRun", parts["_own"])
    own.summary.continue_from(vars(session)["_own"].summary, own.run)
    cast("Intake", parts["_intake"]).continue_from(vars(session)["_intake"])
    shutdown, following = cast("Shutdown", vars(session)["_shutdown"]), cast("Shutdown", parts["_shutdown"])
    following.failure, shutdown.successor = shutdown.failure, following
    cast("Children", parts["_children"]).continue_for(vars(session)["_children"])
    vars(session).update(parts)
    if written := config_sync.continue_in(lambda: session.run):
        own.run.config.update(written, allow_val_change=True)
    following_link = cast("JobLink", parts["_link"])
    briefly(lambda: _publish_before(following_link, link), None)
    following_link.unit_end().report(link.unit_end().exit_code(()))  # of ranks that have failed before
    link.moving.end(following_link.moving)
    registry.remove(former)
    cast("SessionNotices", parts["_notices"]).moved()
