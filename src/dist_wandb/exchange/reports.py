"""What the parts of one rank's exchange share, and its warnings: one message per event, however many values it has.

The rank concerned reports: it was expected and contributed nothing, or contributed after the row was written. A
recurring event is reported less and less often.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dist_wandb.errors import RendezvousError
from dist_wandb.exchange.interface import Lifecycle
from dist_wandb.exchange.membership.generations import Generation, Presence, least_wait
from dist_wandb.exchange.protocol.calls import Key, is_attached
from dist_wandb.exchange.protocol.rounds import Outcome
from dist_wandb.exchange.rows import Rows
from dist_wandb.job.ranges import named
from dist_wandb.notices import Notices
from dist_wandb.settings.options import Limits
from dist_wandb.settings.plan import Unit

_log = logging.getLogger("dist_wandb")

UNOPENED = "unopened"  # kind of the warning about ranks that have opened no session
NEW_NAME_HEARTBEATS = 5  # patience with a name that was never finished
_MOST_NAMES = 3  # listed by name
_MOST_DOUBLINGS = 10
_MOST_COUNTS = 4  # that a message lists


@dataclass(slots=True)
class _Event:
    last: float  # when it was detected last
    reported: int = 1  # number of messages about it, or about earlier events of its kind
    unreported: int = 0  # number of values that no message covers


class Context(Notices):
    """What all parts of one rank's exchange share; each message of a kind doubles the time until the next one."""

    def __init__(
        self, unit: Unit, limits: Limits, rows: Rows, lifecycle: Lifecycle, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self.unit = unit
        self.limits = limits
        self.rows = rows
        self.lifecycle = lifecycle
        self.rank: int = unit.global_rank
        self.was_awaited: bool | None = None  # by the others, if they have ended before this rank came
        self.overdue: str = ""  # within which time the exchange has not ended, and what to do
        # seconds without an occurrence, after which the next one of its kind is a new event
        self._quiet = max(limits.peer_timeout, NEW_NAME_HEARTBEATS * limits.heartbeat)
        self._clock = clock
        self._events: dict[str, _Event] = {}
        self._taken = 0  # how many calls of this rank were taken before the last round
        self.is_only_one: bool = False  # as far as it was checked: no other rank has opened a session
        self._has_checked = False  # whether ranks that have opened no session were reported

    def values(self, kind: str, keys: Sequence[Key], message: str) -> None:
        """Warn about values unless an earlier message covers them; `message` gets their names and position for `%s`."""
        if not keys:
            return
        if self._goes_on(kind):
            self._events[kind].unreported += len(keys)
            return
        event = self.expect(kind)
        more = f" Since the last message of this kind there were {event.unreported} more." if event.unreported else ""
        event.unreported = 0
        _log.warning("dist_wandb: %s%s", message % _named(keys), more)

    def follows(self, kind: str, cause: str) -> bool:
        """Return whether an occurrence belongs to a reported event of another kind, and need not be reported itself."""
        if cause not in self._events or not self._goes_on(cause):
            return False
        self._events.setdefault(kind, _Event(0.0)).last = self._clock()
        return True

    def expect(self, kind: str) -> _Event:
        """Begin an event of a kind, which is not reported: the caller, or another message, does."""
        event = self._events.setdefault(kind, _Event(0.0, 0))
        event.last, event.reported = self._clock(), event.reported + 1
        return event

    def _goes_on(self, kind: str) -> bool:
        event, now = self._events.get(kind), self._clock()
        if event is None or now - event.last > self._quiet * 2 ** min(event.reported - 1, _MOST_DOUBLINGS):
            return False
        event.last = now
        return True

    def about(self, outcome: Outcome) -> None:
        if outcome.silent or outcome.late or outcome.lost:
            self._late(outcome)
        self._taken += outcome.taken
        for name in outcome.differing:
            self.warn(
                f"differs {name}",
                f"the ranks' values of {name!r}, the x axis, differ in one row, which has that of its lowest rank. "
                "Their calls may not belong together: without step=, the n-th value of a name on one rank is combined "
                "with the n-th on the others. Pass step= to log.",
            )
        if outcome.uneven and self.rows.writes:
            _warn_of_counts(self.warn, outcome.uneven, self.rows.reductions.unreduced, self.unit)
        if outcome.crowded:
            self.warn(
                "pending",
                f"more than {self.limits.max_pending_rows} rows wait for ranks that have not logged them yet, "
                "or are behind. The oldest rows are written without these ranks, and again once they log them. See "
                "max_pending_rows.",
            )

    def _late(self, outcome: Outcome) -> None:
        rank, late, lost = self.rank, outcome.late, outcome.lost
        within = self.limits.peer_timeout
        self.values(
            "silent",
            [key for key in outcome.silent if not is_attached(key.name)],
            f"rank {rank} has not logged %s within {within:g} s of the first rank, although it usually does. Rows are "
            "written without it, and corrected if it logs them later.",
        )
        self.rows.writer.lost["that came too late"] += len(lost)
        self.values(
            "too late",
            lost,
            f"rank {rank} logged %s so long after the other ranks that their values are no longer stored. The rows "
            "remain without this rank. The number of such values is reported at the end.",
        )
        if late and not self.follows("late", "silent"):
            patience = NEW_NAME_HEARTBEATS * self.limits.heartbeat
            why = (
                f"Rows wait {patience:g} s for ranks that have not logged their names before: rank {rank} was further "
                "behind, as after the loss of another rank, or logs its names in another order than the others."
                if self._taken
                else f"It had not logged anything before, and the others waited {patience:g} s for it."
            )
            message = f"rank {rank} logged %s after the other ranks' row was written. A corrected row follows. {why}"
            self.values("late", late, message)

    def too_late(self) -> None:
        """Warn, if the others have ended their sessions; no other message reports what is lost by this."""
        if self.was_awaited is None:
            return
        rank, where = self.rank, self.rows.writing.last_position
        fate = "not combined with their numbers" if self.rows.writes else "lost"
        self.warn(
            "lost",
            f"rank {rank} stalled, or was disconnected, after {where}, and returned after the other ranks had ended "
            f"their sessions. What it logged meanwhile is {fate}."
            if self.was_awaited
            else f"rank {rank} opened its session after the other ranks had ended theirs, so what it logs is {fate}. "
            "Open the same runs in the same order on all ranks: a guard such as `if rank == 0` may stay around log, "
            "but not around an init that is followed by others.",
        )

    def primary_is_unreachable(
        self, rows: int, kept_after: str, failure: str | None, *, is_certain: bool = True
    ) -> None:
        """Warn that the rank that writes is gone, or could not open the run, or has not taken the last `rows`."""
        if failure:
            rank, primary = self.rank, self.unit.global_rank_of(0)
            self.warn(
                "lost",
                f"what rank {rank} logs is lost, because init failed on rank {primary}, which has the run: "
                f"{failure.rstrip('.')}. Correct this there; other ranks cannot write the run.",
            )
            return
        why = "the rank that writes it cannot be reached" if is_certain else "no rank had opened the run yet"
        if self.lifecycle.has_failed:
            why = "it failed, and the other ranks did not take these rows within a heartbeat"
        elif self.overdue:
            why = f"these rows (about {rows}) had not been exchanged {self.overdue}"
        where = kept_after or self.rows.writing.last_position
        self.warn("lost", f"what rank {self.rank} logged after {where} may be lost: {why}.")

    def primary_stays_away(self, limit: float, kept_after: str) -> None:
        self.warn(
            "lost",
            f"what rank {self.rank} logged after {kept_after} may be lost: rank "
            f"{self.unit.global_rank_of(0)}, which writes it, was lost, and did not return within "
            f"finish_timeout ({limit:.3g} s).",
        )

    def time_is_over(self, limit: float, flagged: int) -> None:
        """Warn that the others did not end in `limit` seconds; the `flagged` rows written since then lack a rank."""
        rank = self.rank
        if flagged:
            what = f"the last rows of rank {rank} ({flagged}) are written with its own numbers, and flagged: they"
            self.warn("finish", f"{what} had not been exchanged with the other ranks {self.overdue}.")
        else:
            self.warn(
                "finish",
                f"rank {rank} waited {limit:.3g} s for the other ranks to finish, and continues without them. No row "
                "lacks a rank because of it. See finish_timeout.",
            )

    def not_computed(self, number: int) -> None:
        self.warn(
            "device",
            f"{number} rows of rank {self.rank} are lost: the device has not computed their values, or images "
            f"are not encoded.{' The run ends as failed.' if self.rows.writes else ''}",
        )

    # Ranks

    def absent(self, presence: Presence, before: Generation | None, generation: Generation) -> set[int]:
        """Return the ranks that are missing in a generation, after the one in which this rank took part last.

        Reports them, and those that came late.
        """
        late = set(generation.joined) - set(before.lost) if before is not None and self.speaks_in(before) else ()
        if late:  # the others did not wait for them, because they had not opened a session
            has, logs = ("has", "it logs") if len(late) == 1 else ("have", "they log")
            self.warn(
                "accompanied",
                f"{self._named(presence, late)} opened a session {round(presence.waited, 1):g} s after rank "
                f"{self.rank}, and {has} joined. Earlier rows are written again if {logs} at their steps.",
            )
        absent = presence.absent(generation)
        missing = absent if before is None else absent & set(before.members)
        lifecycle, members = self.lifecycle, set(generation.members)
        lifecycle.lost = (lifecycle.lost | missing) - members - presence.ended("finished", "undelivered")
        reasons: dict[str, list[int]] = {}
        for index in sorted(missing):
            reasons.setdefault(self._why_absent(presence, index, before, generation), []).append(index)
        if reasons and self.speaks_in(generation):
            text = " and ".join(why.format(self._named(presence, those)) for why, those in reasons.items())
            self.warn(
                f"lost {sorted(map(list, reasons.values()))}",
                f"{text[0].upper()}{text[1:]}; continuing without {'it' if len(missing) == 1 else 'them'}. Affected "
                "rows are marked dist_wandb/degraded.",
            )
        return absent

    def _why_absent(self, presence: Presence, index: int, before: Generation | None, generation: Generation) -> str:
        how, where = presence.gone.get(index), self.rows.writing.last_position
        if before is None and how is None:
            waited = f"opened a session, but did not take part within {round(presence.waited, 1):g} s"
            return f"{{}} {'took no part' if generation.number else waited}"
        if before is None:
            ended = "failed" if how == "failed" else "ended its session"
            return f"{{}} {ended} before the first exchange with rank {self.rank}"
        if how == "undelivered":
            return f"{{}} ended after {where}, before the others had received all that it logged (see finish_timeout)"
        return f"{{}} failed after {where}" if how == "failed" else f"lost {{}} after {where}"

    def speaks_in(self, generation: Generation) -> bool:  # for all members
        return generation.members[0] == self.unit.index

    def _named(self, presence: Presence, indices: Iterable[int]) -> str:
        return named(map(presence.global_rank, indices), self.unit.ranks_per_node)

    def unopened(self, presence: Presence, generation: Generation | None, *, is_end: bool = False) -> None:
        """Report ranks that have opened no session: once `join_timeout` has passed, or at the end."""
        within = self.limits.join_timeout
        if presence.waited < (least_wait(within, self.unit) if is_end else within):
            return
        if self._has_checked and not is_end:
            return
        if not (self.rows.writes if generation is None else self.speaks_in(generation)):
            return
        self._has_checked, size = True, self.unit.size
        if generation is not None and len({*generation.members, *generation.lost, *presence.gone}) == size:
            return
        try:
            opened = presence.opened()
        except RendezvousError:  # the store cannot be reached, so this is not known
            return
        self.is_only_one = len(opened) == 1
        unopened = set(range(size)) - opened
        if not unopened or not self.rows.reductions.known:
            return
        if self.is_only_one:
            found = f"no other rank has opened a session, so the run has rank {self.rank}'s own numbers"
        else:
            others = f"{self._named(presence, unopened)} {'has' if len(unopened) == 1 else 'have'}"
            found = f"{others} not opened a session, so the run has the numbers of the other ranks"
        self.warn(
            UNOPENED,
            f"{found}. To include all ranks, open the run on each of them, without a rank guard. To keep one rank's "
            "numbers, pass reduce=None.",
        )


def report_lost(rank: int, lost: Mapping[str, int]) -> None:
    causes = ", ".join(f"{number} {cause}" for cause, number in lost.items() if number)
    if causes:
        _log.warning("dist_wandb: rank %d has lost values: %s.", rank, causes)


def _named(keys: Sequence[Key]) -> str:
    """Return names and positions in words: the first names and the first position, and the number of others."""
    names = list(dict.fromkeys(key.series.name for key in keys))
    what = ", ".join(map(repr, names[:_MOST_NAMES]))
    if len(names) > _MOST_NAMES:
        what = f"{len(names)} names ({what}, …)"
    positions = [
        f"its call {key.occurrence + 1} without a step" if key.step is None else f"step {key.step}" for key in keys
    ]
    positions = list(dict.fromkeys(positions))
    return f"{what} at {positions[0]}" + (f" and in {len(positions) - 1} more rows" if len(positions) > 1 else "")


def _warn_of_counts(
    warn: Callable[[str, str], None], counts: Mapping[str, Mapping[int, int]], own: Collection[str], unit: Unit
) -> None:
    """Warn of names that nobody writes, and of those that were logged unequally often.

    `counts` has how often each rank has logged a name without a step, 0 if only the primary writes it, as its `own`.
    """
    nobodys = [name for name, of_name in counts.items() if 0 in of_name.values() and name not in own]
    uneven = [name for name, of_name in counts.items() if 0 not in of_name.values()]
    for name in nobodys[:1]:
        first = min(rank for rank, count in counts[name].items() if not count)
        warn(
            "unwritten names",
            f"rank {unit.global_rank_of(first)} logged values of {_and_more(nobodys)} that are not reduced, and rank "
            f"{unit.global_rank} did not. Such values (text, media, lists) are written on rank {unit.global_rank} "
            "only, so these are not in the run. Log them there, or pass run_mode='shared'; for tables and images of "
            "all ranks see dist_wandb.gathered.",
        )
    for name in uneven[:1]:
        by_count: dict[int, list[int]] = {}
        for rank, count in counts[name].items():
            by_count.setdefault(count, []).append(unit.global_rank_of(rank))
        shown = ", ".join(
            f"{count} times by {named(ranks)}" for count, ranks in sorted(by_count.items())[:_MOST_COUNTS]
        )
        warn(
            "uneven",
            f"{_and_more(uneven)} was logged without a step {shown}. The n-th value of one rank was combined with the "
            "n-th of the others, so values of different steps may be in one row. Pass step= to log.",
        )


def _and_more(names: Sequence[str]) -> str:
    return repr(names[0]) + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
