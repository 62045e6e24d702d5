"""Agreement on the ranks of a unit that take part in its exchange, through the job's store, generation by generation.

A generation is a period in which the same ranks, its members, take part in all rounds, over one process group or a tree
of them. All claims are made by compare-and-set. The first claim counts, so all ranks read the same members.

- *First.* Ranks publish their arrival in the store. The last one to arrive claims generation 0 for all. Otherwise a
  rank that is elected after `join_timeout` claims it with those that have arrived (`arrive`).
- *Not here.* A rank publishes immediately that it has opened a session (`publish_opened`). Others are not waited for,
  and do not count as missing: `init` may be called under ``if rank == 0``. Rank 0 claims the generation if all ranks
  that have opened a session have arrived, and for 2 s no further one has, nor still ends its own run of the session
  before; if it is the only one, once it has something to write, or ends. Those that come later join.
- *Opening.* Rank 0 arrives when its run is open, for which W&B may take longer than `join_timeout`. The others wait.
- *No primary.* If rank 0 has opened no session within `join_timeout`, or the lowest rank that is here ends before, the
  unit moves: generation 0 is claimed without members, with the lowest rank as its `source`. If that has died, the first
  rank that waits no longer claims it for the lowest one, which is not here any more in the session that follows. All
  ranks open another session, of which that rank is the primary, and pass on what they have logged (`Moved`). While rank
  0 opens the run of an enclosing session, it counts as opening this one. If the store is gone before that claim, there
  is no exchange: one rank, on which they have agreed after 2 s, writes its own rows.
- *No exchange.* With ``reduce=None``, only rank 0 writes, and does not arrive. The others watch for it
  (`watches`), and claim generation 0 in the same way if it has opened no session.
- *Too late.* A rank continues alone immediately (`Over`) if all members of the newest generation are gone or, before
  there is a generation, the coordinator has ended its session, or the primary could not open its run.
- *Broken.* A member finds the exchange broken (a peer died, stalled past `peer_timeout`, or left), or leaves before all
  have closed. It marks the generation as broken. Each remaining member publishes its checkpoint: the number of its last
  round, with what it has shown to all. It adds that number to a list. The first member in the list reads the others',
  and claims the next generation with the members whose numbers arrived in time (`regroup`). It does not wait for a
  member that it has waited for in vain when the generation began (`forming`). No member can finish a round before all
  members have entered it, so members differ by at most one round. A member that is a round behind takes the result from
  the checkpoint of the `source`.
- *Joined.* A rank that is not a member, because it was late or was dropped, requests to join (`join`). All members
  learn of it by a flag in a round, after which they have the same state. The first member publishes this state and
  claims the next generation (`admit`). The new member keeps its pending contributions, which correct rows that were
  written already. It repeats its contributions to a round that was interrupted.
- *Left.* A leaving rank publishes its checkpoint, and how it ended (`leave`). A rank that has finished and delivered
  everything is not missing. It has told the members so in a round, which counts if its process ends before it could
  publish it. A rank whose `finish` ended before that is missing, although it has not failed. Rows that lack a rank are
  marked with `dist_wandb/degraded`, the number of missing ranks.

A new generation begins with a greeting (`participation`): members exchange the work that was pending when the last
generation broke. Contributions of ranks that are gone stay in the totals, but do not complete a cell in place of ranks
that have yet to contribute.

Invariant: generation n + 1 is claimed only after all its members have left generation n at `last_round` or one round
before, so nothing is lost or counted twice.

No rank queries every other rank. Entries of many ranks are a list, which one rank reads for all (`SharedList`).
It publishes the result in the next generation, including departures. The other ranks poll one key, at intervals that
grow with time and with the number of ranks. If the reading rank is gone, another one is elected. So the load of the
store grows linearly with the number of ranks, not quadratically. The store is polled on a dedicated connection
(`JobStore.beside`), with one call per poll, because a key may be deleted between two calls (`store.leftovers`).
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, cast

from dist_wandb.errors import RendezvousError
from dist_wandb.exchange.interface import Hooks
from dist_wandb.exchange.membership.forming import Forming, Moved, Over, Stopped, poll_until_stopped
from dist_wandb.exchange.membership.generations import (
    Checkpoint,
    Generation,
    GenerationStore,
    Presence,
    least_wait,
)
from dist_wandb.job.job_store import JobStore, SharedList
from dist_wandb.job.timed_caller import Interval, interval
from dist_wandb.settings.options import Limits
from dist_wandb.settings.plan import Unit

_CHECK_INTERVAL = 1.0  # seconds between two checks whether the session has ended, or the primary opens its run
_TERM = 2.0  # seconds that an elected rank has to claim a generation, before another rank is elected


class Membership:
    """One rank's part in the agreement on members.

    Methods that wait, `within` some seconds, raise `Stopped` as soon as `is_stopped` returns true, and a
    `RendezvousError` if the store is gone.
    """

    def __init__(
        self,
        unit: Unit,
        limits: Limits,
        keys: JobStore,  # of the unit, on a dedicated connection
        is_stopped: Callable[[], bool],
    ) -> None:
        self.presence: Presence = Presence(unit, keys)
        self.generations: GenerationStore = GenerationStore(keys, unit.index)
        self.forming: Forming = Forming(unit, limits, keys, self.generations, self.presence.global_rank, is_stopped)
        self.unit: Unit = unit
        self.limits: Limits = limits
        self._is_stopped = is_stopped
        self._join_requests: dict[int, SharedList] = {}  # requests to join the latest generation, by its number

    # The first generation

    def arrive(
        self,
        within: float,
        hooks: Hooks = Hooks(),  # noqa: B008  # immutable; if they `move`, another rank may become the primary
        is_due: Callable[[], bool] = lambda: False,  # has this rank something logged some seconds ago, or ends it?
        has_rows: Callable[[], bool] = lambda: False,  # has this rank, which has not failed, something not written?
        *,
        watches: bool = False,  # whether it only waits until it is certain which rank writes: there is no exchange
    ) -> Generation:
        """Arrive, and wait for the first generation, `within` some seconds for ranks that have opened a session.

        This rank may be no member. Raises Over if there is no rank left to wait for, and Moved if another rank, or this
        one, is the primary; to a rank that only watches, in any case. If this rank waits no longer, it moves with what
        it has to write, unless rank 0 may still come.
        """
        arrival = _Arriving(self, within, hooks, is_due, watches=watches)
        # whether to check at once whether it is this rank that has to claim the generation
        is_urgent = lambda: (not self.unit.index or hooks.move is not None) and is_due()  # noqa: E731
        try:
            found = poll_until_stopped(arrival.first, math.inf, self._is_stopped, self.unit.size, is_urgent)
        except Stopped:
            may_move = self.unit.index > 0 and hooks.move and has_rows()
            if may_move and not self.presence.has_primary() and not hooks.is_opening():
                first = self.generations.claim(Generation(0, (), source=min(self.presence.present())))
                if first.source:
                    raise Moved(first.source) from None
            raise
        return cast("Generation", found)

    # The following ones

    def elected(self, number: int, claim: Callable[[], Generation]) -> Generation:
        """Return a generation, which an elected rank claims; if that is gone, the next elected one."""
        for term in itertools.count():
            if self.generations.is_elected(number, term):
                break
            claimed = self.until(lambda: self.generations.get(number), interval(_TERM, self.unit.size))
            if claimed is not None:
                return claimed
        return claim()

    def regroup(
        self, generation: Generation, checkpoint: Checkpoint, within: float, closed: Collection[int] = ()
    ) -> Generation:
        """Agree with the remaining members on the next generation, after this one broke.

        Members that have said in a round that they contribute nothing more (`closed`) have finished if they are gone,
        even if their process has ended before they published it.
        """
        self.generations.publish_checkpoint(generation, checkpoint)
        summaries = self.generations.summaries(generation)
        is_first = summaries.append([self.unit.index, checkpoint.round]) == 1
        self.generations.mark_broken(generation)  # afterwards: who found it broken knows best whom to wait for
        presence, read = self.presence, dict[int, int]()

        def claimed() -> Generation | None:
            following = self.generations.following(generation)
            return following or (claim() if is_first and are_complete() else None)

        def are_complete() -> bool:
            read.update(dict(summaries.read_new()))
            gone = presence.gone_among(generation.members) | self.forming.missing
            return (read.keys() | gone).issuperset(generation.members)

        def claim() -> Generation:
            """Claim it with the members that have published their last round and are not gone."""
            are_complete()  # reads new summaries
            known = {**read, **presence.last_rounds.get(generation.number, {}), **read}  # if equal, one that is here
            source = max(known, key=known.__getitem__)
            members = tuple(sorted(read.keys() - presence.gone.keys()))
            finished = set(closed) & set(generation.members) - set(members) - presence.gone.keys()
            presence.gone.update(dict.fromkeys(finished, "finished"))
            following = Generation(generation.number + 1, members, (), known[source], source)
            return self.claim(following, generation)

        patience = within if is_first else within + _TERM
        return self.until(claimed, patience) or self.elected(generation.number + 1, claim)

    def claim(self, generation: Generation, before: Generation | None = None) -> Generation:
        """Claim a generation; mark it as broken if a member has left meanwhile, perhaps without seeing the claim."""
        members, presence = generation.members, self.presence
        known = {*generation.lost} if before is None else {*generation.lost, *before.lost, *before.members}
        places = {**({} if before is None else before.places), **presence.places}
        lost = tuple(sorted(known - set(members) - presence.gone.keys()))
        claimed = self.generations.claim(replace(generation, lost=lost, gone=presence.gone, places=places))
        if presence.gone_among(claimed.members):
            self.generations.mark_broken(claimed)
        return claimed

    def admit(self, generation: Generation, checkpoint: Checkpoint, state: dict[str, Any]) -> Generation:
        """Claim the next generation, with all ranks that request to join. The first member calls this after a round."""
        joining = tuple(sorted(self.joining(generation)))
        self.generations.publish_checkpoint(generation, checkpoint)
        self.generations.publish_state(generation, state)
        members, index = tuple(sorted({*generation.members, *joining})), self.unit.index
        following = Generation(generation.number + 1, members, joining, checkpoint.round, index)
        return self.claim(following, generation)

    def join(self, generation: Generation, within: float) -> Generation:
        """Return the newest generation if this rank is a member, or a later one that it requests to join.

        Waits `within` seconds for each of them, then raises RendezvousError; Over if all members are gone.
        """
        while self.unit.index not in generation.members:
            if self.presence.are_gone(generation.members):
                raise Over
            self.generations.join_requests(generation).append(self.presence.own)
            following = self.until(functools.partial(self._next_or_over, generation), within)
            if following is None:
                raise RendezvousError(
                    f"Rank {self.unit.global_rank} asked to take part again, but no other rank answered within "
                    f"{within:g} s. The other ranks have ended or continue without it."
                )
            generation = following
        return generation

    def _next_or_over(self, before: Generation) -> Generation | None:
        is_over = self.presence.are_gone(before.members)  # before it is read: none follows then
        if (following := self.generations.following(before)) is None and is_over:
            raise Over
        return following

    def joining(self, generation: Generation) -> set[int]:
        if generation.number not in self._join_requests:
            self._join_requests = {generation.number: self.generations.join_requests(generation)}
        join_requests = self._join_requests[generation.number]
        join_requests.read_new(soon=True)
        return set(map(self.presence.learn, join_requests.values)) - set(generation.members)

    def leave(
        self, generation: Generation | None, checkpoint: Checkpoint, how: str, *, is_closed: bool = False
    ) -> None:
        """Publish that this rank is gone, and `how`, as in `Presence.gone`.

        If all leave after the last round (`is_closed`), its result may still be on its way, which is not interrupted.
        """
        number = None if generation is None else generation.number
        if generation is not None:
            self.generations.publish_checkpoint(generation, checkpoint)
        self.presence.leave(how, number, checkpoint.round)
        left = generation or self.generations.get(0)
        while left is not None:  # also later generations of which it became a member without noticing
            if self.unit.index in left.members and not (is_closed and left is generation):
                self.generations.mark_broken(left)
            left = self.generations.following(left)

    def until(self, query: Callable[[], Generation | None], within: float) -> Generation | None:
        return poll_until_stopped(query, within, self._is_stopped, self.unit.size)


class _Arriving:
    """A rank that has arrived, and has no generation yet; the arguments are those of `Membership.arrive`."""

    def __init__(
        self, membership: Membership, within: float, hooks: Hooks, is_due: Callable[[], bool], *, watches: bool
    ) -> None:
        self._membership = membership
        self._within, self._hooks, self._is_due, self._watches = within, hooks, is_due, watches
        self._is_last = membership.presence.arrive()
        self._counts, self._changed = (0, 0), membership.presence.began  # of ranks that have come; since when
        self._over_check, self._check = (Interval(_CHECK_INTERVAL, membership.unit.size) for _ in range(2))

    def first(self) -> Generation | None:
        """Return the first generation, or `None` if it is not claimed yet. Claim it if it is time."""
        presence = self._membership.presence
        try:
            is_here = self._watches and presence.has_primary()
            found = self._membership.generations.get(0)  # it counts also if rank 0 has come since
            if found is None and is_here:
                raise Moved(0)
            found = found or self._claimed()
        except RendezvousError:
            if not self._hooks.move or not presence.stand_in:
                raise
            raise Moved(presence.stand_in) from None
        if found is not None and not found.members and found.source is not None:
            raise Moved(found.source)
        return found

    def _claimed(self) -> Generation | None:
        presence, unit, hooks = self._membership.presence, self._membership.unit, self._hooks
        now, is_first = time.monotonic(), not unit.index
        if self._over_check.is_over(now):
            if not is_first and (failure := hooks.failure()):
                raise Over(failure)
            if hooks.is_over() and (self._watches or not presence.present() - {unit.index}):
                raise Over
            if hooks.move and presence.waited >= least_wait(self._within, unit):
                presence.choose_stand_in()
        if (self._is_last and len(presence.arrived()) == unit.size) or (is_first and self._is_complete()):
            return self._claim_first(())
        is_late = presence.waited >= self._within
        ends_without_primary = hooks.move and not is_first and self._is_due()
        if not (is_late or ends_without_primary) or not self._check.is_over(now):
            return None
        if not is_first and hooks.is_opening():
            return None
        if is_late:
            return self._membership.elected(0, self._claim_late)
        if presence.waited < least_wait(self._within, unit):
            return None
        is_lowest = unit.index == min(presence.present(), default=None)
        return self._claim_late() if is_lowest and 0 not in presence.opened() else None

    def _is_complete(self) -> bool:
        """Return whether all ranks that have opened a session have arrived, and there was enough time for others."""
        presence, limits = self._membership.presence, self._membership.limits
        is_due = self._is_due()  # first: a rank that opened its session before this one ended is counted
        counts = presence.counts()
        if counts != self._counts or self._hooks.is_opening():
            self._counts, self._changed = counts, time.monotonic()
        if time.monotonic() - self._changed < least_wait(self._within, self._membership.unit):
            return False
        if not (counts[0] > 1 or is_due):
            return False
        opened, arrived = presence.opened(), presence.arrived()
        if len(opened) < counts[0] or not opened <= arrived:  # fewer if a rank is about to set its entry
            return False
        patience = min(limits.peer_timeout, limits.flush_timeout / 2)  # for ranks of the former session
        return presence.waited >= patience or presence.before() <= arrived

    def _claim_late(self) -> Generation:
        presence = self._membership.presence
        opened, lowest = presence.opened(), min(presence.present(), default=0)
        if self._hooks.move and 0 not in opened and lowest:
            return self._membership.generations.claim(Generation(0, (), source=lowest))
        if self._watches:
            raise Moved(0)
        return self._claim_first(opened)

    def _claim_first(self, opened: Collection[int]) -> Generation:
        presence = self._membership.presence
        present = tuple(sorted(presence.present()))
        return self._membership.claim(Generation(0, present, lost=(*opened, *presence.before())))
