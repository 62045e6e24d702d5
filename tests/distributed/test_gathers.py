"""Tables and images of all ranks, with real gloo groups: ranks are threads of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from limits import Limit
from units import HASTY, QUICK, Ranks, RecordingRun, Row, Stall, UnitExchange, eventually

from dist_wandb import gathered
from dist_wandb.exchange import attachments
from dist_wandb.exchange.transport import BrokenError, gloo
from dist_wandb.payloads import cells, gathers

SMALL = 1100  # approximate bytes of a table of one row, while it is kept


class Looking(RecordingRun):
    """Reads images when they are logged, as W&B does: their captions, and their first pixel."""

    def log(self, row: Row, commit: bool | None = None) -> None:
        seen = {name: self._seen(value) for name, value in row.items()}
        super().log({**row, **seen}, commit)

    @staticmethod
    def _seen(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        captions = [cells.copied_picture(image, {}, cells.Copies()).beside.get("caption") for image in value]
        return [(caption, image.image.getpixel((0, 0))) for caption, image in zip(captions, value, strict=True)]


def rows_of(rank: int, number: int) -> list[list[Any]]:
    return [[f"{rank}-{index}", index / 2] for index in range(number)]


def table(rank: int, number: int = 1, **arguments: Any) -> Any:
    return gathered(rows_of(rank, number), ["text", "score"], **arguments)


def whole(*numbers: int) -> list[list[Any]]:
    return [[rank, *row] for rank, number in enumerate(numbers) for row in rows_of(rank, number)]


def written(unit: Ranks, name: str = "table") -> dict[int, list[list[Any]]]:
    return {step: found.data for step, found in unit.last(name).items()}


def images(color: int, number: int = 1) -> list[np.ndarray[Any, Any]]:
    return [np.full((4, 6, 3), color + index, dtype=np.uint8) for index in range(number)]


# --- healthy ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [(2, 3), (0, 4, 1), (3, 0, 2, 1)])
def test_tables_of_all_ranks_become_one_in_the_row_of_their_numbers(
    ranks: Callable[..., Ranks], numbers: tuple[int, ...]
) -> None:
    unit = ranks(len(numbers))
    for step, more in ((0, 0), (1, 0), (1, 1), (None, 2)):  # twice at a step, and without one
        for rank, number in enumerate(numbers):
            unit.log(rank, {"loss": float(rank), "table": table(rank, number + more)}, step)
    unit.close()
    assert [sorted(row) for row in unit.run.rows] == [["global_step", "loss", "table"]] * 4
    assert unit.run.rows[0]["table"].columns == ["rank", "text", "score"]
    wanted = [whole(*(number + more for number in numbers)) for more in (0, 0, 1, 2)]
    assert [row["table"].data for row in unit.run.rows] == wanted


def test_columns_that_differ_are_matched_by_name(ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture) -> None:
    unit = ranks(2)
    for step in range(2):
        unit.log(0, {"table": gathered([[1, 2]], ["a", "b"])}, step)
        unit.log(1, {"table": gathered([[4, 3]], ["c", "b"])}, step)
    unit.close()
    assert unit.run.rows[0]["table"].columns == ["rank", "a", "b", "c"]
    assert written(unit)[0] == [[0, 1, 2, None], [1, None, 3, 4]]
    assert caplog.text.count("with different columns. They are matched by name") == 1


# --- limits -----------------------------------------------------------------------------------------------------------


def test_the_limit_applies_to_all_ranks_together_and_is_reported(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    unit = ranks(3)
    for rank, number in enumerate((2, 30, 40)):
        unit.log(rank, {"table": table(rank, number, limit=12)}, 0)
    unit.close()
    assert written(unit)[0] == whole(2, 5, 5)
    assert "'table' has 12 of 72 rows (2 of 2 of rank 0, 5 of 30 of rank 1, 5 of 40 of rank 2)" in caplog.text


def test_bytes_are_bounded_and_sent_in_pieces(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture, limit: Limit
) -> None:
    limit(attachments, _MOST_BYTES=20_000)
    limit(gloo, PIECE=1000)
    unit = ranks(2)
    unit.log_all(lambda rank: {"small": table(rank), "table": gathered([["x" * 990]] * 15, ["text"])}, 0)
    unit.close()
    assert written(unit, "small")[0] == whole(1, 1)
    assert written(unit)[0] == [[rank, "x" * 990] for rank in range(2) for _ in range(9)]
    assert "'table' has 18 of 30 rows (9 of 15 of each of ranks 0, 1)" in caplog.text


def test_pending_tables_are_bounded(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture, limit: Limit
) -> None:
    limit(attachments, _MOST_WAITING=5000)  # two tables, each with 1 KiB besides its rows
    unit = ranks(2, limits=replace(QUICK, heartbeat=1))
    unit.write_all(lambda rank: {"table": table(rank)}, 0)
    for step in range(1, 5):
        unit.log(0, {"table": gathered([["x" * 990]], ["text"])}, step)
    eventually(lambda: "wait on rank 0 for other ranks" in caplog.text)
    for step in range(1, 5):
        unit.log(1, {"table": gathered([["y"]], ["text"])}, step)
    unit.close()
    assert [len(written(unit)[step]) for step in range(5)] == [2, 1, 1, 2, 2]


# --- failing ranks ----------------------------------------------------------------------------------------------------


def test_a_table_of_one_rank_is_written_and_does_not_delay_numbers(ranks: Callable[..., Ranks]) -> None:
    unit = ranks(3, kind=UnitExchange)
    for step in range(3):  # the last row stays open
        unit.log(1, {"table": table(1, 2)}, step)
        unit.log_all({"loss": 1.0}, step)
    eventually(lambda: unit.last("loss").items() >= {(0, 1.0), (1, 1.0)})
    eventually(lambda: written(unit).keys() >= {0, 1})
    unit.close()
    assert written(unit) == {step: [[1, *row] for row in rows_of(1, 2)] for step in range(3)}


@pytest.mark.parametrize("ends", [2, 0])
def test_a_rank_that_dies_while_sending_does_not_affect_the_table_of_the_others(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch, ends: int
) -> None:
    """If rank 0 ends before that is known, the table has its own rows."""
    unit = ranks(3)
    dying = threading.Event()
    collect = gloo.GlooGroup.collect

    def die(group: gloo.GlooGroup, data: bytes) -> list[bytes]:
        if group.rank == 2:
            dying.set()
            eventually(lambda: unit.exchanges[2].lifecycle.is_stopped)
            raise BrokenError("dead")
        return collect(group, data)

    monkeypatch.setattr(gloo.GlooGroup, "collect", die)
    unit.log_all(lambda rank: {"loss": float(rank), "table": table(rank)}, 0)
    assert dying.wait(30)
    unit.exchanges[ends].die()
    if ends:
        unit.close(0, 1)
    assert written(unit) == {0: whole(1, 1) if ends else whole(1)}
    assert unit.last("loss") == {0: 1.0}, "its number had arrived"
    assert unit.flagged() == {0: 1 if ends else 2}


def test_a_late_table_is_added_but_one_that_is_much_too_late_does_not_replace_the_written_one(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture, limit: Limit
) -> None:
    limit(attachments, MOST_KEPT=8 * SMALL)
    unit = ranks(2, kind=UnitExchange)
    for step in range(11):
        unit.log(0, {"table": table(0)}, step)
    unit.flush(0)
    for step in (0, 1, 10):
        unit.log(1, {"table": table(1)}, step)
    unit.close()
    assert written(unit)[0] == written(unit)[1] == whole(1)
    assert written(unit)[10] == whole(1, 1)
    assert unit.flagged() == {0: 1, 1: 1}
    assert caplog.text.count("it came after the parts of other ranks were dropped") == 1
    assert "rank 0 has lost values: 2 that came too late." in caplog.text


def test_tables_logged_while_the_primary_is_away_are_written_when_it_returns(
    ranks: Callable[..., Ranks], limit: Limit
) -> None:
    limit(attachments, MOST_KEPT=0)
    unit = ranks(3, limits=HASTY)
    unit.write_all(lambda rank: {"loss": 1.0, "table": table(rank)}, 0)
    stall = Stall()
    unit.lose_soon(1.0)
    unit.log(0, {"loss": stall.number()}, 1)
    for step in (1, 2):
        unit.log_all(lambda rank: {"table": table(rank)}, step, ranks=(1, 2))
    eventually(lambda: unit.exchanges[1].kept == 2)
    stall.over.set()
    unit.close()
    assert written(unit) == {0: whole(1, 1, 1), **dict.fromkeys((1, 2), whole(0, 1, 1))}


def test_images_logged_immediately_before_a_failure_are_written(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = ranks(2, run=Looking())
    unit.write_all({"loss": 1.0}, 0)
    png = cells.png_of

    def png_slowly(*arguments: Any) -> bytes:
        time.sleep(0.2)
        return png(*arguments)

    monkeypatch.setattr(gathers, "png_of", png_slowly)
    unit.log(0, {"samples": gathered(images(7))}, 1)
    unit.exchanges[0].die()
    assert unit.last("samples") == {1: [("rank 0", (7,) * 3)]}


def test_values_that_cannot_be_encoded_or_decoded_do_not_affect_other_rows(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = ranks(2, run=Looking())
    for rank in range(2):
        shape = (4, 4) if rank == 0 else (2, 3, 4, 5, 6)
        unit.log(rank, {"samples": gathered([np.zeros(shape, dtype=np.uint8)])}, 0)
    unit.flush()
    assert unit.run.rows[0]["samples"] == [("rank 0", 0)]
    assert "'samples' on rank 1 cannot be sent" in caplog.text
    monkeypatch.setattr(attachments, "framed", lambda *parts: b"".join(part[:-1] for part in parts))
    for step in (1, 2):
        unit.log_all(lambda rank: {"loss": 1.0, "table": table(rank)}, step)
    unit.close()
    assert unit.last("loss") == {1: 1.0, 2: 1.0}
    assert "bytes that a rank sent as a table or images cannot be read: they are cut off" in caplog.text
