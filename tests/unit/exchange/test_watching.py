"""Rows that are kept until it is certain which rank writes the run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import pytest
from units import eventually

from dist_wandb.exchange.rows import Contribution
from dist_wandb.exchange.watching import WatchingExchange
from dist_wandb.settings.limits import Limits

if TYPE_CHECKING:
    from dist_wandb.exchange.interface import Exchange


class Taking:
    """An exchange that takes rows."""

    def __init__(self) -> None:
        self.rows: list[Contribution] = []
        self.put = self.rows.append
        self.lost: list[tuple[int, str]] = []

    def lose(self, rows: int, why: str) -> None:
        """Take the number of rows that are lost."""
        self.lost.append((rows, why))


def test_rows_beyond_the_limit_are_counted_as_lost() -> None:
    is_certain, successor = threading.Event(), Taking()

    def succeed(_is_due: Callable[[], bool], _is_stopped: Callable[[], bool]) -> None:
        is_certain.wait()
        exchange.pass_on(cast("Exchange", successor))

    exchange = WatchingExchange(Limits(max_pending_rows=2), 1, succeed)
    exchange.start()
    for step in range(5):
        exchange.put(Contribution({"loss": 1.0}, step, True))
    is_certain.set()
    eventually(lambda: exchange.has_ended)
    assert [row.step for row in successor.rows] == [0, 1]
    assert successor.lost == [(3, "see max_pending_rows")]


def test_a_run_that_the_next_rank_cannot_open_does_not_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    def succeed(*_: Any) -> None:
        raise ValueError("no")

    exchange = WatchingExchange(Limits(), 1, succeed)
    exchange.start()
    exchange.put(Contribution({"loss": 1.0}, 1, True))
    assert exchange.close(timeout=10)
    assert "rank 1 cannot open the run, which no rank writes" in caplog.text
