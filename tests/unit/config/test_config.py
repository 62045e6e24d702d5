"""One config on all ranks. Ranks are threads that meet in a real store; wandb's config is the real one."""

from __future__ import annotations

import copy
import enum
import linecache
import math
import pickle
import re
import threading
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import wandb

import dist_wandb
from dist_wandb.config import text as config_text
from dist_wandb.config.sync import ConfigSync
from dist_wandb.config.view import ConfigView
from dist_wandb.errors import ConfigurationError, RendezvousError
from dist_wandb.runs import config_guard
from dist_wandb.runs.null_run import NullRun
from dist_wandb.session.opener import open_session
from dist_wandb.session.session import Session
from dist_wandb.settings.config_values import comparable, given_values, told
from dist_wandb.settings.limits import Limits
from dist_wandb.settings.options import Options
from dist_wandb.store import job_identity
from dist_wandb.store.job_store import JobStore
from dist_wandb.topology.model import Topology

if TYPE_CHECKING:
    from tests.conftest import FakeWandb, OnRanks

HEARTBEAT = 0.05
TWO = [Topology(rank, rank, 0, 2, 2, 1) for rank in range(2)]
THREE = [Topology(rank, rank, 0, 3, 3, 1) for rank in range(3)]
NODES = [Topology(2 * node + rank, rank, node, 4, 2, 2) for node in range(2) for rank in range(2)]
LIMITS = Limits(join_timeout=30.0, finish_timeout=30.0, peer_timeout=30.0, heartbeat=HEARTBEAT)
Open = Callable[..., Session]
Job = Callable[..., list[Session]]


@pytest.fixture
def store(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> dist.Store:  # noqa: ARG001  # goes first
    store = dist.HashStore()
    monkeypatch.setattr(JobStore, "find", lambda name, rank, timeout: JobStore(store, name, rank, timeout))
    monkeypatch.setattr(job_identity, "node_identity", lambda: "host")
    return store


@pytest.fixture
def open_rank(store: dist.Store) -> Iterator[Open]:  # noqa: ARG001  # they meet there
    """Open a session on one rank, on this thread."""
    opened: list[Session] = []

    def open_one(
        topology: Topology,
        config: object = None,
        wandb_init: Mapping[str, Any] = MappingProxyType({}),
        limits: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> Session:
        session = open_session(
            Options(limits=replace(LIMITS, **limits), **options),
            {"mode": "offline", **({} if config is None else {"config": config}), **wandb_init},
            integration="test",
            topology=topology,
            number=1,
            create_new=False,
            announces=False,
        )
        opened.append(session)
        return session

    yield open_one
    for session in opened:
        session.finish(1)


@pytest.fixture
def job(open_rank: Open, on_ranks: OnRanks) -> Job:
    """Open a session on every rank at once."""

    def open_all(topologies: list[Topology], configs: Mapping[int, object] | None = None, **options: Any) -> Any:
        def open_one(rank: int) -> Session:
            return open_rank(topologies[rank], (configs or {}).get(rank), **options)

        return on_ranks(len(topologies), open_one)

    return open_all


def reads(session: Session, expected: Mapping[str, Any], within: float = 20.0) -> bool:
    """Whether a rank comes to read a config, by itself."""
    deadline = time.monotonic() + within
    while dict(session.config) != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return dict(session.config) == expected


def alike(values: object) -> dict[int, object]:
    return dict.fromkeys(range(4), values)


NESTED = {"lr": 0.1, "net": {"sizes": [3, {"x": None}], "names": {1: "a", 2: "b"}}, "debug": False, "big": 10**30}


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
@pytest.mark.parametrize("configs", [alike(NESTED), {0: NESTED}], ids=["all ranks are given it", "rank 0 is given it"])
def test_the_config_reads_the_same_on_every_rank(job: Job, mode: str, configs: dict[int, object]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sessions = job(TWO, configs, run_mode=mode)
        for session in sessions:
            assert reads(session, NESTED)
            assert session.config["net"]["sizes"][1] == {"x": None}
            assert session.config["net"]["names"][2] == "b"
            assert (session.config.lr, session.config.get("lr"), "lr" in session.config) == (0.1, 0.1, True)
            assert type(session.config["net"]) is dict


@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
def test_tuples_and_what_is_no_number_reach_ranks_that_were_given_nothing(
    open_rank: Open, fake_wandb: FakeWandb, mode: str
) -> None:
    first = open_rank(TWO[0], {"betas": (0.9, (1, 2)), "best": math.nan, "ends": [math.nan, math.inf]}, run_mode=mode)
    second = open_rank(TWO[1], run_mode=mode)
    for session in (first, second):
        seen = {name: repr(told(value)) for name, value in dict(session.config).items()}
        assert seen == {"betas": "[0.9, [1, 2]]", "best": "None", "ends": "[None, inf]"}  # what W&B makes of them
    assert set(fake_wandb.arguments[-1]["config"]) == set(seen)  # as soon as its run is opened


def test_a_rank_without_a_run_reads_a_config_as_wandbs_own(job: Job) -> None:
    for session in job(TWO, alike({"lr": 0.1, "net": {"h": 3}})):
        config = session.run.config
        assert session.config is config
        assert list(config.keys()) == [name for name in config if not name.startswith("_")] == ["lr", "net"]
        assert list(config.items()) == [("lr", 0.1), ("net", {"h": 3})]
        assert config.as_dict() == dict(config) == {"lr": 0.1, "net": {"h": 3}}
        assert repr(config) == "{'lr': 0.1, 'net': {'h': 3}}"
        assert (config.get("none"), config.get("none", 7), "none" in config) == (None, 7, False)
        assert config
        with pytest.raises(KeyError, match="none"):
            _ = config["none"]
        with pytest.raises(AttributeError, match="none"):
            _ = config.none
        with pytest.raises(AttributeError):
            _ = config.__deepcopy_it__


@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
def test_every_rank_tells_how_many_names_there_are(job: Job, mode: str) -> None:
    for session in job(TWO, alike({"lr": 0.1, "net": {}}), run_mode=mode):
        assert len(session.config) == 2
        assert ("lr" in session.config, "x" in session.config, session.config.get("x", 7)) == (True, False, 7)


def test_alone_too_and_an_empty_config_stays_true(open_rank: Open) -> None:
    session = open_rank(Topology.single())
    assert (len(session.config), bool(session.config)) == (0, True)
    session.config.lr = 0.1
    session.config["_of_wandb"] = 1
    assert len(session.config) == 1


def test_a_rank_without_a_run_accepts_every_write_and_reads_what_it_wrote(job: Job, fake_wandb: FakeWandb) -> None:
    _, second = job(TWO, alike({"lr": 0.1}))
    config = second.config
    config.update({"a": 1}, allow_val_change=True)
    config.update(Namespace(b=2))
    config["c"] = 3
    config.d = 4
    config.setdefaults({"lr": 7, "e": 5})
    config.update_locked({"f": 6}, user="me")
    config.merge_locked({"g": 7})
    config.update("nothing.yaml")
    config.persist()
    del config["lr"]
    own = {"lr": 0.1, "a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6, "g": 7}
    assert (dict(config), len(config), list(config.values())) == (own, 8, list(own.values()))
    assert dict(fake_wandb.runs[0].config) == {"lr": 0.1}


def test_what_is_written_on_a_rank_without_a_run_holds_until_the_primary_says_something_else(job: Job) -> None:
    first, second = job(TWO, alike({"lr": 0.1, "n": 1}))
    second.config.lr = 0.2
    time.sleep(2 * HEARTBEAT)
    assert (second.config.lr, first.config.lr) == (0.2, 0.1)
    first.config.n = 1
    first.config.update({"lr": 0.3}, allow_val_change=True)
    assert reads(second, {"lr": 0.3, "n": 1})


def test_the_same_write_on_all_ranks_is_read_at_once(job: Job) -> None:
    """The slower rank's value is not there yet, or an older one of it is."""
    first, second = job(TWO, alike({"lr": 0.1}))
    for value in (1, 2, 3):
        for session in (first, second) if value % 2 else (second, first):
            session.config.update({"epoch": value}, allow_val_change=True)
            assert session.config.epoch == value
    assert reads(second, {"lr": 0.1, "epoch": 3})


@pytest.mark.parametrize("mode", ["auto", "shared"])
@pytest.mark.parametrize("config", [{"lr": 0.1}, None], ids=str)
def test_what_a_rank_was_given_beyond_the_primarys_config_is_not_in_it(
    job: Job, mode: str, config: dict[str, object] | None
) -> None:
    _, second = job(TWO, {0: config, 1: {"lr": 0.1, "more": 1}}, run_mode=mode)
    assert dict(second.config) == (config or {})


def test_another_writer_of_a_shared_run_does_not_begin_with_a_config_that_the_primary_lacks(
    open_rank: Open, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ConfigSync, "completed", lambda _, arguments, *__: arguments)  # the primary has not told it yet
    open_rank(TWO[0], None, run_mode="shared")
    open_rank(TWO[1], {"more": 1}, run_mode="shared")
    assert [arguments.get("config") for arguments in fake_wandb.arguments] == [None, None]


@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
def test_what_a_rank_writes_is_newer_than_what_it_has_not_seen_yet(job: Job, mode: str) -> None:
    first, second = job(TWO, alike({"lr": 0.1}), run_mode=mode, limits={"heartbeat": 1000.0})
    first.config.update({"n": 1})
    second.config.update({"n": 2})
    second._config_sync.look(at_once=True)
    assert second.config.n == 2


@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
@pytest.mark.parametrize("through", ["session", "run", "item", "attribute"])
def test_what_the_primary_sets_later_reaches_all_ranks(job: Job, mode: str, through: str) -> None:
    first, second = job(TWO, alike({"lr": 0.1}), run_mode=mode)
    assert dict(second.config) == {"lr": 0.1}
    if through == "session":
        first.config.update({"steps": 7})
    elif through == "run":
        first.run.config.update({"steps": 7})
    elif through == "item":
        first.run.config["steps"] = 7
    else:
        config: Any = first.run.config
        config.steps = 7
    assert second.config["steps"] == 7  # what is not there is looked for at once
    assert reads(second, {"lr": 0.1, "steps": 7})


@pytest.mark.parametrize("mode", ["auto", "shared"])
def test_a_value_that_the_primary_changes_is_read_within_a_heartbeat(job: Job, mode: str) -> None:
    first, second = job(TWO, alike({"lr": 0.1}), run_mode=mode)
    assert second.config.lr == 0.1
    first.run.config.update({"lr": 0.2}, allow_val_change=True)
    assert reads(second, {"lr": 0.2})


def test_the_other_writers_of_a_shared_run_send_what_the_primary_set_without_being_asked(
    job: Job, fake_wandb: FakeWandb
) -> None:
    first, second = job(TWO, alike({"lr": 0.1}), run_mode="shared")
    first.config.update({"steps": 7})
    theirs: Any = second.run.config
    deadline = time.monotonic() + 20
    while {"steps": 7} not in theirs.sent and time.monotonic() < deadline:
        second.log({"loss": 0.5})
        time.sleep(0.01)
    assert theirs.sent == [{"steps": 7}]
    assert len(fake_wandb.runs) == 2


def test_what_the_primary_set_last_is_taken_over_in_flush_and_finish(job: Job) -> None:
    first, second, third = job(THREE, alike({"lr": 0.1}), run_mode="new", limits={"heartbeat": 1000.0})
    first.config.update({"steps": 7})
    second.flush()
    third.finish()
    for session in (second, third):
        assert session.run.config.as_dict() == {"lr": 0.1, "steps": 7}


def test_a_change_inside_of_a_value_is_told_with_the_next_look(job: Job) -> None:
    first, second = job(TWO, alike({"net": {"h": 3}}))
    first.config["net"]["h"] = 4
    assert reads(second, {"net": {"h": 4}})


def test_a_heartbeat_costs_nothing_that_grows_with_the_config(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is spent on a thread whose rounds the other ranks wait for."""
    first, second = job(TWO, alike({f"n{number}": number for number in range(500)}), limits={"heartbeat": 1000.0})
    assert reads(second, dict(first.config))
    taken: list[object] = []
    asked: list[str] = []
    peek = JobStore.try_get

    def take(value: object) -> object:
        taken.append(value)
        return value

    def ask(self: JobStore, key: str) -> object:
        asked.append(key)
        return peek(self, key)

    monkeypatch.setattr(config_text, "told", take)
    monkeypatch.setattr(JobStore, "try_get", ask)
    for session in (first, second):
        for _ in range(3):
            session._config_sync.look._next = 0.0
            session._config_sync.look()
    assert taken == []
    assert {key for key in asked if key.startswith("config/")} == {"config/of//version"}  # not the values
    first.config["new"] = 8
    assert taken == [8]
    second._config_sync.look(at_once=True)
    assert second.config["new"] == 8


@pytest.mark.parametrize("write", ["update_locked", "merge_locked"])
def test_what_wandb_itself_sets_later_is_told(job: Job, write: str) -> None:
    first, second = job(TWO, alike({"lr": 0.1}), limits={"heartbeat": 1000.0})
    getattr(first.config, write)({"lr": 0.2}, user="sweep", _allow_val_change=True)
    second._config_sync.look(at_once=True)
    assert second.config.lr == 0.2


def test_what_is_changed_behind_wandbs_back_is_told_in_flush(job: Job) -> None:
    first, second = job(TWO, alike({"lr": 0.1}), limits={"heartbeat": 1000.0})
    first.config._items["lr"] = 0.2
    first.config["--width"] = 3  # wandb takes the dashes away
    first.flush()
    second._config_sync.look(at_once=True)
    assert dict(second.config) == {"lr": 0.2, "width": 3}


def test_a_rank_with_a_run_may_set_what_it_has_from_the_primary(job: Job) -> None:
    first, second = job(TWO, alike({"lr": 0.1}), run_mode="new")
    first.config.update({"seed": 1, "more": 1})
    assert second.config.seed == 1
    second.config["seed"] = 2
    second.config.update({"more": 2, "lr": 0.1})
    assert (second.config.seed, second.config.more) == (2, 2)
    with pytest.raises(wandb.Error, match='change value of key "seed"'):
        second.config["seed"] = 3
    with pytest.raises(wandb.Error, match='change value of key "lr"'):
        second.config.update({"lr": 3, "more": 2})


def test_in_new_mode_what_a_rank_sets_itself_is_its_own(job: Job) -> None:
    sessions = job(TWO, {0: {"seed": 0, "lr": 0.1}, 1: {"seed": 1}}, run_mode="new")
    assert reads(sessions[1], {"seed": 1, "lr": 0.1})
    for rank, session in enumerate(sessions):
        session.config.update({"where": rank})
    sessions[0].config.update({"seed": 7}, allow_val_change=True)
    time.sleep(3 * HEARTBEAT)
    assert dict(sessions[0].config) == {"seed": 7, "lr": 0.1, "where": 0}
    assert dict(sessions[1].config) == {"seed": 1, "lr": 0.1, "where": 1}


def test_what_another_writer_adds_gives_way_to_what_the_primary_sets_at_that_moment(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = job(TWO, alike({"lr": 0.1}), run_mode="shared")
    with second.unchanged_config() as known:
        assert "seen_by" not in known
        first.config.update({"seen_by": 0})
        known.update({"seen_by": 1})
    assert reads(second, {"lr": 0.1, "seen_by": 0})

    def told_just_now(values: object) -> dict[str, Any]:
        if values == {"at": 1}:
            first.config.update({"at": 0})
        return given_values(values)

    monkeypatch.setattr(config_guard, "given_values", told_just_now)
    second.config.setdefaults({"at": 1})
    assert reads(second, {"lr": 0.1, "seen_by": 0, "at": 0})


@pytest.mark.parametrize("resumed", [True, False])
def test_in_new_mode_a_run_that_goes_on_keeps_what_it_had_of_its_own(
    open_rank: Open, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    """W&B hands the config of its earlier start to a run that is resumed."""
    begin = fake_wandb.init

    def init(**arguments: Any) -> Any:
        run = begin(**arguments)
        run.resumed = resumed
        run.config.update({"seen_by": len(fake_wandb.runs) - 1, "epochs": 3})
        return run

    monkeypatch.setattr(fake_wandb, "init", init)
    first, second = (open_rank(topology, {}, run_mode="new") for topology in TWO)
    assert reads(second, {"seen_by": 1 if resumed else 0, "epochs": 3})
    first.config.update({"seen_by": 7, "epochs": 4}, allow_val_change=True)
    assert reads(second, {"seen_by": 1 if resumed else 7, "epochs": 4})


def test_in_new_mode_what_all_ranks_were_given_alike_follows_rank_0(open_rank: Open) -> None:
    first = open_rank(TWO[0], {"lr": 0.1, "seed": 0}, run_mode="new")
    first.config.update({"lr": 0.2, "seed": 7}, allow_val_change=True)  # before rank 1 has looked
    second = open_rank(TWO[1], {"lr": 0.1, "seed": 1}, run_mode="new")
    assert dict(second.config) == {"lr": 0.2, "seed": 1}
    first.config.update({"lr": 0.3}, allow_val_change=True)
    assert reads(second, {"lr": 0.3, "seed": 1})
    second.config.update({"lr": 0.4}, allow_val_change=True)
    first.config.update({"lr": 0.5}, allow_val_change=True)
    time.sleep(3 * HEARTBEAT)
    assert dict(second.config) == {"lr": 0.4, "seed": 1}


def test_under_a_sweep_what_a_rank_sets_later_is_its_own(open_rank: Open, fake_wandb: FakeWandb) -> None:
    fake_wandb.sweep = {"lr": 0.5}
    first = open_rank(TWO[0], {"lr": 0.1}, run_mode="new")
    fake_wandb.sweep = {}
    second = open_rank(TWO[1], {"lr": 0.1}, run_mode="new")
    for rank, session in ((1, second), (0, first)):
        session.config.update({"where": rank})
    time.sleep(3 * HEARTBEAT)
    assert dict(second.config) == {"lr": 0.5, "where": 1}


def test_on_several_nodes_a_ranks_config_is_that_of_its_nodes_run_completed_by_rank_0(job: Job) -> None:
    sessions = job(NODES, {0: {"lr": 0.1, "node": 0}, 2: {"node": 1}}, rank_scope="worker", config_sync="off")
    for session in sessions[:2]:
        assert reads(session, {"lr": 0.1, "node": 0})
    for session in sessions[2:]:
        assert reads(session, {"lr": 0.1, "node": 1})
    sessions[0].config.update({"steps": 7})
    assert all(reads(session, {"lr": 0.1, "node": 0, "steps": 7}) for session in sessions[:2])
    assert all(reads(session, {"lr": 0.1, "node": 1, "steps": 7}) for session in sessions[2:])


@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
def test_the_values_of_a_sweep_win_on_all_ranks(open_rank: Open, fake_wandb: FakeWandb, mode: str) -> None:
    """Only the first node's agent tells its processes of the sweep."""
    fake_wandb.sweep = {"lr": 0.5}
    first = open_rank(TWO[0], {"lr": 0.1, "batch": 8}, run_mode=mode)
    fake_wandb.sweep = {}
    second = open_rank(TWO[1], {"lr": 0.2, "batch": 8}, run_mode=mode, config_sync="off")
    for session in (first, second):
        assert dict(session.config) == {"lr": 0.5, "batch": 8}
    if mode == "shared":
        assert fake_wandb.arguments[1]["config"] == {"lr": 0.5, "batch": 8}


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_a_guarded_start_waits_for_nobody(open_rank: Open) -> None:
    start = time.monotonic()
    session = open_rank(TWO[0], {"lr": 0.1})
    session.config.update({"steps": 7})
    assert dict(session.config) == {"lr": 0.1, "steps": 7}
    assert time.monotonic() - start < 20


def test_who_reads_before_the_primary_has_opened_its_run_waits_for_it(open_rank: Open) -> None:
    second = open_rank(TWO[1], {"lr": 0.2}, config_sync="off")
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.append(second.config["lr"]))
    reader.start()
    time.sleep(0.1)
    assert found == []
    open_rank(TWO[0], {"lr": 0.1}, config_sync="off")
    reader.join(30)
    assert found == [0.1]


def test_if_the_primary_never_comes_a_rank_reads_what_it_was_given_with_one_warning(
    open_rank: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = open_rank(TWO[1], {"lr": 0.2, "p": Path("x")}, limits={"join_timeout": 0.1})
    second.config.update({"own": 1})
    assert second.config.own == 1  # it knows that, so it does not wait
    with pytest.warns(UserWarning, match="read on rank 1, but its primary did not open its run within 0.1 s"):
        assert second.config.lr == 0.2
    with warnings.catch_warnings(), monkeypatch.context() as after_that:
        warnings.simplefilter("error")
        after_that.setattr(JobStore, "wait_get", lambda *_: pytest.fail("waited twice"))
        assert dict(second.config) == {"lr": 0.2, "p": Path("x"), "own": 1}
    open_rank(TWO[0], {"lr": 0.1}, config_sync="off")
    assert reads(second, {"lr": 0.1, "own": 1})


def test_without_a_store_a_rank_reads_what_it_was_given_until_there_is_one(
    open_rank: Open, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before_the_process_group:
        before_the_process_group.setattr(JobStore, "find", lambda *_: None)
        first, second = (open_rank(TWO[rank], {"lr": 0.1 * (rank + 1)}) for rank in range(2))
        with pytest.warns(UserWarning, match="there is no store of the job yet"):
            assert second.config.lr == 0.2
    assert store is not None
    first.config.update({"steps": 7})
    with pytest.warns(UserWarning, match="were given different configs"):
        assert reads(second, {"lr": 0.1, "steps": 7})


def test_where_the_store_is_gone_the_config_stays_as_it_was(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = job(TWO, alike({"lr": 0.1}))
    assert second.config.lr == 0.1

    def fail(*_: Any) -> None:
        raise RendezvousError("gone")

    monkeypatch.setattr(JobStore, "try_get", fail)
    monkeypatch.setattr(JobStore, "publish", fail)
    time.sleep(2 * HEARTBEAT)
    first.config.update({"steps": 7})
    second.config.update({"own": 1})
    assert (dict(first.config), dict(second.config)) == ({"lr": 0.1, "steps": 7}, {"lr": 0.1, "own": 1})


def test_reading_asks_the_store_once_in_a_heartbeat(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    _, second = job(TWO, alike({"lr": 0.1}), limits={"heartbeat": 1000.0})
    assert second.config.lr == 0.1
    asked: list[str] = []  # threads of the exchange ask the store, too, by themselves
    monkeypatch.setattr(second._config_sync._connection, "try_get", asked.append)
    for _ in range(1000):
        assert second.config.lr == 0.1
        assert second.config["lr"] == 0.1
    assert len(asked) <= 1


def test_a_process_that_is_not_the_sessions_does_not_use_its_connection(
    open_rank: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = open_rank(TWO[1], {"lr": 0.2}, reduce=None, config_sync="off")
    monkeypatch.setattr(second._config_sync._connection, "_pid", -1)
    first = open_rank(TWO[0], {"lr": 0.1}, config_sync="off")
    second.config.update({"own": 1})
    assert dict(second.config) == {"lr": 0.2, "own": 1}
    monkeypatch.setattr(first._config_sync._connection, "_pid", -1)
    monkeypatch.setattr(
        first._config_sync._connection._job_store, "publish", lambda *_: pytest.fail("told by another process")
    )
    first.config.update({"steps": 1})


def test_a_config_that_is_copied_or_pickled_keeps_what_was_known(job: Job) -> None:
    _, second = job(TWO, alike({"net": {"h": 3}}))
    for twin in (copy.copy(second.config), copy.deepcopy(second.config), pickle.loads(pickle.dumps(second.config))):  # noqa: S301
        assert twin.net == twin["net"] == {"h": 3}
        assert twin.as_dict() == {"net": {"h": 3}}
        with pytest.raises(AttributeError, match="none"):
            _ = twin.none


def test_after_the_end_the_config_stays_readable_and_nobody_is_asked(job: Job) -> None:
    first, second = job(TWO, alike({"lr": 0.1}), run_mode="shared")
    second.finish(1)
    first.config.update({"steps": 7})
    second._config_sync.look(at_once=True)
    assert dict(second.run.config) == {"lr": 0.1}
    first.finish(1)
    assert dict(first.config) == {"lr": 0.1, "steps": 7}


def test_a_rank_that_never_asked_reads_what_it_was_given_after_the_end(open_rank: Open) -> None:
    second = open_rank(TWO[1], {"lr": 0.2}, limits={"join_timeout": 60.0}, reduce=None)
    second.finish(1)
    assert dict(second.config) == {"lr": 0.2}


# --- the run's own object ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_keeps_its_own_config_and_gets_it_back_as_it_was(
    open_rank: Open, fake_wandb: FakeWandb, world: int
) -> None:
    session = open_rank(TWO[0] if world > 1 else Topology.single(), {"lr": 0.1}, reduce=None)
    (run,) = fake_wandb.runs
    kind = type(fake_wandb.init().config)
    assert session.config is session.run.config is run.config
    assert isinstance(session.config, wandb.Config)  # type: ignore[attr-defined]  # for all to use, but not declared
    session.finish()
    assert type(run.config) is kind
    assert vars(run.config).keys() == vars(kind({})).keys()


@pytest.mark.usefixtures("fake_wandb")
def test_the_config_of_a_stand_in_for_a_run_is_left_alone() -> None:
    class Run:
        config = {"lr": 0.1}  # noqa: RUF012

    theirs: Any = Run()
    config_sync = ConfigSync(Options(), Topology.single(), None)
    config_sync.attach(theirs, open_session(Options(), {}, integration="test").plan, "")
    assert type(theirs.config) is dict


# --- values that W&B cannot hold --------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


class Nameless:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


LOOP: dict[str, Any] = {}
LOOP["loop"] = LOOP
REFUSED = {
    "object": (object(), "<object object>"),
    "bytes": (b"\xff", r"b'\xff'"),
    "loop": (LOOP, "{'loop': {...}}"),
    "nameless": (Nameless(), "<Nameless without a repr>"),
    "media": (MappingProxyType({"a": 1}), "mappingproxy({'a': 1})"),
    "keys": ({(1, 2): 3}, "{(1, 2): 3}"),
}
TAKEN = {"path": (Path("a"), "a"), "set": ({1}, [1]), "one": (1.5, 1.5), "huge": (10**5000, 10**5000)}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
def test_values_that_wandb_cannot_hold_are_written_as_text_at_init(
    job: Job, fake_wandb: FakeWandb, world: int, mode: str
) -> None:
    given = {name: value for name, (value, _) in {**REFUSED, "lr": (0.1, 0.1), "path": (Path("a"), "a")}.items()}
    expected = {name: text for name, (_, text) in REFUSED.items()} | {"lr": 0.1, "path": "a"}
    with pytest.warns(UserWarning, match="W&B cannot hold these values of the config on rank") as caught:
        sessions = job(TWO if world == 2 else [Topology.single()], alike(given), run_mode=mode)
    assert all(reads(session, expected) for session in sessions)
    (message,) = [str(warning.message) for warning in caught]
    assert f"is written: {'; '.join(map(repr, REFUSED))}. Pass" in message
    assert all(dict(run.config) == expected for run in fake_wandb.runs)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", REFUSED)
def test_values_that_wandb_cannot_hold_are_written_as_text_later(
    open_rank: Open, fake_wandb: FakeWandb, world: int, name: str
) -> None:
    session = open_rank(TWO[0] if world == 2 else Topology.single(), {"lr": 0.1})
    value, text = REFUSED[name]
    (run,) = fake_wandb.runs
    message = "W&B cannot hold these values of the config on rank 0"
    with pytest.warns(UserWarning, match=message):
        session.config.update({"a": value, "b": 1})
    with pytest.warns(UserWarning, match=message):
        session.config["c"] = value
    with pytest.warns(UserWarning, match=message):
        session.config.d = value
    with pytest.warns(UserWarning, match=message):
        session.config.setdefaults({"e": value, "a": 7})
    assert dict(run.config) == {"lr": 0.1, "a": text, "b": 1, "c": text, "d": text, "e": text}
    sent: dict[str, Any] = {}
    for message in run.config.sent:
        sent.update(message)
    assert sent == {"a": text, "b": 1, "c": text, "d": text, "e": text}


def test_what_wandb_can_hold_is_left_to_it(open_rank: Open, fake_wandb: FakeWandb) -> None:
    given = {name: value for name, (value, _) in TAKEN.items()}
    del given["huge"]  # beyond what Python writes as text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_rank(Topology.single(), given)
        assert fake_wandb.arguments[0]["config"] is given


def test_names_that_are_no_text_and_configs_of_other_kinds_do_not_end_the_job(
    open_rank: Open, fake_wandb: FakeWandb
) -> None:
    session = open_rank(Topology.single(), MappingProxyType({"lr": 0.1, 7: 1}))
    session.config.update({8: 2})
    session.config.update(Namespace(a=3))
    assert fake_wandb.arguments == [{"mode": "offline", "config": {"lr": 0.1, "7": 1}}]
    assert type(fake_wandb.arguments[0]["config"]) is dict
    assert dict(fake_wandb.runs[0].config) == {"lr": 0.1, "7": 1, "8": 2, "a": 3}


def test_what_wandb_refuses_for_other_reasons_it_says_itself(open_rank: Open) -> None:
    session = open_rank(TWO[0], {"lr": 0.1})
    with pytest.raises(wandb.Error, match="change value of key"):
        session.config.update({"lr": 0.2})
    with pytest.raises(wandb.Error, match="doesn't exist"):
        session.config.update("nothing.yaml")
    with pytest.raises(TypeError, match="config must be a dict"):
        session.config.update(7)


# --- comparing --------------------------------------------------------------------------------------------------------


def given_differently(
    job: Job, configs: Mapping[int, object], world: list[Topology] = TWO, **options: Any
) -> list[str]:
    """The warnings of a job."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for session in job(world, configs, **options):
            session._config_sync.look(at_once=True)
    return [str(warning.message) for warning in caught if "given different configs" in str(warning.message)]


@pytest.mark.parametrize("mode", ["auto", "shared"])
def test_ranks_that_were_given_different_values_are_told_once(job: Job, mode: str) -> None:
    configs = {rank: {"lr": 0.1 * (rank > 0), "seed": 7 * (rank > 0), "same": [1]} for rank in range(3)}
    (message,) = given_differently(job, configs, THREE, run_mode=mode)
    assert re.search(
        r"given different configs: 'lr' is 0.1 on rank (1|2), but 0.0 on rank 0; 'seed' is 7 on rank \1, but 0 on "
        "rank 0. Further ranks may differ, too. The config of a run is that of its primary. config_sync='check' makes",
        message,
    )


def test_a_rank_that_comes_first_compares_once_rank_0_is_there(open_rank: Open) -> None:
    second = open_rank(TWO[1], {"lr": 0.2})
    firsts = []

    def open_rank_0() -> None:
        firsts.append(open_rank(TWO[0], {"lr": 0.1}))
        second.flush()  # rank 1 compares by then, or at its next heartbeat

    with pytest.warns(UserWarning, match="'lr' is 0.2 on rank 1, but 0.1 on rank 0"):
        open_rank_0()
    assert dict(second.config) == dict(firsts[0].config) == {"lr": 0.1}


EQUAL: dict[str, tuple[object, object]] = {
    "numbers": ({"lr": 0.1}, {"lr": 0.1}),
    "only rank 0 has one": ({"lr": 0.1}, None),
    "only rank 1 has one": (None, {"lr": 0.1}),
    "other names": ({"a": 1}, {"b": 1}),
    "functions": ({"fn": lambda: 0}, {"fn": lambda: 0}),
    "objects": ({"o": Nameless()}, {"o": Nameless()}),
    "objects with an address": ({"o": threading.Lock}, {"o": threading.Lock}),
    "sets": ({"s": {"x", "y", "z"}}, {"s": {"z", "y", "x"}}),
    "order": ({"d": {"a": 1, "b": 2}}, {"d": {"b": 2, "a": 1}}),
    "tuples": ({"t": (1, 2)}, {"t": [1, 2]}),
    "no numbers": ({"nan": float("nan")}, {"nan": float("nan")}),
    "other kinds": (Namespace(lr=0.1), {"lr": 0.1}),
    "long": ({"long": "x" * 1000}, {"long": "x" * 1000}),
    "enums": ({"e": Colour.RED}, {"e": Colour.RED}),
    "numpy": ({"n": np.float32(0.5)}, {"n": 0.5}),
    "tensors": ({"n": torch.tensor(2)}, {"n": 2}),
}


@pytest.mark.filterwarnings("ignore:W&B cannot hold")
@pytest.mark.parametrize("config_sync", ["warn", "check"])
@pytest.mark.parametrize("kind", EQUAL)
def test_what_is_equal_in_effect_is_no_difference(job: Job, kind: str, config_sync: str) -> None:
    assert given_differently(job, dict(enumerate(EQUAL[kind])), config_sync=config_sync) == []


def test_what_is_handed_over_for_comparison_is_short_and_the_same_in_every_process() -> None:
    (short, digest) = comparable({"text": "x" * 1000})["text"]
    assert (len(short), len(digest)) == (40, 64)
    assert told({"b", "a", "c"}) == ["a", "b", "c"]


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
    assert "; and 40 more. The config of" in warned


OF_RANKS = [
    "rank",
    "local_rank",
    "LOCAL_RANK",
    "local-rank",
    "gpu",
    "device",
    "cuda_device",
    "ddp.node_rank",
    "a/gpu_id",
]


@pytest.mark.parametrize("config_sync", ["warn", "check"])
def test_what_differs_between_ranks_by_nature_is_not_compared(job: Job, config_sync: str) -> None:
    configs = {
        rank: {"lr": 0.1, **dict.fromkeys(OF_RANKS, rank), "ddp": {"rank": rank, "world": 2}, "all": [{"gpu": rank}]}
        for rank in range(2)
    }
    assert given_differently(job, configs, config_sync=config_sync) == []


@pytest.mark.parametrize("name", ["gpus", "devices", "lora_rank", "rank.lr", "ranks", "world_size"])
def test_what_only_sounds_like_it_is(job: Job, name: str) -> None:
    (warned,) = given_differently(job, {rank: {name: rank} for rank in range(2)})
    assert f"{name!r} is 1 on rank 1, but 0 on rank 0" in warned


def test_in_new_mode_each_rank_keeps_what_differs_by_nature(job: Job) -> None:
    configs = {rank: {"rank": rank, "ddp": {"rank": rank}} for rank in range(2)}
    sessions = job(TWO, configs, run_mode="new")
    for rank, session in enumerate(sessions):
        session.flush()
        assert dict(session.config) == configs[rank]


@pytest.mark.parametrize("choice", [{"config_exclude_keys": ["seed"]}, {"config_include_keys": ["lr"]}])
@pytest.mark.parametrize("config_sync", ["warn", "check"])
def test_what_wandb_is_told_to_leave_out_is_not_compared_nor_shown(
    open_rank: Open, on_ranks: OnRanks, choice: Mapping[str, Any], config_sync: str, caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of values that W&B cannot hold, neither

        def open_one(rank: int) -> dict[str, Any]:
            given = {"lr": 0.1, "seed": object() if rank else 7}
            session = open_rank(TWO[rank], given, config_sync=config_sync, wandb_init=choice)
            session.flush()
            return dict(session.config)

        assert on_ranks(2, open_one) == [{"lr": 0.1}] * 2
    assert "different configs" not in caplog.text


def test_what_is_left_out_on_rank_0_reaches_no_rank_that_was_given_nothing(open_rank: Open) -> None:
    first = open_rank(TWO[0], {"lr": 0.1, "seed": 7}, run_mode="new", wandb_init={"config_exclude_keys": ["seed"]})
    second = open_rank(TWO[1], run_mode="new")
    assert dict(first.config) == dict(second.config) == {"lr": 0.1}


def test_the_warning_names_the_line_that_opened_the_run(open_rank: Open) -> None:
    """Also where the thread of the exchange finds it out."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        open_rank(TWO[1], {"lr": 0.2})
        open_rank(TWO[0], {"lr": 0.1})
        deadline = time.monotonic() + 30
        while not caught and time.monotonic() < deadline:
            time.sleep(0.01)
    (warned,) = caught
    assert (warned.filename, linecache.getline(warned.filename, warned.lineno).strip()) == (
        __file__,
        "session = open_session(",
    )


def test_as_an_error_it_leaves_no_traceback(open_rank: Open, caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = open_rank(TWO[1], {"lr": 0.2})
        open_rank(TWO[0], {"lr": 0.1})
        second.flush()
    said = [record for record in caplog.records if "given different configs" in record.getMessage()]
    assert [record.exc_info for record in said] == [None]


def test_in_new_mode_different_values_are_wanted_unless_they_are_to_be_checked(job: Job) -> None:
    configs = {rank: {"seed": rank} for rank in range(2)}
    assert given_differently(job, configs, run_mode="new") == []


def test_the_comparison_can_be_turned_off(job: Job, store: dist.Store) -> None:
    assert given_differently(job, {rank: {"lr": rank} for rank in range(2)}, config_sync="off") == []
    keys = JobStore(store, "test/1", TWO[0], 1.0).beside("config_sync")
    given = [keys.has([f"config/given/{rank}"]) for rank in (0, 1)]
    assert given == [False, False]


@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
def test_a_check_that_fails_is_the_same_error_on_all_ranks(
    open_rank: Open, on_ranks: OnRanks, fake_wandb: FakeWandb, mode: str
) -> None:
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


def test_a_check_that_passes_says_nothing(job: Job) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sessions = job(THREE, alike({"lr": 0.1}), config_sync="check")
    assert all(reads(session, {"lr": 0.1}) for session in sessions)


def test_a_check_goes_on_without_ranks_that_do_not_come_and_so_do_they_later(open_rank: Open) -> None:
    with pytest.warns(UserWarning, match=r"waited 0.1 s, but rank 1, 2 did not come"):
        first = open_rank(THREE[0], {"lr": 0.1}, config_sync="check", limits={"join_timeout": 0.1})
    with pytest.warns(UserWarning, match="'lr' is 0.2 on rank 1"):
        second = open_rank(THREE[1], {"lr": 0.2}, config_sync="check")
    assert dict(first.config) == dict(second.config) == {"lr": 0.1}


def test_a_check_without_rank_0_ends_and_does_not_fail_when_it_comes(open_rank: Open) -> None:
    open_rank(TWO[1], {"lr": 0.2}, config_sync="check", limits={"join_timeout": 0.1})
    assert open_rank(TWO[0], {"lr": 0.1}, config_sync="check").run


def test_a_check_without_a_way_to_the_other_ranks_is_an_error(
    open_rank: Open, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JobStore, "find", lambda *_: None)
    with pytest.raises(RendezvousError, match="config_sync='check' compares the configs of all ranks, but rank 0 has"):
        open_rank(TWO[0], {"lr": 0.1}, config_sync="check")
    assert fake_wandb.arguments == []


def test_alone_there_is_nothing_to_check(fake_wandb: FakeWandb) -> None:
    assert dist_wandb.init(config={"lr": 0.1}, config_sync="check").config.lr == 0.1
    assert len(fake_wandb.runs) == 1


# --- secrets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
def test_a_secret_is_read_on_all_ranks_that_were_given_it(job: Job, mode: str) -> None:
    given = {"lr": 0.1, "hf_token": "a", "net": {"api_key": "b", "h": 3}}
    for session in job(TWO, alike(given), run_mode=mode):
        assert reads(session, given)
        assert list(session.config.keys()) == list(given)


def test_a_secret_that_a_rank_was_not_given_is_not_there_and_says_why(job: Job) -> None:
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


def test_a_secret_that_the_primary_changes_is_not_read_as_the_old_one(job: Job) -> None:
    first, second = job(TWO, alike({"lr": 0.1, "hf_token": "old", "net": {"token": "old", "h": 1}}))
    assert second.config.hf_token == "old"  # noqa: S105  # of nothing
    first.config.update({"hf_token": "new", "net": {"token": "new", "h": 1}, "lr": 0.2}, allow_val_change=True)
    assert reads(second, {"lr": 0.2, "net": {"h": 1}})


@pytest.mark.parametrize("config_sync", ["warn", "check"])
def test_secrets_are_not_compared(job: Job, config_sync: str) -> None:
    configs = {rank: {"lr": 0.1, "hf_token": f"t{rank}", "net": [{"api_key": rank}]} for rank in range(2)}
    assert given_differently(job, configs, config_sync=config_sync) == []


# --- the integrations -------------------------------------------------------------------------------------------------


def test_what_was_passed_is_seen_in_all_its_kinds() -> None:
    own = wandb.Config()  # type: ignore[attr-defined]  # for all to use, but not declared
    own["lr"] = 0.1
    assert [given_values(config) for config in ({"lr": 0.1}, Namespace(lr=0.1), own)] == [{"lr": 0.1}] * 3
    assert [given_values(config) for config in (None, "file.yaml", 7, Namespace, [("lr", 1)])] == [{}] * 5


def test_a_null_run_of_no_session_has_no_config() -> None:
    assert dict(NullRun().config.items()) == {}
    run: Any = NullRun()

    class Fixed:
        def read(self, name: str | None = None) -> Mapping[str, Any]:  # noqa: ARG002  # the protocol's
            return {"lr": 0.1}

        def write(self, values: Mapping[str, Any]) -> None:
            raise AssertionError(values)

    run.show_config(ConfigView(Fixed()))
    assert run.config.lr == 0.1
    assert not run
