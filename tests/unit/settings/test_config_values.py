"""Values of a config: given values, values that W&B certainly accepts, values that differ between ranks by nature."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from dist_wandb.settings.config_values import given_values


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
