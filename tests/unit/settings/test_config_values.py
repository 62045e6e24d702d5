"""Configs: objects of values become plain values; which values count as secrets, and what other ranks receive."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pydantic
import pytest
from fakes import TWO, FakeWandb, Job

import dist_wandb
from dist_wandb.settings.config_values import (
    MISSING,
    encoded,
    filled,
    given_values,
    is_secret,
    publishable,
    redacted,
    shown,
    without_secrets,
)


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


# --- secrets ----------------------------------------------------------------------------------------------------------

SECRETS = [
    *("hf_token", "token", "TOKEN", "hfToken", "HFToken", "auth-token", "authtoken", "access.token", "tokens"),
    *("api_key", "apiKey", "APIKey", "WANDB_API_KEY", "wandbkey", "aws_access_key_id", "keys", "a/key", "key2"),
    *("password", "passWord", "pass_word", "PASSWD", "dbPassword", "pwd", "db_pass", "passphrase"),
    *("secret", "clientSecret", "my-secret-1", "secrets", "credentials", "gcpCredential", "creds", "auth", "oauth2"),
    *("basic_auth", "authorization", "auth.user", "cookie", "bearer", "jwt", "github_pat", "dsn", "slack_webhook"),
]
ORDINARY = [
    *("lr", "monkey", "keypoints", "keyframe_rate", "keyword", "keyboard", "author", "authors", "authority"),
    *("tokenizer", "tokenization", "bypass", "passes", "compass", "secretary", "pattern", "path", "hotkeys"),
    *("donkeys", "cookiecutter", "patience", "", "...", "_", "0"),
]


@pytest.mark.parametrize("name", SECRETS)
def test_names_of_secrets_are_recognised_in_many_spellings_unless_they_are_empty(name: str) -> None:
    full = ["x", b"x", ["x"], {"a": [{"b": "x"}]}, ("x", 1), {"x"}, Path("x"), object()]
    empty: list[object] = [None, True, "", " ", [], {}, {"a": [None, False]}]
    assert [value for value in (*full, *empty) if is_secret(name, value)] == full


@pytest.mark.parametrize("name", ORDINARY)
def test_names_that_only_resemble_secrets_are_not_secrets(name: str) -> None:
    values = ("x", 7, ["x"], {"password": "x"})  # items of a dict have their own names
    assert not [value for value in values if is_secret(name, value)]


@pytest.mark.parametrize(
    ("names", "is_one"),
    [
        (("max_tokens", "num_key_value_heads", "token_dim", "tokens_per_step", "keys", "key_dim"), False),
        (("hf_token", "api_key", "pin.password", "secrets", "auth"), True),
    ],
    ids=["needed by all ranks", "secrets"],
)
def test_numbers_are_secrets_under_some_names(names: tuple[str, ...], is_one: bool) -> None:
    values = (7, 0.5, [1, 2], {"a": 1}, np.float32(1), np.int64(7), np.arange(3))
    assert {is_secret(name, value) for name in names for value in values} == {is_one}


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("postgresql://joe:pw@host/db", True),
        ("https://joe@host/db", False),
        ("https://host:443/a:b@c", False),
        ("Account(user='me', password='x')", True),
        ("{'api_key': 'x'}", True),
        ('{"auth" : {"a": 1}}', True),
        ("train.py --password=x", True),
        ("the password is good", False),
        ("tokens: many", False),
        ("Linear(in_features=3, bias=True)", False),
    ],
)
def test_text_that_contains_a_secret_is_one(text: str, is_one: bool) -> None:
    assert is_secret("note", text) is is_one
    assert is_secret("notes", ["x", (text,)]) is is_one
    assert (shown(text) == "…") is is_one


class Account:
    def __repr__(self) -> str:
        return "Account(password='x')"


LOOP: dict[str, Any] = {"password": "s3cr3t"}
LOOP["loop"] = LOOP


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": 1, "token": "s3cr3t"}, "{'a': 1, 'token': …}"),
        ([{"auth": {"user": "s3cr3t"}}, (1, {"x": Account()})], "[{'auth': …}, [1, {'x': <Account …>}]]"),
        (OrderedDict(a=1), "OrderedDict({'a': 1})"),
        (MappingProxyType({"a": (1,)}), "mappingproxy({'a': (1,)})"),
        (Account(), "<Account …>"),
    ],
    ids=repr,
)
def test_the_shown_text_is_the_repr_without_secrets(value: object, text: str) -> None:
    found = shown(value).replace("tests.unit.", "").replace("OrderedDict([('a', 1)])", "OrderedDict({'a': 1})")
    assert found == text
    assert "s3cr3t" not in shown(LOOP)
    assert "s3cr3t" not in json.dumps(encoded(without_secrets({"x": LOOP})))


GIVEN: dict[str, Any] = {
    "lr": 0.1,
    "hf_token": "s3cr3t",
    "net": {"size": 3, "api_key": "s3cr3t", "of": [{"token": "s3cr3t"}, 7]},
    "names": {1: {"password": "s3cr3t"}, 2: "b"},
    "auth": {"user": "s3cr3t"},
}


def published(
    values: Mapping[str, Any], given: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Any, dict[str, bool]]:
    """Return what a rank publishes of a config, and what other ranks learn of the secrets in it."""
    message = json.dumps(publishable(values, given))
    assert "s3cr3t" not in message
    found, withheld = json.loads(message)
    return found, withheld


def test_a_rank_without_the_secrets_reads_the_rest() -> None:
    rest: dict[str, Any] = {
        "lr": 0.1,
        "hf_token": MISSING,
        "net": {"size": 3, "of": [{}, 7]},
        "names": {1: {}, 2: "b"},
        "auth": MISSING,
    }
    assert filled(*published(GIVEN, GIVEN)) == rest
    assert filled(*published(GIVEN, GIVEN), {"net": {"size": 4, "api_key": "mine"}, "auth": None}) == rest


@pytest.mark.parametrize(
    ("name", "given", "is_read"),
    [
        ("keys", {(1, 2): 3}, True),  # as text, it would be a secret under that name
        ("names", {(1, 2): {"token": "s3cr3t"}}, True),
        ("keys", {(1, 2): "s3cr3t"}, False),
    ],
)
def test_text_that_wandb_stores_in_place_of_a_value_is_read_unless_that_is_a_secret(
    name: str, given: object, is_read: bool
) -> None:
    assert filled(*published({name: shown(given)}, {name: given})) == {name: shown(given) if is_read else MISSING}


def test_values_without_secrets_are_not_copied() -> None:
    value = {"a": [1, {"b": (2, "x")}]}
    assert without_secrets({"x": value})["x"] is value
    assert redacted(value) is value


@pytest.mark.parametrize(
    "text",
    ["a" * 10**6, "a:" * 10**5, "https://" + "a:" * 10**5, "x=" * 10**5, "'\"  " * 10**5, "a-" * 10**5, "A1b" * 10**5],
)
def test_long_text_is_searched_in_linear_time(text: str) -> None:
    began = time.thread_time()
    is_secret(text[:1000], text)
    assert time.thread_time() - began < 5.0
