"""The names that the ranks have agreed on, and how many ranks contribute to each. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dist_wandb.settings.reduction import matches_any


@dataclass(slots=True)
class Name:
    """The shared state of one name."""

    index: int  # number of names agreed on before it
    has_spread: bool  # whether the spread of its numbers over the ranks is wanted
    usual: int = 0  # number of ranks that contributed when it was finished last; 0 if it never was
    whole: int = 0  # the same, when it was finished last with no rank missing; 0 if it never was
    most: int = 0  # largest number of ranks that ever contributed
    lacking: bool = False  # whether it was given up, and not whole since
    proven: bool = False  # whether all ranks have once passed a cell of it to which some did not contribute

    @property
    def is_new(self) -> bool:
        """Whether it was never finished."""
        return not self.usual


class Names(dict[str, Name]):
    """The names in the order in which they were agreed on; `spread` has patterns of those whose spread is wanted."""

    def __init__(self, spread: Sequence[str]) -> None:
        super().__init__()
        self.spread: tuple[str, ...] = tuple(spread)

    def learn(self, names: Iterable[str]) -> None:
        """Add the unknown names among these, in this order."""
        for name in names:
            if name not in self:
                self[name] = Name(len(self), matches_any(name, self.spread))

    def has_spread(self, name: str) -> bool:
        """Return whether the spread of a name over the ranks is wanted."""
        known = self.get(name)
        return known is not None and known.has_spread

    def forget_usual(self) -> None:
        """Forget how many ranks contribute, because this was learnt from too few of them."""
        for known in self.values():
            known.usual = known.whole = 0

    def as_list(self) -> list[list[Any]]:
        """Return the names as JSON values."""
        return [[name, one.usual, one.whole, one.most, one.lacking, one.proven] for name, one in self.items()]

    def restore(self, items: Iterable[Sequence[Any]]) -> None:
        """Take over the names of the other ranks, given by `as_list`."""
        self.clear()
        for name, *counts in items:
            self[name] = Name(len(self), matches_any(name, self.spread), *counts)
