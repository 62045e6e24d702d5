"""In a world of one process, `DistWandbLogger` makes exactly the calls that the stock logger makes."""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import wandb
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import WandbLogger
from lightning_trainers import as_rank
from torch import nn
from wandb.sdk.wandb_run import Run  # `wandb.Run` is newer than the oldest version

from dist_wandb import DistWandbLogger
from dist_wandb.errors import ConfigurationError
from dist_wandb.job.topology import Topology
from dist_wandb.session import registry
from dist_wandb.settings.options import OPTION_NAMES, Limits
from dist_wandb.settings.reduction import DEGRADED

Drive = Callable[[WandbLogger], object]

MODEL = nn.Linear(2, 1)
ALONE = {"limits": Limits(join_timeout=0.1, finish_timeout=1.0)}  # limits for jobs whose other ranks never join


class Wandb:
    """A stand-in for `wandb.init` that records its arguments, `WANDB_MODE` at the time, and the calls of the run."""

    def __init__(self, directory: Path) -> None:
        self.arguments: list[dict[str, Any]] = []
        self.modes: list[str | None] = []
        self.run = mock.Mock(spec=Run, config=mock.Mock())
        self.run.configure_mock(
            id="made-by-wandb", url="https://wandb.example/runs/x", dir=str(directory), offline=False, disabled=False
        )
        self.run.name = "misty-lake-1"

    def init(self, **arguments: Any) -> mock.Mock:
        self.arguments.append(arguments)
        self.modes.append(os.environ.get("WANDB_MODE"))
        return self.run

    @property
    def calls(self) -> list[Any]:
        """The calls of the run, in order, in a form that compares by content."""
        return [(name, comparable(args), comparable(kwargs)) for name, args, kwargs in self.run.mock_calls]


def comparable(value: Any) -> Any:
    if isinstance(value, wandb.Table):
        return ("table", value.columns, value.data)
    if isinstance(value, dict):
        return {name: comparable(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [comparable(item) for item in value]
    return value


@pytest.fixture(autouse=True)
def _one_process(
    bare_environment: None,  # noqa: ARG001  # must run first
    new_process: None,  # noqa: ARG001  # must run first
    ended_exchanges: None,  # noqa: ARG001  # must run first
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for media in ("Image", "Audio", "Video"):  # the real classes need further packages
        setattr(wandb, media, lambda data, kind=media, **details: (kind, data, details))
    with mock.patch.dict(os.environ):  # the stock logger does not restore it
        yield


def drive_with(logger_class: type[WandbLogger], arguments: dict[str, Any], drive: Drive, directory: Path) -> Wandb:
    """Create a logger with a stand-in for wandb, and use it."""
    stand_in = Wandb(directory)

    @functools.wraps(wandb.init)
    def init(**given: Any) -> mock.Mock:
        return stand_in.init(**given)

    with mock.patch.dict(os.environ), mock.patch.object(wandb, "init", init):
        injected = {"experiment": stand_in.run} if arguments.get("experiment") else {}
        drive(logger_class(**{**arguments, **injected}))
    return stand_in


def check_like_stock(arguments: dict[str, Any], drive: Drive, directory: Path, **options: str) -> None:
    """Use both loggers alike, ours with further options, and compare what wandb is asked for."""
    stock = drive_with(WandbLogger, arguments, drive, directory)
    ours = drive_with(DistWandbLogger, {**arguments, **options}, drive, directory)
    assert (ours.arguments, ours.modes, ours.calls) == (stock.arguments, stock.modes, stock.calls)


def use_everything(logger: WandbLogger) -> None:
    _ = logger.experiment
    logger.log_metrics({"loss": 0.5})
    logger.log_metrics(metrics={"loss": 0.4, "epoch": 1}, step=3)
    logger.log_hyperparams({"lr": 0.1, "net": {"width": 3}, "activation": nn.functional.relu})
    logger.log_hyperparams(Namespace(seed=np.int64(1), root=Path("path")))
    logger.log_table("table", columns=["a", "b"], data=[[1, 2]], step=4)
    logger.log_text("text", columns=["word"], data=[["x"]])
    logger.log_image("images", ["a.png", "b.png"], step=5, caption=["a", "b"])
    logger.log_audio("audio", ["a.wav"], sample_rate=[8000])
    logger.log_video("video", ["a.mp4"], step=6, fps=[4])
    logger.watch(MODEL, log="all", log_freq=7, log_graph=False)
    logger.log_metrics({}, step=0)
    odd: Any = (np.int64(7), 8.0, 8.5, np.float32(0.5), -1)
    for step in odd:
        logger.log_metrics({"loss": 0.3}, step=step)
    logger.log_metrics({"loss": 0.2, "trainer/global_step": 1}, step=9)
    logger.save()
    logger.finalize("success")


CONSTRUCTORS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "name, project, save_dir": {"name": "base", "project": "digits", "save_dir": "logs"},
    "save_dir as a path": {"save_dir": Path("logs")},
    "dir": {"dir": Path("logs"), "save_dir": None},
    "save_dir and dir": {"save_dir": "logs", "dir": "other"},
    "id": {"id": "exp"},
    "version": {"version": "exp"},
    "version and id": {"version": "exp", "id": "other"},
    "anonymous": {"anonymous": True},
    "offline": {"offline": True},
    "mode": {"mode": "offline"},
    "further arguments": {"tags": ["a"], "group": "night", "notes": "n", "job_type": "train", "config": {"lr": 1}},
    "resume": {"resume": "must", "id": "exp"},
    "prefix": {"prefix": "fold-1"},
    "sync_tensorboard": {"sync_tensorboard": True},
    "log_model": {"log_model": True, "checkpoint_name": "best", "add_file_policy": "immutable"},
    "an injected experiment": {"experiment": True},
    "an injected experiment offline": {"experiment": True, "offline": True},
}
NEWER = ("sync_tensorboard", "log_model")  # the logger of Lightning 2.2 treats them differently, or lacks them


@pytest.mark.parametrize(
    "constructor",
    [pytest.param(name, marks=pytest.mark.newest) if name in NEWER else name for name in CONSTRUCTORS],
)
def test_calls_names_and_attributes_are_those_of_the_stock_logger(constructor: str, tmp_path: Path) -> None:
    seen: dict[type[WandbLogger], list[Any]] = {WandbLogger: [], DistWandbLogger: []}
    driven: dict[type[WandbLogger], Wandb] = {}
    attributes: dict[type[WandbLogger], dict[str, Any]] = {}
    for logger_class in seen:

        def use(logger: WandbLogger, kind: type[WandbLogger] = logger_class) -> None:
            attributes[kind] = {name: value for name, value in vars(logger).items() if name != "_experiment"}
            for _ in range(2):
                places = logger.name, logger.version, logger.save_dir
                seen[kind].append((*places, os.environ.get("WANDB_MODE")))
                _ = logger.experiment
            use_everything(logger)

        driven[logger_class] = drive_with(logger_class, CONSTRUCTORS[constructor], use, tmp_path)
    ours, stock = driven[DistWandbLogger], driven[WandbLogger]
    assert (ours.arguments, ours.modes, ours.calls) == (stock.arguments, stock.modes, stock.calls)
    assert len(stock.calls) >= 8
    if "experiment" not in CONSTRUCTORS[constructor]:
        assert seen[DistWandbLogger] == seen[WandbLogger]
    known = attributes[WandbLogger]
    assert {name: attributes[DistWandbLogger].get(name) for name in known} == known


FIRST_CALLS: dict[str, Drive] = {
    "log_metrics": lambda logger: logger.log_metrics({"loss": 0.5}, step=1),
    "log_hyperparams": lambda logger: logger.log_hyperparams({"lr": 0.1}),
    "watch": lambda logger: logger.watch(MODEL),
    "log_table": lambda logger: logger.log_table("table", columns=["a"], data=[[1]]),
    "use_artifact": lambda logger: logger.use_artifact("data:latest"),
    "nothing but finalize": lambda logger: logger.finalize("success"),
    "a failure": lambda logger: (logger.log_metrics({"loss": 0.5}), logger.finalize("failed")),
    "name, version and save_dir": lambda logger: (logger.name, logger.version, logger.save_dir),
}


@pytest.mark.parametrize("first", FIRST_CALLS)
def test_whichever_call_comes_first_opens_the_run_as_in_the_stock_logger(first: str, tmp_path: Path) -> None:
    check_like_stock({}, FIRST_CALLS[first], tmp_path)


# --- the constructor --------------------------------------------------------------------------------------------------


@pytest.mark.newest  # add_file_policy is new in Lightning 2.6
def test_the_constructor_adds_only_keyword_parameters_to_the_stock_ones() -> None:
    stock = list(inspect.signature(WandbLogger).parameters.values())
    ours = list(inspect.signature(DistWandbLogger).parameters.values())
    positional, further = stock[:-1], stock[-1]
    assert further.kind is inspect.Parameter.VAR_KEYWORD
    assert [(p.name, p.default, p.kind) for p in ours[: len(positional)]] == [
        (p.name, p.default, p.kind) for p in positional
    ]
    assert [(p.name, p.kind) for p in ours[len(positional) : -1]] == [
        (name, inspect.Parameter.KEYWORD_ONLY) for name in (*OPTION_NAMES, "timings")
    ]
    assert (ours[-1].name, ours[-1].kind) == (further.name, further.kind)


def test_an_argument_that_an_old_lightning_does_not_have_is_refused_with_the_version_that_has_it() -> None:
    if "add_file_policy" in inspect.signature(WandbLogger).parameters:
        assert DistWandbLogger(add_file_policy="immutable")
        return
    with pytest.raises(ConfigurationError, match="this version of Lightning does not know it"):
        DistWandbLogger(add_file_policy="immutable")


def in_trainer(loggers: Any) -> None:
    Trainer(logger=loggers, accelerator="cpu", max_steps=1).fit(BoringModel())


@pytest.mark.parametrize(
    "use",
    [
        lambda: in_trainer(DistWandbLogger),
        lambda: in_trainer([DistWandbLogger]),
        lambda: Fabric(accelerator="cpu", devices=1, loggers=DistWandbLogger).log("loss", 0.5),  # type: ignore[arg-type]
    ],
    ids=["Trainer", "list", "Fabric"],
)
def test_a_class_in_place_of_a_logger_is_refused_with_the_line_to_write(use: Callable[[], None]) -> None:
    line = r"Write DistWandbLogger\(\), for example Trainer\(logger=DistWandbLogger\(\)\)"
    with pytest.raises(ConfigurationError, match=line):
        use()
    assert isinstance(DistWandbLogger.experiment, property)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"tag": ["a"]},
            "DistWandbLogger got the argument 'tag', which wandb.init does not know. Did you mean 'tags'?",
        ),
        ({"version": "a:b"}, "id='a:b' given to DistWandbLogger has ':'"),
        ({"experiment": mock.Mock(), "run_mode": "new"}, "experiment= hands DistWandbLogger one run, but"),
        ({"experiment": mock.Mock(), "primary_rank": -1}, "experiment= hands DistWandbLogger a run of rank 0, but"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused_by_the_constructor(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        DistWandbLogger(**arguments)


# --- before the run is open -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["shared", "new"])
def test_hyperparameters_and_watch_wait_for_the_run_and_keep_their_order(mode: str, tmp_path: Path) -> None:
    def use(logger: WandbLogger) -> None:
        logger.log_hyperparams({"lr": 0.1})
        logger.watch(MODEL, log="all")
        logger.log_hyperparams({"lr": 0.2})
        assert registry.open_sessions() == []
        for _ in range(2):  # they are made once
            _ = logger.experiment

    stand_in = drive_with(DistWandbLogger, {"run_mode": mode}, use, tmp_path)
    assert [call for call in stand_in.calls if call[0] != "define_metric"] == [
        ("config.update", [{"lr": 0.1}], {"allow_val_change": True}),
        ("watch", [MODEL], {"log": "all", "log_freq": 100, "log_graph": True}),
        ("config.update", [{"lr": 0.2}], {"allow_val_change": True}),
    ]


# --- pickles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["shared", "new"])
def test_a_pickle_opens_no_run_and_keeps_ids_options_and_deferred_calls(mode: str, tmp_path: Path) -> None:
    def use(logger: WandbLogger) -> None:
        logger.log_hyperparams({"lr": 0.1})
        twin = pickle.loads(pickle.dumps(logger))  # noqa: S301  # its own pickle
        assert registry.open_sessions() == []
        assert (twin.version, twin.name, twin.save_dir) == ("exp", "digits", "logs")
        twin.log_metrics({"loss": 0.5}, step=2)

    arguments = {"run_mode": mode, "id": "exp", "project": "digits", "save_dir": "logs", "prefix": "fold"}
    stand_in = drive_with(DistWandbLogger, arguments, use, tmp_path)
    assert [given["id"] for given in stand_in.arguments] == ["exp"]
    assert stand_in.calls[-2:] == [
        ("config.update", [{"lr": 0.1}], {"allow_val_change": True}),
        ("log", [{"fold-loss": 0.5, "trainer/global_step": 2}], {}),
    ]


@pytest.mark.parametrize(
    ("statuses", "exits", "code"),
    [
        *((("failed",), None, 1), (("failed", "success"), None, 0), (("success", "failed"), None, 1)),
        *((("success",), None, 0), (("failed",), 0, 0), (("failed",), 3, 3)),
    ],
)
def test_the_last_stage_of_the_trainer_or_sys_exit_in_it_decides_how_the_run_ends(
    tmp_path: Path, statuses: tuple[str, ...], exits: int | None, code: int
) -> None:
    """A script may catch the exception of a Trainer and end normally."""

    def use(logger: WandbLogger) -> None:
        logger.log_metrics({"loss": 0.5}, 1)
        with nullcontext() if exits is None else suppress(SystemExit), ExitStack() as trainer:
            for status in reversed(statuses):
                trainer.callback(logger.finalize, status)  # which the Trainer calls while the exception is handled
            if exits is not None:
                sys.exit(exits)
        for session in registry.open_sessions():
            registry.shutdowns[session].end_with_process(exits or 0, failed=False)

    stand_in = drive_with(DistWandbLogger, {}, use, tmp_path)
    assert stand_in.run.finish.call_args_list == [mock.call(exit_code=code)]


@pytest.mark.parametrize(
    ("node_rank", "scope", "opened"),
    [(None, "global", 1), (None, "worker", 1), ("0", "global", 1), ("0", "worker", 0), ("1", "global", 0)],
)
def test_a_pickle_opens_the_run_only_if_its_owner_is_certain(
    node_rank: str | None, scope: str, opened: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if node_rank is not None:
        monkeypatch.setenv("NODE_RANK", node_rank)
    stand_in = drive_with(DistWandbLogger, {"rank_scope": scope}, pickle.dumps, tmp_path)
    assert len(stand_in.arguments) == opened


# --- one of two ranks, before and after they are known ----------------------------------------------------------------


@pytest.mark.newest  # wandb before 0.27 has no such limits
def test_the_first_of_two_ranks_opens_the_run_with_the_users_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_rank(monkeypatch, 0)
    named = {"id": "exp", "project": "digits"}
    stand_in = drive_with(
        DistWandbLogger, {"offline": True, "anonymous": True, **named, **ALONE}, use_everything, tmp_path
    )
    (given,) = stand_in.arguments
    limits = given.pop("settings")
    others = {"dir": ".", "name": None, "resume": "allow", "mode": "offline", "anonymous": "allow"}
    assert given == {**named, **others}
    assert limits.model_fields_set == {"finish_timeout", "x_transaction_log_flush_interval"}
    assert stand_in.modes == ["dryrun"]


@pytest.fixture
def trainer_starts(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make torch.distributed report that this process is rank 0 of two from now on."""

    def start() -> None:
        ranks = Topology(0, 0, 0, 2, 2, 1)
        monkeypatch.setattr(Topology, "from_torch_distributed", classmethod(lambda _cls, _environ=None: ranks))

    return start


def test_a_run_opened_before_the_trainer_started_is_the_run_of_the_job(
    tmp_path: Path, trainer_starts: Callable[[], None]
) -> None:
    def use(logger: WandbLogger) -> None:
        early = logger.experiment
        trainer_starts()
        assert logger.experiment is early
        logger.log_metrics({"loss": 0.5}, step=1)
        assert [open_one.topology.world_size for open_one in registry.open_sessions()] == [2]
        assert registry.open_sessions()[0].flush()

    stand_in = drive_with(DistWandbLogger, ALONE, use, tmp_path)
    assert len(stand_in.arguments) == 1
    assert stand_in.calls[-1] == ("log", [{"loss": 0.5, DEGRADED: 1, "trainer/global_step": 1}], {})


@pytest.mark.parametrize("mode", ["shared", "new"])
def test_a_run_opened_too_early_for_the_mode_is_an_error(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer_starts: Callable[[], None]
) -> None:
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-1")  # names the job, so no store is needed

    def use(logger: WandbLogger) -> None:
        _ = logger.experiment
        trainer_starts()
        with pytest.raises(ConfigurationError, match=r"was opened by logger\.experiment before the Trainer"):
            _ = logger.experiment

    assert len(drive_with(DistWandbLogger, {"run_mode": mode}, use, tmp_path).arguments) == 1


def test_calls_are_deferred_despite_incomplete_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning requires such variables on a cluster whose launcher it does not know."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("NODE_RANK", "1")
    assert (
        drive_with(DistWandbLogger, {"run_mode": "new"}, lambda logger: logger.log_hyperparams({}), tmp_path).calls
        == []
    )
