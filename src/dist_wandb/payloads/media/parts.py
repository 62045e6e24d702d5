"""What one rank gives to a table or a panel of images, as others received it."""

from __future__ import annotations

from typing import Any, NamedTuple

from dist_wandb.payloads.framing import excerpt
from dist_wandb.payloads.media.cells import BESIDE
from dist_wandb.settings.reduction import LARGEST_EXACT_INTEGER

Columns = list[str | int]


class Part(NamedTuple):
    """What one rank gives to the whole.

    Args:
        rank: Its index in the job.
        columns: Names of a table's columns; of images none.
        total: How many rows or images it had.
        items: Those within the limit.
    """

    rank: int
    columns: Columns
    total: int
    items: list[Any]


def natural(number: Any) -> int:
    """A rank, a place or a number of items, as it was told."""
    if type(number) is not int or not 0 <= number < LARGEST_EXACT_INTEGER:
        raise ValueError(f"{excerpt(number)} is not a number of a rank or of items")
    return number


def named_arguments(arguments: Any) -> dict[str, Any]:
    """What goes along with a picture; arguments of `wandb.Image`, and none that decides about files."""
    if not isinstance(arguments, dict) or not set(arguments) <= set(BESIDE):
        raise ValueError(f"{excerpt(arguments)} does not go along with an image")
    return arguments
