"""The tracker in place of Accelerate's own: the names under which it is found, and the interface that both share."""

from __future__ import annotations

import inspect
import re
import warnings
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from accelerate import PartialState
from accelerate import accelerator as accelerators
from accelerate.tracking import GeneralTracker, WandBTracker
from accelerate.utils import LoggerType
from accelerate_state import Recorder, accelerator_with, look_like, quick, reset
from fakes import FakeWandb

from dist_wandb import DistWandbTracker, UsageError
from dist_wandb.accelerate import wrapping
from dist_wandb.errors import ConfigurationError
from dist_wandb.runs.null_run import NullRun
from dist_wandb.session.session import Session
from dist_wandb.settings.options import Limits

pytestmark = pytest.mark.usefixtures("fresh_state")


# --- interface of the stock tracker -----------------------------------------------------------------------------------


def test_every_public_name_and_parameter_of_the_stock_tracker_is_available(fake_wandb: FakeWandb) -> None:
    PartialState(cpu=True)
    stock, ours = WandBTracker("digits", tags=["a"]), DistWandbTracker("digits", tags=["a"])
    if hasattr(stock, "start"):
        stock.start()
    ours.start()
    public = {name for name in dir(stock) if not name.startswith("_")}
    assert public - set(dir(ours)) == set()
    for name in ("store_init_configuration", "log", "log_images", "log_table", "finish"):
        theirs = list(inspect.signature(getattr(WandBTracker, name)).parameters.values())
        mine = list(inspect.signature(getattr(DistWandbTracker, name)).parameters.values())
        shared = [p for p in mine if p.name not in ("gather", "limit")]  # only our tracker has these, as keywords
        assert [(p.name, p.kind, p.default) for p in shared] == [(p.name, p.kind, p.default) for p in theirs], name
    assert (ours.run_name, ours.init_kwargs) == (stock.run_name, {"tags": ["a"]})
    runs: list[Any] = fake_wandb.runs
    assert ours.run is ours.tracker is runs[-1]


def test_run_name_sets_the_project_as_in_the_stock_tracker(fake_wandb: FakeWandb) -> None:
    tracker = DistWandbTracker(run_name="digits")
    tracker.start()
    assert fake_wandb.arguments == [{"project": "digits"}]
    assert DistWandbTracker("digits", run_name="digits").run_name == "digits"
    with pytest.raises(ConfigurationError, match="project='a' and run_name='b', which both name the W&B project"):
        DistWandbTracker("a", run_name="b")


def test_the_constructor_does_not_initialise_accelerates_state(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = DistWandbTracker("digits")
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "true")  # the state reads it once
    assert accelerator_with(tracker).state.debug


def test_the_run_can_be_read_after_the_end(fake_wandb: FakeWandb) -> None:
    accelerator = accelerator_with(DistWandbTracker())
    accelerator.init_trackers("digits")
    assert repr(accelerator.trackers[0]).startswith("<dist_wandb.DistWandbTracker <dist_wandb.Session ")
    accelerator.end_training()
    assert repr(accelerator.trackers[0]) == "<dist_wandb.DistWandbTracker without an open session>"
    assert accelerator.trackers[0].run is accelerator.get_tracker("wandb", unwrap=True) is fake_wandb.runs[0]
    with pytest.raises(ConfigurationError, match="is not started, or finished already") as raised:
        accelerator.log({"loss": 0.5})
    assert isinstance(raised.value, UsageError), "scripts catch wandb's error"


def test_arguments_of_the_stock_tracker_are_passed_to_wandb(fake_wandb: FakeWandb) -> None:
    for log_with in (DistWandbTracker(), "dist_wandb", "wandb"):
        accelerator = accelerator_with(log_with)
        config = None if log_with == "wandb" else {"lr": 0.1}  # the stock tracker needs wandb.config
        accelerator.init_trackers("digits", config, {"wandb": {"tags": ["a"]}, "tensorboard": {"flush_secs": 1}})
        accelerator.log({"loss": 0.1, "text": "a", "nested": {"b": 1}}, step=0)
        accelerator.log({"loss": 0.2}, step=1, log_kwargs={"wandb": {"commit": True}})
        accelerator.log({"late": 0.3}, step=1)
        accelerator.get_tracker("wandb").log_images({}, step=1)
        if config is not None:
            accelerator.get_tracker("wandb").store_init_configuration({"lr": 0.2, "seed": 1})
        accelerator.end_training()
        reset()
    ours, named, stock = fake_wandb.runs
    assert ours.config == named.config == {"lr": 0.2, "seed": 1}
    assert (
        ours.rows
        == named.rows
        == [{**row, "global_step": step} for row, step in zip(stock.rows, (0, 1, 1), strict=True)]
    )
    assert [{**given, "config": None} for given in fake_wandb.arguments] == [
        {"project": "digits", "tags": ["a"], "config": None}
    ] * 3


@dataclass
class Settings:
    lr: float = 0.1


@pytest.mark.parametrize("config", [Settings(), Namespace(lr=0.1), SimpleNamespace(lr=0.1), {"lr": 0.1}])
def test_a_config_may_be_any_object_that_wandb_takes(config: Any, fake_wandb: FakeWandb) -> None:
    accelerator = accelerator_with(DistWandbTracker())
    accelerator.init_trackers("digits", config=config)
    assert fake_wandb.runs[0].config == {"lr": 0.1}
    accelerator.end_training()


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_wandb")
@pytest.mark.parametrize("make", [DistWandbTracker, lambda: "dist_wandb", lambda: [Recorder(), "dist_wandb"]])
def test_as_a_replacement_it_is_found_by_the_stock_trackers_name_and_class(make: Callable[[], Any]) -> None:
    accelerator = accelerator_with(make())
    accelerator.init_trackers("digits")
    tracker = next(tracker for tracker in accelerator.trackers if isinstance(tracker, DistWandbTracker))
    assert isinstance(tracker, WandBTracker), "trainers also choose the tracker by its class"
    name = tracker.name
    assert name == "wandb"
    assert name == "dist_wandb" == DistWandbTracker.name
    assert name in ("tensorboard", "wandb")
    assert name not in ("tensorboard", "dist")
    assert not name != "wandb"  # noqa: SIM202  # this operator is meant
    assert all(name != other for other in ("tensorboard", 1))
    assert (f"{name}", {name: 1}) == ("dist_wandb", {"dist_wandb": 1})


def test_together_with_the_stock_tracker_each_has_its_own_name_and_arguments(fake_wandb: FakeWandb) -> None:
    accelerator = accelerator_with([DistWandbTracker(), "wandb"])
    accelerator.init_trackers("digits", init_kwargs={"wandb": {"tags": ["a"]}})
    assert fake_wandb.arguments == [{"project": "digits"}, {"project": "digits", "tags": ["a"]}]
    assert [str(tracker.name) for tracker in accelerator.trackers if tracker.name == "wandb"] == ["wandb"]
    assert isinstance(accelerator.get_tracker("wandb"), WandBTracker)
    assert isinstance(accelerator.get_tracker("dist_wandb"), DistWandbTracker)


# --- lists and "all" --------------------------------------------------------------------------------------------------


def kinds(log_with: Any) -> list[Any]:
    return [held if isinstance(held, GeneralTracker) else str(held) for held in accelerator_with(log_with).log_with]


def test_all_selects_this_tracker_instead_of_accelerates_own() -> None:
    for requested in ("all", LoggerType.ALL, ["all"], ["all", "wandb"]):
        found = kinds(requested)
        assert ("dist_wandb" in found, "wandb" in found, len(found)) == (True, False, len(set(found)))
    accelerators.filter_trackers = accelerators.filter_trackers.__wrapped__
    assert "wandb" in kinds("all")  # without ours in the list


def test_all_with_an_instance_selects_that_instance() -> None:
    tracker, other = DistWandbTracker(), Recorder()
    found = kinds(["all", tracker, other])
    assert [held for held in found if held in (tracker, other)] == [tracker, other]
    assert not {"wandb", "dist_wandb"} & {held for held in found if isinstance(held, str)}


@pytest.mark.parametrize("requested", ["wandb", ["wandb"], None, [], LoggerType.WANDB])
def test_values_without_this_tracker_are_resolved_as_before(requested: Any) -> None:
    assert accelerators.filter_trackers(requested) == accelerators.filter_trackers.__wrapped__(requested)


@pytest.mark.parametrize("requested", ["nothing", ["dist_wandb", "nothing"]])
def test_an_unknown_name_is_refused_as_before(requested: Any) -> None:
    with pytest.raises(ValueError, match="Unsupported logging capability: nothing"):
        accelerator_with(requested)


@pytest.mark.parametrize("requested", [DistWandbTracker, ["tensorboard", DistWandbTracker]])
def test_a_class_in_place_of_a_tracker_is_refused_with_the_line_to_write(requested: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=re.escape("Write DistWandbTracker(), for example Accelerator(log_with")
    ):
        accelerator_with(requested)


def test_an_accelerate_with_another_signature_is_not_patched() -> None:
    def other(log_with: Any, something_new: Any) -> list[Any]:
        return [log_with, something_new]

    accelerators.filter_trackers = other
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Accelerate warns about a name that is registered twice
        wrapping.register(DistWandbTracker)
    assert accelerators.filter_trackers is other


# --- repeated initialisation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_name", [False, True], ids=["by instance", "by name"])
def test_after_a_second_init_trackers_the_run_continues_and_logs_once(fake_wandb: FakeWandb, by_name: bool) -> None:
    other = Recorder()
    accelerator = accelerator_with([other, "dist_wandb" if by_name else DistWandbTracker()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for lr in (0.1, 0.2):
            accelerator.init_trackers("digits", {"lr": lr})
    accelerator.log({"loss": 0.5})
    (run,) = fake_wandb.runs
    assert (run.config, run.rows) == ({"lr": 0.2}, [{"loss": 0.5, "global_step": 0}])
    assert sum(call[0] == "log" for call in other.calls) == 2  # other trackers are called as before
    with pytest.warns(
        UserWarning, match=r"again on rank 0 with another 'project', 'tags', but .*finish\(\) on all ranks"
    ):
        accelerator.init_trackers("letters", {"lr": 0.2}, {"dist_wandb": {"tags": ["a"]}})
    accelerator.end_training()
    assert [one.exit_codes for one in fake_wandb.runs] == [[None]]


def test_accelerators_in_a_loop_without_end_training_have_one_run(
    fake_wandb: FakeWandb, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with Accelerate's own tracker, and wandb 0.31, in one process."""
    for number in (1, 2, 3):
        accelerator = accelerator_with(DistWandbTracker())
        accelerator.init_trackers("digits", {"fold": number}, {"dist_wandb": {"name": f"fold-{number}"}})
        accelerator.log({"number": number})
    accelerator.end_training()
    (run,) = fake_wandb.runs
    assert ([row["number"] for row in run.rows], run.config, run.exit_codes) == ([1, 2, 3], {"fold": 3}, [None])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "while the run" in line]
    assert "init_trackers was called at test_accelerate_drop_in.py:" in line
    assert "this call but config have no effect. For another run, call tracker.finish() on all ranks first" in line


# --- on other ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["never used, guarded", "never used", "without logs, guarded", "without logs"])
def test_a_rank_skips_sessions_without_it_and_takes_part_in_the_end(
    open_main: Callable[..., Session], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    look_like(monkeypatch, rank=1)
    first, second = accelerator_with(quick()), accelerator_with(quick())
    main = open_main(number=1)
    is_used = way.startswith("without logs")
    if not is_used:
        main.finish()
    else:
        first.get_tracker("wandb").finish()
    open_main(number=2)
    if is_used:
        first.get_tracker("wandb").finish()  # without effect
        assert isinstance(first.get_tracker("wandb").tracker, NullRun)
    if not way.endswith("guarded"):
        second.init_trackers("digits")
    second.log({"loss": 0.5})
    assert second.get_tracker("dist_wandb").session.id == "id-2"


@pytest.mark.usefixtures("fake_wandb")
@pytest.mark.parametrize("kind", ["default", "error"])
def test_a_rank_whose_job_has_ended_can_log_and_end_despite_warnings_as_errors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: Literal["default", "error"]
) -> None:
    look_like(monkeypatch, rank=1)
    accelerator = accelerator_with(quick())  # there is no store
    accelerator.log({"loss": 0.5})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(kind)
        accelerator.end_training()
    given = caplog.text if kind == "error" else str(caught[0].message)
    assert "Rank 1 logged 1 rows, but the main process has not called" in given


def test_early_rows_of_a_tracker_by_name_are_kept_when_it_gets_its_arguments(
    open_main: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    look_like(monkeypatch, rank=1)
    accelerator = accelerator_with("dist_wandb")
    accelerator.log({"loss": 0.5}, step=3)
    early = accelerator.get_tracker("dist_wandb")
    assert list(early.late_join.rows)
    open_main(number=1)
    limits = {"reduce": None, "limits": Limits(join_timeout=30.0, finish_timeout=0.2)}
    accelerator.init_trackers("digits", init_kwargs={"dist_wandb": limits})
    tracker = accelerator.get_tracker("dist_wandb")
    assert tracker is not early
    assert accelerator.log_with == [tracker]
    assert not list(early.late_join.rows)


def test_a_rank_ahead_of_the_main_process_does_not_join_the_run_of_an_earlier_turn(
    open_main: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    look_like(monkeypatch, rank=1)
    first, second = accelerator_with(DistWandbTracker(limits=Limits(join_timeout=0.3))), accelerator_with(quick())
    first.log({"loss": 0.5})
    with pytest.warns(UserWarning, match="Rank 1 logged 1 rows, but the main process has not called"):
        first.get_tracker("dist_wandb").finish()
    open_main(number=1)
    open_main(number=2)
    second.log({"loss": 0.5})
    assert second.get_tracker("dist_wandb").session.id == "id-2"


@pytest.mark.parametrize("ends", [True, False])
def test_a_rank_goes_on_with_the_session_of_an_earlier_tracker(
    open_main: Callable[..., Session], monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """Unless the main process, which alone calls `init_trackers` and `end_training`, has ended it."""
    look_like(monkeypatch, rank=1)
    first, second = accelerator_with(quick()), accelerator_with(quick())
    main = open_main(number=1)
    first.log({"loss": 0.5})
    session = first.get_tracker("dist_wandb").session
    if ends:
        main.finish()
        open_main(number=2)
    second.log({"loss": 0.5})
    found = second.get_tracker("dist_wandb").session
    assert (found is session, found.id) == ((False, "id-2") if ends else (True, "id-1"))
