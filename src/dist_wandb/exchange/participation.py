"""One rank's way through the generations of its unit: it arrives, enters, forms groups, recovers, and admits others.

On the way it reports the ranks that are missing, and those that never opened a session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from dist_wandb.errors import RendezvousError
from dist_wandb.exchange.cycle import Cycle
from dist_wandb.exchange.interface import Phase
from dist_wandb.exchange.membership.forming import BROKEN_POLL_INTERVAL, Stopped, grace
from dist_wandb.exchange.membership.generations import Generation, Presence, keys_of, least_wait
from dist_wandb.exchange.membership.membership import Membership, Situation
from dist_wandb.exchange.protocol.calls import Intent
from dist_wandb.exchange.protocol.pacing import Interval
from dist_wandb.exchange.protocol.rounds import Rounds
from dist_wandb.exchange.reports import Context
from dist_wandb.store.job_store import JobStore
from dist_wandb.store.timed_caller import TimedCaller, interval
from dist_wandb.topology.ranges import named

UNOPENED = "unopened"  # kind of the warning about ranks that have opened no session
PRIMARY = 0  # its index in the unit
_STORE_POLL_INTERVAL = 0.05  # seconds between two checks whether there is a store


class Attendance:
    """The ranks that participate together with this one, generation after generation."""

    def __init__(self, context: Context) -> None:
        self.is_only_one: bool = False  # as of the last `check`: no other rank has opened a session
        self.lost: frozenset[int] = frozenset()  # as in `Exchange`
        self.unmet: frozenset[int] = frozenset()  # as in `Exchange`
        self._context = context
        self._has_checked = False

    def enter(self, presence: Presence, before: Generation | None, generation: Generation) -> set[int]:
        """Begin a generation after the one in which this rank participated last; return, and report, missing ranks."""
        late = set(generation.joined) - set(before.lost) if before is not None and self._speaks(before) else ()
        if late:  # the others did not wait for them, because they had not opened a session
            has, logs = ("has", "it logs") if len(late) == 1 else ("have", "they log")
            self._context.warn(
                "accompanied",
                f"{self._named(presence, late)} opened a session {round(presence.waited, 1):g} s after rank "
                f"{self._context.rank}, and {has} joined. Earlier rows are written again if {logs} at their steps.",
            )
        absent = presence.absent(generation)
        missing = absent if before is None else absent & set(before.members)
        still_lost = (self.lost | missing) - set(generation.members)
        self.lost = frozenset(still_lost - presence.departures.ended("finished", "undelivered"))
        reasons: dict[str, list[int]] = {}
        for index in sorted(missing):
            is_new = before is None
            why = f"{{}} {presence.why_absent(index, generation)}" if is_new else self._why_gone(presence, index)
            reasons.setdefault(why, []).append(index)
        if reasons and self._speaks(generation):
            text = " and ".join(why.format(self._named(presence, those)) for why, those in reasons.items())
            self._context.warn(
                f"lost {sorted(map(list, reasons.values()))}",
                f"{text[0].upper()}{text[1:]}; continuing without {'it' if len(missing) == 1 else 'them'}. Affected "
                "rows are marked dist_wandb/degraded.",
            )
        return absent

    def _speaks(self, generation: Generation) -> bool:
        """Return whether this rank reports for all members of a generation."""
        return generation.members[0] == self._context.unit.index

    def _why_gone(self, presence: Presence, index: int) -> str:
        where = self._context.rows.writing.last_position
        if index in presence.departures.ended("undelivered"):
            return f"{{}} ended after {where}, before the others had received all that it logged (see finish_timeout)"
        has_failed = index in presence.departures.ended("failed")
        return f"{{}} failed after {where}" if has_failed else f"lost {{}} after {where}"

    def _named(self, presence: Presence, indices: Iterable[int]) -> str:
        return named(map(presence.global_rank, indices), self._context.unit.ranks_per_node)

    def check(self, presence: Presence, generation: Generation | None, *, is_end: bool = False) -> None:
        """Report ranks that have opened no session: once `join_timeout` has passed, or at the end."""
        if is_end and generation is None:  # those that have, and with which there was no round until now, are lost
            with suppress(RendezvousError):
                opened = presence.opened() - {self._context.unit.index}
                self.lost = self.unmet = frozenset(opened - presence.departures.among(opened))
        within = self._context.limits.join_timeout
        within = least_wait(within, self._context.unit) if is_end else within
        if presence.waited < within or (self._has_checked and not is_end):
            return
        if not (self._speaks(generation) if generation is not None else self._context.rows.writes):
            return
        self._has_checked, size = True, self._context.unit.size
        if generation is not None and len({*generation.members, *generation.lost, *presence.departures.known}) == size:
            return
        try:
            opened = presence.opened()
        except RendezvousError:  # the store cannot be reached, so this is not known
            return
        self.is_only_one = len(opened) == 1
        unopened = set(range(size)) - opened
        if not unopened:
            return
        if self.is_only_one:
            found = f"no other rank has opened a session, so the run has rank {self._context.rank}'s own numbers"
        else:
            others = f"{self._named(presence, unopened)} {'has' if len(unopened) == 1 else 'have'}"
            found = f"{others} not opened a session, so the run has the numbers of the other ranks"
        self._context.warn(
            UNOPENED,
            f"{found}. To include all ranks, open the run on each of them, without a rank guard. To keep one rank's "
            "numbers, pass reduce=None.",
        )


class Participation:
    """One rank's way through generations."""

    def __init__(self, context: Context, rounds: Rounds, cycle: Cycle) -> None:
        self.attendance: Attendance = Attendance(context)
        self.generation: Generation | None = None  # in which this rank participates, or participated last
        self.membership: Membership | None = None  # before there is a store
        self._context = context
        self._rounds = rounds
        self._cycle = cycle
        self._broken_poll = Interval(interval(BROKEN_POLL_INTERVAL, context.unit.size))
        self._joining_poll = Interval(context.limits.heartbeat)

    # Joining

    def arrive(
        self, find: Callable[[], JobStore | None], gives_up: Callable[[], bool], situation: Situation
    ) -> Generation:
        """Find the job's store, and return the first generation of the unit.

        Raises as `Membership.arrive`; RendezvousError also if there is no store when it is too late.
        """
        lifecycle, limits, unit = self._context.lifecycle, self._context.limits, self._context.unit
        deadline = time.monotonic() + limits.join_timeout
        while (job_store := find()) is None:
            if gives_up():
                raise Stopped
            if time.monotonic() > deadline or lifecycle.is_closing:  # a finishing rank creates no process group
                waited = "until it finished" if lifecycle.is_closing else f"within {limits.join_timeout:g} s"
                raise RendezvousError(
                    f"Rank {unit.global_rank} found no store of the job {waited}, so its numbers cannot be combined "
                    "with those of other ranks. Call init_process_group."
                )
            time.sleep(_STORE_POLL_INTERVAL)
        # A rank that was disconnected rejoins after its network returns; until then no other rank waits for it.
        within = limits.join_timeout + limits.peer_timeout
        caller = TimedCaller(within, lambda: lifecycle.is_stopped or lifecycle.phase is Phase.LEAVING)
        self.membership = Membership(unit, limits, job_store.beside(keys_of(unit), caller), gives_up)
        self._context.rows.writing.global_rank_of = self.membership.presence.global_rank
        return self.membership.arrive(limits.join_timeout, situation)

    def enter(self, generation: Generation) -> Generation:
        """Begin a generation, or, if this rank is not in it, the next one in which it is: see `Membership.join`."""
        membership = self.joined
        if self._context.unit.index not in generation.members:
            if generation.follows(self.generation) and self._rounds.table.round > generation.last_round:
                self._rounds.put_back()  # the contributions to a round that this generation's members broke off
            generation = membership.generations.latest(generation)
            if not membership.has_ended(generation):
                if self.generation is not None or self._context.unit.index in generation.lost:
                    self._context.warn("late", f"rank {self._context.rank} did not arrive in time, and asks to join.")
                self._context.reports.expect("late")  # the others report a rank that they have not waited for
            limits = self._context.limits
            generation = membership.join(generation, limits.join_timeout + limits.peer_timeout)
            self.generation = None
            self._cycle.has_primary = False
            state = membership.generations.state(generation)
            self._cycle.restore(state)
            membership.presence.global_ranks.update(state["ranks"])
        membership.presence.departures.known.update(generation.gone)
        before, self.generation = self.generation, generation
        absent = self.attendance.enter(membership.presence, before, generation)
        self._rounds.resize(generation.members, absent)
        self._cycle.has_primary = PRIMARY in generation.members
        if self._cycle.has_primary:
            self._cycle.kept.clear()  # it received them when it joined
        return generation

    # The end of a generation

    def catch_up(self, generation: Generation) -> bool:
        """Catch up with the others' state when a generation began; return whether all ranks were done then."""
        if generation.source in (None, self._context.unit.index) or not generation.follows(self.generation):
            return False
        checkpoint = self.joined.generations.checkpoint_before(generation)
        return checkpoint is not None and self._cycle.catch_up(checkpoint)

    def recover(self, generation: Generation) -> Generation:
        closed = self._rounds.table.ranks.closed - {PRIMARY}  # which has yet to write
        return self.joined.regroup(
            generation, self._cycle.checkpoint(), grace(self._context.limits, self._context.unit), closed
        )

    def admit(self, generation: Generation) -> Generation:
        """Return the generation with the joining ranks, after a round in which all members have learnt of them."""
        membership = self.joined
        if generation.members[0] == self._context.unit.index:
            state = {**self._cycle.snapshot(), "ranks": list(membership.presence.global_ranks.items())}
            return membership.admit(generation, self._cycle.checkpoint(), state)
        following = membership.await_next(generation, self._context.limits.peer_timeout)
        return following or self.recover(generation)

    def leave(self, is_delivered: Callable[[], bool], *, is_closed: bool) -> None:
        """Announce that this rank leaves, after the last round of all (`is_closed`) or before it: see `Membership`."""
        if self.membership is None:
            return
        lifecycle = self._context.lifecycle
        generation = self.generation if self._rounds.table.round else None  # without a round, it may lack anybody
        self.attendance.check(self.membership.presence, generation, is_end=True)
        lifecycle.phase = Phase.LEAVING
        with suppress(RendezvousError):  # the job is over
            checkpoint, delivered = self._cycle.checkpoint(), is_delivered()
            self.membership.leave(
                self.generation, checkpoint, failed=lifecycle.has_failed, delivered=delivered, is_closed=is_closed
            )

    # Queries during rounds

    def is_somebody_waiting(self) -> bool:
        """Return whether a rank outside wants to join; one member checks this, at intervals."""
        generation, membership = self.generation, self.membership
        if generation is None or membership is None or generation.members[0] != self._context.unit.index:
            return False
        if len(generation.members) + len(membership.presence.departures.ended("finished")) >= self._context.unit.size:
            return False
        self.attendance.check(membership.presence, generation)
        is_time = self._joining_poll.is_over(time.monotonic())
        return (is_time or self._rounds.intent is Intent.CLOSING) and bool(membership.joining(generation))

    def is_broken(self) -> bool:
        """Return whether another member has broken off; checked at intervals."""
        generation, membership = self.generation, self.membership
        if generation is None or membership is None or not self._broken_poll.is_over(time.monotonic()):
            return False
        return membership.generations.is_broken(generation)

    def be_alone(self) -> None:
        unit, membership, generation = self._context.unit, self.membership, self.generation
        others = set(range(unit.size))
        if membership is not None and generation is not None:
            presence = membership.presence
            others = {*generation.members, *presence.absent(generation)} - presence.departures.ended("finished")
        elif membership is not None:
            with suppress(RendezvousError):  # then it is not known who has opened a session
                others = membership.presence.opened()
        self._rounds.resize([unit.index], others - {unit.index})

    @property
    def joined(self) -> Membership:
        """The membership, once there is a store."""
        if self.membership is None:
            raise RuntimeError("there is no store yet")
        return self.membership
