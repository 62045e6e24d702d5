"""Which values of a config count as secrets, how they are shown, and what other ranks receive."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from dist_wandb.settings.config_values import (
    MISSING,
    encoded,
    filled,
    is_secret,
    publishable,
    redacted,
    shown,
    without_secrets,
)

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
    began = time.perf_counter()
    is_secret(text[:1000], text)
    assert time.perf_counter() - began < 5.0
