"""Cells of tables, and the checks of what other ranks send with them."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from typing import Any

import pytest

from dist_wandb.payloads.cells import BESIDE, Copies, copied_cell, named_arguments, natural


class Moment(datetime):
    """A datetime of another library."""


class MissingDate(datetime):
    """Like pandas' `NaT`: a datetime that differs from itself, and has no date."""

    __hash__ = None  # type: ignore[assignment]  # not needed

    def __ne__(self, other: object) -> bool:
        return True

    def date(self) -> date:
        raise ValueError("there is no date")


ZONE = timezone(timedelta(hours=2))


@pytest.mark.parametrize(
    ("cell", "copied"),
    [
        (date(2026, 2, 3), date(2026, 2, 3)),
        (Moment(2026, 2, 3, 4, tzinfo=ZONE), datetime(2026, 2, 3, 4, tzinfo=ZONE)),
        (MissingDate(2026, 2, 3, tzinfo=ZONE), None),
    ],
)
def test_dates_are_copied_as_plain_dates_and_missing_ones_as_none(cell: Any, copied: date | None) -> None:
    found = copied_cell(cell, Copies())
    assert found == copied
    assert type(found) is type(copied)
    inner = copied_cell([cell], Copies())
    assert inner == [copied.isoformat() if copied else None]


@pytest.mark.parametrize("number", [-1, 2**53, 2**70, 1.0, True, "1", None])
def test_other_received_ranks_and_amounts_are_refused(number: object) -> None:
    with pytest.raises(ValueError, match="is not a number of a rank or of items"):
        natural(number)


@pytest.mark.parametrize(
    "arguments", [{"data_or_path": "/etc/passwd"}, {**dict.fromkeys(BESIDE), "mode": "L"}, [], None]
)
def test_other_received_arguments_of_an_image_are_refused(arguments: object) -> None:
    with pytest.raises(ValueError, match="are not arguments of an image"):
        named_arguments(arguments)
