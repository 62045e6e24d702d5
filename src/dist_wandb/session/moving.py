"""A session moves if its primary never opens it: it continues as another session, of which another rank is the primary.

Each rank opens that session when it learns of this (`exchange.membership.beginning`), on the thread of the exchange.
The user keeps the object that `init` has returned: it gets the parts of the other session. A call that is in progress
on another thread ends with the former parts, and then does the same with the new ones (`Shutdown.successor`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from dist_wandb.errors import RendezvousError
from dist_wandb.exchange.membership.beginning import Situation, primary_of
from dist_wandb.exchange.membership.polling import Stopped
from dist_wandb.exchange.membership.presence import keys_of
from dist_wandb.session import registry

if TYPE_CHECKING:
    from dist_wandb.exchange.interface import Exchange
    from dist_wandb.session.job_link import JobLink
    from dist_wandb.session.notices import SessionNotices
    from dist_wandb.session.session import Session
    from dist_wandb.session.shutdown import Shutdown

MOVED = "/moved"  # part of the name of a session that continues another one
_OWN = ("opened_at", "opened_inside", "_is_block", "_pid")  # what a session keeps


def successor_of(
    link: JobLink, is_opening: Callable[[], bool], is_due: Callable[[], bool], is_stopped: Callable[[], bool]
) -> Exchange | None:
    """Wait until it is certain that the primary has opened a session; otherwise continue with another one.

    Args:
        link: The link of the session, which takes part in no exchange.
        is_opening: See `Situation`.
        is_due: Returns whether this rank ends.
        is_stopped: Returns whether to stop waiting immediately.

    Returns:
        The exchange with which the session continues; `None` if the primary is here, or the store is gone.
    """
    store, unit, within = link.store, link.unit, link.options.limits.join_timeout
    if store is None:
        return None
    situation = Situation(is_due=is_due, is_over=link.is_over, is_opening=is_opening)
    try:
        primary = primary_of(unit, store.beside(keys_of(unit)), within, situation, is_stopped)
    except (Stopped, RendezvousError):
        return None
    return link.move(unit.global_rank_of(primary)) if primary else None


def move(session: Session, reopen: Callable[[int], Session], primary_rank: int) -> Exchange:
    """Continue a session as another one.

    Args:
        session: The session.
        reopen: Opens the other one, given the rank of its primary.
        primary_rank: That rank.

    Returns:
        The exchange that takes the rows that were logged so far.
    """
    other = reopen(primary_rank)
    other.opened_at, other.opened_inside = session.opened_at, session.opened_inside or session
    parts = {name: part for name, part in vars(other).items() if name not in _OWN}
    shutdown, following = cast("Shutdown", vars(session)["_shutdown"]), cast("Shutdown", parts["_shutdown"])
    following.failure, shutdown.successor = shutdown.failure, following
    vars(session).update(parts)
    registry.remove(session)
    cast("SessionNotices", parts["_notices"]).moved()
    return cast("Exchange", parts["_exchange"])
