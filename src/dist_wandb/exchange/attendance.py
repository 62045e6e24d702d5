"""The ranks that are missing from a generation, and the warnings about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dist_wandb.errors import RendezvousError
from dist_wandb.exchange.context import Context
from dist_wandb.exchange.membership.generations import Generation
from dist_wandb.exchange.membership.presence import Presence
from dist_wandb.topology.ranges import named


class Attendance:
    """The ranks that participate together with this one, generation after generation.

    Attributes:
        is_only_one: Whether no other rank has opened a session in the time that it had for this.
        lost: Indices in the unit of ranks that participated, and are gone without having finished.
    """

    def __init__(self, context: Context) -> None:
        self.is_only_one: bool = False
        self.lost: frozenset[int] = frozenset()
        self._context = context

    def enter(self, presence: Presence, before: Generation | None, generation: Generation) -> set[int]:
        """Begin a generation, and warn about missing ranks.

        Args:
            presence: The ranks that are present.
            before: The generation in which this rank participated last.
            generation: The one that begins.

        Returns:
            The missing ranks.
        """
        was_only_one, self.is_only_one = self.is_only_one, self.finds_itself_alone(presence)
        if was_only_one and not self.is_only_one:
            others, is_one = self._named(presence, generation.joined), len(generation.joined) == 1
            self._context.warn(
                "accompanied",
                f"{others} opened a session {round(presence.waited, 1):g} s after rank {self._context.rank}, and "
                f"{'has' if is_one else 'have'} joined. Earlier rows are written again if "
                f"{'it logs' if is_one else 'they log'} at their steps.",
            )
        absent = set() if self.is_only_one else presence.absent(generation.members)
        if before is None or was_only_one:
            newly_lost, missing = set[int](), absent
        else:
            newly_lost = missing = absent & set(before.members)
        still_lost = (self.lost | newly_lost) - set(generation.members)
        self.lost = frozenset(still_lost - presence.departures.left - presence.departures.undelivered)
        had_begun = before is not None and not was_only_one
        reasons: dict[str, list[int]] = {}
        for index in sorted(missing):
            why = self._why_gone(presence, index) if had_begun else f"{{}} {presence.why_absent(index, generation)}"
            reasons.setdefault(why, []).append(index)
        if generation.members[0] == self._context.unit.index:  # one line for all ranks that go on together
            self._warn_of_missing(presence, reasons)
        return set(absent)

    def _warn_of_missing(self, presence: Presence, reasons: Mapping[str, Sequence[int]]) -> None:
        if reasons:
            text = " and ".join(why.format(self._named(presence, missing)) for why, missing in reasons.items())
            pronoun = "it" if sum(map(len, reasons.values())) == 1 else "them"
            self._context.warn(
                f"lost {sorted(map(list, reasons.values()))}",
                f"{text[0].upper()}{text[1:]}; continuing without {pronoun}. Affected rows are marked "
                "dist_wandb/degraded.",
            )

    def _why_gone(self, presence: Presence, index: int) -> str:
        where = self._context.rows.writing.last_position
        departure = presence.departures.known.get(index)
        if departure is not None and departure.how == "undelivered":
            return f"{{}} ended after {where}, before the others had received all that it logged (see finish_timeout)"
        if departure is not None and departure.how == "failed":
            return f"{{}} failed after {where}"
        return f"lost {{}} after {where}"

    def _named(self, presence: Presence, indices: Iterable[int]) -> str:
        return named(map(presence.global_rank, indices), self._context.unit.ranks_per_node)

    def finds_itself_alone(self, presence: Presence) -> bool:
        """Return whether this rank writes and no other rank has opened a session within `join_timeout`."""
        if not self._context.rows.writes:
            return False
        try:
            if not presence.is_only_one(self._context.limits.join_timeout):
                return False
        except RendezvousError:  # the store cannot be reached, so this is not known
            return False
        self._context.warn(
            "only one",
            f"no other rank has opened a session, so the run has rank {self._context.rank}'s own numbers. To include "
            "all ranks, open the run on each of them, without a rank guard. To keep one rank's numbers, pass "
            "reduce=None.",
        )
        return True
