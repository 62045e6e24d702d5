"""Lightning's part in restarts: the base id in checkpoints, and before there are ranks."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from dist_wandb import DistWandbLogger, restart
from dist_wandb import lightning as door
from dist_wandb import session as sessions_room
from dist_wandb.errors import ReadError
from dist_wandb.lightning_checkpoints import KEY, BaseIdInCheckpoints
from dist_wandb.options import Options
from dist_wandb.restart import Keeper
from dist_wandb.script_ids import ScriptIds
from dist_wandb.topology import Topology

if TYPE_CHECKING:
    from tests.conftest import FakeWandb

NOTES = Path("wandb") / restart.NOTES_DIRECTORY


@pytest.fixture(autouse=True)
def fresh_process(
    fake_wandb: FakeWandb,  # noqa: ARG001  # goes first
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[], None]:
    """No logger was made yet; call it to have that again, as in a job's next start."""

    def begin() -> None:
        monkeypatch.setattr(door, "_script_ids", ScriptIds(tmp_path))

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


def test_of_several_loggers_each_finds_its_own(tmp_path: Path) -> None:
    first = trainer([DistWandbLogger(id="a"), DistWandbLogger(id="b")])
    first.fit(BoringModel())
    first.save_checkpoint(tmp_path / "x.ckpt")
    assert DistWandbLogger.id_in(tmp_path / "x.ckpt", 0) == "a"
    assert DistWandbLogger.id_in(str(tmp_path / "x.ckpt"), logger=1) == "b"


def test_a_trainer_gets_one_callback_and_keeps_the_order_of_others() -> None:
    saving = ModelCheckpoint()
    first = trainer(DistWandbLogger(), callbacks=[saving])
    for _ in range(2):
        first.fit(BoringModel())
    ours = [callback for callback in first.callbacks if isinstance(callback, BaseIdInCheckpoints)]  # type: ignore[attr-defined]
    assert len(ours) == 1
    assert first.callbacks[-1] is saving  # type: ignore[attr-defined]


def test_a_trainer_without_the_logger_loads_such_checkpoints_without_a_word(tmp_path: Path) -> None:
    first = trainer(DistWandbLogger())
    first.fit(BoringModel())
    first.save_checkpoint(tmp_path / "x.ckpt")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer(False).fit(BoringModel(), ckpt_path=tmp_path / "x.ckpt")
    assert not [warning for warning in said if "callbacks" in str(warning.message)]


def test_before_runs_are_open_nothing_is_added() -> None:
    checkpoint: dict[str, Any] = {}
    logger = DistWandbLogger()
    callback = BaseIdInCheckpoints(0, logger._known_base_id)
    callback.on_save_checkpoint(SimpleNamespace(), BoringModel(), checkpoint)  # type: ignore[arg-type]
    assert checkpoint == {}
    pickle.dumps(callback)  # as a spawn strategy does with a Trainer's callbacks


def test_modules_without_a_trainer_are_left_alone() -> None:
    logger = DistWandbLogger()
    logger.log_graph(BoringModel())
    Fabric(accelerator="cpu", devices=1).setup_module(module := LightningModule())
    logger.log_graph(module)


def test_the_directory_of_a_sharded_checkpoint_is_looked_into(tmp_path: Path) -> None:
    torch.save({KEY: {"0": "exp"}}, tmp_path / "meta.pt")
    assert DistWandbLogger.id_in(tmp_path) == "exp"


@pytest.mark.parametrize("content", [{}, {KEY: {"1": "exp"}}, {KEY: {"0": 7}}, {KEY: "exp"}, []], ids=repr)
def test_a_checkpoint_without_an_id_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(ReadError, match=r"x\.ckpt: holds no run id of logger 0"):
        DistWandbLogger.id_in(tmp_path / "x.ckpt")


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").write_bytes(b"x" * 100)
    for name in ("x.ckpt", "y.ckpt", "."):
        with pytest.raises(ReadError):
            DistWandbLogger.id_in(tmp_path / name)


class Unpickled:
    """Shows that it was unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.putenv, ("DIST_WANDB_TEST_UNPICKLED", "1")


def test_a_checkpoint_that_could_run_code_is_read_only_if_it_is_trusted(tmp_path: Path) -> None:
    torch.save({KEY: {"0": "exp"}, "hyper_parameters": Unpickled()}, tmp_path / "x.ckpt")
    with pytest.raises(ReadError, match="If you trust the file, pass weights_only=False"):
        DistWandbLogger.id_in(tmp_path / "x.ckpt")
    assert DistWandbLogger.id_in(tmp_path / "x.ckpt", weights_only=False) == "exp"


# --- before there are ranks -------------------------------------------------------------------------------------------


def leave_note(base_id: str, *, world_size: int = 2, session: str = "DistWandbLogger/0", **arguments: Any) -> None:
    topology = Topology(0, 0, 0, world_size, world_size, 1)
    Keeper(session, Options("new"), topology, {"dir": ".", "project": "digits", **arguments}).leave(base_id)


def test_a_logger_that_may_continue_knows_the_id_before_there_are_ranks(
    fresh_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its children, which ddp starts from the script, learn it from their parent."""
    leave_note("earlier")
    logger = DistWandbLogger(project="digits", run_mode="new", resume="auto")
    assert logger._base_id == "earlier"
    leave_note("another one")
    monkeypatch.setenv("NODE_RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(os, "getppid", os.getpid)  # as if this were its child
    fresh_process()
    assert DistWandbLogger(project="digits", run_mode="new", resume="auto").version == "earlier"


@pytest.mark.parametrize("arguments", [{}, {"resume": "auto", "id": "exp"}, {"resume": "never"}])
def test_others_do_not(arguments: dict[str, Any]) -> None:
    leave_note("earlier")
    assert DistWandbLogger(project="digits", run_mode="new", **arguments)._base_id != "earlier"


def test_a_world_of_one_leaves_resuming_to_wandb(fake_wandb: FakeWandb) -> None:
    leave_note("earlier", world_size=1)
    logger = DistWandbLogger(project="digits", run_mode="new", resume="auto")
    assert logger.experiment.id == "made-by-wandb-0"
    assert fake_wandb.arguments[0]["resume"] == "auto"
    assert len(list(NOTES.iterdir())) == 1


def test_several_ranks_continue_what_the_note_says(
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
    session = first._session
    assert session is not None
    sessions_room._sessions.remove(session)  # as by SIGKILL
    fresh_process()
    second = DistWandbLogger(project="digits", resume="auto", **options)  # type: ignore[arg-type]
    assert second.experiment.id == before
    assert fake_wandb.arguments[-1]["resume"] == "allow"
