"""The names that the ranks have agreed on, and how many ranks contribute to each. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dist_wandb.settings.reduction import matches_any


@dataclass(slots=True)
class Name:
    """What all ranks know of one name.

    Args:
        index: How many names were agreed on before it.
        has_spread: Whether the spread of its numbers over the ranks is wanted.
        usual: How many ranks contributed when it was finished last; 0 where it never was.
        whole: How many did when it was finished last with none missing; 0 where it never was.
        most: The most that ever did.
        lacking: Whether it was given up, and was not whole since.
        proven: Whether all ranks have once passed a cell of it that some did not contribute to.
    """

    index: int
    has_spread: bool
    usual: int = 0
    whole: int = 0
    most: int = 0
    lacking: bool = False
    proven: bool = False

    @property
    def is_new(self) -> bool:
        """Whether it was never finished."""
        return not self.usual


class Names(dict[str, Name]):
    """The names in the order in which they were agreed on.

    Args:
        spread: Patterns of names whose spread over ranks is wanted.
    """

    def __init__(self, spread: Sequence[str]) -> None:
        super().__init__()
        self.spread: tuple[str, ...] = tuple(spread)

    def learn(self, names: Iterable[str]) -> None:
        """Add those that are not known, in this order."""
        for name in names:
            if name not in self:
                self[name] = Name(len(self), matches_any(name, self.spread))

    def has_spread(self, name: str) -> bool:
        """Whether the spread of a name over the ranks is wanted."""
        known = self.get(name)
        return known is not None and known.has_spread

    def forget_usual(self) -> None:
        """Forget how many ranks contribute, because that was learnt from too few of them."""
        for known in self.values():
            known.usual = known.whole = 0

    def as_list(self) -> list[list[Any]]:
        """As JSON can hold it."""
        return [
            [name, known.usual, known.whole, known.most, known.lacking, known.proven] for name, known in self.items()
        ]

    def restore(self, items: Iterable[Sequence[Any]]) -> None:
        """Take over what others know, given by `as_list`."""
        self.clear()
        for name, *counts in items:
            self[name] = Name(len(self), matches_any(name, self.spread), *counts)
