"""The wait for the first generation of a unit: which ranks it waits for, and who claims it.

- The last rank to arrive claims generation 0 for all.
- *Not here.* A rank publishes immediately that it has opened a session (`publish_opened`). Others are not
  waited for, and do not count as missing: `init` may be called under ``if rank == 0``. Rank 0 claims the generation if
  all ranks that have opened a session have arrived, and for 2 s no further one has; if it is the only one, once it has
  something to write, or ends. The ranks of a job do not start at the same time: those that come later join.
- *Opening.* Rank 0 arrives when its run is open, for which W&B may take longer than `join_timeout`. The others wait.
- *No primary.* If rank 0 has opened no session within `join_timeout`, or the lowest rank that is here ends before, the
  unit moves: generation 0 is claimed without members, with the lowest rank as its `source`. All ranks open another
  session, of which that rank is the primary, and pass on what they have logged (`Moved`). While rank 0 opens the run of
  an enclosing session, it counts as opening this one.
- *No exchange.* With ``reduce=None``, ranks do not arrive, and only rank 0 writes. The others watch for it
  (`primary_of`), and claim generation 0 in the same way if it has opened no session.
- Otherwise a rank that is elected after `join_timeout` claims the generation with those that have arrived.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from dist_wandb.exchange.membership.generations import Generation, GenerationStore, Presence, has_opened, least_wait
from dist_wandb.exchange.membership.meeting import poll_until_stopped
from dist_wandb.exchange.protocol.pacing import Interval
from dist_wandb.settings.plan import Unit
from dist_wandb.store.job_store import JobStore
from dist_wandb.store.polling import interval

if TYPE_CHECKING:
    from dist_wandb.exchange.membership.membership import Membership

_CHECK_INTERVAL = 1.0  # seconds between two checks whether the session has ended, or the primary opens its run


class Over(Exception):  # noqa: N818  # not an error either: this rank is late
    """The other ranks have ended their sessions."""


class Moved(Exception):  # noqa: N818  # not an error either: the ranks continue in another session
    """The primary has not opened a session. Another rank becomes the primary of another session."""

    def __init__(self, primary: int) -> None:
        super().__init__(primary)
        self.primary = primary  # its index in the unit


@dataclass(frozen=True)
class Situation:
    """What is asked of a session that waits for the first generation, repeatedly."""

    is_due: Callable[[], bool] = lambda: False  # has this rank something that was logged some seconds ago, or ends it?
    is_over: Callable[[], bool] = lambda: False  # has the coordinator ended its session?
    # does the primary still open its run, or that of an enclosing session, after which it may come to this one?
    is_opening: Callable[[], bool] = lambda: False
    may_move: bool = False  # whether another rank may become the primary


def primary_of(unit: Unit, keys: JobStore, within: float, situation: Situation, is_stopped: Callable[[], bool]) -> int:
    """Return the rank of the unit that writes the run, once it is certain, to a rank that takes part in no exchange.

    It is 0, unless that rank has opened no session `within` some seconds: then the lowest that has opened one. Raises
    Stopped if waiting was stopped, and RendezvousError if the store is gone.
    """
    presence, generations = Presence(unit, keys), GenerationStore(keys, unit.index)

    def primary() -> int | None:
        if has_opened(keys, 0):
            return 0
        first = generations.get(0)
        if first is None:
            lowest = min(presence.opened())
            ends = situation.is_due() and unit.index == lowest and not situation.is_opening()
            if not (ends and presence.waited >= least_wait(within, unit)) and presence.waited < within:
                return None
            if situation.is_over():
                return 0
            first = generations.claim(Generation(0, (), source=lowest))
        return first.source or 0

    return cast("int", poll_until_stopped(primary, math.inf, is_stopped, unit.size, situation.is_due))


class Beginning:
    """One rank's wait for the first generation; `within` some seconds for ranks that have opened a session."""

    def __init__(self, membership: Membership, unit: Unit, within: float, situation: Situation) -> None:
        self._membership = membership
        self._presence = membership.presence
        self._unit = unit
        self._within = within
        self._situation = situation
        self._is_last = self._presence.arrive()
        self._counts, self._changed = (0, 0), self._presence.began  # of ranks that have come; since when
        self._over_check, self._check = (Interval(interval(_CHECK_INTERVAL, unit.size)) for _ in range(2))

    def is_urgent(self) -> bool:
        """Return whether to check at once whether it is this rank that has to claim the generation."""
        return (self._is_first or self._situation.may_move) and self._situation.is_due()

    def first(self) -> Generation | None:
        """Return the first generation, or `None` if it is not claimed yet. Claim it if it is time.

        Raises Over if there is no rank left to wait for, and Moved if another rank, or this one, is the primary.
        """
        found = self._membership.generations.get(0) or self._claimed()
        if found is not None and not found.members and found.source is not None:
            raise Moved(found.source)
        return found

    def _claimed(self) -> Generation | None:
        now, presence, situation = time.monotonic(), self._presence, self._situation
        if self._over_check.is_over(now) and situation.is_over() and not presence.present() - {self._unit.index}:
            raise Over
        if (self._is_last and len(presence.arrived()) == self._unit.size) or (self._is_first and self._is_complete()):
            return self._membership.claim(Generation(0, tuple(sorted(presence.present()))))
        is_late = presence.waited >= self._within
        if not (is_late or self._ends_without_primary()) or not self._check.is_over(now):
            return None
        if not self._is_first and situation.is_opening():
            return None
        if is_late:
            return self._membership.elected(0, self._claim_late)
        if presence.waited < least_wait(self._within, self._unit):
            return None
        is_lowest = self._unit.index == min(presence.present(), default=None)
        return self._claim_late() if is_lowest and 0 not in presence.opened() else None

    @property
    def _is_first(self) -> bool:
        return self._unit.index == 0

    def _ends_without_primary(self) -> bool:
        return self._situation.may_move and not self._is_first and self._situation.is_due()

    def _is_complete(self) -> bool:
        """Return whether all ranks that have opened a session have arrived, and there was enough time for others."""
        counts = self._presence.counts()
        if counts != self._counts:
            self._counts, self._changed = counts, time.monotonic()
        if time.monotonic() - self._changed < least_wait(self._within, self._unit):
            return False
        return (counts[0] > 1 or self._situation.is_due()) and self._presence.opened() <= self._presence.arrived()

    def _claim_late(self) -> Generation:
        opened, present = self._presence.opened(), sorted(self._presence.present())
        if self._situation.may_move and 0 not in opened and present:
            return self._membership.generations.claim(Generation(0, (), source=present[0]))
        return self._membership.claim(Generation(0, tuple(present), lost=tuple(opened)))
