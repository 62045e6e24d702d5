"""`DistWandbLogger` on different ranks: media on ranks with a run, several loggers in a process, signals in Fabric."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import wandb
from fakes import FakeRun, FakeWandb
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyExperiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_trainers import as_rank, quiet_trainer

import dist_wandb
from dist_wandb import DistWandbLogger
from dist_wandb.errors import ConfigurationError
from dist_wandb.lightning import session_holder
from dist_wandb.lightning.launching import LaunchState, ScriptIds
from dist_wandb.session import inherited_rank, registry
from dist_wandb.settings.options import Limits

pytestmark = pytest.mark.usefixtures("unhandled_sigterm")

SHORT: dict[str, Any] = {"limits": Limits(join_timeout=0.1, finish_timeout=1.0)}  # for ranks that never join
STEP = "trainer/global_step"


@pytest.fixture(params=[1, 2])
def alone_or_rank_0(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param > 1:
        as_rank(monkeypatch, 0)


@pytest.fixture
def made(new_process: None) -> list[str]:  # noqa: ARG001  # restores wandb's names
    """The created media objects; each of them would be a file."""
    kinds: list[str] = []

    def stand_in(kind: str) -> Callable[..., tuple[str, object]]:
        def make(data: object = None, **_: object) -> tuple[str, object]:
            kinds.append(kind)
            return kind, data

        return make

    for kind in ("Image", "Audio", "Video", "Table"):
        setattr(wandb, kind, stand_in(kind))
    return kinds


NAMES = {"image": "Image", "audio": "Audio", "video": "Video", "table": "Table", "text": "Table"}


# --- media ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "rank", "per_rank", "written"),
    [
        ("auto", 0, "auto", NAMES),
        ("auto", 1, "auto", None),
        ("shared", 0, "auto", NAMES),
        ("shared", 1, "auto", [f"rank-1/{name}" for name in NAMES]),
        ("shared", 1, "im*", ["rank-1/image"]),
        ("new", 1, "auto", NAMES),
    ],
)
def test_media_are_logged_only_on_ranks_with_a_run(
    monkeypatch: pytest.MonkeyPatch,
    fake_wandb: FakeWandb,
    made: list[str],
    mode: Any,
    rank: int,
    per_rank: Any,
    written: Any,
) -> None:
    as_rank(monkeypatch, rank)
    logger = DistWandbLogger(id="exp", run_mode=mode, offline=True, per_rank=per_rank, **SHORT)
    logger.log_image("image", ["a.png"], step=1)
    logger.log_audio("audio", ["a.wav"], step=1)
    logger.log_video("video", ["a.mp4"], step=1)
    logger.log_table("table", columns=["a"], data=[[1]], step=1)
    logger.log_text("text", columns=["a"], data=[["b"]], step=1)
    registry.open_sessions()[0].finish()
    assert made == ([] if written is None else list(NAMES.values())), "a rank without a run writes no files needlessly"
    assert [set(row) for run in fake_wandb.runs for row in run.rows] == [{name, STEP} for name in written or ()]


@pytest.mark.parametrize(
    ("mode", "rank", "watches"), [("auto", 1, False), ("shared", 0, True), ("shared", 1, False), ("new", 1, True)]
)
def test_watched_values_are_logged_by_the_writer_of_plain_names(
    monkeypatch: pytest.MonkeyPatch, fake_wandb: FakeWandb, mode: Any, rank: int, watches: bool
) -> None:
    as_rank(monkeypatch, rank)
    logger = DistWandbLogger(id="exp", run_mode=mode, offline=True, **SHORT)
    watch = mock.Mock()
    _ = logger.experiment
    runs: list[Any] = fake_wandb.runs
    for run in runs:
        run.watch = watch
    module = BoringModel()
    logger.watch(module, log="all", log_freq=7)
    calls = [mock.call(module, log="all", log_freq=7, log_graph=True)]
    assert watch.call_args_list == (calls if watches else [])


@pytest.mark.parametrize(("rank", "lr"), [(0, 0.2), (1, 0.1)])
def test_in_a_shared_run_secondaries_do_not_overwrite_the_primarys_config(
    monkeypatch: pytest.MonkeyPatch, fake_wandb: FakeWandb, rank: int, lr: float
) -> None:
    as_rank(monkeypatch, rank)
    logger = DistWandbLogger(id="exp", run_mode="shared", config={"lr": 0.1}, offline=True, **SHORT)
    _ = logger.experiment
    logger.log_hyperparams({"lr": 0.2, "new": 1})
    assert dict(fake_wandb.runs[0].config) == {"lr": lr, "new": 1}
    registry.open_sessions()[0].finish()


# --- the step of a row ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone_or_rank_0")
def test_a_row_at_the_step_of_experiment_lies_where_one_without_a_step_does(
    fake_wandb: FakeWandb,
) -> None:
    """As with the stock logger, whose row at ``step=experiment.step`` is the next one, with the Trainer's last step."""
    logger = DistWandbLogger(id="exp", offline=True, **SHORT)
    experiment: Any = logger.experiment
    logger.log_metrics({"loss": 1.0}, 3)
    experiment.log({"a": 1.0})
    experiment.log({"b": 2.0}, step=registry.open_sessions()[0].step)
    experiment.log({"c": 3.0})
    for session in registry.open_sessions():
        session.finish()
    names = {name: row for row in fake_wandb.runs[0].rows for name in row}
    assert [names[name].get(STEP, 3) for name in ("loss", "a", "b", "c")] == [3] * 4


@pytest.mark.usefixtures("alone_or_rank_0")
def test_rows_in_the_run_of_a_session_of_the_script_lie_on_its_axis_too(
    fake_wandb: FakeWandb,
) -> None:
    """Charts of the run are drawn on `global_step`, which `init` has defined: W&B shows no row without it."""
    with dist_wandb.init(id="exp", mode="offline", **SHORT) as run:
        live(fake_wandb.runs[0])
        logger = DistWandbLogger(**SHORT)
        logger.log_metrics({"loss": 1.0}, 3)
        experiment: Any = logger.experiment
        experiment.log({"direct": 1.0}, commit=False)
        logger.log_metrics({"loss": 0.5}, 5)
        for session in registry.open_sessions()[1:]:
            session.flush()
        run.log({"after": 2.0})
        run.log({"own": 2.0}, step=9)
    rows = fake_wandb.runs[0].rows
    assert [row["global_step"] for row in rows for name in ("loss", "after", "own") if name in row] == [3, 5, 5, 9]
    assert [row["global_step"] for row in rows if "direct" in row] in ([3], [5])


@pytest.mark.usefixtures("fake_wandb", "alone_or_rank_0")
@pytest.mark.parametrize("row", [Namespace(loss=1.0), [("loss", 1.0)], None], ids=["namespace", "pairs", "none"])
def test_what_is_no_mapping_is_refused(row: Any) -> None:
    logger = DistWandbLogger(id="exp", offline=True, **SHORT)
    for step in (None, 1):
        with pytest.raises(ConfigurationError, match="on rank 0, but it takes a mapping"):
            logger.log_metrics(row, step)
    registry.open_sessions()[0].finish()


@pytest.mark.usefixtures("alone_or_rank_0")
def test_an_open_row_is_continued_in_the_next_stage(
    fake_wandb: FakeWandb,
) -> None:
    """As with the stock logger: W&B's `watch` leaves rows open."""
    logger = DistWandbLogger(id="exp", offline=True, **SHORT)
    experiment: Any = logger.experiment
    live(fake_wandb.runs[0])
    experiment.log({"open": 1.0}, commit=False)
    logger.finalize("success")
    logger.log_metrics({"loss": 0.5}, 5)
    for session in registry.open_sessions():
        session.finish()
    assert [{*row} - {"dist_wandb/degraded"} for row in fake_wandb.runs[0].rows] == [{"open", "loss", STEP}]


def test_a_process_of_ddp_spawn_knows_the_axis_of_the_scripts_session(fake_wandb: FakeWandb) -> None:
    """There, the session of the script is not open."""
    with dist_wandb.init(id="exp", mode="offline", **SHORT):
        live(fake_wandb.runs[0])
        logger = DistWandbLogger(**SHORT)
        _ = logger.experiment
        copied = copy.deepcopy(logger)
        registry.open_sessions()[-1].finish()
    copied.log_metrics({"loss": 1.0}, 3)
    assert fake_wandb.runs[-1].rows == [{"loss": 1.0, STEP: 3, "global_step": 3}]


# --- several loggers in one process -----------------------------------------------------------------------------------


def live(run: FakeRun) -> None:
    """Set `wandb.run`, as `wandb.init` does with the first run."""
    module: Any = wandb
    module.run = run


@pytest.mark.parametrize(("is_the_users", "run_id"), [(False, None), (False, "a"), (True, "other")])
def test_a_logger_without_an_id_of_its_own_and_any_beside_a_users_run_use_the_run_in_progress(
    fake_wandb: FakeWandb, is_the_users: bool, run_id: str | None
) -> None:
    first: Any = fake_wandb.init(id="a") if is_the_users else DistWandbLogger(id="a").experiment
    live(first)
    with pytest.warns(UserWarning, match="There is a wandb run already in progress"):
        assert DistWandbLogger(id=run_id).experiment is first


@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_logger_without_an_id_uses_the_run_in_progress_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, fake_wandb: FakeWandb, mode: Any, rank: int
) -> None:
    """As in one process: a loop over folds that finishes no run has one. Both loggers share a session, as do copies."""
    as_rank(monkeypatch, rank)
    first = DistWandbLogger(id="exp", run_mode=mode, offline=True, **SHORT)
    first.log_metrics({"loss": 1.0}, 0)
    if fake_wandb.runs:
        live(fake_wandb.runs[0])
    second = DistWandbLogger(run_mode=mode, name="fold-1", config={"fold": 1}, offline=True, **SHORT)
    second.log_metrics({"loss": 2.0}, 1)
    copy.deepcopy(first).log_metrics({"loss": 3.0}, 2)
    assert len(registry.open_sessions()) == 1
    assert len(fake_wandb.runs) == (0 if (mode, rank) == ("auto", 1) else 1)
    assert [run.id for run in fake_wandb.runs] == [second.version] * len(fake_wandb.runs)
    for session in reversed(registry.open_sessions()):
        session.finish()
    values = [row[name] for run in fake_wandb.runs for row in run.rows for name in row if name.endswith("loss")]
    assert sorted(set(values)) == ([1.0, 2.0, 3.0] if fake_wandb.runs else [])


@pytest.mark.usefixtures("fake_wandb")
def test_in_a_spawned_process_the_last_logger_ends_the_session_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, 1)
    with mock.patch.object(session_holder, "LaunchState", partial(LaunchState, home=-1)):
        loggers = [DistWandbLogger(**SHORT) for _ in range(2)]
    for logger in loggers:
        logger.log_metrics({"loss": 1.0}, 0)
    (session,) = registry.open_sessions()
    loggers[0].finalize("success")
    assert registry.open_sessions() == [session]
    loggers[1].finalize("success")
    assert registry.open_sessions() == []


def test_arguments_without_effect_are_named(fake_wandb: FakeWandb) -> None:
    _ = DistWandbLogger(name="fold-0", config={"fold": 0}).experiment
    live(fake_wandb.runs[0])
    fake_wandb.runs[0].name = "fold-0"
    with pytest.warns(UserWarning, match=r"will use it, so these arguments have no effect: name='fold-1', config\."):
        _ = DistWandbLogger(name="fold-1", config={"fold": 1}).experiment
    with pytest.warns(UserWarning, match=r"will use it\. If"):
        _ = DistWandbLogger(name="fold-0").experiment


def test_arguments_that_are_none_count_as_not_given(monkeypatch: pytest.MonkeyPatch, fake_wandb: FakeWandb) -> None:
    """LightningCLI passes all arguments of `wandb.init`, most of them as `None`."""
    as_rank(monkeypatch, 0)
    unsaid: dict[str, Any] = dict.fromkeys(("reinit", "mode", "resume", "settings", "group", "config", "tags"))
    for name in "ab":
        logger = DistWandbLogger(id=name, run_mode="new", offline=True, **unsaid, **SHORT)
        logger.log_metrics({"loss": 1.0}, 0)
        live(fake_wandb.runs[0])
    assert [arguments["id"] for arguments in fake_wandb.arguments] == ["a-rank-0", "b-rank-0"]
    assert [arguments["reinit"] for arguments in fake_wandb.arguments] == [None, "create_new"]
    assert all(run.offline for run in fake_wandb.runs)
    assert {arguments["resume"] for arguments in fake_wandb.arguments} == {"allow"}  # later stages open them again


@pytest.mark.newest  # the oldest Trainer asks the loggers in their order
def test_its_run_is_open_before_other_loggers_start(fake_wandb: FakeWandb, tmp_path: Path) -> None:
    """W&B's tensorboard patch must be applied before the other logger creates its writer."""
    opened: list[int] = []

    class Other(CSVLogger):
        @property
        def experiment(self) -> Any:
            opened.append(len(fake_wandb.runs))
            return mock.MagicMock()

    quiet_trainer([Other(tmp_path), DistWandbLogger()], default_root_dir=tmp_path, limit_train_batches=0).fit(
        BoringModel()
    )
    assert opened
    assert min(opened) == 1


@pytest.mark.usefixtures("fake_wandb")
@pytest.mark.parametrize("twin_of", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])  # noqa: S301
def test_the_experiment_of_a_rank_without_a_run_can_be_copied(monkeypatch: pytest.MonkeyPatch, twin_of: Any) -> None:
    as_rank(monkeypatch, 1)
    experiment: Any = DistWandbLogger(id="exp", **SHORT).experiment
    twin: Any = twin_of(experiment)
    assert issubclass(type(twin), DummyExperiment)
    assert (twin.id, experiment.id) == ("exp", "exp")
    assert twin.something(foo="bar") is None
    assert not twin.use_artifact("net:v0").download(root="x")
    twin.finish()


def test_a_child_that_cannot_attach_to_its_parents_run_reopens_it(
    fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the environment had been restored since the parent opened its run."""
    monkeypatch.setattr(FakeRun, "__reduce__", lambda _: (Lost, ()), raising=False)
    parent, runs = DistWandbLogger(id="exp"), list[Any]()
    fake_wandb.runs = runs
    assert parent.experiment is runs[0]
    child = pickle.loads(pickle.dumps(parent))  # noqa: S301
    registry.remove(registry.open_sessions()[0])  # which the child does not have
    assert child.experiment is runs[1]
    assert "reopens the run of its parent, because wandb could not attach to it: no such run" in caplog.text
    assert fake_wandb.arguments[1]["id"] == "exp"


class Lost:
    """What a child receives of a run whose service it cannot find."""

    @property
    def config(self) -> Any:
        raise RuntimeError("no such run")


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("in_fabric", [True, False])
def test_sigterm_is_handled_only_for_runs_of_several_ranks_in_fabric(
    monkeypatch: pytest.MonkeyPatch, fake_wandb: FakeWandb, world: int, in_fabric: bool
) -> None:
    if world > 1:
        as_rank(monkeypatch, 0)
    logger = DistWandbLogger(id="exp", **SHORT)
    _ = logger.experiment
    module = BoringModel()
    if not in_fabric:
        module.trainer = SimpleNamespace(callbacks=[])  # type: ignore[assignment]
        logger.log_graph(module)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # a Trainer that starts now finds no handler
    logger.log_metrics({"loss": 1.0}, 0)
    assert (signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL) is (in_fabric and world > 1)
    registry.open_sessions()[0].finish()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert len(fake_wandb.runs) == 1


# --- before fit, in the processes that Lightning's ddp launcher starts from the script --------------------------------


@pytest.fixture
def become_further_process(
    fake_wandb: FakeWandb,  # noqa: ARG001  # must run first
    begin_script: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[], None]:
    """Begin as the main process; call the result to continue as local rank 1, its child."""
    begin_script()

    def become() -> None:
        begin_script(parent=os.getpid())
        monkeypatch.setattr(rank_zero_only, "rank", 1)

    return become


GIVEN: dict[str, Any] = {"project": "digits", "group": "g", "tags": ["a"], "job_type": "train"}


def test_before_fit_a_rank_reads_the_run_of_rank_0(become_further_process: Callable[[], None]) -> None:
    """Otherwise ranks train with different values, without a message."""
    first = DistWandbLogger(**GIVEN, config={"lr": 0.3, "use_bn": True}).experiment
    become_further_process()
    logger = DistWandbLogger(**GIVEN, config={"lr": 0.2, "hidden": 8})
    config: Any = logger.experiment.config
    config.update({"late": 1})
    logger.log_hyperparams({"depth": 2})
    assert (config["lr"], config.lr, config.get("lr", 0.1), bool(config["use_bn"])) == (0.3, 0.3, 0.3, True)
    assert {name: int(config[name]) for name in ("hidden", "late", "depth")} == {"hidden": 8, "late": 1, "depth": 2}
    assert config.get("missing", 7) == 7
    assert bool(config)
    with pytest.raises(KeyError):
        config["missing"]
    run: Any = logger.experiment
    assert (run.id, run.dir) == (first.id, first.dir)


def test_without_rank_0s_run_a_rank_reads_what_it_was_given(
    become_further_process: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when only this rank reads the config; an agent's file is in its environment, too."""
    file = tmp_path / "values.yaml"
    file.write_text("wandb_version: 1\n\nlr:\n  value: 0.5\n")
    for variable, value in {
        "SWEEP_ID": "s",
        "RUN_ID": "t",
        "PROJECT": "of-agent",
        "SWEEP_PARAM_PATH": str(file),
    }.items():
        monkeypatch.setenv(f"WANDB_{variable}", value)
    become_further_process()
    run: Any = DistWandbLogger(**GIVEN, config={"lr": 0.3, "hidden": 8}).experiment
    assert dict(run.config) == {"lr": 0.5, "hidden": 8}
    assert (run.project, run.group, run.tags, run.job_type, run.offline) == ("of-agent", "g", ("a",), "train", False)
    assert (run.path, run.name, Path(run.dir).name) == ("of-agent/t", None, "wandb")


def test_further_processes_are_told_no_secrets(become_further_process: Callable[[], None]) -> None:
    config = {"lr": 0.3, "api_key": "0123456789abcdef0123456789abcdef01234567"}
    _ = DistWandbLogger(config=config).experiment
    become_further_process()
    told = str(inherited_rank.told("ids", os.getpid()))
    assert "0.3" in told
    assert "0123456789abcdef" not in told
    assert dict(DistWandbLogger(config=config).experiment.config) == config


# --- base ids that Lightning's main process passes to them ------------------------------------------------------------


def test_a_further_process_takes_the_ids_of_its_parent_in_order_and_offers_nothing(
    become_further_process: Callable[[], None], begin_script: Callable[..., None]
) -> None:
    ids, layers = ScriptIds(), list[object]([64])
    assert (ids.next_id("first"), ids.next_id("second")) == ((0, "first"), (1, "second"))
    ids.offer(0, "of the run", {"config": {"layers": layers}})  # known later
    layers.append(object())  # no text of JSON
    become_further_process()
    child = ScriptIds()
    assert [child.next_id("own") for _ in range(3)] == [(0, "of the run"), (1, "second"), (2, "own")]
    assert inherited_rank.told("ids", os.getpid()) == [["of the run", {"config": {"layers": [64]}}], "second"]
    begin_script(os.getpid() + 1)
    assert ScriptIds().next_id("own") == (0, "own")


def test_a_process_uses_and_offers_its_own_id_where_none_is_offered(
    become_further_process: Callable[[], None], temporary: Path
) -> None:
    ScriptIds().next_id("of before")
    ScriptIds().offer(1, "second")
    assert inherited_rank.told("ids", os.getpid()) == ["", "second"]
    with mock.patch.object(inherited_rank, "tell", side_effect=OSError):
        assert ScriptIds().next_id("first") == (0, "first"), "ids are passed later"
    become_further_process()
    child = ScriptIds()
    assert [child.next_id("mine")[1], child.next_id("also mine")[1]] == ["mine", "second"]
    assert list(temporary.iterdir()) == []


def test_a_fork_offers_its_own_ids_and_the_environment_is_unchanged(tmp_path: Path) -> None:
    script = (
        "import os, sys; before = dict(os.environ); from dist_wandb.lightning.launching import ScriptIds; "
        "from dist_wandb.session.inherited_rank import told; ids = ScriptIds(); ids.next_id('first'); "
        "os.fork() or (ids.next_id('of the fork'), print(told('ids', os.getpid())), sys.exit()); os.wait(); "
        "print(told('ids', os.getpid())); assert dict(os.environ) == before"
    )
    command = [sys.executable, "-u", "-W", "ignore", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["['', 'of the fork']", "['first']"]
