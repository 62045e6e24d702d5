"""Rows that are kept until it is certain which rank writes the run."""

from __future__ import annotations

from typing import Any

import pytest

from dist_wandb.exchange.direct import WatchingExchange
from dist_wandb.exchange.rows import Contribution
from dist_wandb.job.model import Topology
from dist_wandb.settings.options import Limits
from dist_wandb.settings.plan import unit_of

UNIT = unit_of(Topology(1, 1, 0, 2, 2, 1), "global")


def test_a_run_that_the_next_rank_cannot_open_does_not_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    def move(*_: Any) -> None:
        raise ValueError("no")

    exchange = WatchingExchange(Limits(), UNIT, lambda *_: 1, move)
    exchange.start()
    exchange.put(Contribution({"loss": 1.0}, 1, True))
    assert not exchange.close(timeout=10)
    assert not exchange.flush()
    assert "rank 1 cannot open the run, which no rank writes" in caplog.text


def test_rows_are_reported_if_it_is_never_certain_which_rank_writes_the_run(caplog: pytest.LogCaptureFixture) -> None:
    exchange = WatchingExchange(Limits(), UNIT, lambda *_: None, lambda _: None)
    exchange.put(Contribution({"loss": 1.0}, 1, True))
    exchange.start()
    assert not exchange.close(timeout=10)
    assert "what rank 1 logged may be lost: it ended before it was certain which rank writes the run" in caplog.text
