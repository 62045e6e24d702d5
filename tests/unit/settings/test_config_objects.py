"""Objects of values as configs: OmegaConf, namespaces, dataclasses, attrs, pydantic models become plain values."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import OrderedDict
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pydantic
import pytest
from fakes import TWO, FakeWandb, Job

import dist_wandb
from dist_wandb.settings.config_values import given_values


@dataclass
class Layers:
    depth: int = 2
    sizes: list[int] = field(default_factory=lambda: [8, 2])
    more: Any = field(default_factory=lambda: Namespace(bias=True))


class Model(pydantic.BaseModel):
    layers: dict[str, int] = {"depth": 2}


class Sizes:  # as attrs makes a class
    __slots__ = ("depth",)
    __attrs_attrs__ = (SimpleNamespace(name="depth"),)

    def __init__(self) -> None:
        self.depth = 2


class ConfigDict:  # a stand-in for that of ml_collections, which is not installed with the tests
    __module__ = "ml_collections.config_dict.config_dict"

    def __init__(self) -> None:
        self._fields = {"depth": 2}

    def to_dict(self) -> dict[str, int]:
        return {"depth": 2}


class Pair(NamedTuple):
    first: Layers
    second: int


PLAIN = {"depth": 2, "sizes": [8, 2], "more": {"bias": True}}


class DictConfig(dict):  # type: ignore[type-arg]  # a stand-in for OmegaConf's, which is not installed with the tests
    __module__ = "omegaconf.dictconfig"


@pytest.fixture
def omegaconf(monkeypatch: pytest.MonkeyPatch) -> type[DictConfig]:
    """A stand-in for the package: its containers have interpolations, which one function resolves."""

    def to_container(value: DictConfig, *, resolve: bool) -> dict[str, Any]:
        if resolve and "${nowhere}" in value.values():
            raise ValueError  # as its errors about interpolations are
        return {
            name: to_container(item, resolve=resolve)
            if isinstance(item, DictConfig)
            else 2
            if resolve and item == "${depth}"
            else item
            for name, item in value.items()
        }

    module: Any = ModuleType("omegaconf")
    module.OmegaConf = SimpleNamespace(to_container=to_container)
    monkeypatch.setitem(sys.modules, "omegaconf", module)
    return DictConfig


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Namespace(lr=0.1, mlp=Namespace(**vars(Layers()))), {"lr": 0.1, "mlp": PLAIN}),
        (SimpleNamespace(mlps=[Layers()]), {"mlps": [PLAIN]}),
        (Layers(), PLAIN),
        (Model(), {"layers": {"depth": 2}}),
        (Sizes(), {"depth": 2}),
        (ConfigDict(), {"depth": 2}),
        (
            {"model": Model(), "of": [Layers(), Sizes()]},
            {"model": {"layers": {"depth": 2}}, "of": [PLAIN, {"depth": 2}]},
        ),
        ({"of": OrderedDict(a=[Layers()]), "pair": Pair(Layers(), 1)}, {"of": {"a": [PLAIN]}, "pair": [PLAIN, 1]}),
    ],
    ids=["Namespace", "SimpleNamespace", "dataclass", "pydantic", "attrs", "ml_collections", "dict", "subclasses"],
)
def test_objects_of_values_are_plain_values_of_the_config(
    config: object, expected: dict[str, Any], fake_wandb: FakeWandb
) -> None:
    session = dist_wandb.init(config=config)
    assert given_values(fake_wandb.arguments[0]["config"]) == expected
    assert fake_wandb.runs[0].config == expected
    session.config["inner"], session.config.later = Namespace(layers=config), config
    later = {name: fake_wandb.runs[0].config[name] for name in ("inner", "later")}
    assert later == {"inner": {"layers": expected}, "later": expected}


def test_the_config_of_omegaconf_is_resolved(omegaconf: type[DictConfig], fake_wandb: FakeWandb, job: Job) -> None:
    config = omegaconf(mlp=omegaconf(depth=2, sizes="${depth}"))
    sessions = job(TWO, lambda _: {"config": config})
    expected = {"mlp": {"depth": 2, "sizes": 2}}
    assert fake_wandb.arguments[0]["config"] == expected
    assert [dict(session.config) for session in sessions] == [expected] * 2
    sessions[0].config.update({"late": omegaconf(depth="${depth}"), "missing": omegaconf(at="${nowhere}")})
    assert fake_wandb.runs[0].config["late"] == {"depth": 2}
    missing = fake_wandb.runs[0].config["missing"]
    assert (type(missing), missing) == (dict, {"at": "${nowhere}"})


class Settings:
    """An object in which a script may keep its hyperparameters."""

    def __init__(self) -> None:
        self.lr = 0.1
        self.__dict__["__hidden"] = 1


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ({"lr": 0.1, 2: "two"}, {"lr": 0.1, "2": "two"}),
        (Settings(), {"lr": 0.1}),
        *((other, {}) for other in (None, "config.yaml", Settings, 5, [1])),
    ],
)
def test_given_values_are_read_by_name(config: object, values: dict[str, Any]) -> None:
    assert given_values(config) == values
