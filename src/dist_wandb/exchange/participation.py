"""One rank's way through the generations of its unit, and their rounds, also alone.

In a round, the members exchange what they offer, choose the same calls, and reduce the two lists that they pack. The
consequences are the same on all members: they exchange metric states, tables and images of finished rows and the
spreads of their numbers, and write these rows. Work that remains when the exchange breaks (`_due`) is done by the next
generation. That begins with a greeting in which the members exchange what remains.

While the primary is away (it stalled, and may return), the others continue, keep finished rows up to a limit, and
hand them over with the shared state when it joins. A rank that finishes meanwhile waits for it within `finish_timeout`.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from dist_wandb.errors import RendezvousError
from dist_wandb.exchange.attachments import MOST_KEPT
from dist_wandb.exchange.interface import Hooks, Phase
from dist_wandb.exchange.membership import Membership
from dist_wandb.exchange.membership.forming import BROKEN_POLL_INTERVAL, Stopped, grace
from dist_wandb.exchange.membership.generations import Checkpoint, Generation, keys_of
from dist_wandb.exchange.protocol.calls import Intent, Key, attached_among, is_attached
from dist_wandb.exchange.protocol.memory import Row
from dist_wandb.exchange.protocol.plan import Plan
from dist_wandb.exchange.protocol.rounds import Outcome, Rounds, decoded, encoded
from dist_wandb.exchange.reports import Context
from dist_wandb.exchange.transport import Group
from dist_wandb.exchange.turns import Pacer
from dist_wandb.job.timed_caller import LAST_CALL, Interval, TimedCaller, call_or_default

PRIMARY = 0  # its index in the unit
_MOST_KEPT = 20_000  # rows kept for a primary that is away
_STORE_POLL_INTERVAL = 0.05  # seconds between two checks whether there is a store


class Participation:
    """Carries out one rank's rounds; `begin` and `round` raise BrokenError if the exchange failed."""

    def __init__(self, context: Context, rounds: Rounds, pacer: Pacer) -> None:
        self.membership: Membership | None = None  # before there is a store
        self.generation: Generation | None = None  # in which this rank participates, or participated last
        self.group: Group | None = None  # between two generations
        self.kept: deque[Row] = deque(maxlen=_MOST_KEPT)  # for a primary that is away
        self.kept_after: str = ""  # the position after which rows are kept for it
        self._context = context
        self._rounds = rounds
        self._pacer = pacer  # does not count the time that attachments take
        self._members: Sequence[int] = ()
        self._has_primary = False  # whether the primary participates
        self._checkpoint = Checkpoint(0)
        self._due: tuple[Row, ...] = ()  # finished, but not written yet
        self._broken_poll = Interval(BROKEN_POLL_INTERVAL, context.unit.size)
        self._joining_poll = Interval(context.limits.heartbeat)

    @property
    def joined(self) -> Membership:
        """The membership, once there is a store."""
        if self.membership is None:
            raise RuntimeError("there is no store yet")
        return self.membership

    # Joining

    def arrive(
        self, hooks: Hooks, is_due: Callable[[], bool], has_rows: Callable[[], bool], gives_up: Callable[[], bool]
    ) -> Generation:
        """Find the job's store, and return the first generation of the unit.

        Raises as `Membership.arrive`; RendezvousError also if there is no store when it is too late.
        """
        lifecycle, limits, unit = self._context.lifecycle, self._context.limits, self._context.unit
        deadline = time.monotonic() + limits.join_timeout
        while (job_store := hooks.find()) is None:
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
        return self.membership.arrive(limits.join_timeout, hooks, is_due, has_rows)

    def catch_up(self, generation: Generation) -> bool:
        """Catch up with the others, who are at most one round ahead; return whether all ranks were done then."""
        if generation.source in (None, self._context.unit.index) or not generation.follows(self.generation):
            return False
        checkpoint = self.joined.generations.checkpoint_before(generation)
        if checkpoint.round != self._rounds.table.round + 1 or not checkpoint.offers:
            return False
        return self._unpack(checkpoint).closed

    def enter(self, generation: Generation) -> Generation:
        """Begin a generation, or, if this rank is not in it, the next one in which it is: see `Membership.join`.

        Reports ranks that are missing, and those that came late.
        """
        membership, presence, context = self.joined, self.joined.presence, self._context
        if context.unit.index not in generation.members:
            if generation.follows(self.generation) and self._rounds.table.round > generation.last_round:
                self._rounds.put_back()  # the contributions to a round that this generation's members broke off
            generation = membership.generations.latest(generation)
            if not presence.are_gone(generation.members):
                if self.generation is not None or context.unit.index in generation.lost:
                    context.warn("late", f"rank {context.rank} did not arrive in time, and asks to join.")
                context.expect("late")  # the others report a rank that they have not waited for
            generation = membership.join(generation, context.limits.join_timeout + context.limits.peer_timeout)
            self.generation, self._has_primary = None, False
            state = membership.generations.state(generation)
            self._rounds.restore(state)
            self._checkpoint = Checkpoint(self._rounds.table.round)
            if context.rows.writes:  # what the others have finished while the primary was away
                self._due += tuple(decoded(state["unwritten"]))
            else:
                self.kept.extend(decoded(state["unwritten"]))
        presence.gone.update(generation.gone)
        presence.places.update(generation.places)
        before, self.generation = self.generation, generation
        self._rounds.resize(generation.members, context.absent(presence, before, generation))
        self._has_primary = PRIMARY in generation.members
        if self._has_primary:
            self.kept.clear()  # it received them when it joined
        return generation

    # Rounds

    def begin(self, group: Group, generation: Generation) -> None:
        """Begin the rounds of a generation: do the work that remained."""
        self.group, self._members = group, generation.members
        spreads = self._context.rows.spreads
        due = [row for row in self._due if attached_among(row.names) or spreads.due([row])]
        own = {"round": self._rounds.table.round, "due": [encoded(row._replace(own=())) for row in due]}
        greetings = [json.loads(text) for text in group.tally(json.dumps(own).encode())]
        if any(greeting["round"] != own["round"] for greeting in greetings):  # gloo would abort the process
            raise RuntimeError(f"the members disagree at the beginning of a generation: {greetings}")
        together = {json.dumps(row): decoded(row) for greeting in greetings for row in greeting["due"]}
        self._exchange(group, list(together.values()))
        self.write_due()

    def round(self, *, regroup: bool = False) -> Outcome:
        """Take part in one round, and do the work that follows from it; `regroup` requests a new generation."""
        group, table = self.group, self._rounds.table
        if group is None:
            raise RuntimeError("a round needs a group")
        offered = group.tally(self._rounds.offer(time.monotonic(), regroup=regroup))
        offers: dict[bytes, frozenset[int]] = {}
        for offer, those in offered.items():
            offers[offer] = frozenset(map(self._members.__getitem__, those))
        plan = self._rounds.plan(offers)
        packed = plan.pack()
        sums, maxima = group.reduce(*packed) if any(packed) else packed
        attachments = self._context.rows.attachments
        if attachments.bytes_sent:
            attachments.passed()
        outcome = self._unpack(Checkpoint(table.round + 1, offers, sums, maxima), plan)
        self._exchange(group, self._due)
        self.write_due()
        # the end of the next round, which releases what is not kept for late ranks, should come at once
        return replace(outcome, more=True) if attachments.bytes_sent > 2 * MOST_KEPT else outcome

    def _unpack(self, checkpoint: Checkpoint, plan: Plan | None = None) -> Outcome:
        plan = plan or self._rounds.plan(checkpoint.offers)
        outcome = self._rounds.unpack(plan, checkpoint.sums, checkpoint.maxima)
        self._checkpoint = checkpoint
        self._context.rows.spreads.keep(self._rounds.outbox.last)
        self._due += outcome.rows
        return outcome

    def _exchange(self, group: Group, rows: Sequence[Row]) -> None:
        own, keys = self._context.rows, list[Key]()
        for row in rows:
            if attached := attached_among(row.names):
                keys += [Key(row.names[at], row.step, row.occurrences[at]) for at in attached]
        if keys and (self._has_primary or own.writes):
            for attachment, due in own.attachments.due(keys, is_alone=len(self._members) == 1):
                began = time.monotonic()
                attachment.exchange(due, group)
                self._pacer.exclude(time.monotonic() - began)  # it is long on a slow network
        if of_spreads := own.spreads.due(rows):
            own.spreads.exchange(of_spreads, group)

    def write_due(self) -> None:
        own, rows, self._due = self._context.rows, self._due, ()
        if rows and not own.writes and not self._has_primary:
            if len(self.kept) + len(rows) > _MOST_KEPT:
                self._context.warn(
                    "unwritten",
                    f"more than {_MOST_KEPT:,} rows wait on rank {self._context.rank} for the rank that writes them, "
                    "which is away: the oldest are lost, and counted at the end.",
                )
                dropped = sum(len(row.names) for row in [*self.kept, *rows][:-_MOST_KEPT])
                own.writer.lost["that could not be kept for the rank that writes them"] += dropped
            self.kept_after = self.kept_after if self.kept else own.writing.last_position
            self.kept.extend(row._replace(own=()) for row in rows)
        own.writing.write(rows)
        own.spreads.found.clear()

    @property
    def keeps_rows(self) -> bool:
        return bool(self.kept) and not self._has_primary

    def awaits_primary(self) -> bool:
        """Return whether the rank that writes is away, but may return for the values kept for it."""
        may_come = self.keeps_rows and self._context.lifecycle.phase is not Phase.ALONE
        return may_come and not self.joined.presence.is_gone(PRIMARY)

    def is_awaited(self, *, by_late: bool = False) -> bool:
        """Return whether the others will request states, tables or spreads, or may, for a late rank (`by_late`)."""
        may_have_spread = self._context.rows.spreads.may_have
        if any(is_attached(key.name) or may_have_spread(key.name) for key in self._rounds.own_open()):
            return True
        ranks, memory = self._rounds.table.ranks, self._rounds.table.memory
        others, attachments = ranks.members - ranks.closed, self._context.rows.attachments
        givers = map(memory.ranks_of, attachments.cells() if others and by_late else ())
        return any(those is not None and not those >= others for those in givers)

    def is_somebody_waiting(self) -> bool:
        """Return whether a rank outside wants to join; one member checks this, at intervals."""
        generation, membership = self.generation, self.membership
        if generation is None or membership is None or not self._context.speaks_in(generation):
            return False
        outside = self._context.unit.size - len(generation.members)
        if not outside or outside <= len(membership.presence.ended("finished")):
            return False
        self._context.unopened(membership.presence, generation)
        is_time = self._joining_poll.is_over(time.monotonic())
        return (is_time or self._rounds.intent is Intent.CLOSING) and bool(membership.joining(generation))

    def is_broken(self) -> bool:
        generation, membership = self.generation, self.membership
        if generation is None or membership is None or not self._broken_poll.is_over(time.monotonic()):
            return False
        return membership.generations.is_broken(generation)

    # The end of a generation

    def end_rounds(self) -> None:
        if self.group is not None:
            self.group.close()
            self.group = None

    def recover(self, generation: Generation) -> Generation:
        closed = self._rounds.table.ranks.closed - {PRIMARY}  # which has yet to write
        within = grace(self._context.limits, self._context.unit)
        return self.joined.regroup(generation, self._checkpoint, within, closed)

    def admit(self, generation: Generation) -> Generation:
        """Return the generation with the joining ranks, after a round in which all members have learnt of them."""
        membership = self.joined
        if self._context.speaks_in(generation):
            state = {**self._rounds.snapshot(), "unwritten": encoded(list(self.kept))}
            return membership.admit(generation, self._checkpoint, state)
        generations, within = membership.generations, self._context.limits.peer_timeout
        return membership.until(lambda: generations.following(generation), within) or self.recover(generation)

    def leave(self, *, delivered: bool, is_closed: bool) -> None:
        """Announce that this rank leaves, after the last round of all (`is_closed`) or before it: see `Membership`."""
        if self.membership is None:
            return
        lifecycle, presence = self._context.lifecycle, self.membership.presence
        generation = self.generation if self._rounds.table.round else None  # without a round, it may lack anybody
        if generation is None:  # those with which there was no round until now are lost
            with suppress(RendezvousError):
                opened = presence.opened() - {self._context.unit.index}
                lifecycle.lost = lifecycle.unmet = frozenset(opened - presence.gone_among(opened))
        self._context.unopened(presence, generation, is_end=True)
        lifecycle.phase = Phase.LEAVING
        how = "failed" if lifecycle.has_failed else "finished" if delivered else "undelivered"
        left = partial(self.membership.leave, self.generation, self._checkpoint, how, is_closed=is_closed)
        call_or_default(left, None, LAST_CALL)  # goes on in the background if the store stands still

    # Alone

    def was_awaited(self) -> bool:
        """Return whether the others have given this rank up: it took part, here or before this session, or is late."""
        presence = self.joined.presence
        if self.generation is not None or presence.waited >= self._context.limits.peer_timeout:
            return True
        with suppress(RendezvousError):
            return self._context.unit.index in presence.before()
        return False

    def continue_alone(self, *, is_closed: bool = False) -> None:
        """Switch to rounds of this rank only; the others are missing, unless the last round of all is over."""
        self.end_rounds()
        unit, membership, generation = self._context.unit, self.membership, self.generation
        self.group, self._members = Group(), (unit.index,)
        if not self._rounds.table.open:  # in rows that are open, an axis may be a cell
            self._rounds.side_data.axes = self._context.rows.axes()
        if self._context.rows.writes:  # what an exchange that broke has not merged
            self._exchange(self.group, self._due)
        if is_closed:
            return
        others = set(range(unit.size))
        if membership is not None and generation is not None:
            presence = membership.presence
            others = {*generation.members, *presence.absent(generation)} - presence.ended("finished")
        elif membership is not None:
            with suppress(RendezvousError):  # then it is not known who has opened a session
                others = membership.presence.opened()
        self._rounds.resize([unit.index], others - {unit.index})
