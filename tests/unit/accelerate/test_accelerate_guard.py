"""The tracker in one process: which arguments count, and what the wrapping of `Accelerator` does and does not do."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import accelerate
import pytest
import torch.distributed as dist
import wandb
from accelerate import Accelerator, PartialState
from accelerate.tracking import GeneralTracker
from accelerate_state import accelerator_with, look_like
from processes import wait_until

from dist_wandb import DistWandbTracker, get_run
from dist_wandb.accelerate import wrapping
from dist_wandb.errors import ConfigurationError, UnsupportedVersionError
from dist_wandb.job.job_store import JobStore
from dist_wandb.job.model import Topology
from dist_wandb.job.timed_caller import settle
from dist_wandb.runs.null_run import NullRun
from dist_wandb.session.opener import open_session
from dist_wandb.session.session import Session
from dist_wandb.settings.options import Limits, Options

if TYPE_CHECKING:
    from tests.conftest import FakeWandb

WRAPPED = ("init_trackers", "log", "get_tracker", "end_training")

pytestmark = pytest.mark.usefixtures("fresh_state")


@pytest.fixture
def off_main(fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001  # must run first
    """Make this process look like the second of two, without a process group."""
    look_like(monkeypatch, rank=1)


@pytest.fixture
def unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore `Accelerator` to its state before dist_wandb was imported, for one test."""
    for name in WRAPPED:
        monkeypatch.setattr(Accelerator, name, getattr(Accelerator, name).__wrapped__)
    monkeypatch.delattr(Accelerator, wrapping._MARK)


class Recorder(GeneralTracker):  # type: ignore[misc]  # Accelerate ships no types
    """A tracker that is not ours and records its calls."""

    name = "recorder"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def start(self) -> None:
        self.calls.append(("start",))

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(("config", values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append(("log", values, step, kwargs))

    def finish(self) -> None:
        self.calls.append(("finish",))


# --- the wrapping -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unwrapped")
def test_the_installed_accelerate_has_the_wrapped_methods_with_known_parameters() -> None:
    found = {name: wrapping._parameters(getattr(Accelerator, name)) for name in WRAPPED}
    assert found == {
        "init_trackers": ("self", "project_name", "config", "init_kwargs"),
        "log": ("self", "values", "step", "log_kwargs"),
        "get_tracker": ("self", "name", "unwrap"),
        "end_training": ("self",),
    }
    assert {name for name, _, _ in wrapping._WRAPPED} == set(WRAPPED)


@pytest.mark.usefixtures("unwrapped")
def test_the_first_tracker_wraps_and_further_ones_do_not() -> None:
    before = [getattr(Accelerator, name) for name in WRAPPED]
    DistWandbTracker()
    once = [getattr(Accelerator, name) for name in WRAPPED]
    assert [method.__wrapped__ for method in once] == before
    DistWandbTracker()
    wrapping.wrap_accelerator()
    assert [getattr(Accelerator, name) for name in WRAPPED] == once


@pytest.mark.usefixtures("unwrapped")
def test_a_tracker_with_wrap_false_does_not_wrap() -> None:
    before = [getattr(Accelerator, name) for name in WRAPPED]
    DistWandbTracker(wrap=False)
    assert [getattr(Accelerator, name) for name in WRAPPED] == before


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.usefixtures("unwrapped")
def test_a_changed_signature_is_refused_with_version_and_workaround(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Accelerator, name, lambda self, something_new: None)  # noqa: ARG005  # a signature
    with pytest.raises(UnsupportedVersionError) as refused:
        DistWandbTracker()
    expected = f"Accelerator.{name} of accelerate {accelerate.__version__} has the parameters ('self', 'something_new')"
    assert str(refused.value).startswith(expected)
    assert "Pass wrap=False and call DistWandbTracker.attach(accelerator) on every rank" in str(refused.value)


@pytest.mark.usefixtures("unwrapped")
def test_a_missing_method_is_refused_and_nothing_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Accelerator, "end_training")
    log = Accelerator.log
    with pytest.raises(UnsupportedVersionError, match=re.escape("Accelerator.end_training of accelerate")):
        wrapping.wrap_accelerator()
    assert Accelerator.log is log


@pytest.mark.usefixtures("unwrapped")
def test_an_accelerate_that_cannot_be_wrapped_accepts_an_attached_tracker(
    fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Accelerator, "log", lambda self, something_new: None)  # noqa: ARG005  # a signature
    tracker = DistWandbTracker.attach(accelerator_with(None), "digits")
    tracker.log({"loss": 0.5}, step=1)
    assert tracker.session.flush()
    assert fake_wandb.runs[0].rows == [{"loss": 0.5, "global_step": 1}]


def test_wrapped_methods_keep_their_names_and_documentation() -> None:
    for name in WRAPPED:
        method = getattr(Accelerator, name)
        assert method.__name__ in (name, "execute_on_main_process", "_inner")
        assert method.__doc__ == method.__wrapped__.__doc__


def use_all_wrapped(accelerator: Accelerator) -> list[object]:
    accelerator.init_trackers("digits", config={"lr": 0.1}, init_kwargs={"recorder": {"unused": 1}})
    accelerator.log({"loss": 0.5})
    accelerator.log({"loss": 0.4}, step=3, log_kwargs={"recorder": {"commit": False}})
    accelerator.log(values={"loss": 0.3}, step=4)
    seen = [accelerator.get_tracker("recorder"), accelerator.get_tracker("recorder", unwrap=True)]
    accelerator.end_training()
    return seen


def test_another_tracker_is_called_as_before(fake_wandb: FakeWandb) -> None:
    recorder = Recorder()
    tracker, unwrapped = use_all_wrapped(accelerator_with(recorder))
    assert tracker is recorder
    assert unwrapped is recorder.calls
    starts = [("start",)] if hasattr(GeneralTracker, "start") else []  # Accelerate 1.8 and newer
    assert recorder.calls == [
        *starts,
        ("config", {"lr": 0.1}),
        ("log", {"loss": 0.5}, None, {}),
        ("log", {"loss": 0.4}, 3, {"commit": False}),
        ("log", {"loss": 0.3}, 4, {}),
        ("finish",),
    ]
    assert fake_wandb.arguments == []


@pytest.mark.usefixtures("off_main")
def test_off_the_main_process_another_tracker_is_still_not_called(fake_wandb: FakeWandb) -> None:
    recorder = Recorder()
    tracker, unwrapped = use_all_wrapped(accelerator_with(recorder))
    assert recorder.calls == []
    assert isinstance(tracker, GeneralTracker)
    assert unwrapped is not recorder.calls
    assert fake_wandb.arguments == []


def test_an_accelerator_without_trackers_works_as_before(fake_wandb: FakeWandb) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.init_trackers("digits")
    accelerator.log({"loss": 0.5}, step=1)
    assert accelerator.trackers == []
    assert isinstance(accelerator.get_tracker("dist_wandb"), GeneralTracker)
    accelerator.end_training()
    assert fake_wandb.arguments == []


def test_an_unknown_tracker_is_refused_as_before(fake_wandb: FakeWandb) -> None:
    accelerator = accelerator_with(Recorder())
    accelerator.init_trackers("digits")
    with pytest.raises(ValueError, match="dist_wandb is not an available tracker"):
        accelerator.get_tracker("dist_wandb")
    assert fake_wandb.arguments == []


def test_the_tracker_has_the_class_attributes_that_accelerate_reads() -> None:
    tracker = DistWandbTracker()
    assert (tracker.name, tracker.requires_logging_directory, tracker.main_process_only) == ("dist_wandb", False, False)


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"tag": ["a"]},
            "DistWandbTracker got the argument 'tag', which wandb.init does not know. Did you mean 'tags'",
        ),
        ({"runmode": "new"}, "Did you mean 'run_mode'?"),
        ({"run_mode": "share"}, "run_mode='share' is unknown."),
        ({"rank_scope": "node"}, "rank_scope='node' is unknown."),
        ({"reduce": "avg"}, "reduce='avg' is not a reduction."),
        ({"id": "a/b"}, "id='a/b' given to DistWandbTracker has '/'"),
        ({"id": "a\x1bb"}, "id='a\\x1bb' given to DistWandbTracker has '\\x1b', which cannot be printed"),
        ({"mode": "shared"}, "Pass run_mode='shared'"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused_by_the_constructor(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        DistWandbTracker("digits", **arguments)


def test_init_trackers_reaches_an_instance(fake_wandb: FakeWandb) -> None:
    accelerator = accelerator_with(DistWandbTracker())
    arguments = {"tags": ["a"], "config": {"lr": 0.2, "more": 1}}
    accelerator.init_trackers("digits", config={"lr": 0.1}, init_kwargs={"dist_wandb": arguments})
    both = {"lr": 0.1, "more": 1}  # from the start, for ranks that read them
    assert fake_wandb.arguments == [{"project": "digits", "tags": ["a"], "config": both}]
    assert fake_wandb.runs[0].config == both


def test_arguments_of_the_constructor_take_precedence_over_init_trackers(fake_wandb: FakeWandb) -> None:
    accelerator = accelerator_with(DistWandbTracker("mine", tags=["mine"]))
    accelerator.init_trackers("theirs", init_kwargs={"dist_wandb": {"tags": ["theirs"], "notes": "theirs"}})
    assert fake_wandb.arguments == [{"project": "mine", "tags": ["mine"], "notes": "theirs"}]


def test_a_tracker_by_name_gets_project_and_arguments_from_init_trackers(fake_wandb: FakeWandb) -> None:
    accelerator = accelerator_with("dist_wandb")
    arguments = {"run_mode": "new", "rank_scope": "worker", "tags": ["a"]}
    accelerator.init_trackers("digits", config={"lr": 0.1}, init_kwargs={"dist_wandb": arguments})
    assert fake_wandb.arguments == [{"project": "digits", "tags": ["a"], "config": {"lr": 0.1}}]
    assert fake_wandb.runs[0].config == {"lr": 0.1}
    plan = accelerator.get_tracker("dist_wandb").session.plan
    assert (plan.run_mode, plan.rank_scope) == ("new", "worker")


@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "by instance"])
def test_an_unknown_argument_in_init_trackers_is_refused(fake_wandb: FakeWandb, by_name: bool) -> None:
    accelerator = accelerator_with("dist_wandb" if by_name else DistWandbTracker())
    given_to = "DistWandbTracker" if by_name else "init_trackers"
    with pytest.raises(ConfigurationError, match=rf"{given_to} got the argument 'tag', .* Did you mean 'tags'\?"):
        accelerator.init_trackers("digits", init_kwargs={"dist_wandb": {"tag": ["a"]}})
    assert fake_wandb.arguments == []


def test_together_with_the_stock_tracker_arguments_for_wandb_go_only_to_that_one(fake_wandb: FakeWandb) -> None:
    accelerator = accelerator_with([DistWandbTracker(), "wandb"])
    accelerator.init_trackers("digits", init_kwargs={"wandb": {"tags": ["a"]}})
    assert fake_wandb.arguments == [{"project": "digits"}, {"project": "digits", "tags": ["a"]}]


# --- usage ------------------------------------------------------------------------------------------------------------


def both_ways() -> list[Callable[[], Any]]:
    return [DistWandbTracker, lambda: "dist_wandb"]


@pytest.mark.parametrize("log_with", both_ways(), ids=["by instance", "by name"])
def test_as_a_replacement_the_tracker_gets_arguments_for_wandb(
    fake_wandb: FakeWandb, log_with: Callable[[], Any]
) -> None:
    accelerator = accelerator_with(log_with())
    accelerator.init_trackers("digits", init_kwargs={"wandb": {"tags": ["a"]}, "tensorboard": {"flush_secs": 1}})
    assert fake_wandb.arguments == [{"project": "digits", "tags": ["a"]}]
    accelerator.log({"loss": 0.5}, log_kwargs={"wandb": {"commit": False}})
    accelerator.log({"accuracy": 0.9})
    assert fake_wandb.runs[0].rows == [{"loss": 0.5, "accuracy": 0.9, "global_step": 0}]
    assert accelerator.get_tracker("wandb") is accelerator.get_tracker("dist_wandb")


@pytest.mark.parametrize("log_with", both_ways(), ids=["by instance", "by name"])
def test_the_tracker_works_from_init_trackers_to_end_training(
    fake_wandb: FakeWandb, log_with: Callable[[], Any]
) -> None:
    accelerator = accelerator_with(log_with())
    accelerator.init_trackers("digits")
    accelerator.log({"loss": 0.5}, step=3)
    accelerator.log({"accuracy": 0.9}, log_kwargs={"dist_wandb": {"commit": True}})
    (run,) = fake_wandb.runs
    tracker = accelerator.get_tracker("dist_wandb")
    assert accelerator.get_tracker("dist_wandb", unwrap=True) is tracker.tracker is run
    assert get_run() is tracker.session
    accelerator.end_training()
    assert run.logged == [({"loss": 0.5, "accuracy": 0.9, "global_step": 3}, {})]
    assert run.exit_codes == [None]
    assert not get_run()


def test_images_and_tables_are_logged_as_wandbs(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb, "Image", lambda value: ("image", value))  # the real one needs pillow
    accelerator = accelerator_with(DistWandbTracker())
    accelerator.init_trackers("digits")
    tracker = accelerator.get_tracker("dist_wandb")
    tracker.log_images({"images": ["a", "b"]}, step=1, commit=False)
    tracker.log_table("table", columns=["x", "y"], data=[[1, 2]], step=2, commit=False)
    images, table = fake_wandb.runs[0].rows
    assert [kwargs for _, kwargs in fake_wandb.runs[0].logged] == [{"commit": False}, {}, {"commit": False}]
    assert images == {"images": [("image", "a"), ("image", "b")], "global_step": 1}
    assert isinstance(table["table"], wandb.Table)
    assert (table["table"].columns, table["table"].data, table["global_step"]) == (["x", "y"], [[1, 2]], 2)


def test_a_tracker_that_is_started_twice_opens_one_run(fake_wandb: FakeWandb) -> None:
    tracker = DistWandbTracker("digits")
    tracker.start()
    tracker.start()
    assert len(fake_wandb.runs) == 1


def test_a_tracker_that_is_finished_twice_finishes_once(fake_wandb: FakeWandb) -> None:
    tracker = DistWandbTracker("digits")
    tracker.start()
    tracker.finish()
    tracker.finish()
    assert fake_wandb.runs[0].exit_codes == [None]
    with pytest.raises(ConfigurationError, match="is not started, or finished already"):
        _ = tracker.session


USES: list[Callable[[DistWandbTracker], object]] = [
    lambda tracker: tracker.session,
    lambda tracker: tracker.tracker,
    lambda tracker: tracker.log({"loss": 0.5}),
    lambda tracker: tracker.store_init_configuration({"lr": 0.1}),
]


@pytest.mark.parametrize("use", USES, ids=["session", "tracker", "log", "store_init_configuration"])
def test_a_tracker_that_is_not_started_raises_an_error(use: Callable[[DistWandbTracker], object]) -> None:
    with pytest.raises(ConfigurationError, match="The DistWandbTracker of rank 0 is not started, or finished already"):
        use(DistWandbTracker())


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
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.end_training()
    assert fake_wandb.arguments == [{"project": "digits", "tags": ["a"], "config": {"lr": 0.1}}]
    (run,) = fake_wandb.runs
    assert (run.config, run.rows, run.exit_codes) == ({"lr": 0.1}, [{"loss": 0.5, "global_step": 1}], [None])
    assert accelerator.get_tracker("dist_wandb") is tracker
    assert [getattr(Accelerator, name) for name in WRAPPED] == methods


def test_attach_uses_an_existing_tracker(fake_wandb: FakeWandb) -> None:
    tracker = DistWandbTracker("digits", wrap=False)
    accelerator = accelerator_with(tracker)
    accelerator.init_trackers("theirs")
    assert DistWandbTracker.attach(accelerator) is tracker
    assert accelerator.trackers == [tracker]
    assert len(fake_wandb.runs) == 1


def test_attaching_twice_gives_one_tracker_and_one_run(fake_wandb: FakeWandb) -> None:
    accelerator = accelerator_with(None)
    first = DistWandbTracker.attach(accelerator, "digits")
    assert DistWandbTracker.attach(accelerator) is first
    assert len(fake_wandb.runs) == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"project": "digits"}, "project"), ({"run_mode": "new", "tags": ["a"]}, "run_mode, tags")],
)
def test_attach_refuses_arguments_if_a_tracker_exists(arguments: dict[str, Any], named: str) -> None:
    accelerator = accelerator_with(DistWandbTracker())
    with pytest.raises(ConfigurationError, match=f"attach was given {named}, but the accelerator already has a"):
        DistWandbTracker.attach(accelerator, **arguments)


def test_attach_refuses_an_unknown_argument() -> None:
    with pytest.raises(ConfigurationError, match=r"Did you mean 'tags'\?"):
        DistWandbTracker.attach(accelerator_with(None), tag=["a"])


def launched_with(monkeypatch: pytest.MonkeyPatch, **variables: str) -> DistWandbTracker:
    """Create a tracker in a process that is the only one for Accelerate, with the given variables of a launcher."""
    tracker = DistWandbTracker()
    accelerator_with(tracker)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    return tracker


@pytest.mark.usefixtures("fake_wandb")
def test_separate_worlds_of_accelerate_under_a_launcher_cause_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = launched_with(monkeypatch, RANK="1", WORLD_SIZE="2")
    with pytest.warns(UserWarning, match=r"The launcher started 2 processes \(WORLD_SIZE .*Accelerator\(cpu=True\)"):
        tracker.start()


@pytest.mark.parametrize("variables", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "3"}], ids=["none", "1", "stale"])
@pytest.mark.usefixtures("fake_wandb")
def test_one_process_causes_no_warning(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    tracker = launched_with(monkeypatch, **variables)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker.start()


# --- off the main process ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_name", [False, True], ids=["by instance", "by name"])
@pytest.mark.usefixtures("off_main")
def test_off_the_main_process_accelerate_calls_the_tracker_too(fake_wandb: FakeWandb, by_name: bool) -> None:
    limits = Limits(join_timeout=0.1, finish_timeout=0.5)  # there are no other ranks
    accelerator = accelerator_with("dist_wandb" if by_name else DistWandbTracker(limits=limits))
    init_kwargs = {"dist_wandb": {"limits": limits}} if by_name else {}
    accelerator.init_trackers("digits", config={"lr": 0.1}, init_kwargs=init_kwargs)
    accelerator.log({"loss": 0.5}, step=1)
    tracker = accelerator.get_tracker("dist_wandb")
    assert isinstance(tracker, DistWandbTracker)
    assert isinstance(accelerator.get_tracker("dist_wandb", unwrap=True), NullRun)
    assert (tracker.session.topology.global_rank, tracker.session.topology.world_size) == (1, 2)
    accelerator.end_training()
    assert not get_run()
    assert fake_wandb.arguments == []


@pytest.mark.usefixtures("off_main")
def test_rows_lost_because_the_main_process_never_started_are_reported(fake_wandb: FakeWandb) -> None:
    accelerator = accelerator_with(DistWandbTracker())
    accelerator.log({"loss": 0.5})
    accelerator.log({"loss": 0.4})
    with pytest.warns(UserWarning, match="Rank 1 logged 2 rows, but the main process has not called"):
        accelerator.end_training()
    assert fake_wandb.arguments == []


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


@pytest.fixture
def main_process_at(store: dist.Store) -> Callable[..., Session]:  # noqa: ARG001  # they meet there
    """Open the session of the main process in this process too, with a shared store."""

    def open_on_main(options: Options, config: dict[str, Any] | None = None) -> Session:
        arguments = {} if config is None else {"config": config}
        main = open_session(
            options, arguments, integration="DistWandbTracker", topology=Topology(0, 0, 0, 2, 2, 1), number=1
        )
        main.release()
        return main

    return open_on_main


@pytest.mark.usefixtures("off_main")
def test_rows_logged_before_the_main_process_started_are_written_later(
    fake_wandb: FakeWandb, main_process_at: Callable[..., Session]
) -> None:
    accelerator = accelerator_with(DistWandbTracker())
    accelerator.log({"loss": 0.5})
    accelerator.log({"loss": 0.4}, step=7, log_kwargs={"dist_wandb": {"commit": False}})
    assert fake_wandb.arguments == []
    main = main_process_at(Options("new", limits=Limits(join_timeout=30.0)))
    accelerator.log({"accuracy": 0.3})
    session = accelerator.get_tracker("dist_wandb").session
    assert session.id == f"{main.plan.base_id}-rank-1"
    assert session.flush()
    assert fake_wandb.runs[1].logged == [
        ({"loss": 0.5, "global_step": 0}, {}),
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
def test_log_detects_that_the_main_process_has_started(
    fake_wandb: FakeWandb, main_process_at: Callable[..., Session]
) -> None:
    accelerator = accelerator_with(DistWandbTracker())
    accelerator.log({"loss": 0.0}, step=0)
    main_process_at(Options("new", limits=Limits(join_timeout=30.0)))
    steps = itertools.count(1)

    def logged() -> bool:
        accelerator.log({"loss": 0.5}, step=next(steps))
        return len(fake_wandb.runs) == 2

    wait_until(logged, within=30)
    session = accelerator.get_tracker("dist_wandb").session
    assert session.flush()
    assert [row["global_step"] for row in fake_wandb.runs[1].rows] == list(range(next(steps)))


@pytest.mark.usefixtures("off_main")
def test_early_rows_beyond_the_limit_are_dropped_with_a_warning(
    fake_wandb: FakeWandb, main_process_at: Callable[..., Session]
) -> None:
    tracker = DistWandbTracker()
    accelerator = accelerator_with(tracker)
    most = tracker.late_join.rows.maxlen
    assert most is not None
    for step in range(most):
        accelerator.log({"loss": 0.5}, step=step)
    with pytest.warns(UserWarning, match=f"Rank 1 logged {most} rows and more"):
        accelerator.log({"loss": 0.5}, step=most)
    main_process_at(Options("new", limits=Limits(join_timeout=30.0)))
    assert tracker.session
    accelerator.log({"loss": 0.5}, step=most + 1)
    assert tracker.session.flush()
    assert [row["global_step"] for row in fake_wandb.runs[1].rows] == list(range(1, most + 2))


# --- the config -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("off_main", "fake_wandb")
@pytest.mark.parametrize("way", ["init_trackers", "attach"])
def test_a_rank_without_a_run_reads_the_main_processs_config_despite_its_own(
    main_process_at: Callable[..., Session], way: str
) -> None:
    main_process_at(Options(reduce=None, limits=Limits(join_timeout=30.0)), {"lr": 0.1})
    accelerator = accelerator_with(DistWandbTracker(reduce=None, limits=Limits(join_timeout=30.0)))
    ways: dict[str, Callable[[], object]] = {
        "init_trackers": lambda: accelerator.init_trackers("digits", config={"lr": 0.2}),
        "attach": lambda: DistWandbTracker.attach(accelerator, config={"lr": 0.2}),
    }
    with pytest.warns(UserWarning, match="'lr' is 0.2 on rank 1, but 0.1 on rank 0"):
        ways[way]()
    tracker = accelerator.get_tracker("dist_wandb")
    assert dict(tracker.tracker.config) == dict(tracker.session.config) == {"lr": 0.1}
    tracker.store_init_configuration({"own": 1})
    assert tracker.tracker.config.own == 1


@pytest.mark.usefixtures("off_main")
def test_with_separate_runs_ranks_keep_their_own_config(
    fake_wandb: FakeWandb, main_process_at: Callable[..., Session]
) -> None:
    main_process_at(Options("new", limits=Limits(join_timeout=30.0)), {"lr": 0.1, "more": 1})
    accelerator = accelerator_with(DistWandbTracker(run_mode="new", limits=Limits(join_timeout=30.0)))
    accelerator.init_trackers("digits", config={"lr": 0.2})
    assert fake_wandb.runs[1].config == {"lr": 0.2, "more": 1}


@pytest.mark.usefixtures("off_main", "fake_wandb")
def test_config_waits_until_the_main_process_has_started(
    main_process_at: Callable[..., Session],
) -> None:
    config = (
        accelerator_with(DistWandbTracker(reduce=None, limits=Limits(join_timeout=20.0)))
        .get_tracker("dist_wandb", unwrap=True)
        .config
    )
    config.update({"own": 1})
    assert config["own"] == 1
    main = threading.Timer(0.2, main_process_at, [Options(reduce=None, limits=Limits(join_timeout=30.0)), {"lr": 0.1}])
    main.start()
    assert dict(config) == {"own": 1, "lr": 0.1}
    main.join()


@pytest.mark.usefixtures("off_main", "fake_wandb", "main_process_at")
def test_if_the_main_process_never_starts_the_config_is_empty() -> None:
    config = (
        accelerator_with(DistWandbTracker(reduce=None, limits=Limits(join_timeout=0.1)))
        .get_tracker("dist_wandb", unwrap=True)
        .config
    )
    with pytest.warns(UserWarning, match="main process did not call accelerator.init_trackers within 0.1 s"):
        assert config.get("lr", 7) == 7


@pytest.mark.usefixtures("off_main", "fake_wandb")
def test_session_waits_until_the_main_process_has_started(
    main_process_at: Callable[..., Session],
) -> None:
    tracker = DistWandbTracker(reduce=None, limits=Limits(join_timeout=30.0))
    main = threading.Timer(0.2, main_process_at, [Options(reduce=None, limits=Limits(join_timeout=30.0)), {"lr": 0.1}])
    main.start()
    session = tracker.session
    main.join()
    assert dict(session.config) == {"lr": 0.1}
    tracker.finish()
    with pytest.raises(ConfigurationError, match="rank 1 is not started, or finished already"):
        _ = tracker.session


@pytest.mark.usefixtures("off_main", "fake_wandb", "main_process_at")
def test_if_the_main_process_never_starts_there_is_no_session() -> None:
    with pytest.raises(ConfigurationError, match="rank 1 is not started"):
        _ = DistWandbTracker(reduce=None, limits=Limits(join_timeout=0.1)).session


def test_a_process_without_a_session_ends_after_its_query_of_the_store() -> None:
    """A query that returns while the interpreter shuts down would abort the process."""
    script = (
        "import time; from dist_wandb.accelerate import DistWandbTracker; "
        "from dist_wandb.job.timed_caller import BackgroundPoll; "
        "DistWandbTracker(); BackgroundPoll(lambda: time.sleep(1) or print('answered'), 1.0).result()"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert "answered" in ended.stdout
