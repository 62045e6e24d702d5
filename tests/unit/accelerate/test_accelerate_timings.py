"""`DistWandbTracker(timings=True)`: the parts of a step in a script with Accelerate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from accelerate_state import set_state
from fakes import FakeWandb
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dist_wandb import ConfigurationError, DistWandbTracker
from dist_wandb.accelerate.timings import PreparedTimings
from dist_wandb.errors import UnsupportedVersionError

pytestmark = pytest.mark.usefixtures("fresh_state")

LOADED = ["data", None]
STEP = ["forward", None, "backward", None, "optimizer", None]
EPOCH = [*LOADED, *LOADED, *STEP, *LOADED, *STEP]


class Script:
    """A script with two batches of one sample each."""

    def __init__(self, tracker: Any = None, **arguments: Any) -> None:
        self.accelerator = Accelerator(cpu=True, log_with=tracker or DistWandbTracker(timings=True), **arguments)
        self.layer = nn.Linear(2, 1)
        self.loader: Any = DataLoader(torch.ones(2, 2))  # type: ignore[arg-type]  # it accepts objects with a length and items
        self.given = (self.layer, torch.optim.SGD(self.layer.parameters()), self.loader)
        self.model, self.optimizer, self.batches = self.accelerator.prepare(*self.given)

    def start(self) -> Script:
        self.accelerator.init_trackers("digits")
        return self

    def train(self, batches: Any = None) -> None:
        for step, batch in enumerate(batches or self.batches):
            loss: Tensor = self.model(batch).sum()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.accelerator.log({"loss": loss.item()}, step=step)


def test_a_step_of_each_run_passes_through_its_parts_in_order_and_once(
    parts: list[str | None], fake_wandb: FakeWandb
) -> None:
    script = Script()
    script.accelerator.prepare(script.model, script.optimizer)  # again
    for number in range(2):
        script.start().train()
        # Accelerate reads one batch ahead
        assert parts == EPOCH * (number + 1)
        script.accelerator.end_training()
        parts[:] = parts[: len(EPOCH) * (number + 1)]
        rows = [row for row in fake_wandb.runs[number].rows if "time/forward" in row]
        assert len(rows) == 2
        assert all(row[f"time/{part}"] > 0 for row in rows for part in ("data", "forward", "backward", "optimizer"))


def test_without_timings_nothing_is_measured(parts: list[str | None]) -> None:
    Script(DistWandbTracker(timings=True))  # another accelerator
    Script(DistWandbTracker()).start().train()
    assert parts == []


def test_a_failed_backward_pass_ends_its_part(parts: list[str | None]) -> None:
    script = Script().start()
    with pytest.raises(RuntimeError, match="grad"):
        script.accelerator.backward(torch.ones(1))
    assert parts == ["backward", None]


def test_loading_on_rank_0_for_all_ranks_is_not_measured(parts: list[str | None]) -> None:
    script = Script(dataloader_config=DataLoaderConfiguration(dispatch_batches=True)).start()
    script.train()
    assert "data" not in parts
    assert parts.count("forward") == 2


def test_a_compiled_model_is_measured_from_outside_and_may_wait(parts: list[str | None]) -> None:
    script = Script(dynamo_backend="eager").start()
    script.train()
    assert parts.count("forward") == 2
    session = mock.MagicMock()
    PreparedTimings(lambda: session).measure([script.model])
    script.model(torch.ones(1, 2))
    (forward,) = (call for call in session.timed.call_args_list if call.args == ("forward",))
    assert forward.kwargs["waits"]


@pytest.mark.usefixtures("fake_wandb")
@pytest.mark.parametrize(
    ("kind", "dimensions", "is_sharded"),
    [
        (DistributedType.FSDP, None, True),
        (DistributedType.DEEPSPEED, None, True),
        (DistributedType.MULTI_CPU, None, False),
        (DistributedType.MULTI_CPU, ("dp_replicate",), False),
        (DistributedType.MULTI_CPU, ("dp_replicate", "tp"), True),
    ],
)
def test_sharded_parameters_count_as_waiting(
    kind: DistributedType, dimensions: tuple[str, ...] | None, is_sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Accelerator(cpu=True)
    set_state(monkeypatch, distributed_type=kind)
    if dimensions is not None:
        monkeypatch.setitem(vars(AcceleratorState()), "device_mesh", SimpleNamespace(mesh_dim_names=dimensions))
    session = mock.MagicMock()
    timings = PreparedTimings(lambda: session).timings
    for part in ("forward", "backward", "optimizer"):
        timings.enter(part)
    waiting = {call.args[0]: call.kwargs["waits"] for call in session.timed.call_args_list}
    assert waiting == {"forward": is_sharded, "backward": True, "optimizer": is_sharded}


def test_timings_that_cannot_be_measured_are_refused(fake_wandb: FakeWandb) -> None:
    with pytest.raises(ConfigurationError, match="timings=1 is neither True nor False"):
        DistWandbTracker(timings=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="wrap=False was given"):
        DistWandbTracker(timings=True, wrap=False)
    accelerator = Accelerator(cpu=True, log_with="dist_wandb")
    with pytest.raises(ConfigurationError, match=r"comes too late.*log_with=DistWandbTracker\(timings=True\)"):
        accelerator.init_trackers("digits", init_kwargs={"dist_wandb": {"timings": True}})
    assert fake_wandb.runs == []
    Accelerator.backward = lambda _self, _loss: None
    with pytest.raises(UnsupportedVersionError, match=r"Accelerator\.backward .* Leave timings=True out"):
        DistWandbTracker(timings=True)
