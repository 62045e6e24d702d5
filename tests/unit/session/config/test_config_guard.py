"""The guarded config of a run: the run's own object, and values that W&B cannot store."""

from __future__ import annotations

import warnings
from argparse import Namespace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import wandb
from config_jobs import LOOP, Nameless, Open, alike, reads
from fakes import TWO, FakeWandb, Job

from dist_wandb.job.topology import Topology


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
TAKEN = {"path": (Path("a"), "a"), "set": ({1}, [1]), "one": (1.5, 1.5), "huge": (10**5000, 10**5000)}


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
    given = {name: value for name, (value, _) in TAKEN.items()}
    del given["huge"]  # too large for Python to write as text
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
