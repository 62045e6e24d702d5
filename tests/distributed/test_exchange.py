"""The exchange with real gloo groups: ranks are threads of this process, over a store in memory."""

from __future__ import annotations

import functools
import logging
import math
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torchmetrics
from benchmarks import growth
from counting import Outage
from limits import Limit
from torch.distributed import HashStore
from units import HASTY, QUICK, SOON, Ranks, RecordingRun, Row, Stall, UnitExchange, eventually, waiting_for

from dist_wandb import gathered
from dist_wandb.exchange import collective, interface, turns
from dist_wandb.exchange.collective import CollectiveExchange
from dist_wandb.exchange.membership import generations
from dist_wandb.exchange.membership.generations import Presence, publish_opened
from dist_wandb.exchange.rows import Contribution
from dist_wandb.job.job_store import JobStore
from dist_wandb.job.topology import Topology
from dist_wandb.settings.plan import Unit
from dist_wandb.settings.reduction import DEGRADED


def has_rows(unit: Ranks, number: int) -> bool:
    return len(unit.run.rows) == number


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def keys_of(store: HashStore, rank: int, size: int) -> JobStore:
    """Return the keys of the unit, as a rank sees them."""
    return JobStore(store, "test", Topology(rank, rank, 0, size, size, 1), 20).below("unit/")


def begin_opening(unit: Ranks, rank: int) -> None:
    """Publish that a rank opens its session, which it does not do yet."""
    publish_opened(keys_of(unit.store, rank, unit.size), Unit("", rank, unit.size, rank, range(unit.size)))


def goes_on_with(exchange: CollectiveExchange, size: int) -> bool:
    return len(exchange.rounds.table.ranks.members) == size and exchange.group is not None


# --- healthy ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_row_covers_all_ranks_and_costs_two_collectives(ranks: Callable[..., Ranks], size: int) -> None:
    unit = ranks(size)
    unit.write_all(lambda rank: {"loss": float(rank), "epoch": 3}, 0)
    start = time.monotonic()
    before = [exchange.rounds.table.round for exchange in unit.exchanges.values()]
    groups: list[Any] = [exchange.group for exchange in unit.exchanges.values()]
    collectives = [group.collectives for group in groups]
    for step in range(1, 21):
        for rank in range(size):
            unit.log(rank, {"loss": float(rank + step), "epoch": 3}, step)
        eventually(functools.partial(has_rows, unit, step + 1))
    rounds = [exchange.rounds.table.round - old for exchange, old in zip(unit.exchanges.values(), before, strict=True)]
    assert max(rounds) <= 20 + 3 + 10 * (time.monotonic() - start)  # heartbeats may occur between two rows
    unit.close()
    rounds = [exchange.rounds.table.round - old for exchange, old in zip(unit.exchanges.values(), before, strict=True)]
    for group, old in zip(groups, collectives, strict=True):
        assert group.collectives - old <= 2 * max(rounds)
    assert unit.last("loss") == {step: step + (size - 1) / 2 for step in range(21)}
    assert set(map(type, unit.last("epoch").values())) == {int}
    assert len(unit.run.rows) == 21
    assert not unit.flagged()


def test_the_benchmark_of_growth_counts_collectives_and_bytes_of_a_row() -> None:
    cost = growth.cost_of(2, names=20, rows=3)
    assert cost is not None
    assert cost.collectives == 2
    assert 20 * 8 < cost.bytes < 20 * 200
    assert cost.milliseconds > 0


@pytest.mark.parametrize("notice", [True, False])
def test_a_rank_that_has_closed_and_is_gone_is_not_lost(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture, notice: bool
) -> None:
    """Without notice: on a starved machine its process may end before its thread has published it."""
    unit = ranks(3, limits=HASTY)
    unit.write_all(lambda rank: {"loss": float(rank)}, 0)
    unit.lose_soon(3.0)  # its connections may stay open, unlike those of a process
    unit.close(2)
    unit.exchanges[2].leave() if notice else unit.exchanges[2].die(notice=False)
    for step in range(1, 4):
        unit.log_all(lambda rank: {"loss": float(rank)}, step, ranks=range(2))
    unit.close(0, 1)
    assert unit.last("loss") == {0: 1.0, 1: 0.5, 2: 0.5, 3: 0.5}
    assert not unit.flagged()
    assert not warnings(caplog)
    assert unit.exchanges[0].lifecycle.lost == frozenset()


def test_a_rank_leaves_only_once_the_others_have_received_all_it_logged(
    ranks: Callable[..., Ranks], limit: Limit
) -> None:
    """A mean needs nothing more, but spreads, metric states and tables are requested when all ranks have logged."""
    limit(collective, _LAST_ROUND=0.01)
    unit = ranks(3, spread=["spread"])
    unit.write_all({"loss": 0.0, "spread": 0.0}, 0)
    metrics = [torchmetrics.MeanMetric() for _ in range(3)]
    for rank, metric in enumerate(metrics):
        metric.update(float(rank))
    parts: list[Row] = [{"spread": float(r), "metric": metrics[r], "table": gathered([[r]], ["x"])} for r in range(3)]
    unit.log(2, parts[2], 1)
    unit.close(2)
    end = threading.Thread(target=unit.exchanges[2].leave, daemon=True)
    end.start()
    end.join(1.0)
    assert end.is_alive(), "the others still need it"
    unit.log_all(parts.__getitem__, 1, ranks=range(2))
    unit.close(0, 1)
    end.join(SOON)
    assert not end.is_alive()
    row = unit.run.rows[-1]
    assert (row["spread"], row["metric"], row["spread/argmax_rank"]) == (1.0, 1.0, 2)
    assert row["spread/std"] == pytest.approx(math.sqrt(2 / 3))
    assert sorted(row["table"].data) == [[0, 0], [1, 1], [2, 2]]
    assert not unit.flagged()


def test_uneven_counts_without_a_step_are_reported_at_the_end(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    """Which of a rank's calls belongs to which of another rank cannot be known then, but it is said."""
    unit = ranks(3)
    for rank, count in enumerate((4, 5, 4)):
        for call in range(count):
            unit.log(rank, {"loss": float(call), "even": 1.0} if call < 4 else {"loss": float(call)}, calls=call)
    unit.close()
    (message,) = warnings(caplog)
    assert "'loss' was logged without a step 4 times by ranks 0, 2, 5 times by rank 1." in message
    assert "Pass step= to log" in message


def test_calls_of_one_rank_with_the_x_axis_of_all_are_no_uneven_counts(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    """The axis is part of each call, also of those that only rank 0 makes, and is not combined by its n-th value."""
    unit = ranks(2, axes=["epoch"])
    for call in range(8):
        for rank in range(2 if call % 4 else 1):
            unit.log(rank, {"loss" if call % 4 else "saved": 1.0, "epoch": call // 4}, calls=call)
    unit.close()
    assert [row["epoch"] for row in unit.run.rows if "loss" in row] == [0, 0, 0, 1, 1, 1]
    assert not warnings(caplog)


def test_an_x_axis_that_differs_between_the_ranks_of_a_row_is_reported_once(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    unit = ranks(2, axes=["epoch"])
    for call in range(6):
        for rank in range(2):
            unit.log(rank, {"loss": 1.0, "epoch": call // (2 + rank)}, calls=call)
    unit.close()
    assert [row["epoch"] for row in unit.run.rows] == [0, 0, 1, 1, 2, 2], "that of rank 0"
    messages = warnings(caplog)
    assert messages, "each rank reports it once"
    assert len(messages) == len(unit.exchanges)
    assert all("values of 'epoch', the x axis, differ in one row" in message for message in messages)


# --- failing ranks ----------------------------------------------------------------------------------------------------


def test_rows_before_the_first_value_of_a_rank_are_corrected_once_and_the_reason_is_true(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    unit = ranks(2, kind=UnitExchange)
    for step in range(3):
        unit.log(0, {"loss": 1.0}, step)
    eventually(lambda: len(unit.run.rows) == 3)
    for step in range(3):
        unit.log(1, {"loss": 2.0}, step)
    unit.close()
    assert [row["loss"] for row in unit.run.rows] == [1.0] * 3 + [1.5] * 3
    assert not unit.flagged(), "a rank that has never logged may be one that never does"
    (message,) = warnings(caplog)
    assert "It had not logged anything before, and the others waited 0.5 s for it." in message
    assert "order" not in message


@pytest.mark.parametrize("present", [[0], [0, 1]])
def test_rows_are_not_held_back_for_ranks_that_have_not_opened_a_session(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture, present: list[int]
) -> None:
    unit = ranks(4, *present, reduce="sum", limits=replace(QUICK, join_timeout=600, finish_timeout=600))
    for step in range(3):
        unit.log_all({"ones": 1}, step, ranks=present)
    eventually(lambda: unit.last("ones") == dict.fromkeys(range(3), len(present)))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], "others may still come"
    unit.open(2)
    for step in range(3):
        unit.log(2, {"ones": 1}, step)
    eventually(lambda: unit.last("ones") == dict.fromkeys(range(3), len(present) + 1))
    unit.close()
    assert not unit.flagged()
    joined, missing = warnings(caplog)
    assert "rank 2 opened a session" in joined
    assert "and has joined. Earlier rows are written again if it logs at their steps." in joined
    assert f"rank{'s 1, 3 have' if len(present) == 1 else ' 3 has'} not opened a session, so the run has" in missing


def test_ranks_wait_for_a_primary_that_is_opening_its_run(ranks: Callable[..., Ranks], limit: Limit) -> None:
    """Longer than for ranks that do not open a session, and longer than at the end: W&B's `init` may take minutes."""
    limit(generations, APART=0.0)
    is_opening = threading.Event()
    is_opening.set()
    unit = ranks(2, 1, limits=replace(QUICK, join_timeout=0.3, finish_timeout=20), is_opening=is_opening.is_set)
    unit.log(1, {"loss": 2.0}, 0)
    ending = threading.Thread(target=unit.close, args=[1])
    ending.start()
    time.sleep(1)  # several polls
    assert ending.is_alive()
    unit.open(0)
    is_opening.clear()
    unit.log(0, {"loss": 1.0}, 0)
    unit.close(0)
    ending.join()
    assert unit.run.rows == [{"loss": 1.5, "global_step": 0}]


def test_an_error_in_the_exchange_ends_it(ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> bool:
        raise ValueError("broken")

    unit = ranks(2, 1, limits=replace(QUICK, join_timeout=0.3), is_opening=fail)
    unit.log(1, {"loss": 1.0}, 0)
    eventually(lambda: "the exchange of rank 1 failed; it continues alone" in caplog.text)
    assert not unit.exchanges[1].close()
    assert "what rank 1 logged after the start may be lost" in caplog.text


@pytest.mark.parametrize("is_published", [True, False])
def test_a_rank_that_opens_its_session_slowly_is_waited_for(
    ranks: Callable[..., Ranks], limit: Limit, is_published: bool
) -> None:
    """It is counted before it has published that it opens its session, and before rank 0 counts."""
    limit(generations, APART=0.0)
    store = HashStore()
    keys = keys_of(store, 1, 2)
    index = None if is_published else keys.count("opened/count")
    unit = ranks(2, 0, store=store)
    if is_published:
        begin_opening(unit, 1)
    unit.log(0, {"loss": 1.0}, 0)
    unit.exchanges[0].detach()
    time.sleep(0.5)  # several polls
    assert not unit.exchanges[0].has_ended
    if not is_published:
        keys.publish(f"opened/{index}", 1)
        keys.count("opened/of/1")
    unit.open(1)
    unit.log(1, {"loss": 2.0}, 0)
    unit.close()
    assert unit.last("loss") == {0: 1.5}


@pytest.mark.parametrize(("size", "is_first"), [(3, False), (2, True)])
def test_a_rank_that_dies_between_its_opening_and_its_first_round_is_lost(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture, size: int, is_first: bool
) -> None:
    """Also if the only other one ends before it is given up."""
    limits: dict[str, Any] = {"finish_timeout": 1.0} if is_first else {"join_timeout": 1.0, "peer_timeout": 1.0}
    unit = ranks(size, *range(size - 1), limits=replace(QUICK, **limits))
    begin_opening(unit, size - 1)
    unit.log_all({"loss": 1.0}, 0, ranks=range(size - 1))
    unit.together(lambda exchange: exchange.close())
    assert unit.flagged() == {0: 1}
    assert is_first or "Rank 2 opened a session, but did not take part" in caplog.text
    assert unit.exchanges[0].lifecycle.lost == {size - 1}, "so that the run ends as failed"


def test_ranks_that_end_do_not_spend_all_their_time_on_one_that_died_after_it_had_arrived(
    ranks: Callable[..., Ranks],
) -> None:
    """Without a connection to it, only `peer_timeout` would end their wait, and half of their time to end does."""
    unit = ranks(3, 0, 1, limits=replace(HASTY, peer_timeout=60.0, finish_timeout=8.0))
    Presence(Unit("", 2, 3, 2, range(3)), keys_of(unit.store, 2, 3)).arrive()
    unit.log_all(lambda rank: {"loss": 1.0 + rank}, 0, ranks=range(2))
    unit.close()
    assert (unit.last("loss"), unit.flagged()) == ({0: 1.5}, {0: 1})
    assert unit.exchanges[0].lifecycle.lost == {2}, "so that the run ends as failed"


def test_a_rank_that_comes_too_late_to_what_continues_its_session_says_that_it_stalled(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    unit, index = ranks(2, 0, limits=replace(QUICK, join_timeout=1.0, peer_timeout=1.0)), Unit("", 1, 2, 1, range(2))
    former = Presence(index, JobStore(HashStore(), "former", Topology(1, 1, 0, 2, 2, 1), 20))
    former.arrive()
    Presence(index, keys_of(unit.store, 1, 2)).publish_before(former)
    unit.log(0, {"loss": 1.0}, 0)
    unit.close()
    unit.open(1)
    unit.log(1, {"loss": 1.0}, 0)
    unit.together(lambda exchange: exchange.close(), 1)
    assert "rank 1 stalled, or was disconnected, after the start, and returned after the other ranks" in caplog.text


def test_a_rank_that_failed_before_the_others_began_is_reported(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    unit = ranks(3, 1, limits=replace(QUICK, join_timeout=30))
    unit.exchanges[1].die()
    unit.open(0, 2)
    unit.log_all({"loss": 2.0}, 0, ranks=(0, 2))
    unit.close(0, 2)
    assert unit.flagged() == {0: 1}
    assert (
        "Rank 1 failed before the first exchange with rank 0; continuing without it. Affected rows are marked"
        in caplog.text
    )


def test_the_wait_for_a_rank_that_stops_logging_a_name_times_out_and_names_it(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    unit = ranks(2)
    unit.write_all(lambda rank: {"loss": float(rank)}, 0)
    for exchange in unit.exchanges.values():
        exchange.wait_for_peers(0.5)
    unit.log(0, {"loss": 5.0}, 1)
    eventually(lambda: 1 in unit.last("loss"))
    assert unit.last("loss")[1] == 5.0
    assert unit.flagged() == {1: 1}
    eventually(lambda: "has not logged 'loss' at step 1" in caplog.text)  # once the row may be written
    (message,) = [record.message for record in caplog.records if "has not logged 'loss' at step 1" in record.message]
    assert "rank 1" in message
    unit.log(1, {"loss": 7.0}, 1)
    unit.close()
    assert unit.last("loss")[1] == 6.0
    assert "a corrected row follows" not in caplog.text.lower(), "an earlier message announced the correction"


def test_names_that_change_with_each_step_are_reported_once(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1 is late with each of them, because they are new."""
    unit = ranks(2)

    def is_written(step: int, value: float) -> bool:
        return unit.last(f"step{step}/loss") == {step: value}

    unit.write_all({"loss": 0.5}, 0)
    for exchange in unit.exchanges.values():
        exchange.wait_for_new_names(0.5)
    for step in range(1, 5):
        unit.log(0, {f"step{step}/loss": 1.0}, step)
        eventually(functools.partial(is_written, step, 1.0))
        unit.log(1, {f"step{step}/loss": 3.0}, step)
        eventually(functools.partial(is_written, step, 2.0))
    unit.close()
    (message,) = warnings(caplog)
    assert "rank 1 logged 'step1/loss' at step 1 after the other ranks' row was written" in message
    assert (
        "rank 1 was further behind, as after the loss of another rank, or logs its names in another order than"
        in message
    )


def test_rows_that_a_device_never_computes_count_as_lost(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture, limit: Limit
) -> None:
    limit(collective, _LAST_WAIT=0.5)
    unit = ranks(2)
    unit.write_all({"loss": 1.0}, 0)
    unit.exchanges[0].put(Contribution({"loss": Stall().number(asked=True)}, 1))
    assert unit.together(lambda exchange: exchange.close(0.5)) == [False, True]
    assert unit.last("loss") == {0: 1.0}
    assert unit.exchanges[0].lifecycle.unwritten == 1
    assert "1 rows of rank 0 are lost: the device has not computed their values, or images are not" in caplog.text


def test_pending_rows_are_bounded(ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture) -> None:
    unit = ranks(2, limits=replace(QUICK, max_pending_rows=50))
    unit.write_all({"loss": 0.0}, 0)
    for step in range(1, 400):
        unit.log(0, {"loss": float(step)}, step)
    eventually(lambda: len(unit.run.rows) >= 300)
    eventually(lambda: len(unit.exchanges[0].rounds.table.open) <= 51)
    eventually(lambda: any("more than 50 rows wait" in record.message for record in caplog.records))


def test_a_rank_is_not_waited_for_while_more_rows_than_allowed_wait(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    unit = ranks(2, limits=replace(HASTY, max_pending_rows=20, peer_timeout=120.0))
    unit.write_all({"loss": 0.0}, 0)
    stall = Stall()
    unit.log(1, {"loss": stall.number()}, 1)
    for step in range(1, 60):
        unit.log(0, {"loss": float(step)}, step)
    eventually(lambda: len(unit.run.rows) == 60)
    assert unit.last("loss")[59] == 59.0
    assert set(unit.flagged()) == set(range(1, 60))
    (message,) = [one.message for one in caplog.records if "rank 0 logs rows faster than the ranks" in one.message]
    assert "more than 20 wait, so log takes as long as the exchange of a row" in message
    stall.over.set()


def test_log_keeps_pace_with_an_exchange_that_moves(ranks: Callable[..., Ranks], limit: Limit) -> None:
    limit(turns, _STANDSTILL=60.0)  # on a busy machine
    unit = ranks(2, limits=replace(QUICK, max_pending_rows=50))
    most = 0

    def log(exchange: UnitExchange) -> None:
        nonlocal most
        rank = 0 if exchange is unit.exchanges[0] else 1
        for step in range(2000):
            unit.log(rank, {"loss": float(rank)}, step)
            most = max(most, step - len(unit.run.rows))

    unit.together(log)
    unit.close()
    assert unit.last("loss") == dict.fromkeys(range(2000), 0.5)
    assert most < 1000, "of the two ranks, 370 calls each may be on their way, and 50 rows may be open"


def test_a_stalled_rank_is_dropped_and_returns(ranks: Callable[..., Ranks]) -> None:
    unit = ranks(3, reduce="sum", limits=HASTY)
    stall = Stall()
    for step in range(3):
        for rank in range(3):
            unit.log(rank, {"ones": 1}, step)
    unit.flush()
    unit.lose_soon(1.0)
    unit.log(2, {"stall": stall.number()}, 3)
    for step in range(3, 6):
        for rank in range(2):
            unit.log(rank, {"ones": 1}, step)
    eventually(lambda: unit.last("ones").get(5) == 2)
    assert unit.flagged() == dict.fromkeys(range(3, 6), 1)
    stall.over.set()
    for step in range(3, 6):
        unit.log(2, {"ones": 1}, step)
    eventually(lambda: unit.last("ones") == dict.fromkeys(range(6), 3))
    for step in range(6, 9):
        for rank in range(3):
            unit.log(rank, {"ones": 1}, step)
    unit.close()
    assert unit.last("ones") == dict.fromkeys(range(9), 3)
    assert unit.flagged().keys() == set(range(3, 6)), "rows after its return are complete"


def fail(exchange: CollectiveExchange) -> bool:
    return exchange.close(failed=True)


@pytest.mark.parametrize("failing", [[0], [2], [1, 2], [0, 1, 2]])
def test_what_a_failing_rank_has_logged_is_written(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture, limit: Limit, failing: list[int]
) -> None:
    """It hands its last rows over, within a heartbeat; one rank says that it failed."""
    limit(interface, _LAST_ROUNDS=SOON)  # on a busy machine
    unit = ranks(3)
    for step in range(20):
        for rank in range(3):
            unit.log(rank, {"loss": math.nan if (rank, step) == (2, 19) else 1.0}, step)
    assert all(unit.together(fail, *failing))
    if 0 not in failing:
        unit.log(0, {"loss": 1.0}, 20)
        if 1 not in failing:
            unit.log(1, {"loss": 1.0}, 20)
        unit.close(*({0, 1, 2} - set(failing)))
    loss = unit.last("loss")
    assert [loss[step] for step in range(19)] == [1.0] * 19
    assert math.isnan(loss[19])
    assert len(unit.run.rows) == (21 if 0 not in failing else 20)
    assert unit.flagged() == ({} if 0 in failing else {20: len(failing)})
    texts = [record.message for record in caplog.records]
    if 0 in failing:
        assert not [text for text in texts if "failed after step" in text]
    else:
        lines = [text for text in texts if "failed after step" in text]
        assert len(lines) <= len(failing), "those of other ranks repeat them"
        assert all(f"{rank}" in "".join(lines) for rank in failing)


class SlowRun(RecordingRun):
    def log(self, row: Row, commit: bool | None = None) -> None:
        time.sleep(0.01)
        super().log(row, commit)


def test_finish_writes_everything_however_long_it_takes(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture, limit: Limit
) -> None:
    """The timeout limits the waiting for other ranks, of which one does not answer."""
    unit = ranks(2, run=SlowRun())
    limit(interface, _QUIET=0.2)
    for step in range(150):
        unit.log(0, {"loss": 1.0}, step)
    assert unit.exchanges[0].close(0.3) is False
    assert [row["global_step"] for row in unit.run.rows] == list(range(150))
    assert all(row[DEGRADED] == 1 for row in unit.run.rows)
    assert unit.exchanges[0].lifecycle.unwritten == 0
    assert "rank 0 writes its last rows: " in caplog.text
    assert re.search("of 15[01] are left", caplog.text)


def test_rows_logged_while_the_primary_is_away_are_written_when_it_returns(ranks: Callable[..., Ranks]) -> None:
    unit = ranks(3, limits=HASTY)
    unit.write_all(lambda rank: {"loss": float(rank), "own": 1.0}, 0)
    stall = Stall()
    unit.lose_soon(1.0)
    unit.log(0, {"loss": stall.number()}, 1)
    for step in range(1, 6):
        unit.log_all(lambda rank: {"loss": float(rank)}, step, ranks=(1, 2))
        unit.log(1, {"own": float(step)}, step)
    for rank in (1, 2):
        eventually(functools.partial(goes_on_with, unit.exchanges[rank], 2))
        unit.exchanges[rank].wait_for_peers(1.0)  # the patience with `own`, which only rank 1 logs
    eventually(lambda: unit.exchanges[1].kept >= 10)
    assert not unit.exchanges[1].flush(SOON), "what is kept for the rank that writes is not written"
    stall.over.set()
    unit.close()
    assert unit.last("own") == {0: 1.0, **{step: float(step) for step in range(1, 6)}}
    assert unit.last("loss") == {0: 1.0, 1: 1.0, **dict.fromkeys(range(2, 6), 1.5)}


def test_a_rank_with_a_busy_device_stays_in_the_exchange(ranks: Callable[..., Ranks]) -> None:
    """Its rows wait for the device, in their order; its thread does not."""
    unit = ranks(2)
    unit.write_all({"loss": 0.0, "other": 1.0}, 0)
    stall = Stall()
    unit.log(1, {"loss": stall.number(asked=True)}, 1)
    unit.log(1, {"loss": 3.0}, 2)
    unit.log(0, {"other": 2.0}, 1)
    before = unit.exchanges[0].rounds.table.round
    eventually(lambda: unit.exchanges[0].rounds.table.round > before + 5, SOON)  # less than the timeout for ranks
    assert len(unit.exchanges[0].rounds.table.ranks.members) == 2
    assert unit.together(lambda exchange: exchange.flush(0.3)) == [False, False], "it waits for the device"
    stall.over.set()
    for step in (1, 2):
        unit.log(0, {"loss": 1.0}, step)
    unit.close()
    assert unit.last("loss") == {0: 0.0, 1: 0.5, 2: 2.0}


def test_a_secondary_continues_without_the_store(ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage(HashStore())
    outage.begin()
    unit = ranks(2, 1, store_of=outage.store_of)
    eventually(lambda: re.search("the store is gone.* Rank 1 continues alone", caplog.text))
    for step in range(2):
        unit.log(1, {"loss": 1.0}, step)
        assert not unit.exchanges[1].flush(SOON)
    unit.exchanges[1].close()
    assert [record.exc_info for record in caplog.records] == [None] * 2
    assert "may be lost" in caplog.records[-1].getMessage()


def test_a_rank_that_loses_the_others_and_the_store_says_what_is_lost(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    outage = Outage(HashStore())
    unit = ranks(3, store_of=outage.store_of)
    unit.write_all({"loss": 1.0}, 0)
    unit.exchanges[0].die()
    unit.log_all({"loss": 1.0}, 1, ranks=(1, 2))
    eventually(lambda: unit.exchanges[1].kept == 1)
    outage.begin()
    unit.exchanges[2].die(notice=False)
    eventually(lambda: "what rank 1 logged after step 0 may be lost: the rank that writes it cannot be" in caplog.text)
    assert not unit.exchanges[1].flush()


def test_a_rank_that_returns_after_the_others_have_ended_says_so(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    unit, stall = ranks(3, limits=HASTY), Stall()
    unit.write_all({"loss": 1.0}, 0)
    unit.lose_soon(1.0)
    unit.log(1, {"loss": stall.number()}, 1)
    unit.log_all({"loss": 1.0}, 1, ranks=(0, 2))
    unit.close(0, 2)
    stall.over.set()
    eventually(lambda: "rank 1 stalled, or was disconnected, after step 0" in caplog.text)
    assert "opened its session after" not in caplog.text


def test_after_all_ranks_have_closed_none_is_absent(ranks: Callable[..., Ranks]) -> None:
    """Not even if one has yet to read that the others have left: complete rows would be flagged again."""
    unit = ranks(3)
    unit.log_all({"loss": 1.0}, 0)
    unit.close()
    eventually(lambda: all(exchange.has_ended for exchange in unit.exchanges.values()))
    assert [exchange.rounds.table.ranks.lost for exchange in unit.exchanges.values()] == [{}] * 3


def test_an_exchange_that_cannot_continue_is_reported(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = ranks(2)
    unit.write_all({"loss": 1.0}, 0)

    def fail(*_arguments: Any, **_named: Any) -> None:
        raise KeyError("a bug of ours")

    monkeypatch.setattr(unit.exchanges[0].rounds, "plan", fail)
    unit.log(0, {"loss": 1.0}, 1)
    eventually(lambda: "rank 0 can no longer write rows to W&B" in caplog.text)
    later = np.ones(())
    unit.exchanges[0].put(Contribution({"loss": later}, 2))
    assert unit.exchanges[0].flush(1) is False
    assert unit.exchanges[0].close(1) is False
    is_kept = weakref.ref(later)
    del later
    assert not is_kept()


def test_a_signal_handler_may_log_wherever_it_interrupts_log(ranks: Callable[..., Ranks]) -> None:
    """At each bytecode instruction of `put`, with enough waiting rows to end the lingering of the thread."""
    unit = ranks(2, 0)
    for step in range(300):
        unit.log(0, {"loss": 1.0}, step)
    handled: list[int] = []

    def interrupt(frame: FrameType, _event: str, _argument: Any) -> Any:
        frame.f_trace_opcodes = True
        sys.settrace(None)
        unit.log(0, {"signal": 1.0})
        sys.settrace(interrupt)
        handled.append(frame.f_lasti)
        return interrupt

    def log() -> None:
        sys.settrace(interrupt)
        unit.exchanges[0].put(Contribution({"loss": 1.0}, 300))
        sys.settrace(None)

    thread = threading.Thread(target=log, daemon=True)
    thread.start()
    thread.join(SOON)
    assert not thread.is_alive(), "the handler waits for a lock that the interrupted thread holds"
    assert len(handled) > 10


def test_a_rank_that_ends_without_rows_does_not_become_the_primary_because_the_store_is_slow(
    ranks: Callable[..., Ranks], limit: Limit
) -> None:
    limit(generations, APART=0.0)
    is_closing, moved = threading.Event(), list[int]()
    unit = ranks(2, 1, move=moved.append, store_of=waiting_for(is_closing, HashStore(), "generation/0", reads=True))
    ending = threading.Thread(target=unit.close, args=[1])
    ending.start()
    eventually(lambda: unit.exchanges[1].lifecycle.is_closing)
    is_closing.set()
    ending.join(SOON)
    assert moved == []


def test_a_departure_is_published_although_the_store_stands_still(ranks: Callable[..., Ranks]) -> None:
    """The rank is waited for otherwise, and given up as if it had died."""
    answers = threading.Event()
    unit = ranks(2, 1, store_of=waiting_for(answers, HashStore(), "gone/count", reads=False))
    unit.close(1)
    unit.open(0)
    unit.log(0, {"loss": 1.0}, 0)
    began = time.monotonic()
    answers.set()
    unit.close(0)
    assert time.monotonic() - began < QUICK.peer_timeout
    assert not unit.flagged()
    assert not unit.exchanges[0].lifecycle.lost
