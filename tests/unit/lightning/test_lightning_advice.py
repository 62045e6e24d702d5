"""Lightning's advice to log with `sync_dist=True` is given where it is right, and not where our logger reduces."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes import FakeWandb
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.utilities.rank_zero import WarningCache
from lightning_trainers import quiet_trainer

from dist_wandb import DistWandbLogger


@pytest.fixture(autouse=True)
def cache(
    fake_wandb: FakeWandb,  # noqa: ARG001  # must run first
) -> Iterator[WarningCache]:
    """Lightning's cache of warnings, as in a new process with an initialized process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    result.warning_cache.clear()
    yield result.warning_cache
    result.warning_cache.clear()
    dist.destroy_process_group()


class Module(BoringModel):
    def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).sum()
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: torch.Tensor, _index: int) -> None:
        self.log("val's", self.layer(batch).sum())


def advised(logger: Any, model: BoringModel | None = None, **arguments: Any) -> list[str]:
    batches = {"limit_train_batches": 2, "limit_val_batches": 2, "num_sanity_val_steps": 0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(logger, **batches, **arguments).fit(model or Module())
    messages = [str(warning.message) for warning in caught if "sync_dist=True" in str(warning.message)]
    return sorted(name for name in ("loss", "val's") if any(f"{name!r}," in text for text in messages))


def test_advice_is_not_given_if_our_logger_reduces() -> None:
    assert advised(DistWandbLogger()) == []
    assert advised([DistWandbLogger(id="a"), DistWandbLogger(id="b", run_mode="new")]) == []
    model = Module()
    Fabric(accelerator="cpu", devices=1).setup(model)  # which makes itself the trainer of the module
    assert advised(DistWandbLogger()) == []
    assert advised(False) == ["loss", "val's"]  # a later Trainer without our logger gets the advice as before


def test_advice_is_given_if_our_logger_does_not_reduce(tmp_path: Path) -> None:
    assert advised(DistWandbLogger(reduce=None)) == ["loss", "val's"]
    result.warning_cache.clear()
    assert advised([DistWandbLogger(), CSVLogger(tmp_path)]) == ["loss", "val's"]


@pytest.mark.parametrize("monitored", ["val's", "loss_epoch"])
def test_advice_is_given_for_values_monitored_by_a_callback(monitored: str, tmp_path: Path) -> None:
    name = monitored.removesuffix("_epoch")
    assert advised(DistWandbLogger(), callbacks=[EarlyStopping(monitored)]) == [name]
    result.warning_cache.clear()
    saving: dict[str, Any] = {"callbacks": [ModelCheckpoint(tmp_path, monitor=monitored)], "enable_checkpointing": True}
    assert advised(DistWandbLogger(), **saving) == [name]


def test_advice_is_given_for_values_monitored_by_a_scheduler() -> None:
    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val's"}}

    assert advised(DistWandbLogger(), Scheduled()) == ["val's"]
