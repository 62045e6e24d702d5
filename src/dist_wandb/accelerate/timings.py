"""Measure the objects that Accelerate has prepared: the loader, the model and the optimizer of a training.

The model and the optimizer get torch's own hooks. There are none for the backward pass: in the Trainer it is the time
between the forward pass and the update, in Accelerate it is the call of `Accelerator.backward`. Of a prepared loader
the `base_dataloader` is measured, which reads this rank's batches.

Waiting for other ranks is not measured. With ddp the forward pass first copies buffers from rank 0, so the inner module
has the hooks. A prepared loader begins an epoch by receiving the random state of rank 0, before it calls its
`base_dataloader`. If rank 0 reads for all ranks (`DataLoaderDispatcher`), no loading is measured.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import DistributedType
from accelerate.utils.other import is_compiled_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dist_wandb.accelerate.start import current_mesh
from dist_wandb.accelerate.wrapping import Wrapped, tracker_of
from dist_wandb.session.sections import ForwardHook, StepTimings
from dist_wandb.session.session import Session

_SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
REMEDY = "wraps it to measure timings. Leave timings=True out, and measure with dist_wandb.get_run().timed"


class PreparedTimings:
    """Measures the parts of training steps by the calls of prepared objects, while `session` returns a session."""

    def __init__(
        self,
        session: Callable[[], Session | None],
        *,
        in_trainer: bool = False,  # objects are used for training only, and the backward pass follows the forward pass
    ) -> None:
        self._session = session
        self._in_trainer = in_trainer
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._loaders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hooks: list[Any] = []

    @functools.cached_property
    def timings(self) -> StepTimings:
        """The measured parts of a step; created once Accelerate knows whether parameters are sharded."""
        # Whether they are gathered from other ranks in the forward pass and for the update.
        mesh = current_mesh()
        names = () if mesh is None else mesh.mesh_dim_names or ()
        is_sharded = is_initialized() and AcceleratorState().distributed_type in _SHARDED
        return StepTimings(self._session, is_sharded=is_sharded or bool(set(names) - {"dp_replicate"}))

    def measure(self, prepared: Iterable[Any]) -> None:
        for one in prepared:
            if not isinstance(one, (torch.nn.Module, torch.optim.Optimizer, DataLoader)) or one in self._known:
                continue
            self._known.add(one)
            if isinstance(one, torch.nn.Module):
                inner = one.module if isinstance(one, DistributedDataParallel) else one
                if "torch._dynamo" in sys.modules and is_compiled_module(one):
                    self.timings.waits_in("forward")  # it may contain ddp's module, which copies buffers first
                self._models.add(inner)
                self._hooks += [
                    inner.register_forward_pre_hook(ForwardHook(self._in_forward)),
                    inner.register_forward_hook(ForwardHook(self._after_forward_pass), always_call=True),
                ]
            elif isinstance(one, torch.optim.Optimizer):
                optimizer = getattr(one, "optimizer", one)
                if isinstance(optimizer, torch.optim.Optimizer):  # DeepSpeed's is not; it updates in its backward pass
                    self._hooks += [
                        optimizer.register_step_pre_hook(lambda *_: self.timings.enter("optimizer")),
                        optimizer.register_step_post_hook(lambda *_: self.timings.enter(None)),
                    ]
            elif not isinstance(one, DataLoaderDispatcher):
                loader: Any = getattr(one, "base_dataloader", one)
                self._loaders.add(loader)
                # Accelerate's loaders look up `__iter__` on the object.
                loader.__iter__ = functools.partial(self._iterated, loader)

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for loader in self._loaders:
            vars(loader).pop("__iter__", None)
        self._loaders.clear()
        self._known.clear()
        self._models.clear()
        self.timings.end()

    def _iterated(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of a loader, and measure the time from the request to the arrival of each."""
        batches: Iterator[Any] | None = None
        while True:
            # If all models are in evaluation mode, the batch does not belong to a training step.
            if self._in_trainer or not self._models or any(model.training for model in self._models):
                self.timings.enter("data")
            try:
                batches = type(loader).__iter__(loader) if batches is None else batches
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.timings.enter(None)
            yield batch

    def _in_forward(self, _model: Any) -> None:
        if torch.is_grad_enabled():
            self.timings.enter("forward")

    def _after_forward_pass(self, _model: Any) -> None:
        if torch.is_grad_enabled():
            self.timings.enter("backward" if self._in_trainer else None)


def _prepare(original: Callable[..., Any], self: Accelerator, *args: Any, **kwargs: Any) -> Any:
    prepared = original(self, *args, **kwargs)
    tracker = tracker_of(self)
    if tracker is not None and tracker.prepared is not None:
        tracker.prepared.measure(prepared if isinstance(prepared, tuple) else (prepared,))
    return prepared


def _backward(original: Callable[..., None], self: Accelerator, *args: Any, **kwargs: Any) -> None:
    tracker = tracker_of(self)
    if tracker is None or tracker.prepared is None:
        return original(self, *args, **kwargs)
    tracker.prepared.timings.enter("backward")
    try:
        return original(self, *args, **kwargs)
    finally:
        tracker.prepared.timings.enter(None)


TIMED: Wrapped = {
    "prepare": (("self", "args", "device_placement"), _prepare),
    "backward": (("self", "loss", "kwargs"), _backward),
}
