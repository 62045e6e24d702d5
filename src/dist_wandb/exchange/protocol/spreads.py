"""The spread of the ranks' numbers around their mean, which takes one more round. Pure.

States of a finished value whose spread is wanted: *awaiting*, from the round that finished its cell until the next one;
then written. Invariant: a spread is known only if all ranks that contributed still participate, because each of them
contributes the deviation of its own number from the mean. All values that are finished after one that awaits its spread
wait behind it, so that rows keep their order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from dist_wandb.exchange.protocol.aggregates import Totals
from dist_wandb.exchange.protocol.cells import NOTHING, Counted, Finished, Key, total_of


class Spreads:
    """Finished values that await their spread, and the contributions to them of this rank, by its index in the unit."""

    def __init__(self, rank: int) -> None:
        self.awaiting: list[Finished] = []
        self._rank = rank
        self._own: OrderedDict[Key, Totals] = OrderedDict()

    def keep(self, key: Key, totals: Totals) -> None:
        """Remember this rank's contribution to a cell whose spread is wanted."""
        self._own[key] = totals

    def forget(self, most: int) -> None:
        """Forget this rank's oldest contributions."""
        while len(self._own) > most:
            self._own.popitem(last=False)

    def awaited_of_own(self) -> set[str]:
        """Return the names of values that await their spread and need this rank's part."""
        return {value.key.name for value in self.awaiting if value.key in self._own}

    def part(self, value: Finished) -> tuple[float, float]:
        """Return this rank's part in the sum of squares, and its negated index if it has the largest number."""
        own = self._own.get(value.key)
        if own is None or value.spread is None:
            return 0.0, NOTHING
        deviation = own.plain - value.totals.reduced("mean")
        has_largest = own.nans if value.totals.nans else own.weight and own.largest == value.totals.largest
        # multiplied, because huge deviations overflow to infinity, but raise with a power
        squares = own.weight * deviation * deviation if own.weight else 0.0
        return squares, -float(self._rank) if has_largest else NOTHING

    # Effects of lost ranks

    def resize(self, size: int) -> None:
        """Continue with `size` ranks; drop the spread of values with more contributors."""
        self.awaiting = [
            value._replace(spread=None) if value.totals.number > size else value for value in self.awaiting
        ]

    def held(self) -> list[int]:
        """Return the indices, among the awaiting values, of those to which this rank has contributed."""
        return [index for index, value in enumerate(self.awaiting) if value.key in self._own]

    def recount(self, held: Iterable[Counted]) -> None:
        """Drop the spread of values whose contributors do not all participate, given the `held()` of those that do."""
        holding = total_of(held)
        for index, value in enumerate(self.awaiting):
            if holding[index] < value.totals.number:
                self.awaiting[index] = value._replace(spread=None)
