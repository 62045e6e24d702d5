"""Values of a config: given values, values that W&B certainly accepts, values that differ between ranks by nature."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from dist_wandb.settings.config_values import given_values, is_plain


class Settings:
    """An object in which a script may keep its hyperparameters."""

    def __init__(self) -> None:
        self.lr = 0.1
        self.__dict__["__hidden"] = 1


@pytest.mark.parametrize(
    ("config", "values"),
    [
        *(
            ({"lr": 0.1, 2: "two"}, {"lr": 0.1, "2": "two"}),
            (Namespace(lr=0.1), {"lr": 0.1}),
            (Settings(), {"lr": 0.1}),
        ),
        *((None, {}), ("config.yaml", {}), (Settings, {}), (5, {}), ([1], {})),
    ],
)
def test_given_values_are_read_by_name(config: object, values: dict[str, Any]) -> None:
    assert given_values(config) == values


NESTED: Any = [1]
for _ in range(100):
    NESTED = [NESTED]


@pytest.mark.parametrize("value", [None, True, "text", 0.5, float("nan"), 2**63, [], (1, "a"), {"a": [{"b": None}]}])
def test_values_that_wandb_accepts_are_plain(value: object) -> None:
    assert is_plain(value)


@pytest.mark.parametrize(
    "value",
    [object(), {1}, {1: 2}, [object()], {"a": {2: 3}}, NESTED, int, b"bytes"],
    ids=["object", "set", "number as a name", "object in a list", "number as an inner name", "deep", "class", "bytes"],
)
def test_values_that_wandb_may_refuse_are_not_plain(value: object) -> None:
    assert not is_plain(value)


def test_an_integer_too_long_to_print_is_not_plain() -> None:
    assert is_plain(2**9_999)
    assert not is_plain(2**10_000)
