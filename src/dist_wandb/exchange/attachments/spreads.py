"""The spread of the ranks' numbers around their mean, which takes an exchange of its own once the mean is known.

A spread is known only if all ranks that contributed take part in that exchange, because each of them contributes the
deviation of its own number from the mean.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dist_wandb.exchange.protocol.calls import Call, Key
from dist_wandb.exchange.protocol.lanes import NOTHING, Number, number_at
from dist_wandb.exchange.protocol.table import Row
from dist_wandb.exchange.transport.group import Group

_REMEMBERED = 32_768  # own numbers that are kept for corrections
_MOST_FORMS = 4096  # tuples of names that are kept


@dataclass(frozen=True)
class Spread:
    """The spread of a name's numbers over the ranks."""

    squares: float  # sum of w * (x - mean)**2
    largest_at: int  # the lowest rank that has the largest number, or a NaN if there is one


class Spreads:
    """One rank's part in the spreads of names for which `has_spread` is true."""

    def __init__(self, rank: int, has_spread: Callable[[str], bool]) -> None:
        self._rank = rank  # in the unit
        self.has_spread = has_spread
        # by the names of a row: the indices of those with a spread
        self._of = lru_cache(_MOST_FORMS)(lambda names: tuple(at for at, name in enumerate(names) if has_spread(name)))
        # own numbers by cell; plain tuples, which the garbage collector does not track
        self._own: OrderedDict[tuple[str, int | None, int], tuple[float, ...]] = OrderedDict()
        self.found: dict[Key, Spread] = {}  # those that no row has got yet

    def keep(self, calls: Iterable[Call]) -> None:
        """Remember this rank's contributions to cells whose spread is wanted."""
        for call in calls:
            for at in self._of(call.names):
                key = call.names[at], call.step, call.occurrences[at]
                self._own[key] = (*number_at(*call.lanes, at, len(call.names)),)
        while len(self._own) > _REMEMBERED:
            self._own.popitem(last=False)

    def due(self, rows: Iterable[Row]) -> list[tuple[Key, Number]]:
        """Return the cells of finished rows whose spread is wanted, and their numbers; equal on all ranks."""
        due = [
            (Key(row.names[at], row.step, row.occurrences[at]), number_at(*row.lanes, at, len(row.names)))
            for row in rows
            for at in self._of(row.names)
        ]
        return [(key, number) for key, number in due if number.given and number.weight]

    def exchange(self, due: Sequence[tuple[Key, Number]], group: Group) -> None:
        """Exchange the deviations from the means of some cells, the same on all ranks; raise BrokenError on failure."""
        if not due:
            return
        parts = [self._part(self._own.get((*key,)), number) for key, number in due]
        squares, counts, largest = ([part[lane] for part in parts] for lane in range(3))
        sums, maxima = group.reduce([*squares, *counts], largest)
        for index, (key, number) in enumerate(due):
            if sums[len(due) + index] == number.given:
                largest_at = -1 if maxima[index] == NOTHING else int(-maxima[index])
                self.found[key] = Spread(sums[index], largest_at)

    def _part(self, numbers: tuple[float, ...] | None, number: Number) -> tuple[float, float, float]:
        """Return this rank's part in the sum of squares, whether it has one, and its negated index if it is largest."""
        own = Number(*numbers or ())
        if not own.given:
            return 0.0, 0.0, NOTHING
        deviation = own.plain - number.reduced("mean")
        has_largest = own.is_nan if number.is_nan else own.weight and own.largest == number.largest
        # multiplied, because huge deviations overflow to infinity, but raise with a power
        squares = own.weight * deviation * deviation if own.weight else 0.0
        return squares, 1.0, -float(self._rank) if has_largest else NOTHING
