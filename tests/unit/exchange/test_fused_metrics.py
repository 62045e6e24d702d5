"""The exchange of metric states when it is interrupted, repeated, or too late: ranks in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torchmetrics
from limits import Limit
from merging import Ranks, Replayed

from dist_wandb.exchange import attachments
from dist_wandb.exchange.attachments import Attachments, FusedGathers
from dist_wandb.exchange.attachments.metrics import FusedMetrics
from dist_wandb.exchange.protocol.calls import NUMBER, Key, Series
from dist_wandb.exchange.protocol.lanes import NO_NUMBER, lanes_of
from dist_wandb.exchange.protocol.memory import Row
from dist_wandb.exchange.rows import Contribution, Rows
from dist_wandb.job.topology import Topology
from dist_wandb.payloads.framing import encode, framed
from dist_wandb.payloads.gathers import Gathered
from dist_wandb.payloads.metrics import Snapshot, take_snapshot
from dist_wandb.runs.null_run import NullRun
from dist_wandb.runs.writer import RunWriter
from dist_wandb.settings.plan import plan_run
from dist_wandb.settings.reduction import DEGRADED, check_reduce


class Unit:
    """Ranks that log one `SumMetric` each: its value is 1 + rank at step 0, twice that at step 1, and so on."""

    def __init__(self, size: int) -> None:
        self.written: list[dict[str, Any]] = []
        self.ranks: list[Rows] = []
        for rank in range(size):
            plan = plan_run(Topology(rank, rank, 0, size, size, 1), "auto", "global", "base")
            run: Any = self if rank == 0 else NullRun()
            self.ranks.append(Rows(RunWriter(run, plan, "global_step"), check_reduce("mean"), rank=rank))
        self._metrics = [torchmetrics.SumMetric() for _ in range(size)]

    def log(self, row: dict[str, Any]) -> None:
        self.written.append({name: value for name, value in row.items() if name != "_timestamp"})

    def keep(self, step: int, ranks: Sequence[int] | None = None) -> Key:
        """Log the metric on the ranks, after the round of the last exchange; return its cell."""
        for rank, metric in enumerate(self._metrics):
            self.ranks[rank].attachments.passed()
            metric.update(1.0 + rank)
            snapshot = take_snapshot(metric)
            key = Key(self.fused(rank).series("sum", snapshot), step, 0)
            if ranks is None or rank in ranks:
                self.fused(rank).keep(key, snapshot)
        return key

    def keep_late(self, rank: int, key: Key) -> None:
        """Log 5 on a rank, in a cell that the others had finished without it."""
        metric = torchmetrics.SumMetric()
        metric.update(5.0)
        self.fused(rank).keep(key, take_snapshot(metric))

    def fused(self, rank: int) -> FusedMetrics:
        found = self.ranks[rank].attachments.by_type[Snapshot]
        assert isinstance(found, FusedMetrics)
        return found

    def exchange(self, key: Key, members: Sequence[int], broken_on: Sequence[int] = ()) -> None:
        """Exchange the states of a cell between some ranks; on some of them the result does not arrive."""
        fused = {rank: self.fused(rank) for rank in members}
        completing = [fused[rank] for rank in fused if rank not in broken_on]
        Replayed(len(fused)).exchange(key, [*fused.values()], completing)

    def finish(self, key: Key, contributors: int, *, corrects: bool = False) -> dict[str, Any]:
        """Write a cell on rank 0; return the row."""
        before = len(self.written)
        lanes = lanes_of([NO_NUMBER])
        row = Row((key.name,), (0,), key.step, key.step or 0, lanes, {}, (contributors,), corrects=corrects)
        self.ranks[0].writing.write([row])
        self.ranks[0].writing.end_row()
        return self.written[before] if len(self.written) > before else {}


class Shaped(torchmetrics.Metric):
    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, numbers: torch.Tensor) -> None:
        self.total = self.total + numbers

    def compute(self) -> torch.Tensor:
        return self.total


def shaped(*rows: Sequence[float]) -> list[Shaped]:
    """Return the metrics of ranks; ranks with an empty row have no data."""
    metrics = [Shaped() for _ in rows]
    for metric, row in zip(metrics, rows, strict=True):
        if row:
            metric.update(torch.tensor(row))
    return metrics


def test_states_are_gathered_only_when_needed() -> None:
    ranks = Ranks(3)
    assert ranks.log(shaped([1, 2], [3, 4], [5, 6])) == {"": [9.0, 12.0]}
    assert ranks.collectives == ["reduce", "reduce"]
    assert ranks.log(shaped([1, 2], [], [5, 6])) == {"": [6.0, 8.0]}
    assert ranks.collectives == ["reduce", "reduce"]
    assert ranks.log(shaped([], [3, 4], [5, 6])) == {"": [8.0, 10.0]}
    assert ranks.collectives == ["reduce", "collect"]


def test_states_of_different_shapes_are_refused_once_with_rank_and_advice(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(3)
    for _ in range(3):
        assert ranks.log(shaped([1, 2], [3, 4], [3, 4, 5])) == {}
    (message,) = caplog.messages
    assert "(Shaped) is left out of its row: rank 0 could not compute it" in message
    assert "State 'total' of Shaped is a tensor of shape (3,) on rank 2, but one of shape (2,)" in message
    assert "Give the metric the same arguments" in message


def test_a_metric_that_fails_alone_does_not_affect_the_rest_of_the_row(caplog: pytest.LogCaptureFixture) -> None:
    unit = Unit(1)
    for _ in range(2):
        values = {"curve": take_snapshot(torchmetrics.AUROC("binary")), "loss": 0.5}
        unit.ranks[0].write_own(Contribution(values, None))
    assert [row["loss"] for row in unit.written] == [0.5, 0.5]
    assert not any("curve" in row for row in unit.written)
    (message,) = caplog.messages
    assert "'curve' (BinaryAUROC) is left out of its row: rank 0 could not compute it from its states" in message


def test_a_metric_that_the_rank_that_writes_has_never_logged_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    unit = Unit(2)
    key = unit.keep(0, ranks=[1])
    unit.exchange(key, range(2))
    assert unit.finish(key, 1) == {}
    assert "'sum' was logged as a metric by other ranks, but not yet by rank 0, which computes it" in caplog.text
    lost = unit.ranks[0].attachments.lost
    assert +lost == {"of metrics that it had not logged": 1}
    late = unit.keep(1)
    unit.exchange(late, range(2))
    assert unit.finish(late, 2)["sum"] == 6.0
    unit.keep_late(0, key)
    unit.exchange(key, range(2))
    assert unit.finish(key, 2)["sum"] == 7.0
    assert not lost.total(), "its row is corrected"


def test_the_rank_that_writes_logs_a_metric_once_the_others_have_gone(caplog: pytest.LogCaptureFixture) -> None:
    unit = Unit(3)
    key = unit.keep(0, ranks=[1, 2])
    unit.exchange(key, range(3))
    assert unit.finish(key, 2) == {}
    unit.keep_late(0, key)
    unit.exchange(key, [0])
    assert unit.finish(key, 3, corrects=True) == {"sum": 5.0, DEGRADED: 2, "global_step": 0}
    assert "it came after the parts of other ranks were dropped" not in caplog.text
    assert not unit.ranks[0].attachments.lost.total()


MANY = 20  # more metrics than fit into FEW bytes
FEW = 50_000


def test_a_value_whose_late_part_comes_too_late_is_marked(limit: Limit, caplog: pytest.LogCaptureFixture) -> None:
    limit(attachments, MOST_KEPT=FEW)
    unit = Unit(3)
    late, whole = unit.keep(0, ranks=[0, 1]), unit.keep(1)
    for key, contributors in ((late, 2), (whole, 3)):
        unit.exchange(key, range(3))
        assert DEGRADED not in unit.finish(key, contributors)
    for step in range(2, MANY):
        unit.exchange(unit.keep(step), range(3))
    unit.keep_late(2, late)
    unit.exchange(late, range(3))
    assert unit.finish(late, 3, corrects=True) == {DEGRADED: 1, "global_step": 0}
    assert "a part of 'sum' is not written: it came after the parts of other ranks were dropped" in caplog.text
    unit.exchange(whole, range(3))  # the row is corrected because of another value
    assert unit.finish(whole, 3, corrects=True) == {}, "its value was right"


def test_states_that_cannot_be_copied_from_a_device_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise RuntimeError("device lost")

    one, metric = FusedMetrics(Attachments(0, Counter()), merges=True), torchmetrics.CatMetric()
    metric.update(1.0)
    snapshot = take_snapshot(metric)
    snapshot.to_host = broken  # type: ignore[method-assign]
    known = one.series("cat", snapshot)
    one.keep(Key(known, 1, 0), snapshot)
    assert "'cat' on rank 0 has no part in its row: RuntimeError('device lost')" in caplog.text
    caplog.clear()
    one.keep(Key(known, 2, 0), kept := take_snapshot(metric))
    kept.to_host = broken  # type: ignore[method-assign]
    keys = [Key(known, step, 0) for step in (1, 2)]
    Replayed(1).exchange(keys[1], [one], [one])
    assert "'cat' on rank 0 has no part in its row: RuntimeError('device lost')" in caplog.text
    assert [one.values.pop(key, ({}, 0)) for key in keys] == [({}, 0)] * 2


TWO_STATES = framed(encode([torch.tensor([1.0]), torch.tensor([2.0])]))  # as of another class of the same name


@pytest.mark.parametrize("sent", [None, b"", b"\xff" * 12, (5).to_bytes(8, "little") + b"four", TWO_STATES])
def test_malformed_states_of_a_peer_affect_only_their_own_value(
    sent: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    lost = Counter[str]()
    one = FusedMetrics(Attachments(0, lost), merges=True)
    metric = torchmetrics.CatMetric()
    metric.update(1.0)
    snapshot = take_snapshot(metric)
    key = Key(one.series("cat", snapshot), 1, 0)
    one.keep(key, snapshot)
    Replayed(1, None if sent is None else [sent]).exchange(key, [one], [one])
    assert one.values.pop(key, ({}, 0))[0] == {}
    reason = "The gathered states of CatMetric do not fit" if sent == TWO_STATES else "'cat': left out of their rows"
    assert reason in caplog.text
    assert ("A rank did not send the states of 1 metrics" in caplog.text) is (sent == b"")
    assert lost == {"that could not be computed": 1}


def test_only_a_metric_needs_the_primarys_own_part() -> None:
    needs = Attachments(1, Counter(), {Snapshot: FusedMetrics, Gathered: FusedGathers}, merges=True).needs_primary
    kinds = ("metric", "table", "images", NUMBER)
    assert [needs(Series("a", kind).text) for kind in kinds] == [True, False, False, False]
