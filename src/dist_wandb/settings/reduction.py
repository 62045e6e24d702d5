"""How one number comes from the numbers of many ranks: the words for it, checked, and the arithmetic. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal, NamedTuple

from dist_wandb.errors import ConfigurationError, suggest

Reduction = Literal["mean", "sum", "min", "max", "first"]
Reduce = Reduction | Literal["auto"] | Mapping[str, Reduction] | None
Spread = bool | str | Sequence[str]
PerRank = bool | str | Sequence[str]

REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum", "min", "max", "first")

# Numbers that are equal on all ranks by nature, also behind a slash (`trainer/global_step`): counters and schedules.
EQUAL_BY_NATURE = (
    *("epoch", "iter", "iteration", "step", "global_step", "tokens"),
    *("lr", "lr-*", "learning_rate"),
)
SUM_LANES = 7  # sum of w*x, of w, of x, number of voices, of contributions, of integers, of NaNs
MAX_LANES = 2  # x, -x
LARGEST_EXACT_INTEGER = 2**53


def check_reduce(reduce: object) -> dict[str, Reduction] | None:
    """Check the argument `reduce` of an integration.

    Args:
        reduce: `"auto"` for the mean, one reduction for all names, or any mapping of name patterns (as in `fnmatch`) to
            reductions, of which the first that matches counts; `None` for no reduction at all.

    Returns:
        A mapping of name patterns to reductions, in their order, or `None`.

    Raises:
        ConfigurationError: A reduction that does not exist (the nearest one is named), or a pattern that is no text.

    Example:
        >>> check_reduce("mean")
        {'*': 'mean'}
        >>> check_reduce({"tokens": "sum", "*": "mean"})
        {'tokens': 'sum', '*': 'mean'}
    """
    if reduce is None:
        return None
    if isinstance(reduce, str) and reduce == "auto":
        reduce = "mean"
    if not isinstance(reduce, Mapping):
        return {"*": _check_reduction(reduce, "reduce")}
    for pattern in reduce:
        if not isinstance(pattern, str):
            raise ConfigurationError(f"reduce has {pattern!r} as a name pattern, which is no text. Use e.g. 'loss/*'.")
    return {pattern: _check_reduction(value, f"reduce[{pattern!r}]") for pattern, value in reduce.items()}


def check_spread(spread: object) -> tuple[str, ...]:
    """Check the argument `spread` of an integration.

    Args:
        spread: `True` for all names, `False` for none, or name patterns (as in `fnmatch`).

    Returns:
        The patterns of names whose spread is wanted.

    Raises:
        ConfigurationError: Something else was given.

    Example:
        >>> check_spread(True), check_spread("loss"), check_spread(False)
        (('*',), ('loss',), ())
    """
    return check_patterns("spread", spread)


def check_patterns(argument: str, given: object) -> tuple[str, ...]:
    """Check an argument that selects names.

    Args:
        argument: Its name, for the message.
        given: `True` for all names, `False` for none, or name patterns (as in `fnmatch`).

    Raises:
        ConfigurationError: Something else was given.
    """
    if isinstance(given, bool):
        return ("*",) if given else ()
    if isinstance(given, str):
        return (given,)
    if isinstance(given, Sequence) and all(isinstance(pattern, str) for pattern in given):
        return tuple(given)
    raise ConfigurationError(f"{argument}={given!r} is neither a bool nor name patterns. Pass e.g. ['loss', 'grad/*'].")


def plain_reduce(reduce: object) -> Reduce:
    """The argument `reduce` of an integration, checked, and of types that JSON and pickle know.

    Raises:
        ConfigurationError: As `check_reduce`.
    """
    checked = check_reduce(reduce)
    if checked is None or isinstance(reduce, Mapping):
        return checked
    return "auto" if reduce == "auto" else checked["*"]


class PerRankNames(NamedTuple):
    """Of which names each rank of a shared run also writes what it logs under its label.

    Args:
        patterns: Patterns of the names.
        skips_equal: Whether numbers that are equal on all ranks by nature are left out.
    """

    patterns: tuple[str, ...] = ("*",)
    skips_equal: bool = True

    def has(self, name: str, *, is_number: bool) -> bool:
        """Whether a value of this name is written under the label."""
        if is_number and self.skips_equal and _is_equal_by_nature(name):
            return False
        return matches_any(name, self.patterns)


def check_per_rank(per_rank: object) -> PerRankNames:
    """Check the argument `per_rank` of an integration.

    Args:
        per_rank: `"auto"` for all names but those of numbers that are equal on all ranks by nature
            (`EQUAL_BY_NATURE`); `True` for all, `False` for none, or name patterns (as in `fnmatch`).

    Raises:
        ConfigurationError: Something else was given.

    Example:
        >>> names = check_per_rank("auto")
        >>> [names.has(name, is_number=True) for name in ("loss", "epoch", "trainer/global_step", "lr-AdamW/pg1")]
        [True, False, False, False]
    """
    if isinstance(per_rank, str) and per_rank == "auto":
        return PerRankNames()
    return PerRankNames(check_patterns("per_rank", per_rank), skips_equal=False)


@lru_cache(maxsize=4096)
def _is_equal_by_nature(name: str) -> bool:
    return matches_any(name, EQUAL_BY_NATURE) or matches_any(name, (f"*/{pattern}" for pattern in EQUAL_BY_NATURE))


def plain_patterns(argument: str, given: object) -> bool | str | list[str]:
    """An argument that selects names, checked, and of types that JSON and pickle know.

    Raises:
        ConfigurationError: As `check_patterns`.
    """
    patterns = check_patterns(argument, given)
    return given if isinstance(given, (bool, str)) else list(patterns)


def _check_reduction(value: object, argument: str) -> Reduction:
    for known in REDUCTIONS:
        if value == known:
            return known
    raise ConfigurationError(f"{argument}={value!r} is no reduction. {suggest(value, REDUCTIONS)} None: no reduction.")


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches one of some patterns, as in `fnmatch`, upper and lower case told apart."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def reduction_of(name: str, reduce: Mapping[str, Reduction]) -> tuple[str, Reduction]:
    """The first pattern that a name matches, and its reduction; `("", "mean")` if it matches none."""
    return next(((pattern, reduce[pattern]) for pattern in reduce if fnmatchcase(name, pattern)), ("", "mean"))


class Totals(NamedTuple):
    """What is known of all contributions to one name at one step.

    Args:
        weighted: Sum of w*x.
        weight: Sum of w.
        plain: Sum of x.
        voices: Number of ranks that spoke, also those that gave their number no weight.
        number: Number of contributions.
        integers: How many of them are integers.
        nans: How many of them are NaN; they are left out of `largest` and `smallest`, which cannot hold them.
        largest: Largest x.
        smallest: Smallest x.
    """

    weighted: float = 0.0
    weight: float = 0.0
    plain: float = 0.0
    voices: int = 0
    number: int = 0
    integers: int = 0
    nans: int = 0
    largest: float = -math.inf
    smallest: float = math.inf

    @classmethod
    def of(cls, value: float, weight: float = 1.0) -> Totals:
        """The totals of one contribution. A weight of 0 means none at all."""
        if weight == 0:
            return cls(voices=1)
        try:
            x = float(value)
        except OverflowError:  # an integer beyond all floats
            x = math.copysign(math.inf, value > 0 or -1)
        if x != x:  # noqa: PLR0124  # NaN; on the way of every number
            return cls(x, weight, x, 1, 1, 0, 1)
        is_integer = isinstance(value, int) and abs(value) <= LARGEST_EXACT_INTEGER
        return cls(weight * x, weight, x, 1, 1, int(is_integer), 0, x, x)

    def __add__(self, other: Totals) -> Totals:  # type: ignore[override]  # a tuple's would string them together
        return Totals(
            self.weighted + other.weighted,
            self.weight + other.weight,
            self.plain + other.plain,
            self.voices + other.voices,
            self.number + other.number,
            self.integers + other.integers,
            self.nans + other.nans,
            max(self.largest, other.largest),
            min(self.smallest, other.smallest),
        )

    def lanes(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """As numbers to be summed over ranks, and numbers whose maximum over ranks is to be taken."""
        counts = (float(self.voices), float(self.number), float(self.integers), float(self.nans))
        return (self.weighted, self.weight, self.plain, *counts), (self.largest, -self.smallest)

    @classmethod
    def from_lanes(cls, sums: Sequence[float], maxima: Sequence[float]) -> Totals:
        """The inverse of `lanes`."""
        weighted, weight, plain, *counts = sums
        voices, number, integers, nans = map(int, counts)
        return cls(weighted, weight, plain, voices, number, integers, nans, maxima[0], -maxima[1])

    def reduced(self, reduction: str) -> float:
        """What `reduction` makes of the contributions.

        The mean is sum(w*x) / sum(w) (https://en.wikipedia.org/wiki/Weighted_arithmetic_mean). Equal numbers have
        themselves as their mean, and integers stay integers.
        """
        if self.nans:
            return math.nan
        if reduction == "sum":
            return self._as_integer(self.plain)
        if reduction == "min" or self.smallest == self.largest:
            return self._as_integer(self.smallest)
        return self._as_integer(self.largest) if reduction == "max" else self.weighted / self.weight

    def _as_integer(self, value: float) -> float:
        exact = self.integers == self.number and abs(value) <= LARGEST_EXACT_INTEGER
        return int(value) if exact else value
