"""A config as text, updated piece by piece."""

from __future__ import annotations

import json
from typing import Any

from dist_wandb.run_config.ends import ConfigText


class Clock:
    """A clock that advances only when a value is read."""

    def __init__(self, values: dict[str, Any], cost: float) -> None:
        self.now = 100.0
        self.read: list[str] = []
        self._values = values
        self._cost = cost

    def __call__(self) -> float:
        return self.now

    def value(self, name: str) -> Any:
        self.read.append(name)
        self.now += self._cost
        return self._values[name]


def test_the_text_is_the_config_as_json_in_order() -> None:
    text = ConfigText()
    assert str(text) == "{}"
    assert text.renew({"b": (1, 2), "a": 'say "x"', "o": {1: object}})
    assert not text.renew({"b": [1, 2]})
    assert text.renew({"a": None, "c": 0.5})
    pairs = {"__dist_wandb_pairs__": [[1, "<class 'object'>"]]}
    assert list(json.loads(str(text)).items()) == [("b", [1, 2]), ("a", None), ("o", pairs), ("c", 0.5)]


def test_renew_some_finds_nested_changes_and_reads_only_mutable_values() -> None:
    values: dict[str, Any] = {"lr": 0.1, "name": "x", "net": {"h": 1}, "list": [1]}
    clock = Clock(values, cost=0.0)
    text = ConfigText(clock)
    text.renew(values)
    assert not text.renew_some(clock.value)
    values["net"]["h"] = 2
    assert text.renew_some(clock.value)
    assert json.loads(str(text)) == values
    assert set(clock.read) == {"net", "list"}
    text.renew({"net": 7})
    clock.read.clear()
    text.renew_some(clock.value)
    assert clock.read == ["list"]


def test_renew_some_takes_little_time_and_reads_all_values_in_turn() -> None:
    values = {f"v{index}": [index] for index in range(100)}
    clock = Clock(values, cost=0.0004)
    text = ConfigText(clock)
    text.renew(values)
    spent, began = 0.0, clock.now
    for _ in range(3000):
        before = clock.now
        text.renew_some(clock.value)
        assert clock.now - before < 0.002
        spent += clock.now - before
        clock.now += 0.01
    assert spent < 0.011 * (clock.now - began)
    assert set(clock.read) == set(values)
    assert max(map(clock.read.count, values)) - min(map(clock.read.count, values)) <= 1
