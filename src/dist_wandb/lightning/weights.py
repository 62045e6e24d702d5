"""The number of samples behind the epoch means that Lightning gives to a logger. Only this module uses private names.

The session uses that number as the weight. If the private names are not as expected, or `log_graph` was not called, the
mean over ranks is plain.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
    from torch import Tensor, nn


def epoch_weights(module: nn.Module | None, names: Container[str]) -> dict[str, float | Tensor]:
    """Return the number of samples behind each mean of a row that Lightning logs at the end of an epoch.

    From the values of `self.log(..., on_epoch=True)` Lightning computes sum(b*x) / sum(b) on each rank, with x the
    value and b the batch size of each call: `_ResultMetric.update` and `compute` in Lightning's
    `trainer/connectors/logger_connector/result.py`. With the weight w = sum(b) of each rank, the mean over all samples
    of all ranks is sum(w*y) / sum(w), with y the ranks' means.

    Values of a step have no weight: Lightning drops the batch size before it logs them, and DDP also gives the
    gradients of each rank equal weight. Sums, minima and maxima, values of a `torchmetrics.Metric`, and values with
    `sync_dist=True` have none either: the plain mean is right for them.
    """
    if module is None:
        return {}
    # Lightning has no public API for these counts. The names are the same from 2.2.0 to 2.6.6; without them all ranks
    # use the plain mean, and test_lightning_weights.py fails.
    try:
        trainer: Any = module.trainer
        if trainer._logger_connector._first_loop_iter is not None:  # Lightning's own mark of a step
            return {}
        results = trainer._results
        return {} if results is None else _counts(results, names)
    except (AttributeError, TypeError, ValueError, LookupError, ReferenceError, RuntimeError):  # also without a Trainer
        return {}


def _counts(results: _ResultCollection, names: Container[str]) -> dict[str, float | Tensor]:
    counts: dict[str, float | Tensor] = {}
    for metric in results.values():  # of all dataloaders, which share a row
        meta = metric.meta
        if metric.has_reset or not (meta.logger and meta.on_epoch):
            continue
        _, name = results._forked_name(metric, on_step=False)
        if name not in names:
            continue
        counts.pop(name, None)  # if two hooks log one name, the row has the value of the later one
        if metric.is_tensor and meta.is_mean_reduction and not meta.sync.should:
            count = metric.cumulated_batch_size  # never changed in place, so it can be kept and read later
            counts[name] = float(count) if count.device.type == "cpu" else count  # `float` would wait for the device
    return counts
