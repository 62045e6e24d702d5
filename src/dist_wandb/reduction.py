"""How one number comes from the numbers of many ranks: the words for it, checked. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from dist_wandb.errors import ConfigurationError, suggest

Reduction = Literal["mean", "sum", "min", "max", "first"]
Reduce = Reduction | Mapping[str, Reduction] | None
Spread = bool | str | Sequence[str]

REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum", "min", "max", "first")


def check_reduce(reduce: object) -> dict[str, Reduction] | None:
    """Check the argument `reduce` of a door.

    Args:
        reduce: One reduction for all names, or a mapping of name patterns (as in `fnmatch`) to reductions, of which
            the first that matches counts; `None` for no reduction at all.

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
    if not isinstance(reduce, Mapping):
        return {"*": _check_reduction(reduce, "reduce")}
    for pattern in reduce:
        if not isinstance(pattern, str):
            raise ConfigurationError(f"reduce has {pattern!r} as a name pattern, which is no text. Use e.g. 'loss/*'.")
    return {pattern: _check_reduction(value, f"reduce[{pattern!r}]") for pattern, value in reduce.items()}


def check_spread(spread: object) -> tuple[str, ...]:
    """Check the argument `spread` of a door.

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
    if isinstance(spread, bool):
        return ("*",) if spread else ()
    if isinstance(spread, str):
        return (spread,)
    if isinstance(spread, Sequence) and all(isinstance(pattern, str) for pattern in spread):
        return tuple(spread)
    raise ConfigurationError(f"spread={spread!r} is neither a bool nor name patterns. Pass e.g. ['loss', 'grad/*'].")


def _check_reduction(value: object, argument: str) -> Reduction:
    for known in REDUCTIONS:
        if value == known:
            return known
    raise ConfigurationError(f"{argument}={value!r} is no reduction. {suggest(value, REDUCTIONS)} None: no reduction.")
