"""The callback that `DistWandbLogger(timings=True)` adds to the Trainer while it fits.

Lightning calls, for each batch: ``on_train_batch_start``, the forward pass (``training_step``), ``on_before_backward``,
``on_after_backward``, ``on_before_optimizer_step`` (after the closure, also with LBFGS) and ``on_train_batch_end``.
Loading happens between the last and the first. The callback is the last in the list, so that the work of other
callbacks at the end of a batch, such as saving a checkpoint, does not count as loading.

With ddp the forward pass first copies buffers from rank 0, and waits for that rank. Lightning lets the wrapper call the
module itself after that, so with ddp ``forward`` begins with a hook of the module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dist_wandb.lightning.name_spaces import OfLightning, is_a
from dist_wandb.session.session import Session
from dist_wandb.session.step_timings import ForwardHook, StepTimings

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def measure(trainer: Trainer, session: Callable[[], Session | None]) -> None:
    """Measure the parts of a Trainer's steps while it fits."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # public, but set elsewhere
    if trainer.training and not any(isinstance(callback, StepTimer) for callback in callbacks):
        callbacks.append(StepTimer(trainer, session))


class StepTimer(OfLightning):
    """Measures the parts of training steps, from one call by Lightning to the next."""

    stock = "Callback"

    def __init__(self, trainer: Trainer, session: Callable[[], Session | None]) -> None:
        self._is_ddp = is_a(trainer.strategy, "strategies.DDPStrategy")
        is_sharded = not (self._is_ddp or is_a(trainer.strategy, "strategies.SingleDeviceStrategy"))
        self._timings = StepTimings(session, is_sharded=is_sharded)
        self._hook: Any = None
        self._is_due = False  # whether the forward pass of this batch has yet to begin

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Register for the forward passes of ddp."""
        if self._is_ddp:
            self._hook = pl_module.register_forward_pre_hook(ForwardHook(self._in_forward))

    def on_train_epoch_start(self, *_: Any, **__: Any) -> None:
        """Loading of the first batch begins."""
        self._timings.enter("data")

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """The batch is loaded."""
        self._is_due = self._is_ddp
        self._timings.enter(None if self._is_ddp else "forward")

    def on_before_backward(self, *_: Any, **__: Any) -> None:
        """The loss is computed."""
        self._timings.enter("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Gradients are reduced; in manual optimization other forward passes may follow."""
        self._timings.enter(None if pl_module.automatic_optimization else "forward")

    def on_before_optimizer_step(self, *_: Any, **__: Any) -> None:
        """The update follows."""
        self._timings.enter("optimizer")

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """The next batch is loaded, or the epoch ends."""
        self._timings.enter("data")

    def on_validation_start(self, *_: Any, **__: Any) -> None:
        """The validation is not measured."""
        self._timings.enter(None)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Loading continues, if the validation ran between two batches."""
        if not trainer.sanity_checking:
            self._timings.enter("data")

    def on_train_epoch_end(self, *_: Any, **__: Any) -> None:
        """Work between two epochs is not measured."""
        self._timings.enter(None)

    def on_train_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Remove the hook and this callback."""
        self._timings.end()
        if self._hook is not None:
            self._hook.remove()
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # as above
        # A new list, because Lightning is iterating over the old one.
        trainer.callbacks = [one for one in callbacks if one is not self]  # type: ignore[attr-defined]

    on_exception = on_train_end

    def _in_forward(self, _module: LightningModule) -> None:
        if self._is_due:
            self._is_due = False
            self._timings.enter("forward")
