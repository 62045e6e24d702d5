"""What `DistWandbLogger(timings=True)` adds to the Trainer's callbacks while it fits.

Lightning calls, for each batch: ``on_train_batch_start``, the forward pass (``training_step``), ``on_before_backward``,
``on_after_backward``, ``on_before_optimizer_step`` (which follows the closure, also with LBFGS) and
``on_train_batch_end``. Loading lies between the last and the first. The callback is the last in the list, so that what
other callbacks do at the end of a batch, such as to save a checkpoint, does not count as loading.

With ddp the forward pass first copies buffers from rank 0, which waits for it. Lightning has the wrapper call the
module itself behind that, so there ``forward`` begins with a hook of the module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from dist_wandb.session.session import Session
from dist_wandb.session.step_timings import ForwardHook, StepTimings

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def measure(trainer: Trainer, session: Callable[[], Session | None]) -> None:
    """Have the parts of its steps measured while a Trainer fits."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # public, but set elsewhere
    if trainer.training and not any(isinstance(callback, StepTimer) for callback in callbacks):
        callbacks.append(StepTimer(trainer, session))


class StepTimer(Callback):
    """Measures the parts of training steps, from one call of Lightning to the next.

    Args:
        trainer: The Trainer, whose ranks are known.
        session: The logger's session.
    """

    def __init__(self, trainer: Trainer, session: Callable[[], Session | None]) -> None:
        self._is_ddp = isinstance(trainer.strategy, DDPStrategy)
        is_sharded = not (self._is_ddp or isinstance(trainer.strategy, SingleDeviceStrategy))
        self._timings = StepTimings(session, is_sharded=is_sharded)
        self._hook: Any = None
        self._is_due = False  # whether the forward pass of this batch is still to begin

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Hear of the forward passes of ddp."""
        if self._is_ddp:
            self._hook = pl_module.register_forward_pre_hook(ForwardHook(self._in_forward))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Load the first batch."""
        self._timings.enter("data")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """The batch is there."""
        self._is_due = self._is_ddp
        self._timings.enter(None if self._is_ddp else "forward")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:  # noqa: ARG002
        """The loss is there."""
        self._timings.enter("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Gradients are reduced; in manual optimization other forward passes may follow."""
        self._timings.enter(None if pl_module.automatic_optimization else "forward")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:  # noqa: ARG002
        """The update follows."""
        self._timings.enter("optimizer")

    def on_train_batch_end(
        self,
        trainer: Trainer,  # noqa: ARG002
        pl_module: LightningModule,  # noqa: ARG002
        outputs: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Load the next batch, or go on to the end of the epoch."""
        self._timings.enter("data")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Leave out the validation."""
        self._timings.enter(None)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Load on, if this was between two batches."""
        if not trainer.sanity_checking:
            self._timings.enter("data")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Leave out what Lightning and others do between two epochs."""
        self._timings.enter(None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Leave nothing behind."""
        self._leave(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Leave nothing behind."""
        self._leave(trainer)

    def _in_forward(self, _module: LightningModule) -> None:
        if self._is_due:
            self._is_due = False
            self._timings.enter("forward")

    def _leave(self, trainer: Trainer) -> None:
        self._timings.end()
        if self._hook is not None:
            self._hook.remove()
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # as above
        trainer.callbacks = [one for one in callbacks if one is not self]  # type: ignore[attr-defined]  # it is gone through
