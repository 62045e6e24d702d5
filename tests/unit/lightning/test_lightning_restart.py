"""Restarts with Lightning: the base id in checkpoints, and before the ranks are known."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from dist_wandb import DistWandbLogger
from dist_wandb.errors import ReadError
from dist_wandb.job.model import Topology
from dist_wandb.lightning import launching
from dist_wandb.lightning.checkpoints import KEY
from dist_wandb.lightning.launching import ScriptIds
from dist_wandb.session import registry
from dist_wandb.session.restart import DIRECTORY, RestartStore
from dist_wandb.settings.options import Options

if TYPE_CHECKING:
    from tests.conftest import FakeWandb

NOTES = Path("wandb") / DIRECTORY


@pytest.fixture(autouse=True)
def fresh_process(
    fake_wandb: FakeWandb,  # noqa: ARG001  # must run first
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[], None]:
    """Reset the process, as if no logger had been created; call the result to do so again, as in a restarted job."""

    def begin() -> None:
        monkeypatch.setattr(launching, "script_ids", ScriptIds(tmp_path))

    begin()
    return begin


def trainer(logger: DistWandbLogger | list[DistWandbLogger] | bool, **more: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return Trainer(max_steps=1, limit_val_batches=0, logger=logger, **quiet, **more)  # type: ignore[arg-type]


# --- in checkpoints ---------------------------------------------------------------------------------------------------


def test_checkpoints_hold_the_run_id(tmp_path: Path, fake_wandb: FakeWandb) -> None:
    first = trainer(DistWandbLogger(), callbacks=[ModelCheckpoint(tmp_path, filename="step", every_n_train_steps=1)])
    first.fit(BoringModel())
    first.save_checkpoint(tmp_path / "by-hand.ckpt")
    assert fake_wandb.runs[0].id == "made-by-wandb-0"
    for name in ("step.ckpt", "by-hand.ckpt"):
        assert DistWandbLogger.id_in(tmp_path / name) == "made-by-wandb-0"


def test_each_of_several_loggers_finds_its_own_id(tmp_path: Path) -> None:
    first = trainer([DistWandbLogger(id="a"), DistWandbLogger(id="b")])
    first.fit(BoringModel())
    first.save_checkpoint(tmp_path / "x.ckpt")
    assert DistWandbLogger.id_in(tmp_path / "x.ckpt", 0) == "a"
    assert DistWandbLogger.id_in(str(tmp_path / "x.ckpt"), logger=1) == "b"


class Watching(Callback):
    """Records the Trainer's callbacks while it trains."""

    def on_train_start(self, trainer: Trainer, _module: LightningModule) -> None:
        self.seen = list(trainer.callbacks)  # type: ignore[attr-defined]


def test_saving_does_not_change_the_callbacks_of_a_trainer(tmp_path: Path) -> None:
    watching = Watching()
    given = [watching, ModelCheckpoint(tmp_path, every_n_train_steps=1)]
    first = trainer(DistWandbLogger(), callbacks=given)
    before, listed = first.callbacks, list(first.callbacks)  # type: ignore[attr-defined]
    for _ in range(2):
        first.fit(BoringModel())
        first.save_checkpoint(tmp_path / "by-hand.ckpt")
    with pytest.raises(TypeError):
        first.save_checkpoint()  # type: ignore[call-arg]
    assert first.callbacks is before  # type: ignore[attr-defined]
    assert before == listed == watching.seen
    assert given == [listed[0], listed[-1]]


TUNING: dict[str, Callable[[Tuner, LightningModule], Any]] = {
    "fit": lambda tuner, model: tuner.scale_batch_size(model, max_trials=2),
    "validate": lambda tuner, model: tuner.scale_batch_size(model, max_trials=2, method="validate"),
    "lr": lambda tuner, model: tuner.lr_find(model, num_training=5),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", TUNING)
def test_tuning_leaves_a_trainer_unchanged(tmp_path: Path, what: str) -> None:
    """Lightning's own tests check this for its tuner."""

    class Tuned(BoringModel):
        batch_size, lr = 2, 0.1

        def train_dataloader(self) -> Any:
            return DataLoader(RandomDataset(32, 64), batch_size=self.batch_size)

        val_dataloader = train_dataloader

    logger = DistWandbLogger()
    first = Trainer(
        default_root_dir=tmp_path, max_epochs=1, logger=logger, accelerator="cpu", enable_progress_bar=False
    )
    names = ("loggers", "callbacks", "global_step", "max_steps", "limit_train_batches", "limit_val_batches")
    before = {name: getattr(first, name) for name in names}
    expected = {**before, "loggers": [logger], "callbacks": list(before["callbacks"])}
    TUNING[what](Tuner(first), Tuned())
    assert {name: getattr(first, name) for name in names} == expected


@pytest.mark.newest
def test_checkpoints_without_hyperparameters_hold_the_run_id_too(tmp_path: Path) -> None:
    first = trainer(DistWandbLogger(id="a"), enable_autolog_hparams=False)
    first.fit(BoringModel())
    first.save_checkpoint(tmp_path / "x.ckpt")
    assert DistWandbLogger.id_in(tmp_path / "x.ckpt") == "a"


def test_checkpoints_of_other_trainers_hold_no_id(tmp_path: Path) -> None:
    trainer(DistWandbLogger()).fit(BoringModel())
    other = trainer(False)
    other.fit(BoringModel())
    other.save_checkpoint(tmp_path / "x.ckpt")
    assert KEY not in torch.load(tmp_path / "x.ckpt")


def test_saving_is_wrapped_once() -> None:
    for logger in (DistWandbLogger(id="a"), DistWandbLogger(id="b")):
        assert logger.experiment
    wrapped: Any = Trainer.save_checkpoint
    assert not hasattr(wrapped.__wrapped__, "__wrapped__")
    parameters = inspect.signature(wrapped).parameters
    assert list(parameters)[:4] == ["self", "filepath", "weights_only", "storage_options"]


def test_a_trainer_without_the_logger_loads_checkpoints_without_warnings(tmp_path: Path) -> None:
    first = trainer(DistWandbLogger())
    first.fit(BoringModel())
    first.save_checkpoint(tmp_path / "x.ckpt")
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        trainer(False).fit(BoringModel(), ckpt_path=tmp_path / "x.ckpt")
    assert not [warning for warning in messages if "callbacks" in str(warning.message)]


def test_checkpoints_saved_before_a_run_is_open_hold_no_id(tmp_path: Path) -> None:
    assert DistWandbLogger(id="a").experiment  # so that a logger exists whose id would be added
    first = trainer(False)
    first.fit(BoringModel())
    first.loggers = [DistWandbLogger(id="b")]
    first.save_checkpoint(tmp_path / "x.ckpt")
    assert KEY not in torch.load(tmp_path / "x.ckpt")


def test_modules_without_a_trainer_are_left_alone() -> None:
    logger = DistWandbLogger()
    logger.log_graph(BoringModel())
    Fabric(accelerator="cpu", devices=1).setup_module(module := LightningModule())
    logger.log_graph(module)


def test_the_id_is_read_from_the_directory_of_a_sharded_checkpoint(tmp_path: Path) -> None:
    torch.save({KEY: {"0": "exp"}}, tmp_path / "meta.pt")
    assert DistWandbLogger.id_in(tmp_path) == "exp"


@pytest.mark.parametrize("content", [{}, {KEY: {"1": "exp"}}, {KEY: {"0": 7}}, {KEY: "exp"}, []], ids=repr)
def test_a_checkpoint_without_an_id_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(ReadError, match=r"x\.ckpt: holds no run id of logger 0"):
        DistWandbLogger.id_in(tmp_path / "x.ckpt")


def test_files_that_are_not_checkpoints_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").write_bytes(b"x" * 100)
    for name in ("x.ckpt", "y.ckpt", "."):
        with pytest.raises(ReadError):
            DistWandbLogger.id_in(tmp_path / name)


class Unpickled:
    """Records that it was unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _mark, ("1",)


_marks = ["0"]


def _mark(text: str) -> None:
    _marks.append(text)


def unpickled() -> str:
    return _marks[-1]


@pytest.mark.parametrize("is_zip", [True, False])
def test_code_in_a_checkpoint_is_executed_only_if_trusted(tmp_path: Path, *, is_zip: bool) -> None:
    _marks[:] = ["0"]
    path = tmp_path / "x.ckpt"
    content = {"model": torch.nn.Linear(2, 2), KEY: {"0": "exp"}, "hyper_parameters": Unpickled()}
    torch.save(content, path, _use_new_zipfile_serialization=is_zip)
    assert DistWandbLogger.id_in(path) == "exp"
    assert unpickled() == "0"
    if is_zip:  # torch cannot read older files with mmap
        assert DistWandbLogger.id_in(path, weights_only=False) == "exp"
        assert unpickled() == "1"


@pytest.mark.parametrize("base_id", ["../../x", "a\x1b[31m", "", "x" * 10**6, "a/b"], ids=lambda base_id: base_id[:9])
def test_an_invalid_id_is_refused(tmp_path: Path, base_id: str) -> None:
    torch.save({KEY: {"0": base_id}}, tmp_path / "x.ckpt")
    with pytest.raises(ReadError, match=r"run id of logger 0") as refused:
        DistWandbLogger.id_in(tmp_path / "x.ckpt")
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 2000


@pytest.mark.parametrize("name", ["pipe", "device", "link to a device", "directory with a pipe", "nothing"])
def test_paths_that_are_not_regular_files_are_refused_immediately(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "pipe":
        os.mkfifo(path)
    elif name == "device":
        path = Path("/dev/zero")
    elif name == "link to a device":
        path.symlink_to("/dev/zero")
    elif name == "directory with a pipe":
        path.mkdir()
        os.mkfifo(path / "meta.pt")
    with pytest.raises(ReadError):
        DistWandbLogger.id_in(path)


def test_a_link_to_a_checkpoint_is_followed(tmp_path: Path) -> None:
    """Lightning's last.ckpt may be a link."""
    torch.save({KEY: {"0": "exp"}}, tmp_path / "x.ckpt")
    (tmp_path / "last.ckpt").symlink_to("x.ckpt")
    assert DistWandbLogger.id_in(tmp_path / "last.ckpt") == "exp"


# --- before the ranks are known ---------------------------------------------------------------------------------------


def leave_note(base_id: str, *, world_size: int = 2, session: str = "DistWandbLogger/0", **arguments: Any) -> None:
    topology = Topology(0, 0, 0, world_size, world_size, 1)
    RestartStore(session, Options("new"), topology, {"dir": ".", "project": "digits", **arguments}).leave(base_id)


def test_a_logger_that_may_continue_knows_the_id_before_the_ranks_are_known(
    fresh_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its children, which ddp starts from the script, get the id from their parent."""
    leave_note("earlier")
    assert DistWandbLogger(project="digits", run_mode="new", resume="auto")._holder.base_id == "earlier"
    leave_note("another one")
    monkeypatch.setenv("NODE_RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(os, "getppid", os.getpid)  # as if this process were its own child
    fresh_process()
    assert DistWandbLogger(project="digits", run_mode="new", resume="auto").version == "earlier"


@pytest.mark.parametrize("arguments", [{}, {"resume": "auto", "id": "exp"}, {"resume": "never"}])
def test_other_loggers_do_not_use_the_recorded_id(arguments: dict[str, Any]) -> None:
    leave_note("earlier")
    assert DistWandbLogger(project="digits", run_mode="new", **arguments)._holder.base_id != "earlier"


def test_a_world_of_one_continues_the_recorded_run(fake_wandb: FakeWandb) -> None:
    leave_note("earlier", world_size=1)
    logger = DistWandbLogger(project="digits", run_mode="new", resume="auto")
    assert logger.experiment.id == "earlier"
    assert fake_wandb.arguments[0]["resume"] == "allow"  # W&B would follow its own record, whoever owns it


@pytest.mark.usefixtures("fake_wandb")
def test_without_auto_a_world_of_one_has_no_record() -> None:
    leave_note("earlier", world_size=1)
    logger = DistWandbLogger(project="digits", run_mode="new")
    assert logger.experiment.id == "made-by-wandb-0"
    assert len(list(NOTES.iterdir())) == 1


def test_several_ranks_continue_the_recorded_run(
    fake_wandb: FakeWandb, fresh_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_note("earlier")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(Topology, "from_torch_distributed", classmethod(lambda _: None))
    options = {"run_mode": "auto", "reduce": None}
    first = DistWandbLogger(project="digits", **options)  # type: ignore[arg-type]
    before = first.experiment.id
    assert before != "earlier"
    (session,) = registry.open_sessions()
    registry.remove(session)  # as by SIGKILL
    fresh_process()
    second = DistWandbLogger(project="digits", resume="auto", **options)  # type: ignore[arg-type]
    assert second.experiment.id == before
    assert fake_wandb.arguments[-1]["resume"] == "allow"
