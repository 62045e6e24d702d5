"""The ranks that are missing from a generation, those that never opened a session, and the warnings about them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from dist_wandb.errors import RendezvousError
from dist_wandb.exchange.context import Context
from dist_wandb.exchange.membership.generations import Generation
from dist_wandb.exchange.membership.presence import Presence, least_wait
from dist_wandb.topology.ranges import named

UNOPENED = "unopened"  # kind of the warning about ranks that have opened no session


class Attendance:
    """The ranks that participate together with this one, generation after generation."""

    def __init__(self, context: Context) -> None:
        self.is_only_one: bool = False  # as of the last `check`: no other rank has opened a session
        self.lost: frozenset[int] = frozenset()  # as in `Exchange`
        self._context = context
        self._has_checked = False

    def enter(self, presence: Presence, before: Generation | None, generation: Generation) -> set[int]:
        """Begin a generation after the one in which this rank participated last; return, and report, missing ranks."""
        if before is not None and self._speaks(before):
            self._welcome(presence, set(generation.joined) - set(before.lost))
        absent = presence.absent(generation)
        missing = absent if before is None else absent & set(before.members)
        still_lost = (self.lost | missing) - set(generation.members)
        self.lost = frozenset(still_lost - presence.departures.left - presence.departures.undelivered)
        reasons: dict[str, list[int]] = {}
        for index in sorted(missing):
            is_new = before is None
            why = f"{{}} {presence.why_absent(index, generation)}" if is_new else self._why_gone(presence, index)
            reasons.setdefault(why, []).append(index)
        if self._speaks(generation):
            self._warn_of_missing(presence, reasons)
        return absent

    def _speaks(self, generation: Generation) -> bool:
        """Return whether this rank reports for all members of a generation."""
        return generation.members[0] == self._context.unit.index

    def _welcome(self, presence: Presence, late: Collection[int]) -> None:
        """Report ranks for which the others did not wait, because they had not opened a session."""
        if not late:
            return
        is_one = len(late) == 1
        self._context.warn(
            "accompanied",
            f"{self._named(presence, late)} opened a session {round(presence.waited, 1):g} s after rank "
            f"{self._context.rank}, and {'has' if is_one else 'have'} joined. Earlier rows are written again if "
            f"{'it logs' if is_one else 'they log'} at their steps.",
        )

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

    def check(self, presence: Presence, generation: Generation | None, *, is_end: bool = False) -> None:
        """Report ranks that have opened no session: once `join_timeout` has passed, or at the end.

        Those that have, and with which there was no round until the end, are lost: `generation` is `None` then.
        """
        if is_end and generation is None:
            with suppress(RendezvousError):
                opened = presence.opened() - {self._context.unit.index}
                self.lost = frozenset(opened - presence.gone(opened))
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
            others = f"{self._named(presence, unopened)} {_have(unopened)}"
            found = f"{others} not opened a session, so the run has the numbers of the other ranks"
        self._context.warn(
            UNOPENED,
            f"{found}. To include all ranks, open the run on each of them, without a rank guard. To keep one rank's "
            "numbers, pass reduce=None.",
        )


def _have(ranks: Collection[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
