"""The tracker in one process: which arguments count, and what the wrapping of `Accelerator` does and does not do."""

from __future__ import annotations

import re
import threading
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import accelerate
import numpy as np
import pytest
from accelerate import Accelerator, PartialState
from accelerate.tracking import GeneralTracker
from accelerate_state import QUICK, Recorder, accelerator_with, look_like, quick
from fakes import FakeWandb
from processes import run_python
from torchmetrics import MeanMetric

from dist_wandb import DistWandbTracker, get_run
from dist_wandb.errors import ConfigurationError, UnsupportedVersionError
from dist_wandb.job.job_store import JobStore
from dist_wandb.job.timed_caller import settle
from dist_wandb.session.session import Session
from dist_wandb.settings.options import Limits, Options

WRAPPED = ("init_trackers", "log", "get_tracker", "end_training")

pytestmark = pytest.mark.usefixtures("fresh_state")


@pytest.fixture
def off_main(fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001  # must run first
    """Make this process look like the second of two, without a process group."""
    look_like(monkeypatch, rank=1)


@pytest.fixture
def unwrapped(fresh_state: None) -> None:  # noqa: ARG001  # must run first
    """Restore `Accelerator` to its state before dist_wandb was imported, for one test."""
    for name in WRAPPED:
        setattr(Accelerator, name, getattr(Accelerator, name).__wrapped__)


# --- the wrapping -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unwrapped")
def test_the_first_tracker_wraps_and_further_ones_and_those_with_wrap_false_do_not() -> None:
    before = [getattr(Accelerator, name) for name in WRAPPED]
    DistWandbTracker(wrap=False)
    assert [getattr(Accelerator, name) for name in WRAPPED] == before
    DistWandbTracker()
    once = [getattr(Accelerator, name) for name in WRAPPED]
    assert [method.__wrapped__ for method in once] == before
    DistWandbTracker()
    assert [getattr(Accelerator, name) for name in WRAPPED] == once


@pytest.mark.parametrize("is_missing", [False, True])
@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.usefixtures("unwrapped")
def test_a_changed_or_missing_method_is_refused_with_version_and_workaround(
    fake_wandb: FakeWandb, name: str, is_missing: bool
) -> None:
    if is_missing:
        delattr(Accelerator, name)
    else:
        setattr(Accelerator, name, lambda self, something_new: None)  # noqa: ARG005  # a signature
    before = dict(vars(Accelerator))
    with pytest.raises(UnsupportedVersionError) as refused:
        DistWandbTracker()
    method = f"Accelerator.{name} of accelerate {accelerate.__version__}"
    assert str(refused.value).startswith(
        method if is_missing else f"{method} has the parameters ('self', 'something_new')"
    )
    assert "Pass wrap=False and call DistWandbTracker.attach(accelerator) on every rank" in str(refused.value)
    assert dict(vars(Accelerator)) == before
    tracker = DistWandbTracker.attach(accelerator_with(None), "digits")
    tracker.log({"loss": 0.5}, step=1)
    assert tracker.session.flush()
    assert fake_wandb.runs[0].rows == [{"loss": 0.5, "global_step": 1}]


@pytest.mark.parametrize("rank", [0, 1])
def test_another_tracker_is_called_as_before(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    if rank:
        look_like(monkeypatch, rank)
    recorder = Recorder()
    accelerator = accelerator_with(recorder)
    accelerator.init_trackers("digits", config={"lr": 0.1}, init_kwargs={"recorder": {"unused": 1}})
    accelerator.log({"loss": 0.5})
    accelerator.log({"loss": 0.4}, step=3, log_kwargs={"recorder": {"commit": False}})
    accelerator.log(values={"loss": 0.3}, step=4)
    tracker, unwrapped = accelerator.get_tracker("recorder"), accelerator.get_tracker("recorder", unwrap=True)
    accelerator.end_training()
    assert isinstance(tracker, GeneralTracker)
    assert (tracker is recorder) is (unwrapped is recorder.calls) is (rank == 0)
    starts = [("start",)] if hasattr(GeneralTracker, "start") else []  # Accelerate 1.8 and newer
    calls = [
        *starts,
        ("config", {"lr": 0.1}),
        ("log", {"loss": 0.5}, None, {}),
        ("log", {"loss": 0.4}, 3, {"commit": False}),
        ("log", {"loss": 0.3}, 4, {}),
        ("finish",),
    ]
    assert recorder.calls == ([] if rank else calls)
    assert fake_wandb.arguments == []


def test_without_our_tracker_an_accelerator_works_as_before(fake_wandb: FakeWandb) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.init_trackers("digits")
    accelerator.log({"loss": 0.5}, step=1)
    assert accelerator.trackers == []
    assert isinstance(accelerator.get_tracker("dist_wandb"), GeneralTracker)
    accelerator.end_training()
    accelerator = accelerator_with(Recorder())
    accelerator.init_trackers("digits")
    with pytest.raises(ValueError, match="dist_wandb is not an available tracker"):
        accelerator.get_tracker("dist_wandb")
    assert fake_wandb.arguments == []


# --- arguments --------------------------------------------------------------------------------------------------------


def test_arguments_that_cannot_be_honoured_are_refused_by_the_constructor() -> None:
    message = "DistWandbTracker got the argument 'runmode', which wandb.init does not know."
    with pytest.raises(ConfigurationError, match=message):
        DistWandbTracker("digits", runmode="new")  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match=message):
        DistWandbTracker.attach(accelerator_with(None), runmode="new")


@pytest.mark.parametrize(
    ("log_with", "given", "expected"),
    [
        (
            DistWandbTracker,
            {"tags": ["a"], "config": Namespace(lr=0.2, more=1)},
            {"project": "digits", "tags": ["a"], "config": {"lr": 0.1, "more": 1}},
        ),
        (
            lambda: DistWandbTracker("mine", tags=["mine"]),
            {"tags": ["theirs"], "notes": "theirs"},
            {"project": "mine", "tags": ["mine"], "notes": "theirs"},
        ),
        (
            lambda: "dist_wandb",
            {"run_mode": "new", "rank_scope": "worker", "tags": ["a"]},
            {"project": "digits", "tags": ["a"]},
        ),
    ],
    ids=["by instance", "those of the constructor first", "by name"],
)
def test_the_run_has_the_arguments_of_the_constructor_and_of_init_trackers(
    fake_wandb: FakeWandb, log_with: Callable[[], Any], given: dict[str, Any], expected: dict[str, Any]
) -> None:
    accelerator = accelerator_with(log_with())
    accelerator.init_trackers("digits", config={"lr": 0.1}, init_kwargs={"dist_wandb": given})
    expected = {"config": {"lr": 0.1}, **expected}  # from the start, for ranks that read them
    assert fake_wandb.arguments == [expected]
    assert fake_wandb.runs[0].config == expected["config"]
    plan = accelerator.get_tracker("dist_wandb").session.plan
    assert (plan.run_mode, plan.rank_scope) == (given.get("run_mode", "auto"), given.get("rank_scope", "global"))


@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "by instance"])
def test_an_unknown_argument_in_init_trackers_is_refused(fake_wandb: FakeWandb, by_name: bool) -> None:
    accelerator = accelerator_with("dist_wandb" if by_name else DistWandbTracker())
    given_to = "DistWandbTracker" if by_name else "init_trackers"
    with pytest.raises(ConfigurationError, match=rf"{given_to} got the argument 'tag', .* Did you mean 'tags'\?"):
        accelerator.init_trackers("digits", init_kwargs={"dist_wandb": {"tag": ["a"]}})
    assert fake_wandb.arguments == []


# --- attach -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("something", [None, "accelerator", Accelerator, PartialState])
def test_attach_to_something_other_than_an_accelerator_is_refused(something: Any) -> None:
    message = f"attach was given {type(something).__name__}, not an accelerate.Accelerator. Pass the accelerator"
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        DistWandbTracker.attach(something)


@pytest.mark.usefixtures("unwrapped")
def test_attach_starts_a_tracker_without_wrapping_accelerate(fake_wandb: FakeWandb) -> None:
    methods = [getattr(Accelerator, name) for name in WRAPPED]
    accelerator = accelerator_with(None)
    tracker = DistWandbTracker.attach(accelerator, "digits", config={"lr": 0.1}, tags=["a"], run_mode="shared")
    assert DistWandbTracker.attach(accelerator) is tracker
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.end_training()
    assert fake_wandb.arguments == [{"project": "digits", "tags": ["a"], "config": {"lr": 0.1}}]
    (run,) = fake_wandb.runs
    assert (run.config, run.rows, run.exit_codes) == ({"lr": 0.1}, [{"loss": 0.5, "global_step": 1}], [None])
    assert accelerator.get_tracker("wandb") is accelerator.get_tracker("dist_wandb") is tracker
    assert [getattr(Accelerator, name) for name in WRAPPED] == methods


def test_attach_uses_an_existing_tracker(fake_wandb: FakeWandb) -> None:
    tracker = DistWandbTracker("digits", wrap=False)
    accelerator = accelerator_with(tracker)
    accelerator.init_trackers("theirs")
    assert DistWandbTracker.attach(accelerator) is tracker
    assert accelerator.trackers == [tracker]
    assert len(fake_wandb.runs) == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"project": "digits"}, "project"), ({"run_mode": "new", "tags": ["a"]}, "run_mode, tags")],
)
def test_attach_refuses_arguments_if_a_tracker_exists(arguments: dict[str, Any], named: str) -> None:
    accelerator = accelerator_with(DistWandbTracker())
    with pytest.raises(ConfigurationError, match=f"attach was given {named}, but the accelerator already has a"):
        DistWandbTracker.attach(accelerator, **arguments)


@pytest.mark.parametrize(
    ("variables", "warns"),
    [({}, 0), ({"RANK": "0", "WORLD_SIZE": "1"}, 0), ({"RANK": "3"}, 0), ({"RANK": "1", "WORLD_SIZE": "2"}, 1)],
    ids=["none", "1", "stale", "2"],
)
@pytest.mark.usefixtures("fake_wandb")
def test_separate_worlds_of_accelerate_under_a_launcher_cause_a_warning(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, variables: dict[str, str], warns: int
) -> None:
    tracker = DistWandbTracker()
    accelerator_with(tracker)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    tracker.start()
    found = re.compile(r"The launcher started 2 processes \(WORLD_SIZE .*Accelerator\(cpu=True\)")
    assert [bool(found.search(str(warning.message))) for warning in recwarn] == [True] * warns


# --- off the main process ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("off_main")
def test_off_the_main_process_a_tracker_with_wrap_false_is_not_called(fake_wandb: FakeWandb) -> None:
    tracker = DistWandbTracker(wrap=False)
    accelerator = accelerator_with(tracker)
    accelerator.init_trackers("digits")
    accelerator.log({"loss": 0.5})
    assert not get_run()
    assert DistWandbTracker.attach(accelerator) is tracker
    assert get_run() is tracker.session
    assert fake_wandb.arguments == []


@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "by instance"])
@pytest.mark.usefixtures("off_main")
def test_off_the_main_process_init_trackers_starts_the_tracker(
    fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, by_name: bool
) -> None:
    log_with = "dist_wandb" if by_name else DistWandbTracker(run_mode="new")
    init_kwargs = {"tags": ["a"], "run_mode": "new"} if by_name else {"tags": ["a"]}
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-1")  # names the job, so no store is needed
    accelerator = accelerator_with(log_with)
    accelerator.init_trackers("digits", config={"lr": 0.1}, init_kwargs={"dist_wandb": init_kwargs})
    (arguments,) = fake_wandb.arguments
    assert (arguments["project"], arguments["tags"]) == ("digits", ["a"])
    assert arguments["id"].endswith("-rank-1")
    assert fake_wandb.runs[0].config == {"lr": 0.1}


@pytest.mark.usefixtures("off_main")
def test_rows_logged_before_the_main_process_started_are_written_later_with_the_values_of_their_call(
    fake_wandb: FakeWandb, open_main: Callable[..., Session]
) -> None:
    accelerator, number, metric = accelerator_with(DistWandbTracker()), np.array([1.0]), MeanMetric()
    metric.update(1.0)
    accelerator.log({"number": number, "in": {"list": [number]}, "metric": metric})
    number[0] = 9.0
    metric.update(9.0)
    accelerator.log({"loss": 0.4}, step=7, log_kwargs={"dist_wandb": {"commit": False}})
    assert fake_wandb.arguments == []
    main = open_main(Options("new", limits=Limits(join_timeout=30.0)))
    accelerator.log({"accuracy": 0.3})
    session = accelerator.get_tracker("dist_wandb").session
    assert session.id == f"{main.plan.base_id}-rank-1"
    assert session.flush()
    assert fake_wandb.runs[1].logged == [
        ({"number": 1.0, "in": {"list": [[1.0]]}, "metric": 1.0, "global_step": 0}, {}),
        ({"loss": 0.4, "accuracy": 0.3, "global_step": 7}, {}),
    ]


@pytest.mark.usefixtures("off_main", "fake_wandb")
def test_an_unresponsive_store_does_not_block_log(monkeypatch: pytest.MonkeyPatch) -> None:
    settle(30)  # until threads of earlier tests have ended
    answers, threads = threading.Event(), []

    def find(*_: object) -> None:
        threads.append(threading.current_thread())
        answers.wait(60)

    monkeypatch.setattr(JobStore, "find", find)
    accelerator = accelerator_with(DistWandbTracker(limits=Limits(join_timeout=60.0)))
    for _ in range(20):
        accelerator.log({"loss": 0.5})
    for _ in range(20):
        accelerator.get_tracker("dist_wandb", unwrap=True).log({"loss": 0.5})  # only the first call waits, for a second
    assert not answers.is_set()
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()
    assert len(accelerator.get_tracker("dist_wandb").late_join.rows) == 40
    answers.set()


@pytest.mark.usefixtures("off_main")
def test_early_rows_beyond_the_limit_are_dropped_with_a_warning(
    fake_wandb: FakeWandb, open_main: Callable[..., Session]
) -> None:
    tracker = DistWandbTracker()
    accelerator = accelerator_with(tracker)
    most = tracker.late_join.rows.maxlen
    assert most is not None
    for step in range(most):
        accelerator.log({"loss": 0.5}, step=step)
    with pytest.warns(UserWarning, match=f"Rank 1 logged {most} rows and more"):
        accelerator.log({"loss": 0.5}, step=most)
    open_main(Options("new", limits=Limits(join_timeout=30.0)))
    assert tracker.session
    accelerator.log({"loss": 0.5}, step=most + 1)
    assert tracker.session.flush()
    assert [row["global_step"] for row in fake_wandb.runs[1].rows] == list(range(1, most + 2))


# --- the config -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("off_main")
@pytest.mark.parametrize("is_early", [False, True])
def test_config_and_session_wait_until_the_main_process_has_started(
    open_main: Callable[..., Session], is_early: bool
) -> None:
    tracker = quick()
    config = accelerator_with(tracker).get_tracker("dist_wandb", unwrap=True).config
    if is_early:
        config.update({"own": 1})
        assert config["own"] == 1
    main = threading.Timer(0.2, open_main, [QUICK], {"config": {"lr": 0.1}})
    main.start()
    assert dict(config if is_early else tracker.session.config) == ({"own": 1, "lr": 0.1} if is_early else {"lr": 0.1})
    main.join()
    tracker.finish()
    with pytest.raises(ConfigurationError, match="rank 1 is not started, or finished already"):
        _ = tracker.session


@pytest.mark.usefixtures("off_main")
def test_a_run_that_a_script_has_from_before_the_start_is_that_of_the_session(
    open_main: Callable[..., Session],
) -> None:
    tracker = quick()
    run = accelerator_with(tracker).get_tracker("dist_wandb", unwrap=True)
    assert not run.id
    open_main(QUICK)
    assert tracker.session.step == 0
    run.define_metric("accuracy", summary="max")
    for accuracy in (0.9, 0.5):
        run.log({"accuracy": accuracy})
    run.name = "night"
    assert (run.id, run.step, run.name, tracker.run.name) == (tracker.session.id, 2, "night", "night")
    assert run.summary["accuracy"] == {"max": 0.9}


@pytest.mark.usefixtures("off_main")
def test_what_a_script_does_with_its_run_before_the_start_is_done_with_the_run_of_this_rank(
    fake_wandb: FakeWandb, open_main: Callable[..., Session]
) -> None:
    run = accelerator_with(quick()).get_tracker("dist_wandb", unwrap=True)
    config = run.config
    config.update({"own": 1})
    run.define_metric("val/*", step_metric="epoch")
    run.summary["best"] = 0.5
    run.alert("NaN", text="in the loss")
    open_main(Options("new", limits=Limits(join_timeout=30.0)), config={"lr": 0.1, "own": 0})
    assert dict(config) == {"lr": 0.1, "own": 1}
    config.late = 2
    of_rank: Any = fake_wandb.runs[1]
    assert of_rank.config == {"lr": 0.1, "own": 1, "late": 2}
    assert ("val/*", {"step_metric": "epoch"}) in of_rank.defined
    assert of_rank.summary["best"] == 0.5
    assert [alert[0] for alert in of_rank.alerts] == ["NaN"]


@pytest.mark.usefixtures("off_main", "store")
def test_if_the_main_process_never_starts_there_is_no_session_and_the_config_is_empty() -> None:
    tracker = quick(0.1)
    config = accelerator_with(tracker).get_tracker("dist_wandb", unwrap=True).config
    with pytest.warns(UserWarning, match="main process did not call accelerator.init_trackers within 0.1 s"):
        assert config.get("lr", 7) == 7
    with pytest.raises(ConfigurationError, match="rank 1 is not started"):
        _ = quick(0.1).session


def test_a_process_without_a_session_ends_after_its_query_of_the_store() -> None:
    """A query that returns while the interpreter shuts down would abort the process."""
    script = (
        "import time; from dist_wandb.accelerate import DistWandbTracker; "
        "from dist_wandb.job.timed_caller import BackgroundPoll; "
        "DistWandbTracker(); BackgroundPoll(lambda: time.sleep(1) or print('answered'), 1.0).result()"
    )
    assert "answered" in run_python(script)
