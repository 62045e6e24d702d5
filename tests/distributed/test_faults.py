"""Exchanges with random failures, with real gloo groups: ranks are threads of this process."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torchmetrics
from limits import Limit
from units import QUICK, Ranks, eventually, threads_of_gloo

from dist_wandb import gathered
from dist_wandb.exchange import transport
from dist_wandb.exchange.protocol import rounds
from dist_wandb.exchange.transport import BrokenError
from dist_wandb.exchange.transport.gloo import GlooGroup

IN_ONE_GROUP = ("reduce", "reduce_in_place", "tally", "collect", "send_to_first", "receive_from_first")
IN_A_TREE = ("collect", "send_to_first", "receive_from_first")


class Faults:
    """Makes single collectives fail at random, on one rank before or after it took part; it then loses the result.

    They come after a number of collectives, not with a probability: on a busy machine rows share rounds, and there are
    few collectives. The gaps are the least and the largest number of them from one fault to the next.
    """

    def __init__(self, seed: int, gaps: tuple[int, int]) -> None:
        self._random = random.Random(seed)
        self._gaps = gaps
        self._left = self._random.randint(*gaps)
        self._lock = threading.Lock()
        self.number = 0

    def wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that fails now and then."""

        def call(group: GlooGroup, *arguments: Any, **named: Any) -> Any:
            with self._lock:
                self._left -= 1
                is_due, is_before = not self._left, self._random.random() < 0.5
                if is_due:
                    self.number, self._left = self.number + 1, self._random.randint(*self._gaps)
            if is_due and is_before:
                raise BrokenError("before")
            result = method(group, *arguments, **named)
            if is_due:
                raise BrokenError("after")
            return result

        return call


def break_some(monkeypatch: pytest.MonkeyPatch, faults: Faults, names: tuple[str, ...]) -> None:
    for name in names:
        monkeypatch.setattr(GlooGroup, name, faults.wrap(getattr(GlooGroup, name)))


@pytest.mark.parametrize(
    ("size", "most", "seed"),
    [*((3, 3, seed) for seed in range(6)), *((5, 2, seed) for seed in range(4)), *((7, 3, seed) for seed in range(2))],
)
def test_random_failures_neither_lose_nor_duplicate_numbers(
    ranks: Callable[..., Ranks],
    monkeypatch: pytest.MonkeyPatch,
    limit: Limit,
    size: int,
    most: int,
    seed: int,
) -> None:
    """In a tree, a result on its way down reaches some members and not others: it is in the former's checkpoints."""
    limit(transport, FAN_OUT=most)
    faults = Faults(seed, (6, 30) if size == most else (60, 250))
    break_some(monkeypatch, faults, IN_ONE_GROUP if size == most else IN_A_TREE)
    unit = ranks(size, reduce="sum", spread=["x*"], limits=replace(QUICK, finish_timeout=120))
    schedule = random.Random(seed)
    wanted: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    means = [torchmetrics.SumMetric() for _ in range(size)]
    for step in range(30):
        for rank in schedule.sample(range(size), size):
            values = {
                name: schedule.randrange(100) for name in ("x", "y", f"late-{step // 10}") if schedule.random() > 0.1
            }
            for name, value in values.items():
                wanted[name][step] += value
            means[rank].update(1)
            table = {"table": gathered([[step, rank]], ["step", "by"])} if step % 4 == 0 else {}
            unit.log(rank, {**values, **table, "steps": means[rank]}, step)
            time.sleep(schedule.random() / 200)
    unit.close()
    assert faults.number > 1, "the test must disturb"
    for name, steps in wanted.items():
        assert unit.last(name) == steps
    assert unit.last("steps") == {step: float(size) * (step + 1) for step in range(30)}
    tables = {step: table.data for step, table in unit.last("table").items()}
    assert tables == {step: [[rank, step, rank] for rank in range(size)] for step in range(0, 30, 4)}
    assert not unit.flagged()


@pytest.mark.parametrize("seed", range(3))
def test_random_failures_in_a_burst_neither_lose_nor_duplicate_numbers(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch, limit: Limit, seed: int
) -> None:
    """Most rounds are for many rows: they fail before or after the offers, or after the numbers, were exchanged."""
    limit(rounds, MOST_VALUES=50)
    faults = Faults(seed, (4, 16))
    break_some(monkeypatch, faults, IN_ONE_GROUP)
    unit = ranks(3, reduce="sum", spread=["x"])
    wanted: dict[int, int] = defaultdict(int)
    schedule = random.Random(seed)
    for rank in range(3):
        for step in range(300):
            value = schedule.randrange(100)
            wanted[step] += value
            unit.log(rank, {"x": value, **({"own": rank} if step % 7 == rank else {})}, step)
            unit.log(rank, {"counted": value}, None, calls=2 * step + 1)
    unit.close()
    assert faults.number > 3, "the test must disturb"
    assert max(exchange.rounds.table.round for exchange in unit.exchanges.values()) < 300, "one round for many rows"
    assert {step: row for step, row in unit.last("x").items() if step in wanted} == wanted
    assert unit.last("own") == {step: step % 7 for step in range(300) if step % 7 < 3}
    assert sum(row["counted"] for row in unit.run.rows if "counted" in row) == sum(wanted.values())
    assert not unit.flagged()


def test_connections_of_a_broken_group_are_closed_while_its_members_form_the_next_one(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each group has a thread of gloo with its connections. A handler that keeps records keeps their arguments."""
    caplog.set_level("DEBUG", "dist_wandb")
    faults, before = Faults(0, (10, 20)), threads_of_gloo()
    break_some(monkeypatch, faults, IN_ONE_GROUP)
    unit = ranks(3)
    for step in range(50):
        for rank in range(3):
            unit.log(rank, {"x": rank}, step)
        time.sleep(0.01)
    assert faults.number > 1, "the test must disturb"
    monkeypatch.undo()
    eventually(lambda: threads_of_gloo() - before <= 3)
    unit.close()
    assert unit.last("x") == dict.fromkeys(range(50), 1.0)
