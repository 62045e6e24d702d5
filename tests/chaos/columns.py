"""What a number in a row means: its cell, the ranks whose numbers it contains, and the call that owns it."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from calls import Call, Cells, Contribution


@dataclass(frozen=True)
class Meaning:
    """The meaning of a number: its cell, its contributors, and the calls that may own it."""

    cell: int
    ranks: frozenset[int]
    owners: tuple[Call, ...]


@dataclass(frozen=True, eq=False)
class Column:
    name: str  # name that the ranks logged
    column: str  # name in the rows
    reduction: str  # how the numbers of several ranks are reduced; `"own"` for numbers of one rank only
    cells: Cells  # the contributions that are reduced
    has_faults: bool  # whether ranks may be missing

    def meaning(self, value: Any) -> Meaning | None:
        """Return the meaning of a number, or a text; `None` if it is not the reduction of any ranks' numbers."""
        found = self._known.of(float(value.rpartition(" ")[2] if isinstance(value, str) else value))
        if found is None:
            return None
        cell, ranks = found
        given = self.cells[cell]
        lowest = sorted(ranks)
        if self.reduction != "max" or not self.has_faults:  # a maximum does not tell whether lower ranks are in it
            lowest = lowest[:1]
        return Meaning(cell, ranks, tuple(given[rank].call for rank in lowest))

    @property
    def is_own(self) -> bool:
        """Whether it has only the writer's own values: texts, and all under its label."""
        return self.reduction == "own"

    @property
    def identifies_ranks(self) -> bool:
        """Whether a number identifies its contributors."""
        return self.reduction not in ("min", "max")

    @cached_property
    def _known(self) -> _Known:
        """Cell and contributors by number: of several possibilities the one with the most contributors."""
        known: dict[float, tuple[int, frozenset[int]]] = {}
        largest = max((len(ranks) for ranks in self.cells.values()), default=0)
        for size in range(largest, 0, -1):
            for cell, ranks in self.cells.items():
                for chosen in itertools.combinations(sorted(ranks), size):
                    number = reduced(self.reduction, [ranks[rank] for rank in chosen])
                    known.setdefault(number, (cell, frozenset(chosen)))
        return _Known(known)


class _Known:
    """Cells and contributors by number. Lookups have a small tolerance because some numbers had single precision."""

    def __init__(self, meanings: dict[float, tuple[int, frozenset[int]]]) -> None:
        self._meanings = meanings
        self._sorted = sorted(meanings)

    def of(self, number: float) -> tuple[int, frozenset[int]] | None:
        """Return the meaning of the nearest number, if it is near enough."""
        index = bisect.bisect(self._sorted, number)
        nearest = min(self._sorted[max(0, index - 1) : index + 1], key=lambda each: abs(each - number), default=None)
        return self._meanings[nearest] if nearest is not None and math.isclose(nearest, number, rel_tol=1e-6) else None


def reduced(reduction: str, given: Sequence[Contribution]) -> float:
    values = [each.value for each in given]
    if reduction in ("own", "first"):
        return values[0]
    if reduction == "mean":
        return math.fsum(each.weight * each.value for each in given) / math.fsum(each.weight for each in given)
    if reduction == "sum":
        return math.fsum(values)
    return min(values) if reduction == "min" else max(values)


def deviation(given: Sequence[Contribution]) -> float:
    mean = reduced("mean", given)
    squares = math.fsum(each.weight * (each.value - mean) ** 2 for each in given)
    return math.sqrt(squares / math.fsum(each.weight for each in given))
