"""The Trainers of this process that use our loggers: advice, weights of epoch means, and timings.

The advice is Lightning's, to use `sync_dist=True`. The weight of an epoch mean that Lightning gives to a logger is the
number of samples behind it. If Lightning's private names are not as expected, or `log_graph` was not called, the mean
over ranks is plain.

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
from collections.abc import Callable, Container
from contextlib import suppress
from functools import partialmethod
from typing import TYPE_CHECKING, Any, cast

from lightning_utilities.core.rank_zero import WarningCache

from dist_wandb.lightning.name_spaces import OfLightning, is_a, loaded
from dist_wandb.lightning.session_holder import holder_of
from dist_wandb.session.sections import ForwardHook, Part, StepTimings
from dist_wandb.session.session import Session
from dist_wandb.settings.reduction import Reduction

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch import Tensor, nn

_ADVICE = re.compile(r"It is recommended to use `self\.log\((.+), \.\.\., sync_dist=True\)`")
_NOT_AS_EXPECTED = (AttributeError, TypeError, ValueError, LookupError, ReferenceError, RuntimeError)  # or no Trainer
_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # passed to our loggers; they lead to their Trainers


def remember(module: nn.Module) -> None:
    """Remember a module, which leads to its Trainer; from now on Lightning advises `sync_dist=True` only if useful."""
    _modules.add(module)
    for space in loaded():
        result = sys.modules.get(f"{space.__name__}.trainer.connectors.logger_connector.result")
        cache = getattr(result, "warning_cache", None)
        if type(cache) is WarningCache:
            cache.__class__ = _Cache


def trainer_of(module: nn.Module) -> Trainer | None:
    with suppress(RuntimeError):  # it has none
        trainer: Any = module.trainer
        return trainer if is_a(trainer, "Trainer") else None  # in Fabric, `trainer` is the Fabric object
    return None


class _Cache(WarningCache):
    """Lightning's cache of the warnings that it has given; it also contains any advice that is not useful.

    Lightning looks a warning up in this cache before it gives it, in the same place from 2.2.0 to 2.6.6. The cache gets
    a class derived from its own, so warning filters do not change. In a version without the cache Lightning always
    gives its advice, and test_trainers.py fails.
    """

    def __contains__(self, message: object) -> bool:
        if super().__contains__(message):
            return True
        if (advice := _ADVICE.match(str(message))) is None:
            return False
        # It is not useful if only our loggers receive the name, because they reduce it over ranks, and no callback or
        # scheduler watches it: those read the rank's own value, which Lightning keeps.
        name, trainers = str(ast.literal_eval(advice[1])), map(trainer_of, _modules)
        running = [trainer for trainer in trainers if trainer and trainer.state.status == "running"]
        for trainer in running:
            sessions = [holder.session if holder else None for holder in map(holder_of, trainer.loggers)]
            # Do all loggers reduce numbers over ranks, or are they meant to write each rank's?
            if not all(one and (one.plan.run_mode == "new" or one.options.reductions is not None) for one in sessions):
                return False
            callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # public, but set elsewhere
            watched = [getattr(one, "monitor", None) for one in (*callbacks, *trainer.lr_scheduler_configs)]
            starts = (f"{name}_epoch", f"{name}/dataloader_idx_")
            if any(isinstance(one, str) and (one == name or one.startswith(starts)) for one in watched):
                return False
        return bool(running)


def epoch_weights(module: nn.Module | None, names: Container[str]) -> dict[str, float | Tensor]:
    """Return the number of samples behind each mean of a row that Lightning logs at the end of an epoch.

    From the values of `self.log(..., on_epoch=True)` Lightning computes sum(b*x) / sum(b) on each rank, with x the
    value and b the batch size of each call: `_ResultMetric.update` and `compute` in Lightning's
    `trainer/connectors/logger_connector/result.py`. With the weight w = sum(b) of each rank, the mean over all samples
    of all ranks is sum(w*y) / sum(w), with y the ranks' means.

    Values of a step have no weight: Lightning drops the batch size before it logs them, and DDP also gives the
    gradients of each rank equal weight. Values of a `torchmetrics.Metric`, and values with `sync_dist=True`, have none
    either: the plain mean is right for them. Sums, minima and maxima need none (`epoch_reductions`).
    """
    if module is None:
        return {}
    # Lightning has no public API for these counts. The names are the same from 2.2.0 to 2.6.6; without them all ranks
    # use the plain mean, and test_trainers.py fails.
    try:
        trainer: Any = module.trainer
        if trainer._logger_connector._first_loop_iter is not None:  # Lightning's own mark of a step
            return {}
        counts: dict[str, float | Tensor] = {}
        for metric in (trainer._results or {}).values():  # of all dataloaders, which share a row
            meta = metric.meta
            if metric.has_reset or not (meta.logger and meta.on_epoch):
                continue
            _, name = trainer._results._forked_name(metric, on_step=False)
            if name not in names:
                continue
            counts.pop(name, None)  # if two hooks log one name, the row has the value of the later one
            if metric.is_tensor and meta.is_mean_reduction and not meta.sync.should:
                count = metric.cumulated_batch_size  # never changed in place, so it can be kept and read later
                counts[name] = float(count) if count.device.type == "cpu" else count  # `float` would wait for it
        return counts  # noqa: TRY300
    except _NOT_AS_EXPECTED:
        return {}


def epoch_reductions(module: nn.Module | None, names: Container[str]) -> dict[str, Reduction]:
    # Only those that are not means. With `sync_dist=True`, ``self.log(..., reduce_fx="max")`` is the maximum over
    # batches and ranks. Numbers that Lightning has reduced like this are equal on all ranks, and have the mean.
    found: dict[str, Reduction] = {}
    with suppress(*_NOT_AS_EXPECTED):
        results: Any = cast("Any", module).trainer._results
        for metric in results.values():
            kind = metric.meta.reduce_fx.__name__  # of torch or Python: Lightning accepts no other ones
            if kind != "mean" and metric.is_tensor and not metric.meta.sync.should:
                forms = {results._forked_name(metric, on_step=on_step)[1] for on_step in (True, False)}
                found.update({name: kind for name in forms if name in names})
    return found


def measure(trainer: Trainer, session: Callable[[], Session | None]) -> None:
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
        if self._is_ddp:
            self._hook = pl_module.register_forward_pre_hook(ForwardHook(self._in_forward))

    def _enter(self, part: Part | None, *_: Any, **__: Any) -> None:
        self._timings.enter(part)

    # Loading of the next batch begins, or the epoch ends. Work between two epochs and the validation are not measured.
    on_train_epoch_start = on_train_batch_end = partialmethod(_enter, "data")
    on_train_epoch_end = on_validation_start = partialmethod(_enter, None)
    on_before_backward = partialmethod(_enter, "backward")
    on_before_optimizer_step = partialmethod(_enter, "optimizer")

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self._is_due = self._is_ddp
        self._timings.enter(None if self._is_ddp else "forward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Gradients are reduced; in manual optimization other forward passes may follow."""
        self._timings.enter(None if pl_module.automatic_optimization else "forward")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Loading continues, if the validation ran between two batches."""
        if not trainer.sanity_checking:
            self._timings.enter("data")

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
