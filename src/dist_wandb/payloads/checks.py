"""Checks of the arguments of `log`: names, steps and weights."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from contextlib import suppress

from dist_wandb.errors import ConfigurationError
from dist_wandb.settings.reduction import LARGEST_EXACT_INTEGER


def checked_weight(argument: str, weight: float, rank: int) -> float:
    """Return a weight; raise ConfigurationError if it is negative or not finite."""
    if 0 <= weight < math.inf:
        return weight
    raise ConfigurationError(
        f"{argument}={weight!r} on rank {rank} is negative or not finite, so no mean can be weighted with it. Pass the "
        "number of samples or tokens behind the values; 0 if there were none."
    )


class NotARowError(ConfigurationError, TypeError):
    """What was given to `log` is not a row: a `TypeError`, as in wandb."""


def check_row(metrics: object, rank: int) -> None:
    """Raise NotARowError for a row that is not a mapping of names to values, or has a name that W&B cannot store."""
    if not isinstance(metrics, (dict, Mapping)):  # the check for a dict is faster
        raise NotARowError(
            f"log was given {type(metrics).__name__} on rank {rank}, but it takes a mapping of names "
            'to values, as in log({"loss": 0.5}).'
        )
    try:
        names = "".join(metrics)  # all names at once, because this is a hot path
    except TypeError:  # some name is not text
        names = "\0"
    if "\0" in names or not names.isascii():
        for name in metrics:
            check_name(name, rank)


def check_name(name: object, rank: int) -> None:
    """Raise NotARowError for a name that W&B cannot store, such as one with NUL characters or lone surrogates."""
    if isinstance(name, str) and "\0" not in name:
        if name.isascii():
            return
        with suppress(UnicodeEncodeError):
            name.encode()
            return
    raise NotARowError(
        f"log was given the name {name!r} ({type(name).__name__}) on rank {rank}, but names "
        "are text, without NUL characters and lone surrogates. Nothing of this row was written."
    )


def checked_step(step: object, rank: int) -> int:
    """Return the step as an integer; raise ConfigurationError if it is none, negative, or not exact in a float64."""
    try:
        number = operator.index(step)  # type: ignore[arg-type]  # anything else raises
    except TypeError:
        raise ConfigurationError(
            f"step={step!r} on rank {rank} is not an integer, but rows of the ranks are matched by it. Pass the "
            "number of optimizer steps so far."
        ) from None
    if number < 0:
        raise ConfigurationError(
            f"step={step!r} on rank {rank} is negative, but the x axis begins at 0. Pass the number of optimizer steps "
            "so far, or no step."
        )
    if number > LARGEST_EXACT_INTEGER:
        raise ConfigurationError(
            f"step={step!r} on rank {rank} is beyond 2**53, where ranks cannot distinguish steps. Pass the number of "
            "optimizer steps so far, or a time in seconds."
        )
    return number
