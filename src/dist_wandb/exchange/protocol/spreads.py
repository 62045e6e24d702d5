"""How far the ranks' numbers are from their mean, which takes one more round. Pure.

States of a finished value whose spread is wanted: *awaiting*, from the round that finished its cell until the next
one; then written. Invariant: a spread is given only if all ranks take part that contributed, because each of them
contributes how far its own number is from the mean. All values that are finished after one that awaits its spread wait
behind it, so that rows keep their order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from dist_wandb.exchange.protocol.aggregates import Totals
from dist_wandb.exchange.protocol.cells import NOTHING, Counted, Finished, Key, total_of


class Spreads:
    """Finished values that await their spread, and what this rank contributed to them.

    Args:
        rank: Index of this rank in the unit.
    """

    def __init__(self, rank: int) -> None:
        self.awaiting: list[Finished] = []
        self._rank = rank
        self._own: OrderedDict[Key, Totals] = OrderedDict()

    def keep(self, key: Key, totals: Totals) -> None:
        """Remember what this rank contributed where a spread is wanted."""
        self._own[key] = totals

    def forget(self, most: int) -> None:
        """Forget the oldest of what this rank contributed."""
        while len(self._own) > most:
            self._own.popitem(last=False)

    def awaited_of_own(self) -> set[str]:
        """Names of values that await their spread and this rank's part in it."""
        return {value.key.name for value in self.awaiting if value.key in self._own}

    def part(self, value: Finished) -> tuple[float, float]:
        """This rank's part in the sum of squares of a value, and, negated, its index if it has the largest number."""
        own = self._own.get(value.key)
        if own is None or value.spread is None:
            return 0.0, NOTHING
        deviation = own.plain - value.totals.reduced("mean")
        has_largest = own.nans if value.totals.nans else own.weight and own.largest == value.totals.largest
        # of huge ones infinite, where a power would raise
        squares = own.weight * deviation * deviation if own.weight else 0.0
        return squares, -float(self._rank) if has_largest else NOTHING

    # What is lost with ranks that are gone

    def resize(self, size: int) -> None:
        """Go on with `size` ranks: what more of them contributed to has no spread."""
        self.awaiting = [value.without_spread() if value.totals.number > size else value for value in self.awaiting]

    def held(self) -> list[int]:
        """Positions, among the values that await their spread, of those which this rank has contributed to."""
        return [position for position, value in enumerate(self.awaiting) if value.key in self._own]

    def recount(self, held: Iterable[Counted]) -> None:
        """Keep the spread of values to which all contributed who take part, by what each of them said by `held`."""
        holding = total_of(held)
        for position, value in enumerate(self.awaiting):
            if holding[position] < value.totals.number:
                self.awaiting[position] = value.without_spread()
