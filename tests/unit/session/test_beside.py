"""Calls on a session's run that bypass the session: its own `log`, ``wandb.log``, `define_metric`."""

from __future__ import annotations

from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import wandb
from fakes import TWO, FakeWandb, Job, on_ranks

import dist_wandb
from dist_wandb.runs import interception, wandb_private
from dist_wandb.runs.interception import intercept, original
from dist_wandb.session import opener
from dist_wandb.settings.options import Options

OURS = {"step_metric": "global_step", "step_sync": False}


@pytest.fixture
def alone(fake_wandb: FakeWandb) -> FakeWandb:
    """A world of one in which wandb's module functions work."""
    fake_wandb.sets_globals = True
    return fake_wandb


def test_rows_of_wandb_log_pass_through_the_session(alone: FakeWandb) -> None:
    run, unchanged = dist_wandb.init(), {"loss": 2.0}
    wandb.log({"loss": 1.0})
    run.log(MappingProxyType(unchanged))
    run.run.log({"loss": 3.0})
    wandb.run.log(data={"loss": 4.0}, commit=False)  # type: ignore[union-attr]
    run.log({"more": 6.0}, None, False)  # by position as in wandb: `commit`
    wandb.log({"acc": 0.5})
    wandb.log({"loss": 5.0}, 30)
    assert run.flush()
    assert unchanged == {"loss": 2.0}
    assert alone.runs[0].logged == [
        ({"loss": 1.0, "global_step": 0}, {}),
        ({"loss": 2.0, "global_step": 1}, {}),
        ({"loss": 3.0, "global_step": 2}, {}),
        ({"loss": 4.0, "more": 6.0, "acc": 0.5, "global_step": 3}, {}),
        ({"loss": 5.0, "global_step": 30}, {}),
    ]


def test_finish_restores_the_functions_of_wandb(alone: FakeWandb) -> None:
    before = wandb.log, wandb.define_metric
    run = dist_wandb.init()
    own = run.run
    assert vars(own).keys() >= {"log", "finish", "define_metric"}
    run.finish()
    assert not vars(own).keys() & {"log", "finish", "define_metric"}
    assert (wandb.log, wandb.define_metric) == before
    with pytest.raises(wandb.Error, match=r"wandb\.init"):
        wandb.log({"loss": 1.0})
    assert alone.runs[0].rows == []


def test_mocks_are_not_intercepted() -> None:
    target = mock.Mock()
    take_back = interception.intercept_methods(target, {"log": pytest.fail, "finish": pytest.fail})
    target.log({"loss": 1.0})
    target.log.assert_called_once_with({"loss": 1.0})
    take_back()


def test_the_replacement_of_a_lost_run_is_intercepted_too(alone: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_private, "tear_down_service", lambda: None)
    run = dist_wandb.init(id="exp")
    wandb.define_metric("val/*", step_metric="epoch")
    by_module, first = wandb.log, alone.runs[0]
    first.log = mock.Mock(side_effect=ConnectionResetError)  # type: ignore[method-assign]
    run.log({"loss": 1.0})
    second = alone.runs[1]
    run.run.log({"loss": 2.0})
    by_module({"loss": 3.0})
    assert [(row["loss"], row["global_step"]) for row in second.rows] == [(1.0, 0), (2.0, 1), (3.0, 2)]
    assert ("val/*", {"step_metric": "epoch"}) in second.defined
    run.finish()
    assert "log" not in vars(second)


def test_rows_of_all_ranks_are_reduced(fake_wandb: FakeWandb, job: Job) -> None:
    sessions = job(TWO)

    def work(rank: int) -> None:
        sessions[rank].run.log({"loss": float(rank)})
        sessions[rank].run.log({"loss": float(rank)}, step=20)
        if rank == 0:
            sessions[rank].run.log({"own": 5})
        for call in ({"a": 1}, {}, {"b": 1}, {"c": 1, "global_step": 20}, {"time/fps": 1, "global_step": 20}):
            sessions[rank].log(call, step=20 if "a" in call else None)
        sessions[rank].finish()

    on_ranks(2, work)
    assert fake_wandb.runs[0].rows == [
        {"loss": 0.5, "global_step": 0},
        {"loss": 0.5, "own": 5, "global_step": 20},  # as in wandb: a call without a step ends the open row
        *({name: 1, "global_step": 20} for name in ("a", "b", "c", "time/fps")),  # or with the axis
    ]


def test_the_users_own_run_on_a_rank_without_a_run_keeps_its_log(job: Job) -> None:
    sessions = job(TWO)
    mine = SimpleNamespace(log=lambda _: None)
    wandb.run, wandb.log = mine, mine.log  # type: ignore[assignment]
    on_ranks(2, lambda rank: sessions[rank].finish())
    assert wandb.log is mine.log


@pytest.fixture
def defined(alone: FakeWandb) -> list[tuple[str, dict[str, Any]]]:
    """The metric definitions that W&B gets after the session's own x axis."""
    dist_wandb.init()
    defined = alone.runs[0].defined
    assert defined == [("global_step", {}), ("*", OURS)]
    defined.clear()
    return defined


def test_names_matching_a_users_pattern_are_defined_before_their_first_row(
    defined: list[tuple[str, dict[str, Any]]], alone: FakeWandb
) -> None:
    wandb.define_metric("val/*", "epoch")
    for _ in range(2):
        wandb.log({"val/acc": 0.5, "val": {"deep": 1}, "loss": 1.0, "epoch": 1})
    assert defined == [("val/*", {"step_metric": "epoch"}), ("val/acc", {"step_metric": "epoch"})]
    alone.runs[0].define_metric("val.*", step_metric="t")
    wandb.log({"val": {"deep": 1}})
    assert defined[2:] == [("val.*", {"step_metric": "t"}), ("val.deep", {"step_metric": "t"})]


@pytest.mark.parametrize("name", ["val/*", "val/acc"])
def test_a_definition_that_wandb_refuses_has_no_effect(name: str, alone: FakeWandb) -> None:
    """It was repeated for each name that it matches, and the rows with these names were lost."""
    session = dist_wandb.init()
    with pytest.raises(wandb.Error, match="summary op: best"):
        wandb.define_metric(name, step_metric="epoch", summary="best")
    session.log({"val/acc": 0.5})
    assert [row["val/acc"] for row in alone.runs[0].rows] == [0.5]


def test_names_logged_before_the_pattern_are_defined_again(defined: list[Any]) -> None:
    wandb.log({"val/acc": 0.5})
    wandb.define_metric("val/*", step_metric="epoch", step_sync=True)
    wandb.define_metric("val/top/*", step_metric="t")
    wandb.log({"val/acc": 0.5, "val/top/5": 1.0})
    assert defined[2:] == [
        ("val/acc", {"step_metric": "epoch", "step_sync": True}),
        ("val/top/5", {"step_metric": "t"}),
    ]


def test_a_second_definition_of_a_pattern_adds_to_the_first(defined: list[Any]) -> None:
    wandb.define_metric("val/*", step_metric="epoch", summary="max")
    wandb.define_metric("val/*", summary="min")
    wandb.log({"val/acc": 0.5})
    assert defined[2:] == [("val/acc", {"step_metric": "epoch", "summary": "max,min"})]
    wandb.define_metric("val/*", summary="min", overwrite=True)
    wandb.log({"val/acc": 0.5})
    assert defined[4:] == [("val/acc", {"summary": "min", "overwrite": True, **OURS})]


def test_an_axis_that_the_pattern_matches_is_defined_as_its_other_names(defined: list[Any]) -> None:
    wandb.define_metric("val/*", step_metric="val/epoch", summary="max")
    wandb.log({"val/acc": 0.5, "val/epoch": 1})
    given = {"step_metric": "val/epoch", "summary": "max"}
    assert defined == [("val/*", given), ("val/acc", given), ("val/epoch", given)]


def test_a_users_pattern_for_all_names_replaces_ours(defined: list[Any]) -> None:
    wandb.log({"loss": 1.0})
    wandb.define_metric("train/global_step")
    wandb.define_metric("*", step_metric="train/global_step", step_sync=True)
    for _ in range(2):
        wandb.log({"loss": 1.0, "acc": 0.5, "train/global_step": 3})
    theirs = {"step_metric": "train/global_step", "step_sync": True}
    assert defined == [("train/global_step", {}), ("*", theirs), ("loss", theirs)]


def test_a_definition_by_name_keeps_our_axis_unless_it_has_its_own(defined: list[Any]) -> None:
    wandb.define_metric("loss", step_metric="epoch")
    wandb.define_metric("acc", summary="max")
    wandb.define_metric("loss", summary="min")
    wandb.define_metric("val/*", summary="min")
    wandb.log({"loss": 1.0, "acc": 0.5, "val/loss": 2.0})
    assert defined == [
        ("loss", {"step_metric": "epoch"}),
        ("acc", {"summary": "max", **OURS}),
        ("loss", {"summary": "min"}),
        ("val/*", {"summary": "min"}),
        ("val/loss", {"summary": "min", **OURS}),
    ]


def test_an_adopted_run_has_only_the_users_axes(alone: FakeWandb) -> None:
    mine: Any = alone.init()
    opened = opener.open_session(Options(), {}, integration="test", adopt=lambda _: mine)
    mine.define_metric("val/*", step_metric="epoch")
    opened.log({"val/acc": 0.5})
    assert mine.defined == [("val/*", {"step_metric": "epoch"})]
    assert mine.rows == [{"val/acc": 0.5, "global_step": 0}]
    opened.release()
    mine.log({"val/acc": 1.0})
    assert mine.rows[1:] == [{"val/acc": 1.0}]


class Thing:
    def say(self, word: str) -> str:
        """Say it."""
        return f"thing {word}"


def test_the_last_handler_is_called_and_handlers_may_be_removed_in_any_order() -> None:
    thing = Thing()
    first = intercept(thing, "say", lambda say, word: say(f"first {word}"))
    second = intercept(thing, "say", lambda say, word: say(f"second {word}"))
    kept = thing.say
    assert kept("a") == "thing second a"
    assert original(thing, "say")("a") == "thing a"
    assert kept.__doc__ == "Say it."
    first()
    first()
    assert thing.say("a") == "thing second a"
    second()
    assert thing.say("a") == kept("a") == original(thing, "say")("a") == "thing a"
    assert vars(thing) == {}


def test_wrapping_an_intercepted_method_causes_no_recursion(alone: FakeWandb) -> None:
    run, seen = dist_wandb.init(), []
    covered = run.run.log

    def wrapper(row: dict[str, Any]) -> None:
        seen.append(row)
        covered(row)

    run.run.log = wrapper  # type: ignore[method-assign]
    run.log({"loss": 1.0})
    run.run.log({"loss": 2.0})
    assert alone.runs[0].rows == [{"loss": 1.0, "global_step": 0}, {"loss": 2.0, "global_step": 1}]
    assert seen == [alone.runs[0].rows[0], {"loss": 2.0}, alone.runs[0].rows[1]]
    run.finish()
    assert vars(alone.runs[0])["log"] is wrapper


@pytest.mark.parametrize("last", [31.0, {"c": 2.0}])
def test_a_name_has_its_last_value_in_a_row_of_several_calls(alone: FakeWandb, last: Any) -> None:
    """An earlier mapping replaced the number that was logged last."""
    session = dist_wandb.init()
    for value in (5.0, {"b": 1.0}, 7.0, last):
        session.log({"a": value}, step=0)
    session.log({"a": 9.0}, step=1)
    assert alone.runs[0].rows[0]["a"] == last
