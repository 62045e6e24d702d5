"""One config on all ranks: the comparison of the given configs, and values that W&B cannot store."""

from __future__ import annotations

import re
import threading
import time
import warnings
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import wandb
from config_jobs import LOOP, Colour, Nameless, Open, alike, reads, sync_of
from fakes import THREE, TWO, FakeWandb, Job, Meeting, on_ranks

import dist_wandb
from dist_wandb.errors import ConfigurationError, RendezvousError
from dist_wandb.job.job_store import JobStore, RankValues
from dist_wandb.job.topology import Topology
from dist_wandb.session.session import Session


def given_differently(
    job: Job, configs: Mapping[int, object], world: list[Topology] = TWO, **options: Any
) -> list[str]:
    """Return the warnings of a job."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for session in job(world, configs, **options):
            sync_of(session).refresh(at_once=True)
    return [str(warning.message) for warning in caught if "given different configs" in str(warning.message)]


@pytest.mark.parametrize("mode", ["auto", "shared"])
def test_different_configs_warn_once(job: Job, mode: str) -> None:
    configs = {rank: {"lr": 0.1 * (rank > 0), "seed": 7 * (rank > 0), "same": [1]} for rank in range(3)}
    (message,) = given_differently(job, configs, THREE, run_mode=mode)
    assert re.search(
        r"given different configs: 'lr' is 0.1 on rank (1|2), but 0.0 on rank 0; 'seed' is 7 on rank \1, but 0 on "
        "rank 0. Further ranks may differ, too. Each run has the config of its primary. config_sync='check' makes",
        message,
    )


def test_a_config_that_the_script_changes_later_is_compared_as_it_was_given(
    open_rank: Open, recwarn: pytest.WarningsRecorder
) -> None:
    configs: list[dict[str, Any]] = [{"lr": 0.1, "model": {"sizes": [1, 2]}} for _ in range(2)]
    second = open_rank(TWO[1], configs[1])
    configs[1]["model"]["sizes"].append(3)
    configs[1]["extra"] = 1
    open_rank(TWO[0], configs[0])
    second.flush()
    assert reads(second, configs[0])
    assert not [warning for warning in recwarn if "different configs" in str(warning.message)]


VALUES: dict[str, tuple[object, object]] = {
    "number": (0.1, 0.1),
    "function": (lambda: 0, lambda: 0),
    "object": (Nameless(), Nameless()),
    "object with an address": (threading.Lock, threading.Lock),
    "set": ({"x", "y", "z"}, {"z", "y", "x"}),
    "order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "tuple": ((1, 2), [1, 2]),
    "no number": (float("nan"), float("nan")),
    "long": ("x" * 1000, "x" * 1000),
    "enum": (Colour.RED, Colour.RED),
    "numpy": (np.float32(0.5), 0.5),
    "tensor": (torch.tensor(2), 2),
    "hf_token": ("a", "b"),
    "net": ([{"api_key": 0}], [{"api_key": 1}]),  # secrets
    "LOCAL_RANK": (0, 1),
    "ddp": ({"rank": 0, "world": 2}, {"rank": 1, "world": 2}),
    "all": ([{"gpu": 0}], [{"gpu": 1}]),
}
EQUAL: dict[str, tuple[object, object]] = {
    "values": ({name: pair[0] for name, pair in VALUES.items()}, {name: pair[1] for name, pair in VALUES.items()}),
    "only rank 0 has one": ({"lr": 0.1}, None),
    "only rank 1 has one": (None, {"lr": 0.1}),
    "other names": ({"a": 1}, {"b": 1}),
    "other kinds": (Namespace(lr=0.1), {"lr": 0.1}),
}


@pytest.mark.filterwarnings("ignore:W&B cannot hold")
@pytest.mark.parametrize("config_sync", ["warn", "check"])
@pytest.mark.parametrize("kind", EQUAL)
def test_equivalent_values_are_not_different(job: Job, kind: str, config_sync: str) -> None:
    assert given_differently(job, dict(enumerate(EQUAL[kind])), config_sync=config_sync) == []


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (({"n": 1}, {"n": True}), "'n' is True on rank 1, but 1 on rank 0"),
        (({"n": {"a": 1}}, {"n": {"a": 2}}), "'n' is {'a': 2} on rank 1, but {'a': 1} on rank 0"),
        ((Namespace(lr=1), Namespace(lr=2)), "'lr' is 2 on rank 1, but 1 on rank 0"),
        (({"x": "a" * 999}, {"x": "a" * 998 + "b"}), f"'x' is '{'a' * 38}… on rank 1, but '{'a' * 38}… on rank 0"),
        (({"x": None}, {"x": 0}), "'x' is 0 on rank 1, but None on rank 0"),
    ],
    ids=["kinds", "nested", "namespaces", "long", "nothing"],
)
def test_a_difference_is_shown_with_both_values(job: Job, pair: tuple[object, object], message: str) -> None:
    (warned,) = given_differently(job, dict(enumerate(pair)))
    assert message in warned


def test_a_long_list_of_differences_is_cut(job: Job) -> None:
    (warned,) = given_differently(job, {rank: {f"k{key}": rank for key in range(50)} for rank in range(2)})
    assert "'k9' is 1 on rank 1" in warned
    assert "'k10'" not in warned
    assert "; and 40 more. Each run has" in warned


@pytest.mark.filterwarnings("error")
def test_each_rank_keeps_its_own_values_in_new_mode(job: Job) -> None:
    configs = {rank: {"rank": rank, "ddp": {"rank": rank}, "seed": rank} for rank in range(2)}
    sessions = job(TWO, configs, run_mode="new")
    for rank, session in enumerate(sessions):
        session.flush()
        assert dict(session.config) == configs[rank]


@pytest.mark.parametrize("choice", [{"config_exclude_keys": ["seed"]}, {"config_include_keys": ["lr"]}])
@pytest.mark.parametrize("config_sync", ["warn", "check"])
def test_keys_excluded_from_wandb_are_neither_compared_nor_shown(
    open_rank: Open, choice: Mapping[str, Any], config_sync: str, caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # including warnings of values that W&B cannot store

        def open_one(rank: int) -> dict[str, Any]:
            given = {"lr": 0.1, "seed": object() if rank else 7}
            session = open_rank(TWO[rank], given, config_sync=config_sync, wandb_init=choice)
            session.flush()
            return dict(session.config)

        assert on_ranks(2, open_one) == [{"lr": 0.1}] * 2
    assert "different configs" not in caplog.text


def test_a_warning_turned_into_an_error_is_logged_without_traceback(
    open_rank: Open, caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = open_rank(TWO[1], {"lr": 0.2})
        open_rank(TWO[0], {"lr": 0.1})
        second.flush()
    warned = [record for record in caplog.records if "given different configs" in record.getMessage()]
    assert [record.exc_info for record in warned] == [None]


PUBLISHED: dict[str, Any] = {"values": {}, "imposed": [], "metadata": {}, "withheld": {}}


@pytest.mark.parametrize(
    ("key", "junk"),
    [
        ("config/given/0", {"values": 1}),
        ("config/of/", []),
        ("config/of//version", 7),
        ("config/of/", {**PUBLISHED, "withheld": [1]}),
        ("config/of/", {**PUBLISHED, "values": "lr=0.1"}),
    ],
)
def test_malformed_messages_of_a_rank_are_reported_without_traceback(
    open_rank: Open, store: dist.Store, caplog: pytest.LogCaptureFixture, key: str, junk: object
) -> None:
    keys = JobStore(store, "test/1", TWO[0], 1.0).beside("config_sync")
    keys.publish("config/of//version", {"number": 1, "is_over": False})
    keys.publish(key, junk)
    second = open_rank(TWO[1], {"lr": 0.2}, limits={"join_timeout": 0.1})
    sync_of(second).refresh(at_once=True)
    warned = [record for record in caplog.records if "cannot follow the config" in record.getMessage()]
    assert [record.exc_info for record in warned] == [None]
    assert f"as {key!r}, which is not" in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


def test_a_check_names_a_rank_whose_config_cannot_be_read(open_rank: Open, store: dist.Store) -> None:
    def open_one(rank: int) -> str:
        if rank == 2:
            keys = JobStore(store, "test/1", THREE[2], 1.0)
            RankValues(keys, "config/given by all").publish({"values": 1})
            return ""
        with pytest.raises(ConfigurationError) as error:
            open_rank(THREE[rank], {"lr": 0.1}, config_sync="check")
        return str(error.value)

    for message in on_ranks(3, open_one)[:2]:
        assert "the ranks were given different configs: that of rank 2 cannot be read" in message


def test_the_comparison_can_be_turned_off(job: Job) -> None:
    assert given_differently(job, {rank: {"lr": rank} for rank in range(2)}, config_sync="off") == []


@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
def test_a_failed_check_raises_the_same_error_on_all_ranks(open_rank: Open, fake_wandb: FakeWandb, mode: str) -> None:
    def open_one(rank: int) -> str:
        with pytest.raises(ConfigurationError) as error:
            open_rank(THREE[rank], {"lr": 0.1 * (rank == 2), "seed": 1}, run_mode=mode, config_sync="check")
        return str(error.value)

    start = time.monotonic()
    (message,) = set(on_ranks(3, open_one))
    assert message == (
        "config_sync='check', but the ranks were given different configs: 'lr' is 0.1 on rank 2, but 0.0 on rank 0. "
        "Give all ranks the same, or pass config_sync='warn'."
    )
    assert time.monotonic() - start < 20
    assert fake_wandb.arguments == []


def test_a_check_continues_without_missing_ranks_which_may_arrive_later(open_rank: Open) -> None:
    with pytest.warns(UserWarning, match=r"waited 0.1 s, but ranks 1, 2 did not open a run, so their configs"):
        first = open_rank(THREE[0], {"lr": 0.1}, config_sync="check", limits={"join_timeout": 0.1})
    with pytest.warns(UserWarning, match="'lr' is 0.2 on rank 1"):
        second = open_rank(THREE[1], {"lr": 0.2}, config_sync="check")
    assert dict(first.config) == dict(second.config) == {"lr": 0.1}
    open_rank(TWO[1], {"lr": 0.2}, config_sync="check", limits={"join_timeout": 0.1}, number=2)
    assert open_rank(TWO[0], {"lr": 0.1}, config_sync="check", number=2).run, "also rank 0"


def test_a_check_without_a_store_is_an_error(open_rank: Open, fake_wandb: FakeWandb, meeting: Meeting) -> None:
    meeting.store_of = lambda _: None
    with pytest.raises(RendezvousError, match="config_sync='check' compares the configs of all ranks, but rank 0 has"):
        open_rank(TWO[0], {"lr": 0.1}, config_sync="check")
    assert fake_wandb.arguments == []


def test_a_world_of_one_has_nothing_to_check(fake_wandb: FakeWandb) -> None:
    assert dist_wandb.init(config={"lr": 0.1}, config_sync="check").config.lr == 0.1
    assert len(fake_wandb.runs) == 1


@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
def test_a_secret_is_readable_on_all_ranks_that_were_given_it(job: Job, mode: str) -> None:
    given = {"lr": 0.1, "hf_token": "a", "net": {"api_key": "b", "h": 3}}
    for session in job(TWO, alike(given), run_mode=mode):
        assert reads(session, given)
        assert list(session.config.keys()) == list(given)


def test_a_secret_of_other_ranks_is_missing_with_an_explanation(job: Job) -> None:
    first, second = job(TWO, {0: {"lr": 0.1, "hf_token": "a"}})
    assert dict(first.config) == {"lr": 0.1, "hf_token": "a"}
    assert dict(second.config) == {"lr": 0.1}
    assert ("hf_token" in second.config, second.config.get("hf_token", 7)) == (False, 7)
    with pytest.raises(KeyError, match="'hf_token' is in the config of the run, but"):
        _ = second.config["hf_token"]
    with pytest.raises(AttributeError, match="'hf_token' is in the config of the run, but"):
        _ = second.config.hf_token
    second.config["hf_token"] = "mine"  # noqa: S105  # of nothing
    first.config.update({"lr": 0.2}, allow_val_change=True)
    assert reads(second, {"lr": 0.2, "hf_token": "mine"})


@pytest.mark.parametrize("disabled", [0, 1])
def test_a_rank_whose_run_is_disabled_and_no_other_one_is_reported(open_rank: Open, disabled: int) -> None:
    """Nothing is written if it is rank 0's; if it is another one's, its numbers are in no mean."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        modes = {disabled: "disabled", 1 - disabled: "offline"}
        for session in on_ranks(2, lambda rank: open_rank(TWO[rank], None, {"mode": modes[rank]})):
            sync_of(session).refresh(at_once=True)
    text = {disabled: "'disabled'", 1 - disabled: "'online or offline'"}
    (message,) = [str(warning.message) for warning in caught]
    assert f"'mode' is {text[1]} on rank 1, but {text[0]} on rank 0" in message


@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
def test_ranks_that_are_asked_for_different_runs_warn_once_unless_each_has_one(open_rank: Open, mode: str) -> None:
    def open_own(rank: int) -> Session:
        wandb_init = {"project": "p", "name": f"rank-{rank}", "id": f"exp-{rank}", "tags": ["a", str(rank)]}
        return open_rank(TWO[rank], None, wandb_init, run_mode=mode)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rank, session in enumerate(on_ranks(2, open_own)):
            sync_of(session).refresh(at_once=True)
            assert session.id == session.run.id == (f"exp-0-rank-{rank}" if mode == "new" else "exp-0")
    messages = [str(warning.message) for warning in caught if "asked to open different runs" in str(warning.message)]
    if mode == "new":
        assert messages == []
        return
    (message,) = messages
    assert "'id' is 'exp-1' on rank 1, but 'exp-0' on rank 0; 'name' is 'rank-1' on rank 1, but 'rank-0'" in message
    assert "'tags' is ['a', '1'] on rank 1, but ['a', '0'] on rank 0" in message
    assert "'project'" not in message
    assert "pass run_mode='new'" in message


# --- values that W&B cannot store ------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_keeps_its_config_object_and_it_is_restored_at_the_end(
    open_rank: Open, fake_wandb: FakeWandb, world: int
) -> None:
    session = open_rank(TWO[0] if world > 1 else Topology.single(), {"lr": 0.1}, reduce=None)
    (run,) = fake_wandb.runs
    kind = type(fake_wandb.init().config)
    assert session.config is session.run.config is run.config
    assert isinstance(session.config, wandb.Config)  # type: ignore[attr-defined]  # public, but not declared
    session.finish()
    assert type(run.config) is kind
    assert vars(run.config).keys() == vars(kind({})).keys()


REFUSED = {
    "object": (object(), "<object object>"),
    "bytes": (b"\xff", r"b'\xff'"),
    "loop": (LOOP, "{'loop': {...}}"),
    "nameless": (Nameless(), "<Nameless without a repr>"),
    "media": (MappingProxyType({"a": 1}), "mappingproxy({'a': 1})"),
    "keys": ({(1, 2): 3}, "{(1, 2): 3}"),
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
def test_values_that_wandb_cannot_store_are_written_as_text_at_init(
    job: Job, fake_wandb: FakeWandb, world: int, mode: str
) -> None:
    given = {name: value for name, (value, _) in {**REFUSED, "lr": (0.1, 0.1), "path": (Path("a"), "a")}.items()}
    expected = {name: text for name, (_, text) in REFUSED.items()} | {"lr": 0.1, "path": "a"}
    with pytest.warns(UserWarning, match="W&B cannot hold these values of the config on rank") as caught:
        sessions = job(TWO if world == 2 else [Topology.single()], alike(given), run_mode=mode)
    assert all(reads(session, expected) for session in sessions)
    (message,) = [str(warning.message) for warning in caught if warning.category is UserWarning]
    assert f"is written: {'; '.join(map(repr, REFUSED))}. Pass" in message
    assert all(dict(run.config) == expected for run in fake_wandb.runs)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", REFUSED)
def test_values_that_wandb_cannot_store_are_written_as_text_later(
    open_rank: Open, fake_wandb: FakeWandb, world: int, name: str
) -> None:
    config = open_rank(TWO[0] if world == 2 else Topology.single(), {"lr": 0.1}).config
    value, text = REFUSED[name]
    (run,) = fake_wandb.runs
    for write in (
        lambda: config.update({"a": value, "b": 1}),
        lambda: config.__setitem__("c", value),
        lambda: setattr(config, "d", value),
        lambda: config.setdefaults({"e": value, "a": 7}),
    ):
        with pytest.warns(UserWarning, match="W&B cannot hold these values of the config on rank 0"):
            write()
    assert dict(run.config) == {"lr": 0.1, "a": text, "b": 1, "c": text, "d": text, "e": text}
    sent: dict[str, Any] = {}
    for message in run.config.sent:
        sent.update(message)
    assert sent == {"a": text, "b": 1, "c": text, "d": text, "e": text}


def test_configs_that_wandb_can_store_are_passed_unchanged(open_rank: Open, fake_wandb: FakeWandb) -> None:
    given = {"path": Path("a"), "set": {1}, "one": 1.5}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_rank(Topology.single(), given)
        assert [value is given[name] for name, value in fake_wandb.arguments[0]["config"].items()] == [True] * 3


def test_other_types_of_names_and_configs_are_accepted(open_rank: Open, fake_wandb: FakeWandb) -> None:
    session = open_rank(Topology.single(), MappingProxyType({"lr": 0.1, 7: 1}))
    session.config.update({8: 2})
    session.config.update(Namespace(a=3))
    assert fake_wandb.arguments == [{"mode": "offline", "config": {"lr": 0.1, "7": 1}}]
    assert type(fake_wandb.arguments[0]["config"]) is dict
    assert dict(fake_wandb.runs[0].config) == {"lr": 0.1, "7": 1, "8": 2, "a": 3}


def test_other_errors_of_wandb_are_passed_on(open_rank: Open) -> None:
    session = open_rank(TWO[0], {"lr": 0.1})
    with pytest.raises(wandb.Error, match="change value of key"):
        session.config.update({"lr": 0.2})
    with pytest.raises(wandb.Error, match="doesn't exist"):
        session.config.update("nothing.yaml")
    with pytest.raises(TypeError, match="config must be a dict"):
        session.config.update(7)
