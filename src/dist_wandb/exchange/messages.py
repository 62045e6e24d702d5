"""The texts of one rank's warnings about its exchange. Each event is reported once: see `Reports`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dist_wandb.exchange.context import Context
from dist_wandb.exchange.protocol.calls import Key
from dist_wandb.exchange.protocol.pacing import NEW_NAME_HEARTBEATS
from dist_wandb.exchange.protocol.rounds import Outcome
from dist_wandb.exchange.reports import report_lost
from dist_wandb.topology.ranges import named

_MOST_COUNTS = 4  # that a message lists


class Messages:
    """Warnings about what this rank logs."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._names: set[str] = set()  # that this rank has contributed to
        self.overdue: str = ""  # within which time the exchange has not ended, and what to do
        self._taken = 0  # how many calls of this rank were taken before the last round

    def contributed(self, names: Iterable[str]) -> None:
        """Record names that this rank logs."""
        self._names.update(names)

    def about(self, outcome: Outcome) -> None:
        """Warn about what a round has shown of this rank's values."""
        self._silent(outcome.silent)
        self._late(outcome.late, outcome.lost)
        self._taken += outcome.taken
        for name in outcome.differing:
            self._context.warn(
                f"differs {name}",
                f"the ranks' values of {name!r}, the x axis, differ in one row, which has that of its lowest rank. "
                "Their calls may not belong together: without step=, the n-th value of a name on one rank is combined "
                "with the n-th on the others. Pass step= to log.",
            )
        if outcome.uneven and self._context.rows.writes:
            self._uneven(outcome.uneven)

    def _uneven(self, counts: Mapping[str, Mapping[int, int]]) -> None:
        name, of_name = next(iter(counts.items()))
        by_count: dict[int, list[int]] = {}
        for rank, count in of_name.items():
            by_count.setdefault(count, []).append(self._context.unit.global_rank_of(rank))
        shown = ", ".join(
            f"{count} times by {named(ranks)}" for count, ranks in sorted(by_count.items())[:_MOST_COUNTS]
        )
        others = f" (and {len(counts) - 1} more)" if len(counts) > 1 else ""
        self._context.warn(
            "uneven",
            f"{name!r}{others} was logged without a step {shown}. The n-th value of one rank was combined with the "
            "n-th of the others, so values of different steps may be in one row. Pass step= to log.",
        )

    def _silent(self, keys: Sequence[Key]) -> None:
        rank, patience = self._context.rank, self._context.limits.peer_timeout
        self._context.reports.values(
            "silent",
            [key for key in keys if key.name in self._names],
            lambda values: (
                f"rank {rank} has not logged {values} within {patience:g} s of the first rank, although it usually "
                "does. Rows are written without it, and corrected if it logs them later."
            ),
        )

    def _late(self, late: Sequence[Key], lost: Sequence[Key]) -> None:
        """Warn of cells that were finished before, and are corrected, or not: the others' parts are forgotten."""
        rank, reports = self._context.rank, self._context.reports
        self._context.rows.lost["that came too late"] += len(lost)
        reports.values(
            "too late",
            lost,
            lambda values: (
                f"rank {rank} logged {values} so long after the other ranks that their values are no longer stored. "
                "The rows remain without this rank. The number of such values is reported at the end."
            ),
        )
        if late and not reports.follows("late", "silent"):
            patience = NEW_NAME_HEARTBEATS * self._context.limits.heartbeat
            why = (
                f"Rows wait {patience:g} s for ranks that have not logged their names before, and not for ranks that "
                "have logged them later: log a name on all ranks in the same order."
                if self._taken
                else f"It had not logged anything before, and the others waited {patience:g} s for it."
            )
            reports.values(
                "late",
                late,
                lambda values: (
                    f"rank {rank} logged {values} after the other ranks' row was written. A corrected row follows. "
                    f"{why}"
                ),
            )

    def many_open(self) -> None:
        """Warn that more rows wait for other ranks than `max_pending_rows`."""
        self._context.warn(
            "pending",
            f"more than {self._context.limits.max_pending_rows} rows wait for ranks that have not logged them yet, or "
            "are behind. The oldest rows are written without these ranks, and again once they log them. See "
            "max_pending_rows.",
        )

    def many_unsent(self) -> None:
        """Warn that this rank logs faster than the ranks exchange."""
        self._context.warn(
            "outbox",
            f"rank {self._context.rank} logs rows faster than the ranks exchange them: more than "
            f"{self._context.limits.max_pending_rows} wait, so log takes as long as the exchange of a row. Log less "
            "often.",
        )

    def too_late(self, *, has_taken_part: bool) -> None:
        """Warn that the others have ended their sessions; no other message reports what is lost by this."""
        rank, where = self._context.rank, self._context.rows.writing.last_position
        self._context.warn(
            "lost",
            f"rank {rank} stalled, or was disconnected, after {where}, and returned after the other ranks had ended "
            "their sessions. What it logged meanwhile is not combined with their numbers."
            if has_taken_part
            else f"rank {rank} opened its session after the other ranks had ended theirs, so nothing that it logs is "
            "combined with their numbers. Open the same runs in the same order on all ranks: a guard such as "
            "`if rank == 0` may stay around log, but not around an init that is followed by others.",
        )

    def primary_is_unreachable(self, rows: int) -> None:
        """Warn that the rank that writes this rank's rows cannot be reached, or has not taken the last `rows`."""
        why = "the rank that writes it cannot be reached"
        if self._context.lifecycle.has_failed:
            why = "it failed, and the other ranks did not take these rows within a heartbeat"
        elif self.overdue:
            why = f"these rows (about {rows}) had not been exchanged {self.overdue}"
        where = self._context.rows.writing.last_position
        self._context.warn("lost", f"what rank {self._context.rank} logged after {where} may be lost: {why}.")

    def primary_stays_away(self, limit: float, kept_after: str) -> None:
        """Warn at the end that the rank that writes has not returned within `limit` seconds for rows kept for it."""
        self._context.warn(
            "lost",
            f"what rank {self._context.rank} logged after {kept_after} may be lost: rank "
            f"{self._context.unit.global_rank_of(0)}, which writes it, was lost, and did not return within "
            f"finish_timeout ({limit:.3g} s).",
        )

    def time_is_over(self, limit: float, flagged: int) -> None:
        """Warn that the others did not end in `limit` seconds; the `flagged` rows written since then lack a rank."""
        rank = self._context.rank
        if flagged:
            what = f"the last rows of rank {rank} ({flagged}) are written with its own numbers, and flagged: they"
            self._context.warn("finish", f"{what} had not been exchanged with the other ranks {self.overdue}.")
        else:
            self._context.warn(
                "finish",
                f"rank {rank} waited {limit:.3g} s for the other ranks to finish, and continues without them. No row "
                "lacks a rank because of it. See finish_timeout.",
            )

    def not_computed(self, number: int) -> None:
        """Warn that a device has not computed rows in time."""
        lost = f"{number} rows of rank {self._context.rank} are lost"
        self._context.warn("device", f"{lost}: the device has not computed their values, or images are not encoded.")

    def at_end(self) -> None:
        """Report how many values are lost, by cause: other messages appear once for many values."""
        report_lost(self._context.rank, self._context.rows.lost)
