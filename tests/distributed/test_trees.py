"""Units too large for one group, with real gloo groups in a tree: ranks are threads of this process."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torchmetrics
from limits import Limit
from units import HASTY, SOON, Ranks, Row, eventually

from dist_wandb import gathered
from dist_wandb.exchange import transport
from dist_wandb.exchange import transport as groups
from dist_wandb.exchange.membership.forming import Forming
from dist_wandb.exchange.membership.generations import Generation
from dist_wandb.exchange.transport import BrokenError, gloo
from dist_wandb.exchange.transport.gloo import GlooGroup
from dist_wandb.exchange.transport.tree import TreeGroup


@pytest.fixture(params=[2, 3])
def fan_out(request: pytest.FixtureRequest, limit: Limit) -> int:
    """The maximum number of members of a group."""
    limit(transport, FAN_OUT=request.param)
    return int(request.param)


def log_all_kinds(unit: Ranks) -> None:
    """Numbers that all or some ranks log, in different orders; a metric; a table; spreads."""
    schedule = random.Random(0)
    metrics = [torchmetrics.MeanMetric() for _ in range(unit.size)]
    for step in range(5):
        for rank in schedule.sample(range(unit.size), unit.size):
            metrics[rank].update(float(rank + step), weight=rank + 1)
            row: Row = {"loss": rank * 2.0**-step, "count": rank, "metric": metrics[rank], "spread": float(-rank)}
            row |= {"table": gathered([[step, rank] * (rank % 3)], ["a", "b"] * (rank % 3))} if step == 2 else {}
            unit.log(rank, row | ({"some": rank} if rank % 2 else {}), step, rank + 1.0)


def written(unit: Ranks) -> dict[str, dict[int, Any]]:
    names = {name for row in unit.run.rows for name in row}
    return {name: {step: shown(value) for step, value in unit.last(name).items()} for name in names}


def shown(value: Any) -> Any:
    return sorted(map(str, value.data)) if hasattr(value, "data") else value


@pytest.mark.parametrize(("size", "per_node"), [(5, None), (9, 3), (8, 2), (4, 1)])
def test_a_tree_writes_the_same_rows_as_one_group(
    ranks: Callable[..., Ranks], limit: Limit, fan_out: int, size: int, per_node: int | None
) -> None:
    units = []
    for most in (fan_out, size):
        limit(transport, FAN_OUT=most)
        unit = ranks(size, reduce={"count": "sum"}, spread=["spread"], per_node=per_node)
        log_all_kinds(unit)
        unit.flush()
        units.append(unit)
        kinds = {type(exchange.group) for exchange in unit.exchanges.values()}
        assert kinds == {TreeGroup if most < size else GlooGroup}
        unit.close()
        assert not unit.flagged()
    in_tree, in_one = map(written, units)
    assert in_tree.keys() == in_one.keys()
    for name, values in in_one.items():
        assert in_tree[name] == (pytest.approx(values) if name != "table" else values), name
    assert set(map(type, in_tree["count"].values())) == {int}


@pytest.mark.parametrize(("most", "lost"), [(2, 1), (2, 2), (2, 6), (3, 3), (3, 8), (9, 8)])
def test_survivors_continue_without_a_rank_that_dies(
    ranks: Callable[..., Ranks],
    caplog: pytest.LogCaptureFixture,
    limit: Limit,
    most: int,
    lost: int,
) -> None:
    """Whether the rank is the first of a node, of a level above, or of no group, or all are one group."""
    limit(transport, FAN_OUT=most)
    unit = ranks(9, reduce="sum", per_node=3)
    others = [rank for rank in range(9) if rank != lost]
    for step in range(3):
        unit.write_all(lambda rank: {"ones": 1, "mine": rank}, step)
    began = time.monotonic()
    unit.exchanges[lost].die()
    for step in range(3, 6):
        unit.log_all(lambda rank: {"ones": 1, "mine": rank}, step, ranks=others)
    unit.close(*others)
    assert time.monotonic() - began < SOON
    assert unit.last("ones") == {step: 9 if step < 3 else 8 for step in range(6)}
    assert unit.last("mine") == {step: 36 if step < 3 else 36 - lost for step in range(6)}
    assert unit.flagged() == dict.fromkeys(range(3, 6), 1)
    (reported,) = [record.message for record in caplog.records if f"Rank {lost} failed after" in record.message]
    assert "step 2" in reported, "one survivor reports it, for all"
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


@pytest.mark.usefixtures("fan_out")
def test_if_the_primary_dies_all_others_report_lost_rows(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    """It is the first of all groups, and dies without notice. The others wait for it, because it may return."""
    caplog.set_level(logging.WARNING, "dist_wandb")
    unit = ranks(9, per_node=3, limits=HASTY)
    others = range(1, 9)
    unit.write_all(lambda rank: {"loss": float(rank)}, 0)
    unit.exchanges[0].die(notice=False)
    for step in (1, 2):
        unit.log_all(lambda rank: {"loss": float(rank)}, step, ranks=others)
    assert unit.together(lambda exchange: exchange.flush(), *others) == [False] * 8, "their rows are not written"
    assert unit.together(lambda exchange: exchange.close(0.2), *others) == [False] * 8
    assert unit.last("loss") == {0: 4.0}
    for rank in others:
        what = f"what rank {rank} logged after step 0 may be lost: rank 0, which writes it, was lost"
        assert sum(what in message for message in caplog.messages) == 1
    assert sum("Lost rank 0 after step 0" in message for message in caplog.messages) == 1
    assert len(caplog.messages) == 9


def test_a_slow_network_is_not_mistaken_for_a_dead_rank(
    ranks: Callable[..., Ranks],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    limit: Limit,
) -> None:
    """All pieces together take longer than the timeout for one; members of the lowest level wait for those above."""
    limit(transport, FAN_OUT=2)
    limit(gloo, PIECE=4000)
    send = GlooGroup.send_to_first

    def send_slowly(group: GlooGroup, own: Any, *arguments: Any) -> None:
        if own.numel() * own.element_size() > 1000:
            time.sleep(0.5)
        send(group, own, *arguments)

    unit = ranks(4, spread=["loss"])
    unit.write_all({"loss": 1.0}, 0)
    unit.lose_soon(5.0)
    for exchange in unit.exchanges.values():
        exchange.wait_for_peers(5.0)
    unit.log(0, {"loss": 1.0}, 1)
    eventually(lambda: all(exchange.rounds.table.open for exchange in unit.exchanges.values()))
    unit.pass_rounds()
    monkeypatch.setattr(GlooGroup, "send_to_first", send_slowly)
    unit.log_all(lambda rank: {"table": gathered([[f"{rank}" * 990]] * 14, ["text"])}, 1)
    eventually(lambda: unit.last("table"))
    time.sleep(0.2)
    unit.log_all({"loss": 2.0}, 1, ranks=range(1, 4))
    unit.close()
    assert unit.last("table")[1].data == [[rank, f"{rank}" * 990] for rank in range(4) for _ in range(14)]
    assert [row["loss"] for row in unit.run.rows if "loss" in row] == [1.0, 1.75], "the others were waited for"
    assert not unit.flagged()
    assert "broke" not in caplog.text


def test_ranks_that_cannot_connect_in_an_upper_level_continue_alone(
    ranks: Callable[..., Ranks],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    limit: Limit,
) -> None:
    """This includes ranks whose own groups have formed, after the same number of attempts."""
    limit(transport, FAN_OUT=3)

    store_of = Forming.store_of

    def store_on_node(own: Forming, generation: Generation, group: groups.GroupLayout) -> Any:
        if group.level:
            raise BrokenError("no way between hosts")
        return store_of(own, generation, group)

    monkeypatch.setattr(Forming, "store_of", store_on_node)
    unit = ranks(9, per_node=3)
    unit.log_all(lambda rank: {"loss": float(rank)}, 0)
    began = time.monotonic()
    unit.together(lambda exchange: exchange.flush())
    assert time.monotonic() - began < SOON
    assert unit.last("loss") == {0: 0.0}
    alone = [record.message for record in caplog.records if "continues alone" in record.message]
    assert sum("Ports between the hosts may be closed" in message for message in alone) == len(alone) == 9
    assert sum("Rank 0 cannot connect to ranks 3, 6 in 3 attempts" in message for message in alone) == 1
    assert sum("through others, which cannot connect to each other in 3 attempts" in message for message in alone) == 6
