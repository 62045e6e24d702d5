"""`DistWandbCallback(timings=True)`: the parts of a step in the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeWandb
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from dist_wandb import DistWandbCallback

pytestmark = [pytest.mark.usefixtures("fresh_state"), pytest.mark.slow]

LOADED = ["data", None]
STEP = ["forward", "backward", "optimizer", None]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if bool((x < 0).any()):
            raise ArithmeticError
        return {"loss": self.layer(x).mean()}


def train(out: Path, *, callback: DistWandbCallback | None = None, fails: bool = False, **arguments: Any) -> Trainer:
    data = [{"x": torch.ones(2)}, {"x": torch.full((2,), -1.0 if fails else 1.0)}]
    given = {"max_steps": 2, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    batch = {"per_device_train_batch_size": 1, "use_cpu": True, "dataloader_pin_memory": False}
    trainer = Trainer(
        model=Model(),
        args=TrainingArguments(str(out), **{**given, **batch, **arguments}),
        train_dataset=data,
        eval_dataset=data,
        callbacks=[callback or DistWandbCallback(timings=True)],
    )
    trainer.train()
    return trainer


def is_measured(trainer: Trainer, parts: list[str | None]) -> bool:
    """Return whether a Trainer's model and optimizer are still measured."""
    before = len(parts)
    trainer.model(torch.ones(1, 2))
    trainer.optimizer.step()
    return len(parts) > before


def test_a_step_passes_through_its_parts_in_order(
    parts: list[str | None], whole_run: FakeWandb, tmp_path: Path
) -> None:
    train(tmp_path)
    # Accelerate reads one batch ahead
    assert parts == [None, *LOADED, *LOADED, *STEP, *LOADED, *STEP, None]
    rows = [row for row in whole_run.runs[0].rows if "time/forward" in row]
    assert len(rows) == 2
    assert all(row[f"time/{part}"] > 0 for row in rows for part in ("data", "forward", "backward", "optimizer"))


@pytest.mark.usefixtures("whole_run")
def test_without_timings_nothing_is_measured(parts: list[str | None], tmp_path: Path) -> None:
    train(tmp_path, callback=DistWandbCallback())
    assert parts == []


@pytest.mark.usefixtures("whole_run")
def test_accumulated_gradients_are_one_update(parts: list[str | None], tmp_path: Path) -> None:
    train(tmp_path, gradient_accumulation_steps=2, max_steps=1)
    assert [part for part in parts if part not in ("data", None)] == ["forward", "backward"] * 2 + ["optimizer"]


@pytest.mark.usefixtures("whole_run")
def test_an_evaluation_between_two_steps_is_not_measured(parts: list[str | None], tmp_path: Path) -> None:
    train(tmp_path, eval_strategy="steps", eval_steps=1)
    assert [part for part in parts if part is not None].count("forward") == 2
    assert parts.count("data") == 3


@pytest.mark.usefixtures("whole_run")
def test_all_hooks_are_removed_at_the_end_and_after_a_failure(parts: list[str | None], tmp_path: Path) -> None:
    callback = DistWandbCallback(timings=True)
    assert not is_measured(train(tmp_path, callback=callback), parts)
    with pytest.raises(ArithmeticError):
        train(tmp_path, callback=callback, fails=True)
    del parts[:]
    trainer = train(tmp_path, callback=callback)
    assert [part for part in parts if part not in ("data", None)] == ["forward", "backward", "optimizer"] * 2
    assert not is_measured(trainer, parts)


@pytest.mark.usefixtures("whole_run")
def test_a_compiled_model_is_not_measured(parts: list[str | None], tmp_path: Path) -> None:
    train(tmp_path, torch_compile=True, torch_compile_backend="eager")
    assert [part for part in parts if part is not None] == ["data", "data", "optimizer", "data", "optimizer"]
