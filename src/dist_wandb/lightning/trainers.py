"""The Trainers of this process that use our loggers: base ids, Lightning's advice to use `sync_dist=True`, and timings.

`DistWandbLogger(timings=True)` adds a callback to a Trainer while it fits. Lightning calls, for each batch:
``on_train_batch_start``, the forward pass (``training_step``), ``on_before_backward``, ``on_after_backward``,
``on_before_optimizer_step`` (after the closure, also with LBFGS) and ``on_train_batch_end``. Loading happens between
the last and the first. The callback is the last in the list, so that the work of other callbacks at the end of a batch,
such as saving a checkpoint, does not count as loading.

With ddp the forward pass first copies buffers from rank 0, and waits for that rank. Lightning lets the wrapper call the
module itself after that, so with ddp ``forward`` begins with a hook of the module.
"""

from __future__ import annotations

import ast
import re
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import WarningCache

from dist_wandb.lightning.name_spaces import OfLightning, is_a, loaded
from dist_wandb.lightning.session_holder import holder_of
from dist_wandb.session.sections import ForwardHook, StepTimings
from dist_wandb.session.session import Session

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn

_ADVICE = re.compile(r"It is recommended to use `self\.log\((.+), \.\.\., sync_dist=True\)`")
_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # passed to our loggers; they lead to their Trainers


def remember(module: nn.Module) -> None:
    """Remember a module, which leads to its Trainer; from now on Lightning advises `sync_dist=True` only if useful."""
    _modules.add(module)
    for space in loaded():
        result = sys.modules.get(f"{space.__name__}.trainer.connectors.logger_connector.result")
        cache = getattr(result, "warning_cache", None)
        if type(cache) is WarningCache:
            cache.__class__ = _Cache


def base_ids_of(trainer: Trainer) -> dict[str, str]:
    """Return the base ids of those loggers of a Trainer that are ours and have open runs, by their numbers."""
    holders = map(holder_of, trainer.loggers)
    return {
        str(holder.number): holder.base_id for holder in holders if holder is not None and holder.session is not None
    }


def _needs_sync_dist(name: str) -> bool:
    """Whether Lightning's advice to log a name with `sync_dist=True` is useful."""
    # Not if only our loggers receive the name, because they reduce it over ranks, and no callback or scheduler watches
    # it: those read the rank's own value, which Lightning keeps.
    trainers = [trainer_of(module) for module in _modules]
    running = [trainer for trainer in trainers if trainer and trainer.state.status == "running"]
    return not running or any(_watches(trainer, name) or not _all_reduce(trainer) for trainer in running)


def trainer_of(module: nn.Module) -> Trainer | None:
    """Return the Trainer of a module, if it has one."""
    with suppress(RuntimeError):  # it has none
        trainer: Any = module.trainer
        return trainer if is_a(trainer, "Trainer") else None  # in Fabric, `trainer` is the Fabric object
    return None


def _watches(trainer: Trainer, name: str) -> bool:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # public, but set elsewhere
    watched = [getattr(watching, "monitor", None) for watching in (*callbacks, *trainer.lr_scheduler_configs)]
    names = (name, f"{name}_epoch", f"{name}/dataloader_idx_")
    return any(isinstance(one, str) and (one == name or one.startswith(names[1:])) for one in watched)


def _all_reduce(trainer: Trainer) -> bool:
    """Whether all loggers reduce numbers over ranks, or are meant to write each rank's."""
    holders = map(holder_of, trainer.loggers)
    sessions = [holder.session if holder is not None else None for holder in holders]
    return all(one and (one.plan.run_mode == "new" or one.options.reductions is not None) for one in sessions)


class _Cache(WarningCache):
    """Lightning's cache of the warnings that it has given; it also contains any advice that is not useful.

    Lightning looks a warning up in this cache before it gives it, in the same place from 2.2.0 to 2.6.6. The cache gets
    a class derived from its own, so warning filters do not change. In a version without the cache Lightning always
    gives its advice, and test_lightning_advice.py fails.
    """

    def __contains__(self, message: object) -> bool:
        if super().__contains__(message):
            return True
        advice = _ADVICE.match(str(message))
        return advice is not None and not _needs_sync_dist(str(ast.literal_eval(advice[1])))


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

    on_train_batch_end = on_train_epoch_start  # the next batch is loaded, or the epoch ends

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

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Loading continues, if the validation ran between two batches."""
        if not trainer.sanity_checking:
            self._timings.enter("data")

    def on_train_epoch_end(self, *_: Any, **__: Any) -> None:
        """Work between two epochs is not measured, nor is the validation."""
        self._timings.enter(None)

    on_validation_start = on_train_epoch_end

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
