"""What Lightning's own tests demand of a W&B logger, checked with `DistWandbLogger` and with their kind of mock.

Their mock replaces the whole module `wandb` by a minimal one: no settings, no setup, and runs without most
attributes. Demands that `test_lightning_world_of_one.py` checks by comparison with the stock logger are not repeated.
"""

from __future__ import annotations

import copy
import os
import pickle
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from docstrings import documented_options
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.loggers.logger import DummyExperiment
from processes import run_job

from dist_wandb import DistWandbLogger
from dist_wandb.job.model import Topology
from dist_wandb.session import registry
from dist_wandb.settings.options import OPTION_NAMES, Limits, Options

pytestmark = pytest.mark.newest  # the demands of the newest Lightning


class FakeRun:
    """A run with an id, a config and five mocked methods, but without other attributes of wandb's runs."""

    def __init__(self, run_id: str = "made-up") -> None:
        self.id = run_id
        for method in ("log", "watch", "log_artifact", "use_artifact", "define_metric"):
            setattr(self, method, mock.Mock())
        self.config = mock.Mock()


class Bare:
    """A run with even fewer attributes."""

    id, name, step = "made-up", "night", 0


@pytest.fixture
def fake_run() -> Any:
    return FakeRun()


@pytest.fixture(autouse=True)
def wandb(
    bare_environment: None,  # noqa: ARG001  # must run first
    ended_exchanges: None,  # noqa: ARG001  # must run first
    fake_run: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Any]:
    """Replace the module wandb."""
    module: Any = ModuleType("wandb")
    module.init = mock.Mock(return_value=fake_run)
    module.run = None
    for name in ("require", "Api", "Artifact", "Image", "Audio", "Video", "Table"):
        setattr(module, name, mock.Mock())
    lib: Any = ModuleType("wandb.sdk.lib")
    runs: Any = ModuleType("wandb.wandb_run")
    lib.RunDisabled = runs.Run = FakeRun
    parts = {"wandb": module, "wandb.sdk": ModuleType("wandb.sdk"), "wandb.sdk.lib": lib, "wandb.wandb_run": runs}
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, name, part)
    monkeypatch.setattr(registry, "_sessions", [])
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    yield module
    changed = {name for name in os.environ.keys() | before.keys() if os.environ.get(name) != before.get(name)}
    assert {name for name in changed if "WANDB" in name} <= {"WANDB_MODE"}  # by offline=True, as in the stock logger


def trainer(logger: Any, directory: Path, **more: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    limits: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 3, "limit_val_batches": 1, "log_every_n_steps": 1}
    return Trainer(logger=logger, default_root_dir=directory, **{**quiet, **limits, **more})


# --- the constructor, and names ---------------------------------------------------------------------------------------


def test_the_name_of_a_logger_is_its_project() -> None:
    assert DistWandbLogger().name == "lightning_logs"
    assert DistWandbLogger(project="digits").name == "digits"
    with mock.patch.dict(os.environ, {"WANDB_PROJECT": "from outside"}):
        assert DistWandbLogger().name == "from outside"
        assert DistWandbLogger(project="digits").name == "digits"


def test_positional_arguments_are_those_of_the_stock_logger(fake_run: Any) -> None:
    given: Any = (
        "night",
        "logs",
        "exp",
        False,
        "other",
        "second",
        None,
        "digits",
        "all",
        fake_run,
        "pre",
        "best",
        "immutable",
    )
    ours, stock = DistWandbLogger(*given), WandbLogger(*given)
    assert {name: vars(ours)[name] for name in vars(stock)} == vars(stock)


def test_wandb_gets_the_users_arguments_and_no_others(wandb: Any, fake_run: Any) -> None:
    logger = DistWandbLogger(name="night", save_dir="logs", version="exp", project="digits", resume="never")
    logger.log_metrics({"acc": 1.0})
    wandb.init.assert_called_once_with(
        name="night", dir="logs", id="exp", project="digits", resume="never", anonymous=None
    )
    fake_run.log.assert_called_once_with({"acc": 1.0})


def test_a_new_wandb_does_not_get_arguments_that_it_warns_about(wandb: Any, fake_run: Any) -> None:
    given: list[Any] = []

    def init(anonymous: object = "not set", **_arguments: Any) -> Any:
        given.append(anonymous)
        return fake_run

    wandb.init = init
    _ = DistWandbLogger().experiment
    _ = DistWandbLogger(anonymous=True, experiment=None).experiment
    assert given == ["not set", "allow"]
    wandb.require.assert_not_called()


def test_an_injected_run_is_the_experiment(wandb: Any, fake_run: Any) -> None:
    assert DistWandbLogger(experiment=fake_run).experiment is fake_run
    wandb.init.assert_not_called()


def test_a_run_in_progress_is_used_and_reported_once(
    wandb: Any, fake_run: Any, recwarn: pytest.WarningsRecorder
) -> None:
    wandb.run = fake_run
    logger = DistWandbLogger()
    for _ in range(2):
        assert logger.experiment is fake_run
    said = [str(one.message)[:41] for one in recwarn if one.category is UserWarning]
    assert said == ["There is a wandb run already in progress,"]
    logger.log_metrics({"acc": 1.0}, step=3)
    logger.finalize("success")
    logger.log_metrics({"acc": 0.5}, step=6)
    rows = [call.args[0] for call in fake_run.log.call_args_list]
    assert rows == [{"acc": 1.0, "trainer/global_step": 3}, {"acc": 0.5, "trainer/global_step": 6}]
    wandb.init.assert_not_called()


def test_a_run_with_hardly_any_attributes_can_be_used(wandb: Any, tmp_path: Path) -> None:
    wandb.init.return_value = Bare()
    logger = DistWandbLogger(id="made-up", offline=True)
    first = trainer(logger, tmp_path)
    assert logger.experiment
    assert first.log_dir == logger.save_dir
    second = pickle.loads(pickle.dumps(first))  # noqa: S301  # its own pickle
    assert type(second.logger) is DistWandbLogger
    assert second.logger.experiment
    assert wandb.init.call_args.kwargs["id"] == "made-up"
    registry._end_with_process(0, failed=False)


# --- logging ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {"none": None, "dict": {"a": 1}, "b": [2, 3, 4], "path": Path("path")},
        Namespace(flag=np.bool_(1), count=np.int64(4), share=np.float32(0.5), number=np.cdouble(9 + 4j)),
        {"call": max, "module": torch.nn.ReLU, "text": "x"},
    ],
    ids=["plain", "numpy", "callables"],
)
def test_hyperparameters_are_converted_as_by_the_stock_logger(fake_run: Any, params: Any) -> None:
    for logger_class in (WandbLogger, DistWandbLogger):
        logger_class(experiment=fake_run).log_hyperparams(params)
    stock, ours = fake_run.config.update.call_args_list
    assert repr(ours) == repr(stock)
    assert stock.kwargs == {"allow_val_change": True}


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_media_that_are_not_a_list_or_lack_captions_are_refused(kind: str) -> None:
    log = getattr(DistWandbLogger(), f"log_{kind}")
    with pytest.raises(TypeError, match=f"Expected a list as \"{kind}s\", found <class 'str'>"):
        log("samples", "1.jpg")
    with pytest.raises(ValueError, match="Expected 2 items but only found 1 for caption"):
        log("samples", ["1.jpg", "2.jpg"], caption=["one"])


def test_media_and_tables_are_logged_with_their_step(wandb: Any, fake_run: Any) -> None:
    logger = DistWandbLogger()
    logger.log_image("samples", ["1.jpg", "2.jpg"], 5, caption=["one", "two"])
    wandb.Image.assert_called_with("2.jpg", caption="two")
    logger.log_table("rows", ["a"], [[1]], None, 6)
    wandb.Table.assert_called_once_with(columns=["a"], data=[[1]], dataframe=None)
    logger.log_text(key="text", dataframe="frame")
    rows = [call.args[0] for call in fake_run.log.call_args_list]
    assert rows == [
        {"samples": [wandb.Image()] * 2, "trainer/global_step": 5},
        {"rows": wandb.Table(), "trainer/global_step": 6},
        {"text": wandb.Table()},
    ]


def test_a_subclass_may_override_methods_that_the_trainer_calls(tmp_path: Path) -> None:
    class Remembering(DistWandbLogger):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.history: list[tuple[int | None, list[str]]] = []

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            super().log_metrics(metrics, step)
            self.history.append((step, sorted(metrics)))

    class Model(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = super().training_step(batch, batch_idx)
            self.log("trained", out["loss"])  # type: ignore[index]
            return out

        def on_validation_epoch_end(self) -> None:
            self.log("validated", torch.tensor(0.5))

        def on_test_epoch_end(self) -> None:
            self.log("tested", torch.tensor(2.0))

    logger = Remembering(save_dir=tmp_path)
    one = trainer(logger, tmp_path, limit_train_batches=1, limit_test_batches=1, enable_checkpointing=False)
    one.fit(Model())
    one.test(Model(), verbose=False)
    expected = [(0, ["epoch", "trained"]), (0, ["epoch", "validated"]), (1, ["epoch", "tested"])]
    assert logger.history == expected


def test_a_module_logs_its_hyperparameters_unless_it_is_configured_not_to(fake_run: Any, tmp_path: Path) -> None:
    class Model(BoringModel):
        def __init__(self, width: int, *, is_logged: bool) -> None:  # noqa: ARG002  # saved
            super().__init__()
            self.save_hyperparameters("width", logger=is_logged)

    class Data(LightningDataModule):
        def __init__(self, width: int) -> None:  # noqa: ARG002  # saved
            super().__init__()
            self.save_hyperparameters()

    for is_logged in (False, True):
        trainer(DistWandbLogger(), tmp_path, max_steps=1, enable_checkpointing=False).fit(Model(3, is_logged=is_logged))
        calls = [call.args[0] for call in fake_run.config.update.call_args_list if call.args[0]]
        assert calls == ([{"width": 3}] if is_logged else [])
    data = Data(4)
    data.train_dataloader = BoringModel().train_dataloader  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="Error while merging hparams"):
        trainer(DistWandbLogger(), tmp_path, max_steps=1).fit(Model(3, is_logged=True), data)


# --- in a Trainer -----------------------------------------------------------------------------------------------------


def test_its_run_is_open_before_other_loggers_start(wandb: Any, tmp_path: Path) -> None:
    """W&B's tensorboard patch must be applied before the other logger creates its writer."""
    opened: list[int] = []

    class Other(CSVLogger):
        @property
        def experiment(self) -> Any:
            opened.append(wandb.init.call_count)
            return mock.MagicMock()

    trainer([Other(tmp_path), DistWandbLogger()], tmp_path, max_steps=1, limit_train_batches=0).fit(BoringModel())
    assert opened
    assert min(opened) == 1


def test_checkpoints_are_in_the_directory_of_project_and_version(fake_run: Any, tmp_path: Path) -> None:
    logger = DistWandbLogger(project="digits", save_dir=tmp_path, offline=True)
    _ = logger.experiment
    fake_run.id = "1"  # the id becomes known late
    assert (logger.version, logger.name, logger.save_dir) == ("1", "digits", str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    one = trainer(logger, tmp_path)
    assert one.log_dir == logger.save_dir
    one.fit(BoringModel())
    assert one.log_dir == logger.save_dir
    callback = one.checkpoint_callback
    assert isinstance(callback, ModelCheckpoint)
    assert callback.dirpath == str(tmp_path / "digits" / "1" / "checkpoints")
    assert [path.name for path in Path(callback.dirpath).iterdir()] == ["epoch=0-step=3.ckpt"]


def described(wandb: Any) -> list[tuple[str, Any, str, str]]:
    """Return name, score, file and monitored metric of all artifacts."""
    made = [call.kwargs for call in wandb.Artifact.call_args_list]
    assert {artifact["type"] for artifact in made} <= {"model"}
    return [
        (
            artifact["name"],
            artifact["metadata"]["score"],
            artifact["metadata"]["original_filename"],
            artifact["metadata"]["ModelCheckpoint"]["monitor"],
        )
        for artifact in made
    ]


@pytest.mark.parametrize(
    ("arguments", "monitor", "expected", "aliases"),
    [
        ({"log_model": False}, None, [], []),
        ({"log_model": True}, None, [("model-made-up", None, "epoch=1-step=6.ckpt", None)], [["latest", "best"]]),
        (
            {"log_model": "all"},
            None,
            [
                ("model-made-up", None, "epoch=0-step=3.ckpt", None),
                ("model-made-up", None, "epoch=1-step=6.ckpt", None),
            ],
            [["latest", "best"]] * 2,
        ),
        (
            {"log_model": True, "checkpoint_name": "digits-net"},
            None,
            [("digits-net", None, "epoch=1-step=6.ckpt", None)],
            [["latest", "best"]],
        ),
        (
            {"log_model": True},
            "step",
            [("model-made-up", 3, "epoch=0-step=3.ckpt", "step"), ("model-made-up", 6, "epoch=1-step=6.ckpt", "step")],
            [["latest", "best"], ["latest"]],
        ),
    ],
    ids=["not", "at the end", "as they come", "under a name", "the best and the latest"],
)
def test_checkpoints_become_artifacts(
    wandb: Any,
    fake_run: Any,
    tmp_path: Path,
    arguments: dict[str, Any],
    monitor: str | None,
    expected: list[Any],
    aliases: list[list[str]],
) -> None:
    logger = DistWandbLogger(save_dir=tmp_path, add_file_policy="immutable", **arguments)
    callback = ModelCheckpoint(monitor=monitor, save_top_k=1 if monitor is None else 2)
    trainer(logger, tmp_path, max_epochs=2, callbacks=[callback]).fit(BoringModel())
    assert described(wandb) == expected
    assert all(type(score) in (int, type(None)) for _, score, _, _ in described(wandb))
    assert [call.kwargs["aliases"] for call in fake_run.log_artifact.call_args_list] == aliases
    added = wandb.Artifact.return_value.add_file.call_args_list
    assert [(call.kwargs["name"], call.kwargs["policy"]) for call in added] == [("model.ckpt", "immutable")] * len(
        added
    )


def test_the_checkpoints_of_several_callbacks_become_artifacts(wandb: Any, tmp_path: Path) -> None:
    callbacks = [ModelCheckpoint(monitor="epoch", save_top_k=2), ModelCheckpoint(monitor="step", save_top_k=2)]
    trainer(DistWandbLogger(log_model=True), tmp_path, max_epochs=2, callbacks=callbacks).fit(BoringModel())
    assert [(score, monitor) for _, score, _, monitor in described(wandb)] == [
        *[(0, "epoch"), (1, "epoch"), (3, "step"), (6, "step")]
    ]


def test_artifacts_are_used_through_the_run_or_downloaded_through_the_api(wandb: Any, fake_run: Any) -> None:
    wandb.run = fake_run
    DistWandbLogger.download_artifact("net:v0", "here", "model", use_artifact=True)
    fake_run.use_artifact.assert_called_once_with("net:v0")
    fake_run.use_artifact.return_value.download.assert_called_once_with(root="here")
    DistWandbLogger.download_artifact("net:v0", Path("there"), "model", use_artifact=False)
    wandb.run = None
    DistWandbLogger.download_artifact("net:v0", None, "model")
    assert wandb.Api().artifact.call_args_list == [mock.call("net:v0", type="model")] * 2
    assert wandb.Api().artifact().download.call_args_list == [mock.call(root="there"), mock.call(root=None)]
    wandb.run = fake_run
    with pytest.warns(UserWarning, match="already in progress"):
        DistWandbLogger().use_artifact("net:v0", "model")
    fake_run.use_artifact.assert_called_with("net:v0", type="model")


# --- pickles, and further ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda logger: pickle.loads(pickle.dumps(logger))])  # noqa: S301
def test_a_copy_of_a_logger_continues_the_same_run(wandb: Any, fake_run: Any, twin_of: Any) -> None:
    logger = DistWandbLogger(project="digits", save_dir="logs", prefix="fold")
    wandb.init.assert_not_called()
    twin = twin_of(logger)
    wandb.init.assert_called_once()
    wandb.run = fake_run
    with pytest.warns(UserWarning, match="already in progress"):
        twin.log_metrics({"acc": 1.0})
    assert (twin.name, twin.save_dir, twin.version) == (logger.name, logger.save_dir, logger.version)
    fake_run.log.assert_called_once_with({"fold-acc": 1.0})
    wandb.init.assert_called_once()


def test_a_trainer_with_several_loggers_can_be_pickled(tmp_path: Path) -> None:
    first = trainer([DistWandbLogger(run_mode="new"), CSVLogger(tmp_path)], tmp_path)
    second = pickle.loads(pickle.dumps(first))  # noqa: S301  # its own pickle
    for logger in second.loggers:
        logger.log_metrics({"acc": 1.0}, 0)
        logger.save()
    assert [type(logger) for logger in second.loggers] == [DistWandbLogger, CSVLogger]


@pytest.mark.parametrize("twin_of", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])  # noqa: S301
def test_the_experiment_of_a_rank_without_a_run_can_be_copied(second_of_two: None, twin_of: Any) -> None:  # noqa: ARG001
    experiment: Any = DistWandbLogger(id="exp", limits=Limits(join_timeout=0.1, finish_timeout=0.1)).experiment
    twin: Any = twin_of(experiment)
    assert issubclass(type(twin), DummyExperiment)
    assert (twin.id, experiment.id) == ("exp", "exp")
    twin.finish()


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process the second of two ranks, which never meet."""
    second = Topology(1, 1, 0, 2, 2, 1)
    monkeypatch.setattr(Topology, "from_torch_distributed", classmethod(lambda _cls, _environ=None: second))


@pytest.mark.usefixtures("second_of_two")
def test_a_rank_other_than_the_first_opens_no_run(wandb: Any, tmp_path: Path) -> None:
    logger = DistWandbLogger(save_dir=tmp_path, limits=Limits(join_timeout=0.1, finish_timeout=0.1))
    experiment: Any = logger.experiment
    assert issubclass(type(experiment), DummyExperiment)
    experiment["variable"] = "value"
    assert experiment["variable"] != "value"
    assert experiment.something(foo="bar") is None
    assert not experiment.use_artifact("net:v0").download(root="x")
    with pytest.warns(UserWarning, match="read on rank 1, but"):
        assert experiment.url is None
    experiment.config.update({"lr": 0.1})
    logger.log_hyperparams({"lr": 0.1})
    wandb.init.assert_not_called()


def test_a_child_that_cannot_attach_to_its_parents_run_reopens_it(
    wandb: Any, fake_run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if the environment had been restored since the parent opened its run."""
    logger = DistWandbLogger(id="exp")
    logger._holder.launch.parents_run = pickle.dumps((Lost(), {}))
    monkeypatch.setattr(wandb, "run", None)
    assert logger.experiment is fake_run
    assert "reopens the run of its parent, because wandb could not attach to it: no such run" in caplog.text
    assert wandb.init.call_args.kwargs["id"] == "exp"


class Lost:
    """A run whose service cannot be found."""

    @property
    def config(self) -> Any:
        raise RuntimeError("no such run")


# --- LightningCLI -----------------------------------------------------------------------------------------------------


def options_of(logger: Any) -> Options:
    """Return the options of one of our loggers: nothing public shows them before its run is open."""
    options: Options = logger._options
    return options


def logger_of(*arguments: str) -> Logger | None:
    with mock.patch.object(sys, "argv", ["train.py"]):
        command = LightningCLI(BoringModel, args=list(arguments), run=False, save_config_callback=None)
    made: Logger | None = command.trainer.logger
    return made


def test_the_help_of_a_lightning_cli_documents_all_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # so that words are not broken at hyphens
    with pytest.raises(SystemExit):
        logger_of("--trainer.logger.help=dist_wandb.DistWandbLogger")
    shown = " ".join(capsys.readouterr().out.split())
    texts = documented_options(DistWandbLogger)
    assert tuple(texts) == OPTION_NAMES
    assert {name: text in shown for name, text in texts.items()} == dict.fromkeys(OPTION_NAMES, True)


def test_a_lightning_cli_knows_all_arguments_and_reads_its_printed_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {
        "project": "digits",
        "log_model": "all",
        "run_mode": "shared",
        "rank_scope": "worker",
        "reduce": '{"tokens": "sum", "*": "max"}',
        "spread": '["train/*"]',
        "per_rank": "false",
        "limits.finish_timeout": "7",
        "config_sync": "off",
        "system_metrics": "all-nodes",
        "strict": "true",
    }
    options = ["--trainer.logger=dist_wandb.DistWandbLogger"]
    options += [f"--trainer.logger.{name}={value}" for name, value in given.items()]
    first = logger_of(*options)
    with pytest.raises(SystemExit):
        logger_of(*options, "--print_config")
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    second = logger_of(f"--config={tmp_path / 'printed.yaml'}")
    for logger in (first, second):
        assert isinstance(logger, DistWandbLogger)
        assert (logger._log_model, logger.name) == ("all", "digits")
        chosen = options_of(logger)
        assert (chosen.run_mode, chosen.reduce) == ("shared", {"tokens": "sum", "*": "max"})
        assert (chosen.spread, chosen.per_rank) == (["train/*"], False)
    assert options_of(first) == options_of(second)


@pytest.mark.parametrize(("text", "value"), [("True", True), ("False", False), ("all", "all")])
def test_log_model_can_be_set_in_a_file_or_on_the_command_line(tmp_path: Path, text: str, value: object) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "trainer:\n  logger:\n    class_path: dist_wandb.lightning.DistWandbLogger\n    init_args:\n"
        f"      log_model: {text}\n"
    )
    for more in ([], [f"--trainer.logger.init_args.log_model={text}"]):
        logger = logger_of(f"--config={path}", *more)
        assert isinstance(logger, DistWandbLogger)
        assert logger._log_model == value


def test_an_unknown_mode_is_refused_by_a_lightning_cli(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        logger_of("--trainer.logger=dist_wandb.DistWandbLogger", "--trainer.logger.run_mode=share")
    assert "run_mode" in capsys.readouterr().err


# --- order of imports -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_package_can_be_imported_while_wandb_is_a_mock(tmp_path: Path) -> None:
    script = """
import importlib.machinery, sys, types
from unittest import mock
assert not [name for name in sys.modules if name.startswith("dist_wandb")]
for name in [name for name in sys.modules if name.partition(".")[0] == "wandb" or name.endswith(".loggers.wandb")]:
    del sys.modules[name]  # a warm interpreter has imported them
fake = types.ModuleType("wandb")
fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None)  # transformers, which torchmetrics may import, wants one
fake.init, fake.run = mock.Mock(return_value=mock.Mock(spec=["log", "config", "id"], id="exp")), None
sys.modules["wandb"] = fake
import lightning.pytorch.loggers.wandb as stock
assert "wandb.sdk" not in sys.modules
stock._WANDB_AVAILABLE = True
from dist_wandb import DistWandbLogger
logger = DistWandbLogger()
logger.log_metrics({"a": 1.0}, 2)
fake.init.return_value.log.assert_called_once_with({"a": 1.0, "trainer/global_step": 2})
"""
    run_job([sys.executable, "-c", script], cwd=tmp_path).check()


@pytest.mark.parametrize(("primary", "written"), [(True, {"lr": 0.2, "new": 1}), (False, {"new": 1})])
def test_in_a_shared_run_secondaries_do_not_overwrite_the_primarys_config(
    monkeypatch: pytest.MonkeyPatch, primary: bool, written: dict[str, Any]
) -> None:
    config = mock.MagicMock()
    config.__contains__.side_effect = {"lr": 0.1}.__contains__
    run = SimpleNamespace(config=config)
    opened = SimpleNamespace(plan=SimpleNamespace(shared=True, primary=primary), run=run, config=config)
    opened.unchanged_config = lambda: nullcontext(config)
    logger = DistWandbLogger(run_mode="shared")
    monkeypatch.setattr(logger, "_open", lambda: opened)
    monkeypatch.setattr(logger._holder, "session", opened)
    for params in ({"lr": 0.2, "new": 1}, Namespace(lr=0.2, new=1)):
        logger.log_hyperparams(params)
        config.update.assert_called_once_with(written, allow_val_change=True)
        config.reset_mock()
