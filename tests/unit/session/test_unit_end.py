"""The messages of a unit's ranks about their ends, without a store."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

from dist_wandb.job.job_store import JobStore
from dist_wandb.job.model import Topology
from dist_wandb.session.job_link import UnitEnd
from dist_wandb.settings.plan import Unit, unit_of

THREE = [Topology(rank, rank, 0, 3, 3, 1) for rank in range(3)]


def unit(index: int) -> Unit:
    return unit_of(THREE[index], "global")


@pytest.fixture
def endings() -> list[UnitEnd]:
    store = dist.HashStore()
    return [UnitEnd(JobStore(store, "test", THREE[index], 1.0), unit(index)) for index in range(3)]


def test_nothing_is_awaited_without_a_store() -> None:
    alone = UnitEnd(None, unit(0))
    alone.report_written()
    assert alone.report(3) == 3
    assert alone.exit_code(gone=()) == 0
    assert alone.exit_code(gone={1}) == 0  # with its own run, regardless of the other ranks
    assert alone.await_writers(time.monotonic(), {1})


def test_nothing_is_awaited_if_the_store_is_gone(monkeypatch: pytest.MonkeyPatch, endings: list[UnitEnd]) -> None:
    def gone(*_: Any) -> Any:
        raise RuntimeError("connection reset")

    for name in ("set", "check", "get", "compare_set"):
        monkeypatch.setattr(dist.PrefixStore, name, gone)
    endings[0].report_written()
    assert endings[0].report(3) == 3
    assert endings[0].exit_code(gone=()) == 0
    assert endings[0].await_writers(time.monotonic() + 20, {1, 2})
