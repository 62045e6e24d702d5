"""The weights behind Lightning's epoch means, read from a real Trainer: weighted, the ranks' means are exact."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import lightning
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from dist_wandb import DistWandbLogger
from dist_wandb.lightning.trainers import epoch_weights

pytestmark = pytest.mark.usefixtures("fake_wandb")  # the Trainer uses logger.experiment

Batches = list[list[float]]
LogCall = Callable[["Module", Tensor], None]

THREE_AND_TWO: Batches = [[1.0, 1.0, 1.0], [1.0, 1.0]]


class Module(LightningModule):
    """A module that calls `log_call` with itself and the batch in every step of every stage."""

    def __init__(self, log_call: LogCall, at_epoch_end: Callable[[Module], None] = lambda _: None) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(()))
        self.metric = MeanMetric()
        self.log_call = log_call
        self.at_epoch_end = at_epoch_end

    def training_step(self, batch: Tensor) -> Tensor:
        self.log_call(self, batch)
        return self.parameter * batch.mean()

    def validation_step(self, batch: Tensor, _index: int, dataloader_idx: int = 0) -> None:  # noqa: ARG002
        self.log_call(self, batch)

    def test_step(self, batch: Tensor) -> None:
        self.log_call(self, batch)

    def on_train_epoch_end(self) -> None:
        self.at_epoch_end(self)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Recorder(DistWandbLogger):
    """Records the rows that Lightning logs, each with its weights."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.rows: list[tuple[Mapping[str, float], Mapping[str, Any]]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:  # noqa: ARG002
        self.rows.append((dict(metrics), dict(self._weights_of(metrics))))

    def with_name(self, name: str) -> list[tuple[Mapping[str, float], Mapping[str, Any]]]:
        return [row for row in self.rows if name in row[0]]


def loader(batches: Batches) -> DataLoader[Tensor]:
    return DataLoader([torch.tensor(batch) for batch in batches], batch_size=None)  # type: ignore[arg-type]


def trainer_with(logger: DistWandbLogger, **arguments: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **arguments},
    )


def fit(module: Module, batches: Batches, logger: Recorder | None = None, **arguments: Any) -> Recorder:
    logger = logger or Recorder()
    trainer_with(logger, limit_val_batches=0, **arguments).fit(module, loader(batches))
    return logger


def log_mean(**arguments: Any) -> LogCall:
    return lambda module, batch: module.log("loss", batch.mean(), **arguments)


# --- rows and weights -------------------------------------------------------------------------------------------------


def test_this_version_of_lightning_still_exposes_the_weights() -> None:
    rows = fit(Module(log_mean(on_epoch=True, on_step=False)), THREE_AND_TWO).rows
    assert rows[-1][1], (
        f"Lightning {lightning.__version__} no longer exposes the batch sizes behind its epoch means where "
        "lightning/trainers.py expects them: Trainer._results, Trainer._logger_connector._first_loop_iter, "
        "_ResultMetric.cumulated_batch_size. Until it is adapted, epoch means of uneven ranks are means of means."
    )


def test_steps_have_no_weight_and_counts_restart_each_epoch() -> None:
    logger = fit(Module(log_mean(on_epoch=True, on_step=True)), THREE_AND_TWO, max_epochs=2)
    assert [weights for _, weights in logger.with_name("loss_step")] == [{}] * 4
    assert [weights for _, weights in logger.with_name("loss_epoch")] == [{"loss_epoch": 5.0}] * 2


def test_a_value_only_of_steps_has_no_weight_at_the_end_of_the_epoch() -> None:
    def log_call(module: Module, batch: Tensor) -> None:
        module.log("at_step", batch.mean(), on_step=True, on_epoch=False)
        module.log("unseen", batch.mean(), on_step=False, on_epoch=True, logger=False)
        module.log("loss", batch.mean(), on_step=False, on_epoch=True)

    module = Module(log_call, lambda module: module.logger.log_metrics({"at_step": 1.0, "unseen": 2.0}))  # type: ignore[union-attr]
    assert [weights for _, weights in fit(module, THREE_AND_TWO).rows] == [{}, {}, {}, {"loss": 5.0}]


def test_a_batch_size_given_by_the_user_is_the_weight() -> None:
    rows = fit(Module(log_mean(on_epoch=True, on_step=False, batch_size=7)), THREE_AND_TWO).with_name("loss")
    assert [weights for _, weights in rows] == [{"loss": 14.0}]


def test_values_that_are_not_means_have_no_weight() -> None:
    def log_call(module: Module, batch: Tensor) -> None:
        for reduction in ("sum", "min", "max", "mean"):
            module.log(reduction, batch.mean(), on_step=False, on_epoch=True, reduce_fx=reduction)
        module.metric(batch)
        module.log("metric", module.metric, on_step=False, on_epoch=True)

    row, weights = fit(Module(log_call), THREE_AND_TWO).rows[-1]
    assert row == {"sum": 2.0, "min": 1.0, "max": 1.0, "mean": 1.0, "metric": 1.0, "epoch": 0}
    assert weights == {"mean": 5.0}


@pytest.fixture
def group_of_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Create a process group: without one, Lightning does not synchronize."""
    for variable, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(variable, value)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_values_that_lightning_synchronises_have_no_weight() -> None:
    def log_call(module: Module, batch: Tensor) -> None:
        module.log("synced", batch.mean(), on_step=False, on_epoch=True, sync_dist=True)
        module.log("own", batch.mean(), on_step=False, on_epoch=True)

    row, weights = fit(Module(log_call), THREE_AND_TWO, strategy="ddp").rows[-1]
    assert row["synced"] == row["own"] == 1.0
    assert weights == {"own": 5.0}


def test_if_two_hooks_log_a_name_the_later_weight_applies() -> None:
    def log_call(module: Module, batch: Tensor) -> None:
        module.log("mean", batch.mean(), on_step=False, on_epoch=True)
        module.log("sum", batch.mean(), on_step=False, on_epoch=True)

    def at_epoch_end(module: Module) -> None:
        module.log("mean", 8.0)
        module.log("sum", 8.0, reduce_fx="sum")

    row, weights = fit(Module(log_call, at_epoch_end), THREE_AND_TWO).rows[-1]
    assert (row["mean"], row["sum"]) == (8.0, 8.0)
    assert weights == {"mean": 1.0}


def test_values_logged_by_callbacks_have_no_weight() -> None:
    class Own(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
            trainer.logger.log_metrics({"own": 1.0})  # type: ignore[union-attr]

    logger = fit(
        Module(log_mean(on_epoch=True, on_step=False)), THREE_AND_TWO, callbacks=[Own(), LearningRateMonitor()]
    )
    assert {tuple(row) for row, _ in logger.rows} == {("lr-SGD",), ("own",), ("loss", "epoch")}
    assert all(weights == {} for row, weights in logger.rows if "loss" not in row)


def test_a_row_logged_directly_to_the_logger_has_no_weight() -> None:
    def log_call(module: Module, batch: Tensor) -> None:
        module.log("loss", batch.mean(), on_step=False, on_epoch=True)
        module.logger.log_metrics({"loss": 3.0})  # type: ignore[union-attr]

    rows = fit(Module(log_call), THREE_AND_TWO).with_name("loss")
    assert [weights for _, weights in rows] == [{}, {}, {"loss": 5.0}]


def test_counts_of_an_earlier_epoch_are_not_used_as_weights() -> None:
    def log_call(module: Module, batch: Tensor) -> None:
        if module.current_epoch == 0:
            module.log("loss", batch.mean(), on_step=False, on_epoch=True)

    def at_epoch_end(module: Module) -> None:
        if module.current_epoch == 1:
            module.logger.log_metrics({"loss": 3.0})  # type: ignore[union-attr]

    rows = fit(Module(log_call, at_epoch_end), THREE_AND_TWO, max_epochs=2).with_name("loss")
    assert rows == [({"loss": 1.0, "epoch": 0}, {"loss": 5.0}), ({"loss": 3.0}, {})]


# --- stages and dataloaders -------------------------------------------------------------------------------------------


def test_validation_and_training_of_a_fit_have_separate_weights() -> None:
    def log_call(module: Module, batch: Tensor) -> None:
        stage = "train" if module.training else "val"
        module.log(stage, batch.mean(), on_step=True, on_epoch=True)

    logger = Recorder()
    trainer_with(logger, max_epochs=2, val_check_interval=1).fit(
        Module(log_call), loader(THREE_AND_TWO), loader([[1.0], [1.0, 1.0]])
    )
    assert [weights for _, weights in logger.with_name("val_epoch")] == [{"val_epoch": 3.0}] * 4
    assert [weights for _, weights in logger.with_name("train_epoch")] == [{"train_epoch": 5.0}] * 2
    assert {name for _, weights in logger.rows for name in weights} == {"val_epoch", "train_epoch"}


def test_two_validation_dataloaders_have_a_weight_each() -> None:
    logger = Recorder()
    trainer_with(logger).validate(
        Module(log_mean(on_epoch=True, on_step=True)), [loader(THREE_AND_TWO), loader([[2.0], [2.0, 2.0]])]
    )
    row, weights = logger.rows[-1]
    assert row["loss_epoch/dataloader_idx_0"] == 1.0
    assert row["loss_epoch/dataloader_idx_1"] == 2.0
    assert weights == {"loss_epoch/dataloader_idx_0": 5.0, "loss_epoch/dataloader_idx_1": 3.0}
    assert all(step_weights == {} for _, step_weights in logger.rows[:-1])


def test_dataloaders_with_their_own_names_have_a_weight_each() -> None:
    def log_call(module: Module, batch: Tensor) -> None:
        module.log(f"of-{batch[0]:.0f}", batch.mean(), add_dataloader_idx=False)

    logger = Recorder()
    trainer_with(logger).validate(Module(log_call), [loader(THREE_AND_TWO), loader([[2.0], [2.0, 2.0]])])
    assert logger.rows == [({"of-1": 1.0, "of-2": 2.0, "epoch": 0}, {"of-1": 5.0, "of-2": 3.0})]


def test_the_test_stage_and_log_dict_have_weights() -> None:
    logger = Recorder()
    trainer_with(logger).test(
        Module(lambda module, batch: module.log_dict({"a": batch.mean(), "b": batch.sum()})), loader(THREE_AND_TWO)
    )
    assert [weights for _, weights in logger.rows] == [{"a": 5.0, "b": 5.0}]


# --- ranks ------------------------------------------------------------------------------------------------------------


def mean_over_ranks(ranks: list[Batches]) -> float:
    """Return the weighted mean of the rows that ranks with these batches log."""
    rows = [fit(Module(log_mean(on_epoch=True, on_step=False)), batches).rows[-1] for batches in ranks]
    weighted = sum(weights["loss"] * row["loss"] for row, weights in rows)
    return float(weighted / sum(weights["loss"] for _, weights in rows))


@pytest.mark.parametrize(
    ("ranks", "true_mean"),
    [
        ([THREE_AND_TWO, THREE_AND_TWO], 1.0),
        ([[[1.0], [1.0]], [[3.0]]], 5 / 3),  # Lightning issue 21859: sync_dist=True gives 2.5
        ([[[1.0, 2.0, 3.0], [4.0, 5.0]], [[10.0, 20.0]]], 45 / 7),
        ([[[1.0]], [[2.0] * 4], [[3.0] * 2, [4.0]]], 19 / 8),
    ],
)
def test_the_weighted_mean_over_ranks_is_the_mean_over_all_samples(ranks: list[Batches], true_mean: float) -> None:
    samples = [sample for batches in ranks for batch in batches for sample in batch]
    assert math.isclose(sum(samples) / len(samples), true_mean)
    assert math.isclose(mean_over_ranks(ranks), true_mean, rel_tol=1e-6)


# --- without weights, and their cost ----------------------------------------------------------------------------------


def test_without_a_trainer_there_are_no_weights() -> None:
    module = Module(log_mean())
    assert epoch_weights(None, {"loss": 1.0}) == {}
    assert epoch_weights(module, {"loss": 1.0}) == {}


def test_in_fabric_there_are_no_weights() -> None:
    logger = Recorder()
    module = Module(log_mean())
    fabric = Fabric(accelerator="cpu", devices=1, loggers=[logger])
    fabric.setup(module)
    logger.log_graph(module)
    fabric.log("loss", 1.0)
    assert logger.rows == [({"loss": 1.0}, {})]
    assert epoch_weights(module, {"loss": 1.0}) == {}


def trainer_that_holds(results: Any, *, at_step: bool = False) -> LightningModule:
    connector = SimpleNamespace(_first_loop_iter=True if at_step else None)
    trainer = SimpleNamespace(_logger_connector=connector, _results=results)
    return cast("LightningModule", SimpleNamespace(trainer=trainer))


def results_of_five() -> _ResultCollection:
    results = _ResultCollection(training=True)
    results.log("training_step", "loss", torch.tensor(1.0), on_epoch=True, batch_size=5)
    return results


def test_a_count_on_another_device_is_not_read() -> None:
    results = results_of_five()
    count = results["training_step.loss"].to("meta").cumulated_batch_size  # reading a meta tensor is an error
    assert epoch_weights(trainer_that_holds(results), {"loss": 1.0})["loss"] is count


def test_rows_of_steps_do_not_read_the_results() -> None:
    results = mock.MagicMock()
    assert epoch_weights(trainer_that_holds(results, at_step=True), {"loss": 1.0}) == {}
    assert results.mock_calls == []
    epoch_weights(trainer_that_holds(results), {"loss": 1.0})
    assert results.mock_calls != []


@pytest.mark.parametrize("name", ["has_reset", "meta", "is_tensor", "cumulated_batch_size"])
def test_a_lightning_with_different_internals_gives_no_weights(name: str) -> None:
    results = results_of_five()
    delattr(results["training_step.loss"], name)
    assert epoch_weights(trainer_that_holds(results), {"loss": 1.0}) == {}
    assert epoch_weights(trainer_that_holds([1]), {"loss": 1.0}) == {}
    assert epoch_weights(trainer_that_holds(None), {"loss": 1.0}) == {}
    assert epoch_weights(cast("LightningModule", SimpleNamespace(trainer=None)), {"loss": 1.0}) == {}


# --- the logger -------------------------------------------------------------------------------------------------------


def test_weights_get_the_names_of_the_row_with_its_prefix() -> None:
    logger = fit(Module(log_mean(on_epoch=True, on_step=False)), THREE_AND_TWO, Recorder(prefix="fold"))
    assert logger.rows[-1] == ({"loss": 1.0, "epoch": 0}, {"fold-loss": 5.0})


def test_the_logger_does_not_keep_the_lightning_module_alive() -> None:
    logger = Recorder()
    module = Module(log_mean())
    logger.log_graph(module)
    logger.log_graph(nn.Linear(1, 1), torch.zeros(1))
    watched = weakref.ref(module)
    del module
    gc.collect()
    assert watched() is None
    logger.log_metrics({"loss": 1.0})
    assert logger.rows == [({"loss": 1.0}, {})]


def test_pickles_and_copies_do_not_contain_the_module() -> None:
    logger = DistWandbLogger(run_mode="new")
    module = Module(log_mean())  # with a function of a function, which cannot be pickled
    logger.log_graph(module)
    assert len(pickle.dumps(logger)) > 0
    watched = weakref.ref(module)
    twin = copy.deepcopy(logger)
    del module, logger
    gc.collect()
    assert watched() is None
    assert twin.name == "lightning_logs"
