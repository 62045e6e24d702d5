"""One config on all ranks: reads and writes on each rank, what a rank waits for, and when it asks the store."""

from __future__ import annotations

import copy
import datetime as dt
import math
import pickle
import threading
import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import wandb
from config_jobs import HEARTBEAT, NESTED, NODES, Colour, Open, alike, begin_to_open, connection_of, reads, sync_of
from fakes import THREE, TWO, FakeWandb, Job, Meeting, on_ranks
from limits import Limit
from processes import wait_until
from units import eventually

from dist_wandb.errors import RendezvousError
from dist_wandb.job.job_store import JobStore
from dist_wandb.job.topology import Topology
from dist_wandb.session import job_link, registry
from dist_wandb.session.config import own_config, sync
from dist_wandb.session.config.sync import ConfigSync
from dist_wandb.session.session import Session
from dist_wandb.settings.config_values import encoded, given_values, publishable, without_secrets
from dist_wandb.settings.options import Limits, Options


def test_a_rank_that_has_used_other_values_before_its_session_says_so_once(open_rank: Open) -> None:
    """In Lightning's further processes, which read the config before `fit`."""
    opened = [open_rank(topology, {"lr": 0.1, "local_rank": 0}) for topology in TWO]
    assert opened[1].config["lr"] == 0.1
    with pytest.warns(UserWarning, match=r"Rank 1 read the config before .*: 'lr' \(0.2, 0.1 there\)\. ") as caught:
        opened[1].expect_config({"lr": 0.2, "local_rank": 1, "own": 3})
    assert [warning.category for warning in caught].count(UserWarning) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened[1].expect_config({"lr": 0.1})
        assert opened[1].config["lr"] == 0.1


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
def test_tuples_and_nans_reach_ranks_without_a_given_config(open_rank: Open, fake_wandb: FakeWandb, mode: str) -> None:
    first = open_rank(TWO[0], {"betas": (0.9, (1, 2)), "best": math.nan, "ends": [math.nan, math.inf]}, run_mode=mode)
    second = open_rank(TWO[1], run_mode=mode)
    for session in (first, second):
        seen = {name: repr(encoded(value)) for name, value in dict(session.config).items()}
        assert seen == {"betas": "[0.9, [1, 2]]", "best": "None", "ends": "[None, inf]"}  # as W&B stores them
    assert set(fake_wandb.arguments[-1]["config"]) == set(seen)  # when its run is opened


class Attributes(dict[str, Any]):
    __getattr__ = dict.__getitem__  # raises KeyError


class Lenient(dict[str, Any]):
    __getattr__ = dict.get


class Refusing:
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __call__(self) -> None: ...

    def __repr__(self) -> str:
        return "refusing"


def test_dicts_whose_names_are_attributes_are_values_of_a_config_and_a_summary(job: Job) -> None:
    """Their `hasattr` raises an error, or is true for every name, such as those of tensors."""
    nets = {"net": Attributes(h=1, key=Lenient(name="k")), "loose": Lenient(h=2, password="x"), "call": Refusing()}  # noqa: S106
    with pytest.warns(UserWarning, match="their repr is written: 'call'"):
        sessions = job(TWO, alike(Attributes(nets)))
    for session in sessions:
        assert session.config.net["h"] == 1
        assert session.config["loose"]["h"] == 2
        assert session.config["call"] == "refusing"
        session.log(Attributes(part=Attributes(loss=1.0), other=Lenient(loss=2.0)), step=1)
        session.run.summary["best"] = Attributes(at=Lenient(step=3))
        assert session.run.summary["best"]["at"]["step"] == 3
    kept = without_secrets({"tokens": Lenient(of="abc"), "net": Lenient(password="x", h=1)})  # noqa: S106
    assert kept == {"net": {"h": 1}}


def test_the_config_of_a_rank_without_a_run_behaves_like_that_of_wandb(job: Job) -> None:
    for session in job(TWO, alike({"lr": 0.1, "net": {"h": 3}})):
        config = session.run.config
        assert session.config is config
        assert config.keys() == [name for name in config if not name.startswith("_")] == ["lr", "net"]
        assert config.items() == [("lr", 0.1), ("net", {"h": 3})]
        assert {"lr", "net"} <= {*config._items}
        assert vars(config)["_items"] == config.as_dict()
        config.__dict__["_locked"] = {}  # scripts of sweeps unlock the names so
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
    for twin in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):  # noqa: S301
        assert twin.net == twin["net"] == {"h": 3}
        assert twin.as_dict() == {"lr": 0.1, "net": {"h": 3}}
        with pytest.raises(AttributeError, match="none"):
            _ = twin.none


def test_an_empty_config_in_a_world_of_one_has_length_0_but_is_true(open_rank: Open) -> None:
    session = open_rank(Topology.single())
    assert (len(session.config), bool(session.config)) == (0, True)
    session.config.lr = 0.1
    session.config["_of_wandb"] = 1
    assert len(session.config) == 1


def test_a_rank_without_a_run_reads_back_its_own_writes(job: Job, fake_wandb: FakeWandb) -> None:
    _, second = job(TWO, alike({"lr": 0.1}))
    config = second.config
    config.update(d={"a": (1,), "_target_": "nets.MLP"}, allow_val_change=True)  # of Hydra
    config.update(Namespace(b=2))
    config["c"] = 3
    config.d = 4
    config.setdefaults(d={"lr": 7, "e": 5})
    config.update_locked({"f": 6}, user="me")
    config.merge_locked({"g": 7})
    config.update("nothing.yaml")
    config.persist()
    del config["lr"]
    own = {"lr": 0.1, "a": [1], "b": 2, "c": 3, "d": 4, "e": 5, "f": 6, "g": 7}
    assert (dict(config), len(config), list(config.values())[-1]) == (own, 9, 7)
    assert [getattr(config, name) for name in ("a", "_target_")] == [[1], "nets.MLP"]
    assert dict(fake_wandb.runs[0].config) == {"lr": 0.1}


WRITTEN = {
    "--lr": 0.1,  # of docopt
    "out": Path("runs") / "x",
    "act": torch.nn.ReLU,
    "fn": torch.relu,
    "at": dt.date(2024, 2, 1),
    "sizes": np.arange(3),
    "one": np.array([0.5]),
    "half": np.float32(0.5),
    "nested": {"out": Path("y"), "all": [Path("z"), torch.nn.ReLU]},
    "colour": Colour.RED,
    "dtype": torch.float32,
    "device": torch.device("cpu"),
    "weights": torch.tensor([0.5, 1.0], requires_grad=True),
    "within": dt.timedelta(days=1),
    "share": Decimal("0.5"),
}


def test_what_a_rank_without_a_run_writes_reads_as_wandb_shows_it(job: Job) -> None:
    """The same on all ranks at once: a path is text, on which directories of all ranks depend."""
    config = wandb.Config()  # type: ignore[attr-defined]  # public, but not declared
    config.update(WRITTEN)
    _, second = job(TWO, alike({}))
    second.config.update(WRITTEN)
    assert dict(second.config) == dict(config.items())


def test_a_write_lasts_until_the_primary_changes_the_value_and_one_of_all_ranks_is_read_at_once(job: Job) -> None:
    """The slower rank's value is not published yet, or an older one is."""
    first, second = job(TWO, alike({"lr": 0.1, "n": 1}))
    second.config.lr = 0.2
    time.sleep(2 * HEARTBEAT)
    assert (second.config.lr, first.config.lr) == (0.2, 0.1)
    first.config.n = 1
    first.config.update({"lr": 0.3}, allow_val_change=True)
    assert reads(second, {"lr": 0.3, "n": 1})
    for value in (1, 2, 3):
        for session in (first, second) if value % 2 else (second, first):
            session.config.update({"epoch": value}, allow_val_change=True)
            assert session.config.epoch == value
    assert reads(second, {"lr": 0.3, "n": 1, "epoch": 3})


@pytest.mark.parametrize("mode", ["auto", "shared"])
@pytest.mark.parametrize("config", [{"lr": 0.1}, None], ids=str)
def test_extra_values_given_to_a_rank_are_not_in_the_config(
    job: Job, mode: str, config: dict[str, object] | None
) -> None:
    _, second = job(TWO, {0: config, 1: {"lr": 0.1, "more": 1}}, run_mode=mode)
    assert dict(second.config) == (config or {})


WRITES: dict[str, Callable[[Session], object]] = {
    "session": lambda session: session.config.update({"steps": 7}),
    "run": lambda session: session.run.config.update({"steps": 7}),
    "item": lambda session: session.run.config.__setitem__("steps", 7),
    "attribute": lambda session: setattr(session.run.config, "steps", 7),
    "sweep": lambda session: session.config.update_locked({"steps": 7}, user="sweep", _allow_val_change=True),
    "launch": lambda session: session.config.merge_locked({"steps": 7}, user="sweep", _allow_val_change=True),
}


@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
@pytest.mark.parametrize("through", WRITES)
def test_later_values_of_the_primary_reach_all_ranks(job: Job, mode: str, through: str) -> None:
    first, second = job(TWO, alike({"lr": 0.1}), run_mode=mode)
    assert dict(second.config) == {"lr": 0.1}
    WRITES[through](first)
    assert second.config["steps"] == 7  # a missing name is polled for at once
    assert reads(second, {"lr": 0.1, "steps": 7})


@pytest.mark.parametrize("mode", ["auto", "shared"])
def test_the_exchange_notifies_ranks_of_config_changes(job: Job, mode: str, limit: Limit) -> None:
    """Secondary writers of a shared run send them by themselves, once."""
    limit(sync, _SELDOM=1000.0)
    sessions = job(THREE, alike({"lr": 0.1}), run_mode=mode)
    assert all(reads(session, {"lr": 0.1}) for session in sessions)
    configs: list[Any] = [session.run.config if session.run else None for session in sessions]
    every = [*map(sync_of, sessions)]
    wait_until(lambda: {one.published for one in every[1:]} == {sum(one.connection.publications for one in every)}, 20)
    sessions[0].config.update({"steps": 7})
    for session, config in zip(sessions[1:], configs[1:], strict=True):  # without a read, which would refresh it
        if config is None:
            wait_until(lambda session=session: sync_of(session).known().get("steps") == 7, within=20.0)  # type: ignore[misc]
        else:
            wait_until(lambda config=config: config.sent == [{"steps": 7}], within=20.0)  # type: ignore[misc]


def test_flush_and_finish_take_over_the_last_values_of_the_primary(job: Job) -> None:
    first, second, third = job(THREE, alike({"lr": 0.1}), run_mode="new", limits={"heartbeat": 1000.0})
    first.config.update({"steps": 7})
    second.flush()
    third.finish()
    for session in (second, third):
        assert session.run.config.as_dict() == {"lr": 0.1, "steps": 7}


def test_later_publications_do_not_hide_that_the_run_has_ended(job: Job) -> None:
    first, second = job(TWO, alike({"net": {"h": 3}}), limits={"heartbeat": 1000.0})
    primary, other = sync_of(first), sync_of(second)
    primary.own.publish_end()
    first.config["net"]["h"] = 4
    primary.catch_up()
    other.catch_up()
    assert second.config["net"]["h"] == 4
    assert other.has_run_ended


def test_the_cost_of_a_heartbeat_is_independent_of_the_config_size(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread's time counts: other ranks wait for its rounds."""
    first, second = job(TWO, alike({f"n{number}": number for number in range(500)}), limits={"heartbeat": 1000.0})
    assert reads(second, dict(first.config))
    monkeypatch.setattr(own_config, "publishable", encode := mock.Mock(side_effect=publishable))
    with mock.patch.object(JobStore, "try_get", autospec=True, side_effect=JobStore.try_get) as ask:
        for session in (first, second):
            for _ in range(3):
                sync_of(session).refresh(at_once=True)  # waits for the session's thread, which may refresh now, too
    assert not encode.called
    requests = {call.args[1] for call in ask.call_args_list}
    assert {key for key in requests if key.startswith("config/")} == {"config/of//version"}  # not the values
    first.config["new"] = 8
    assert encode.called
    sync_of(second).refresh(at_once=True)
    assert second.config["new"] == 8


def test_a_store_that_answered_too_late_hides_no_later_value(job: Job) -> None:
    first, second = job(TWO, alike({"lr": 0.1}), limits={"heartbeat": 1000.0})
    publish = JobStore.publish

    def fail(store: JobStore, key: str, value: Any) -> None:
        publish(store, key, value)
        if key.endswith("/version"):
            raise RendezvousError("no answer in time")

    with mock.patch.object(JobStore, "publish", fail):
        first.config.n = 1
    assert second.config.n == 1  # a missing name is polled for
    first.config.update({"n": 2}, allow_val_change=True)
    sync_of(second).refresh(at_once=True)
    assert second.config.n == 2


@pytest.mark.slow
def test_changes_that_bypass_wandb_are_published_in_flush(job: Job) -> None:
    first, second = job(TWO, alike({"lr": 0.1}), limits={"heartbeat": 1000.0})
    first.config.update_locked({"lr": 0.2}, user="sweep", _allow_val_change=True)
    first.config["--width"] = 3  # wandb takes the dashes away
    first.flush(timeout=1.0)  # the other rank does not take part
    sync_of(second).refresh(at_once=True)
    assert dict(second.config) == {"lr": 0.2, "width": 3}


def test_a_rank_with_a_run_may_override_values_of_the_primary(job: Job) -> None:
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


def test_a_simultaneous_value_of_the_primary_has_precedence_over_a_secondarys(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = job(TWO, alike({"lr": 0.1}), run_mode="shared")
    with second.unchanged_config() as known:
        assert "seen_by" not in known
        first.config.update({"seen_by": 0})
        known.update({"seen_by": 1})
    assert reads(second, {"lr": 0.1, "seen_by": 0})

    def set_meanwhile(values: object) -> dict[str, Any]:
        if values == {"at": 1}:
            first.config.update({"at": 0})
        return given_values(values)

    monkeypatch.setattr(own_config, "given_values", set_meanwhile)
    second.config.setdefaults({"at": 1})
    assert reads(second, {"lr": 0.1, "seen_by": 0, "at": 0})


@pytest.mark.parametrize("resumed", [True, False])
def test_a_resumed_run_keeps_its_own_values_in_new_mode(open_rank: Open, fake_wandb: FakeWandb, resumed: bool) -> None:
    """W&B gives a resumed run the config of its earlier start."""
    begin = fake_wandb.init

    def init(**arguments: Any) -> Any:
        run = begin(**arguments)
        run.resumed = resumed
        run.config.update({"seen_by": len(fake_wandb.runs) - 1, "epochs": 3})
        return run

    fake_wandb.init = init  # type: ignore[method-assign]
    first, second = (open_rank(topology, {}, run_mode="new") for topology in TWO)
    assert reads(second, {"seen_by": 1 if resumed else 0, "epochs": 3})
    first.config.update({"seen_by": 7, "epochs": 4}, allow_val_change=True)
    assert reads(second, {"seen_by": 1 if resumed else 7, "epochs": 4})


def test_values_given_alike_to_all_ranks_follow_rank_0_in_new_mode(open_rank: Open) -> None:
    first = open_rank(TWO[0], {"lr": 0.1, "seed": 0}, run_mode="new")
    first.config.update({"lr": 0.2, "seed": 7}, allow_val_change=True)  # before rank 1 has polled
    second = open_rank(TWO[1], {"lr": 0.1, "seed": 1}, run_mode="new")
    assert dict(second.config) == {"lr": 0.2, "seed": 1}
    first.config.update({"lr": 0.3}, allow_val_change=True)
    assert reads(second, {"lr": 0.3, "seed": 1})
    second.config.update({"lr": 0.4}, allow_val_change=True)
    first.config.update({"lr": 0.5, "seed": 8}, allow_val_change=True)
    time.sleep(3 * HEARTBEAT)
    assert dict(first.config) == {"lr": 0.5, "seed": 8}
    assert dict(second.config) == {"lr": 0.4, "seed": 1}


def test_a_ranks_config_is_that_of_its_node_completed_by_rank_0(job: Job) -> None:
    sessions = job(NODES, {0: {"lr": 0.1, "node": 0}, 2: {"node": 1}}, rank_scope="worker", config_sync="off")
    for session in sessions[:2]:
        assert reads(session, {"lr": 0.1, "node": 0})
    for session in sessions[2:]:
        assert reads(session, {"lr": 0.1, "node": 1})
    sessions[0].config.update({"steps": 7})
    assert all(reads(session, {"lr": 0.1, "node": 0, "steps": 7}) for session in sessions[:2])
    assert all(reads(session, {"lr": 0.1, "node": 1, "steps": 7}) for session in sessions[2:])


@pytest.mark.parametrize("given", [0.1, 0.5])  # the second one is what the agent passes to the script, too
@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
def test_sweep_values_have_precedence_on_all_ranks(
    open_rank: Open, fake_wandb: FakeWandb, mode: str, given: float
) -> None:
    """Only the first node's agent passes the sweep's values to its processes. They stay when all ranks write others."""
    fake_wandb.sweep = {"lr": 0.5}
    first = open_rank(TWO[0], {"lr": given, "batch": 8}, run_mode=mode)
    fake_wandb.sweep = {}
    second = open_rank(TWO[1], {"lr": 0.2, "batch": 8}, run_mode=mode, config_sync="off")
    for rank, session in ((1, second), (0, first)):
        assert dict(session.config) == {"lr": 0.5, "batch": 8}
        session.config.lr = 0.1
        session.config.update(Namespace(lr=0.1, where=rank), allow_val_change=True)
        assert dict(session.config) == {"lr": 0.5, "batch": 8, "where": rank}
    time.sleep(3 * HEARTBEAT)
    assert reads(second, {"lr": 0.5, "batch": 8, "where": int(mode == "new")})
    if mode == "shared":
        assert fake_wandb.arguments[1]["config"] == {"lr": 0.5, "batch": 8}


@pytest.mark.parametrize("mode", ["auto", "new"])
def test_other_values_of_a_trial_can_be_written_on_all_ranks(open_rank: Open, fake_wandb: FakeWandb, mode: str) -> None:
    fake_wandb.sweep, fake_wandb.defaults = {"lr": 0.5}, {"epochs": 3}
    sessions = [open_rank(one, {"batch": 8}, run_mode=mode) for one in TWO]
    for session in reversed(sessions):
        session.config.update({"epochs": 5}, allow_val_change=True)
        assert dict(session.config) == {"lr": 0.5, "epochs": 5, "batch": 8}


# --- waiting, and reads without the others ----------------------------------------------------------------------------


def test_reading_the_config_waits_until_the_primary_has_opened_its_run(open_rank: Open) -> None:
    second = open_rank(TWO[1], {"lr": 0.2}, config_sync="off")
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.append(second.config["lr"]))
    reader.start()
    time.sleep(0.1)
    assert found == []
    open_rank(TWO[0], {"lr": 0.1}, config_sync="off")
    reader.join(30)
    assert found == [0.1]


@pytest.mark.parametrize(("sweep", "name"), [("", "lr"), ("which may have a value of it", "own")])
def test_reads_wait_once_in_all_with_one_warning_for_a_primary_that_opens_no_run(
    open_rank: Open, store: dist.Store, monkeypatch: pytest.MonkeyPatch, sweep: str, name: str
) -> None:
    begin_to_open(store)
    second = open_rank(TWO[1], {"lr": 0.2, "p": Path("x")}, limits={"join_timeout": 1.0})
    second.config.update({"own": 1})
    assert second.config.own == 1  # known on this rank, so it does not wait
    monkeypatch.setenv("WANDB_SWEEP_ID", sweep)
    with pytest.warns(UserWarning, match="read on rank 1, but its primary did not open its run .* 1 s"):
        assert second.config[name] in (0.2, 1)

    def poll_once(is_settled: Callable[[], object], *_: Any) -> None:
        if is_settled() is None:
            pytest.fail("it waits again")

    with warnings.catch_warnings(), mock.patch.object(job_link, "poll", poll_once):
        warnings.simplefilter("error")
        assert dict(second.config) == {"lr": 0.2, "p": Path("x"), "own": 1}
        assert (second.id, second.name, second.id) == (None, None, None)


def test_reads_do_not_wait_for_a_primary_whose_init_has_failed(open_rank: Open) -> None:
    second = open_rank(TWO[1], {"lr": 0.2}, config_sync="off")
    with mock.patch("wandb.init", side_effect=ValueError("wrong")), pytest.raises(ValueError, match="wrong"):
        open_rank(TWO[0], {"lr": 0.1}, config_sync="off")
    began = time.monotonic()
    with pytest.warns(UserWarning, match="read on rank 1, but its primary did not open its run"):
        assert second.config.lr == 0.2
    assert time.monotonic() < began + 15  # of 30 s


def test_reads_wait_for_the_rank_that_writes_the_run_without_a_primary(open_rank: Open) -> None:
    limits = {"join_timeout": 1.0}
    sessions = [open_rank(THREE[1 + n], {"lr": 0.1 * n}, limits=limits, config_sync="off") for n in range(2)]
    first, second = (session.config for session in sessions)

    def read(index: int) -> tuple[Any, ...]:
        (first, second)[index].update({"own": index})
        return sessions[index].id, sessions[index].name, (first, second)[index].lr

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = {*on_ranks(2, read)}
        assert found[0] is not None
        sessions[0].config.update({"steps": 7})
        eventually(lambda: second.get("steps") == 7)
    assert dict(second) == {"lr": 0.0, "steps": 7, "own": 1}


def test_a_rank_reads_its_given_config_until_there_is_a_store(open_rank: Open, meeting: Meeting) -> None:
    with warnings.catch_warnings(record=True) as caught:  # another thread may find the store, and compare, at any time
        warnings.simplefilter("always")
        with mock.patch.object(meeting, "store_of", return_value=None):  # before the process group
            first, second = (open_rank(TWO[rank], {"lr": 0.1 * (rank + 1)}) for rank in range(2))
            assert second.config.lr == 0.2
        first.config.update({"steps": 7})
        assert reads(second, {"lr": 0.1, "steps": 7})
    texts = [str(warning.message) for warning in caught]
    assert ["the job has no store yet" in text for text in texts].count(True) == 1
    assert ["were given different configs" in text for text in texts].count(True) == 1


def test_the_config_stays_readable_and_writable_if_the_store_is_gone(job: Job, meeting: Meeting) -> None:
    outage = meeting.outage()
    first, second = job(TWO, alike({"lr": 0.1}))
    assert second.config.lr == 0.1
    outage.begin()
    time.sleep(2 * HEARTBEAT)
    first.config.update({"steps": 7})
    second.config.update({"own": 1})
    assert (dict(first.config), dict(second.config)) == ({"lr": 0.1, "steps": 7}, {"lr": 0.1, "own": 1})


@pytest.mark.parametrize("run_mode", ["auto", "new"])
def test_a_fork_requests_nothing_from_the_store(job: Job, run_mode: str) -> None:
    sessions = job(TWO, alike({"lr": 0.1}), run_mode=run_mode)
    asked_by: list[threading.Thread] = []

    def noted(ask: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *key: (asked_by.append(threading.current_thread()), ask(*key))[1]  # type: ignore[func-returns-value]

    for session in sessions:
        connection = connection_of(session)
        connection.try_get = noted(connection.try_get)
    time.sleep(2 * HEARTBEAT)
    for session in sessions:
        registry.shutdowns[session].relay.prepare_fork()
    assert threading.current_thread() not in asked_by


def test_the_config_stays_readable_after_the_end_without_requests(job: Job) -> None:
    first, second = job(TWO, alike({"lr": 0.1}), run_mode="shared")
    second.finish(1)
    first.config.update({"steps": 7})
    sync_of(second).refresh(at_once=True)
    assert dict(second.run.config) == {"lr": 0.1}
    first.finish(1)
    assert dict(first.config) == {"lr": 0.1, "steps": 7}
    (late,) = job(TWO[1:], {0: {"lr": 0.2}}, limits={"join_timeout": 60.0}, reduce=None, number=2)
    late.finish(1)
    assert dict(late.config) == {"lr": 0.2}, "it has read none before"


# --- when a thread polls: each poll is a request to the store ---------------------------------------------------------


class Rank(ConfigSync):
    """A rank's refreshes and polls, on a simulated clock."""

    def __init__(self, heartbeat: float, patch: pytest.MonkeyPatch) -> None:
        super().__init__(Options(limits=Limits(heartbeat=heartbeat)), TWO[1], None, {})
        self.now = 100.0
        self.refreshes: list[float] = []
        self.polls: list[float] = []
        self.failure: Exception | None = None
        patch.setattr(sync, "time", SimpleNamespace(monotonic=lambda: self.now))

    def update(self, polls: bool) -> None:
        self.refreshes.append(self.now - 100.0)
        if polls:
            self.polls.append(self.now - 100.0)
            if self.failure is not None:
                raise self.failure

    def idle(self, seconds: float, published: float, every: float = 1.0) -> None:
        """Run rounds without messages."""
        for _ in range(round(seconds / every)):
            self.in_background(published)
            self.now += every


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(1.0, monkeypatch)


def test_a_rank_without_reports_of_news_polls_seldom_and_else_at_once(rank: Rank) -> None:
    rank.idle(30, published=0.0)
    assert rank.polls == [0, 10, 20]
    assert rank.refreshes == list(range(30))
    rank.now += 0.25  # not at the time of a heartbeat
    before = len(rank.refreshes)
    rank.idle(12, published=1.0, every=0.125)  # rounds in quick succession
    assert rank.polls[3:] == [30.25, 40.25]
    assert len(rank.refreshes) == before + 12


def test_a_reader_polls_once_per_heartbeat_whatever_the_thread_does(rank: Rank) -> None:
    rank.idle(16, published=0.0)
    before = len(rank.polls)
    for _ in range(8):
        rank.refresh()
        rank.now += 0.5
    assert rank.polls[before:] == [16, 17, 18, 19]


def test_an_error_of_the_config_does_not_end_the_thread(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    rank.failure = ValueError("broken")
    rank.idle(3, published=1.0)
    rank.failure = None
    rank.idle(2, published=2.0)
    assert rank.refreshes == [0, 1, 2, 3, 4]
    (message,) = caplog.messages
    assert message == "dist_wandb: rank 1 could not bring its config up to date"


def test_a_report_that_comes_while_another_thread_writes_is_not_lost(rank: Rank) -> None:
    """The thread whose rounds other ranks wait for does not wait for it."""
    rank.idle(25, published=0.0)
    has_begun, is_over = threading.Event(), threading.Event()

    def write() -> None:
        with rank.undisturbed():  # which polls before and after it
            has_begun.set()
            is_over.wait(60)

    writing = threading.Thread(target=write)
    writing.start()
    assert has_begun.wait(60)
    before = len(rank.polls)
    rank.idle(1, published=1.0)
    assert len(rank.polls) == before
    is_over.set()
    writing.join()
    rank.idle(1, published=1.0)
    assert rank.polls[before:] == [26, 26]
