"""What the logger does in a Trainer: the weights behind epoch means, Lightning's advice on sync_dist, and timings."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import lightning
import pytest
import torch
import torch.distributed as dist
from fakes import FakeWandb
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning_trainers import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from dist_wandb import ConfigurationError, DistWandbLogger
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
        module = self._module() if self._module else None
        self.rows.append((dict(metrics), dict(epoch_weights(module, metrics))))

    def with_name(self, name: str) -> list[tuple[Mapping[str, float], Mapping[str, Any]]]:
        return [row for row in self.rows if name in row[0]]


def loader(batches: Batches) -> DataLoader[Tensor]:
    return DataLoader([torch.tensor(batch) for batch in batches], batch_size=None)  # type: ignore[arg-type]


def fit(module: Module, batches: Batches, logger: Recorder | None = None, **arguments: Any) -> Recorder:
    logger = logger or Recorder()
    quiet_trainer(logger, limit_val_batches=0, **arguments).fit(module, loader(batches))
    return logger


def log_mean(**arguments: Any) -> LogCall:
    return lambda module, batch: module.log("loss", batch.mean(), **arguments)


# --- rows and weights -------------------------------------------------------------------------------------------------


def test_steps_have_no_weight_and_counts_restart_each_epoch() -> None:
    logger = fit(Module(log_mean(on_epoch=True, on_step=True)), THREE_AND_TWO, max_epochs=2)
    assert [weights for _, weights in logger.with_name("loss_step")] == [{}] * 4
    assert [weights for _, weights in logger.with_name("loss_epoch")] == [{"loss_epoch": 5.0}] * 2


AT_END: dict[str, Any] = {"on_step": False, "on_epoch": True}


def log_only_of_steps(module: Module, batch: Tensor) -> None:
    module.log("at_step", batch.mean(), on_step=True, on_epoch=False)
    module.log("unseen", batch.mean(), **AT_END, logger=False)
    module.log("loss", batch.mean(), **AT_END)


def log_reductions(module: Module, batch: Tensor) -> None:
    for reduction in ("sum", "min", "max", "mean"):
        module.log(reduction, batch.mean(), **AT_END, reduce_fx=reduction)
    module.metric(batch)
    module.log("metric", module.metric, **AT_END)


def log_two_names(module: Module, batch: Tensor) -> None:
    module.log("mean", batch.mean(), **AT_END)
    module.log("sum", batch.mean(), **AT_END)


def log_again(module: Module) -> None:
    module.log("mean", 8.0)
    module.log("sum", 8.0, reduce_fx="sum")


def log_directly(module: Module) -> None:
    module.logger.log_metrics({"at_step": 1.0, "unseen": 2.0})  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("log_call", "at_epoch_end", "expected"),
    [
        (log_mean(**AT_END), lambda _: None, {"loss": 5.0}),
        (log_mean(**AT_END, batch_size=7), lambda _: None, {"loss": 14.0}),
        (log_only_of_steps, log_directly, {"loss": 5.0}),
        (log_reductions, lambda _: None, {"mean": 5.0}),
        (log_two_names, log_again, {"mean": 1.0}),
    ],
    ids=["mean", "batch size of the user", "values only of steps", "other reductions", "the later hook"],
)
def test_means_of_an_epoch_have_the_number_of_samples_as_their_weight(
    log_call: LogCall, at_epoch_end: Callable[[Module], None], expected: dict[str, float]
) -> None:
    rows = fit(Module(log_call, at_epoch_end), THREE_AND_TWO).rows
    assert [weights for _, weights in rows] == [*({} for _ in rows[1:]), expected], (
        f"If Lightning {lightning.__version__} no longer exposes the batch sizes behind its epoch means where "
        "lightning/trainers.py expects them (Trainer._results, Trainer._logger_connector._first_loop_iter, "
        "_ResultMetric.cumulated_batch_size), epoch means of uneven ranks are means of means until it is adapted."
    )


@pytest.fixture
def group(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # noqa: ARG001  # must run first
    """A process group of one: without one, Lightning neither synchronizes values nor advises to."""
    for variable, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(variable, value)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    result.warning_cache.clear()
    yield
    result.warning_cache.clear()
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_values_that_lightning_synchronises_have_no_weight() -> None:
    def log_call(module: Module, batch: Tensor) -> None:
        module.log("synced", batch.mean(), on_step=False, on_epoch=True, sync_dist=True)
        module.log("own", batch.mean(), on_step=False, on_epoch=True)

    row, weights = fit(Module(log_call), THREE_AND_TWO, strategy="ddp").rows[-1]
    assert row["synced"] == row["own"] == 1.0
    assert weights == {"own": 5.0}


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


@pytest.mark.parametrize("has_own_names", [False, True])
def test_two_validation_dataloaders_have_a_weight_each(has_own_names: bool) -> None:
    def log_call(module: Module, batch: Tensor) -> None:
        own: dict[str, Any] = {"add_dataloader_idx": False} if has_own_names else {"on_step": True, "on_epoch": True}
        module.log(f"of-{batch[0]:.0f}" if has_own_names else "loss", batch.mean(), **own)

    logger = Recorder()
    quiet_trainer(logger).validate(Module(log_call), [loader(THREE_AND_TWO), loader([[2.0], [2.0, 2.0]])])
    names = ["of-1", "of-2"] if has_own_names else [f"loss_epoch/dataloader_idx_{index}" for index in range(2)]
    row, weights = logger.rows[-1]
    assert [row[name] for name in names] == [1.0, 2.0]
    assert weights == dict(zip(names, [5.0, 3.0], strict=True))
    assert all(step_weights == {} for _, step_weights in logger.rows[:-1])


# --- without weights, and their cost ----------------------------------------------------------------------------------


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


def test_the_logger_and_its_pickles_and_copies_do_not_keep_the_module() -> None:
    logger = Recorder(run_mode="new")
    module = Module(log_mean())  # with a function of a function, which cannot be pickled
    logger.log_graph(module)
    logger.log_graph(nn.Linear(1, 1), torch.zeros(1))
    assert len(pickle.dumps(logger)) > 0
    watched = weakref.ref(module)
    twin = copy.deepcopy(logger)
    del module
    gc.collect()
    assert watched() is None
    for one in (logger, twin):
        one.log_metrics({"loss": 1.0})
        assert one.rows == [({"loss": 1.0}, {})]


# --- advice -----------------------------------------------------------------------------------------------------------


def log_by_stage(module: Module, batch: Tensor) -> None:
    module.log("loss" if module.trainer.training else "val's", batch.sum(), on_epoch=True)


def advised(logger: Any, model: Module | None = None, **arguments: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet_trainer(logger, num_sanity_val_steps=0, **arguments)
        trainer.fit(model or Module(log_by_stage), loader(THREE_AND_TWO), loader(THREE_AND_TWO))
    messages = [str(warning.message) for warning in caught if "sync_dist=True" in str(warning.message)]
    return sorted(name for name in ("loss", "val's") if any(f"{name!r}," in text for text in messages))


@pytest.mark.usefixtures("group")
def test_advice_is_not_given_if_our_logger_reduces() -> None:
    assert advised(DistWandbLogger()) == []
    assert advised([DistWandbLogger(id="a"), DistWandbLogger(id="b", run_mode="new")]) == []
    model = Module(log_by_stage)
    Fabric(accelerator="cpu", devices=1).setup(model)  # which makes itself the trainer of the module
    assert advised(DistWandbLogger()) == []
    assert advised(False) == ["loss", "val's"]  # a later Trainer without our logger gets the advice as before


@pytest.mark.usefixtures("group")
def test_advice_is_given_if_our_logger_does_not_reduce(tmp_path: Path) -> None:
    assert advised(DistWandbLogger(reduce=None)) == ["loss", "val's"]
    result.warning_cache.clear()
    assert advised([DistWandbLogger(), CSVLogger(tmp_path)]) == ["loss", "val's"]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("monitored", ["val's", "loss_epoch"])
def test_advice_is_given_for_values_monitored_by_a_callback(monitored: str, tmp_path: Path) -> None:
    name = monitored.removesuffix("_epoch")
    assert advised(DistWandbLogger(), callbacks=[EarlyStopping(monitored)]) == [name]
    result.warning_cache.clear()
    saving: dict[str, Any] = {"callbacks": [ModelCheckpoint(tmp_path, monitor=monitored)], "enable_checkpointing": True}
    assert advised(DistWandbLogger(), **saving) == [name]


@pytest.mark.usefixtures("group")
def test_advice_is_given_for_values_monitored_by_a_scheduler() -> None:
    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val's"}}

    assert advised(DistWandbLogger(), Scheduled(log_by_stage)) == ["val's"]


# --- timings ----------------------------------------------------------------------------------------------------------


STEP = ["data", "forward", "backward", None, "optimizer"]


class Manual(Module):
    def __init__(self) -> None:
        super().__init__(lambda *_: None)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for _ in range(2):
            self.manual_backward(super().training_step(batch))
            optimizer.step()


def fit_timed(out: Path, module: Module | None = None, *, timings: bool = True, **arguments: Any) -> Trainer:
    trainer = quiet_trainer(DistWandbLogger(save_dir=out, timings=timings), **{"limit_val_batches": 0, **arguments})
    trainer.fit(module or Module(log_mean()), loader(THREE_AND_TWO), loader(THREE_AND_TWO))
    return trainer


def test_rows_have_the_parts_of_the_preceding_steps(
    parts: list[str | None], fake_wandb: FakeWandb, tmp_path: Path
) -> None:
    trainer = fit_timed(tmp_path)
    assert parts == [*STEP, *STEP, "data", None, None]  # the loader has no third batch; the epoch ends; the training
    assert trainer.callbacks == []  # type: ignore[attr-defined]  # public, but set elsewhere
    first, second = (row for row in fake_wandb.runs[0].rows if "loss" in row)
    names = {"time/data", "time/forward", "time/backward", "time/optimizer", "time/step", "time/busy"}
    assert names <= first.keys()
    assert names <= second.keys()
    assert first["time/step"] >= first["time/data"] + first["time/forward"] + first["time/backward"]


def test_without_timings_nothing_is_measured(parts: list[str | None], tmp_path: Path) -> None:
    fit_timed(tmp_path, timings=False)
    assert parts == []
    with pytest.raises(ConfigurationError, match="timings='data' is neither True nor False"):
        DistWandbLogger(save_dir=tmp_path, timings="data")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # The first is the sanity check; loading continues after a validation.
        ({"limit_val_batches": 1, "val_check_interval": 1}, [None, *[*STEP, "data", None] * 2, "data", None, None]),
        ({"accumulate_grad_batches": 2}, [*STEP[:-1], *STEP, "data", None, None]),
    ],
    ids=["validation between batches", "accumulated batches"],
)
def test_validation_is_not_measured_and_accumulating_batches_have_no_optimizer_part(
    parts: list[str | None], tmp_path: Path, arguments: dict[str, Any], expected: list[str | None]
) -> None:
    fit_timed(tmp_path, **arguments)
    assert parts == expected


def test_manual_optimization_measures_several_passes_in_a_step(parts: list[str | None], tmp_path: Path) -> None:
    fit_timed(tmp_path, Manual(), limit_train_batches=1)
    again = ["backward", "forward", "optimizer"]
    assert parts == ["data", "forward", *again, *again, "data", None, None]


def test_an_exception_ends_the_measurement(parts: list[str | None], tmp_path: Path) -> None:
    def fail(module: Module, _: Tensor) -> None:
        assert not module.global_step

    with pytest.raises(AssertionError):
        fit_timed(tmp_path, Module(fail))
    assert parts == [*STEP, "data", "forward", None]


def test_with_ddp_the_forward_pass_starts_after_the_copies_of_buffers(parts: list[str | None], tmp_path: Path) -> None:
    module = Module(log_mean())
    with mock.patch.dict(os.environ):  # Lightning changes it
        try:
            fit_timed(tmp_path, module, strategy="ddp", devices=1, limit_train_batches=1)
        finally:
            dist.destroy_process_group()
    assert parts == ["data", None, *STEP[1:], "data", None, None]
    assert not module._forward_pre_hooks
