"""Calls of `init` while a session is open: whether they return it, decided alike on all ranks."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from dist_wandb.errors import RendezvousError
from dist_wandb.session import job_description
from dist_wandb.store import leftovers
from dist_wandb.store.job_store import LONGEST_PAUSE, JobStore
from dist_wandb.store.polling import poll
from dist_wandb.store.timed_caller import STORE_PATIENCE, briefly
from dist_wandb.user_lines import named_line

if TYPE_CHECKING:
    from dist_wandb.session.job_link import JobLink
    from dist_wandb.user_lines import Line

ENDING = "ending"  # key: set once the coordinator has begun to end the session
_ELSEWHERE = 2.0  # seconds to wait for the coordinator's decision about `init` at another line than the first


class InitCalls:
    """The calls of `init` on this rank while a session is open.

    The coordinator publishes how it has decided, for each line of the script, and that it ends a session. A rank that
    is ahead waits for that: at the line that opened the session, as in a loop whose runs are finished on rank 0 only,
    as long as `init` waits; at another line, which perhaps only this rank reaches, for a few seconds.
    """

    def __init__(self) -> None:
        self._number: Counter[str] = Counter()  # by line
        self._unanswered: set[str] = set()  # lines at which this rank calls `init`, but the coordinator does not

    def agree(self, link: JobLink, line: Line | None, mine: bool, *, is_first: bool) -> bool | None:
        """Decide as the coordinator does whether a call returns the session.

        Args:
            link: The session's link.
            line: The line that calls `init`.
            mine: This rank's own decision. It counts on the coordinator, and if that does not decide.
            is_first: Whether the line is the one that opened the session.

        Returns:
            The decision; `None` if the coordinator ends the session, so that this rank has to end it, too.
        """
        place = named_line(line)
        self._number[place] += 1
        number, key, coordinates = self._number[place], f"again/{place}", link.topology.is_coordinator
        within = link.options.limits.join_timeout
        within = within if is_first else min(_ELSEWHERE, within) if place not in self._unanswered else 0.0

        def decision(store: JobStore) -> tuple[bool | None] | None:
            is_ended = store.has([ENDING]) or leftovers.is_over(store)  # asked first: the decision may be older
            theirs = store.try_get(key)
            if theirs is not None and theirs[0] >= number:
                return (bool(theirs[1]),)
            return (None,) if is_ended else None

        def decided(store: JobStore) -> tuple[bool | None] | None:
            if coordinates:
                store.publish(key, [number, mine])
            elif job_description.is_published(store):
                return poll(lambda: decision(store), within, LONGEST_PAUSE, link.topology.world_size)
            return (mine,)

        with suppress(RendezvousError):
            store = link.find_store()
            found = (mine,) if store is None else briefly(lambda: decided(store), None, within + STORE_PATIENCE)
            if found is not None:
                return found[0]
        self._unanswered.add(place)
        return mine
