"""Restarts with Lightning: the base id in checkpoints, and before the ranks are known."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeWandb
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_trainers import quiet_trainer

from dist_wandb import DistWandbLogger
from dist_wandb.errors import ReadError
from dist_wandb.job.topology import Topology
from dist_wandb.lightning.checkpoints import KEY
from dist_wandb.session.restart import DIRECTORY, RestartStore
from dist_wandb.settings.options import Options

NOTES = Path("wandb") / DIRECTORY


@pytest.fixture(autouse=True)
def fresh_process(
    fake_wandb: FakeWandb,  # noqa: ARG001  # must run first
    begin_script: Callable[..., None],
) -> Callable[..., None]:
    """Reset the process, as if no logger had been created; call the result to do so again, as in a restarted job."""
    begin_script()
    return begin_script


def trainer(logger: DistWandbLogger | list[DistWandbLogger] | bool, **more: Any) -> Trainer:
    return quiet_trainer(logger, max_steps=1, limit_val_batches=0, enable_checkpointing="callbacks" in more, **more)


# --- in checkpoints ---------------------------------------------------------------------------------------------------


def test_checkpoints_hold_the_run_ids(tmp_path: Path) -> None:
    callbacks = [ModelCheckpoint(tmp_path, filename="step", every_n_train_steps=1)]
    first = trainer([DistWandbLogger(), DistWandbLogger(id="b")], callbacks=callbacks)
    before, listed = first.callbacks, list(first.callbacks)  # type: ignore[attr-defined]
    first.fit(BoringModel())
    first.save_checkpoint(tmp_path / "by-hand.ckpt")
    for name in ("step.ckpt", "by-hand.ckpt"):
        assert DistWandbLogger.id_in(tmp_path / name) == "made-by-wandb-0"
        assert DistWandbLogger.id_in(str(tmp_path / name), logger=1) == "b"
    with pytest.raises(TypeError):
        first.save_checkpoint()  # type: ignore[call-arg]
    assert first.callbacks is before  # type: ignore[attr-defined]
    assert before == listed


def test_checkpoints_of_other_trainers_and_of_loggers_without_a_run_hold_no_id(tmp_path: Path) -> None:
    trainer(DistWandbLogger()).fit(BoringModel())
    other = trainer(False)
    other.fit(BoringModel())
    both: tuple[list[Any], ...] = ([], [DistWandbLogger(id="b")])
    for loggers in both:
        other.loggers = loggers
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


@pytest.mark.parametrize("kind", ["sharded", "link"])
def test_the_id_is_read_from_a_directory_and_through_a_link(tmp_path: Path, kind: str) -> None:
    torch.save({KEY: {"0": "exp"}}, tmp_path / "meta.pt")
    (tmp_path / "last.ckpt").symlink_to("meta.pt")  # as Lightning's last.ckpt may be
    assert DistWandbLogger.id_in(tmp_path if kind == "sharded" else tmp_path / "last.ckpt") == "exp"


WITHOUT_AN_ID: list[Any] = [{}, {KEY: {"1": "exp"}}, {KEY: {"0": 7}}, {KEY: "exp"}, []]
INVALID_IDS = ["../../x", "a\x1b[31m", "", "x" * 10**6]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((content, r"x\.ckpt: holds no run id of logger 0") for content in WITHOUT_AN_ID),
        *(({KEY: {"0": base_id}}, "run id of logger 0") for base_id in INVALID_IDS),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_checkpoint_without_a_valid_id_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(ReadError, match=message) as refused:
        DistWandbLogger.id_in(tmp_path / "x.ckpt")
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 2000


OTHER_PLACES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "directory with a pipe": lambda path: path.mkdir() or os.mkfifo(path / "meta.pt"),  # type: ignore[func-returns-value]
    "directory": Path.mkdir,
    "nothing": lambda _path: None,
    "text": lambda path: path.write_text("x" * 100, encoding="utf-8"),
}


@pytest.mark.parametrize("kind", OTHER_PLACES)
def test_what_is_no_checkpoint_is_refused_immediately(tmp_path: Path, kind: str) -> None:
    OTHER_PLACES[kind](tmp_path / "x.ckpt")
    message = r"x\.ckpt: cannot be read as a checkpoint: .*\. Pass one that a Trainer" if kind == "text" else None
    with pytest.raises(ReadError, match=message):
        DistWandbLogger.id_in(tmp_path / "x.ckpt")


class Executed:
    """Makes a directory when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = str(place)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.place,)


def test_code_in_a_checkpoint_is_executed_only_if_trusted(tmp_path: Path) -> None:
    path, place = tmp_path / "x.ckpt", tmp_path / "executed"
    content = {"model": torch.nn.Linear(2, 2), KEY: {"0": "exp"}, "hyper_parameters": Executed(place)}
    torch.save(content, path)
    assert DistWandbLogger.id_in(path) == "exp"
    assert not place.exists()
    assert DistWandbLogger.id_in(path, weights_only=False) == "exp"
    assert place.exists()


# --- before the ranks are known ---------------------------------------------------------------------------------------


def leave_note(base_id: str, *, world_size: int = 2, session: str = "DistWandbLogger/0", **arguments: Any) -> None:
    topology = Topology(0, 0, 0, world_size, world_size, 1)
    RestartStore(session, Options("new"), topology, {"dir": ".", "project": "digits", **arguments}).leave(base_id)


def test_a_logger_that_may_continue_knows_the_id_before_the_ranks_are_known(
    fresh_process: Callable[..., None],
) -> None:
    """Its children, which ddp starts from the script, get the id from their parent."""
    leave_note("earlier")
    DistWandbLogger(project="digits", run_mode="new", resume="auto")
    leave_note("another one")
    fresh_process(parent=os.getpid())
    assert DistWandbLogger(project="digits", run_mode="new", resume="auto").version == "earlier"


@pytest.mark.parametrize("arguments", [{}, {"resume": "auto", "id": "exp"}, {"resume": "never"}])
def test_other_loggers_do_not_use_the_recorded_id(arguments: dict[str, Any]) -> None:
    leave_note("earlier", world_size=1)
    assert DistWandbLogger(project="digits", run_mode="new", **arguments).experiment.id != "earlier"
    assert len(list(NOTES.iterdir())) == 1


def test_a_world_of_one_continues_the_recorded_run(fake_wandb: FakeWandb) -> None:
    leave_note("earlier", world_size=1)
    logger = DistWandbLogger(project="digits", run_mode="new", resume="auto")
    assert logger.experiment.id == "earlier"
    assert fake_wandb.arguments[0]["resume"] == "allow"  # W&B would follow its own record, whoever owns it
