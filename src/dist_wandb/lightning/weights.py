"""The number of samples behind the epoch means that Lightning gives to a logger: the room for its private names.

The session weighs with that number. Where the private names are not as expected, or `log_graph` was not called, the
mean over ranks is plain.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
    from torch import Tensor


def epoch_weights(module: LightningModule | None, names: Container[str]) -> dict[str, float | Tensor]:
    """The number of samples behind each mean of a row that Lightning logs at the end of an epoch.

    Of the values of `self.log(..., on_epoch=True)` Lightning makes sum(b*x) / sum(b) on each rank, with x the value and
    b the batch size of each call: `_ResultMetric.update` and `compute` in Lightning's
    `trainer/connectors/logger_connector/result.py`. With the weight w = sum(b) of each rank, the mean over all samples
    of all ranks is sum(w*y) / sum(w), with y the ranks' means.

    Values of a step have no weight: Lightning drops the batch size before it logs them, and DDP gives each rank's
    gradients equal weight too. Neither have sums, minima and maxima, values of a `torchmetrics.Metric`, and values with
    `sync_dist=True`: for those the plain mean is right.

    Args:
        module: The module that is trained or evaluated; `None` if it is not known.
        names: The names in the row.

    Returns:
        Number of samples by name. A tensor of no dimensions where Lightning counts on another device than the CPU:
        to read it here would wait for that device. Empty at a step, without a Trainer, and if Lightning has changed.

    Example:
        Two ranks, of which each logs its own mean::

            epoch_weights(module, {"loss": 1.0})  # rank 0, batches of 3 and 2: {'loss': 5.0}
            epoch_weights(module, {"loss": 4.0})  # rank 1, one batch of 3:     {'loss': 3.0}
    """
    if module is None:
        return {}
    # Lightning has no public way to these counts. The names are the same from 2.2.0 to 2.6.6; without them all ranks
    # use the plain mean, and test_lightning_weights.py fails.
    try:
        trainer = module.trainer
        if trainer._logger_connector._first_loop_iter is not None:  # Lightning's own sign for a step
            return {}
        results = trainer._results
        return {} if results is None else _counts(results, names)
    except (AttributeError, TypeError, ValueError, LookupError, ReferenceError, RuntimeError):  # no Trainer: Runtime...
        return {}


def _counts(results: _ResultCollection, names: Container[str]) -> dict[str, float | Tensor]:
    counts: dict[str, float | Tensor] = {}
    for metric in results.values():  # those of all dataloaders: they share a row
        meta = metric.meta
        if metric.has_reset or not (meta.logger and meta.on_epoch):
            continue
        _, name = results._forked_name(metric, on_step=False)
        if name not in names:
            continue
        counts.pop(name, None)  # of two hooks that log one name, the later one's value is in the row
        if metric.is_tensor and meta.is_mean_reduction and not meta.sync.should:
            count = metric.cumulated_batch_size  # never changed in place: may be kept and read later
            counts[name] = float(count) if count.device.type == "cpu" else count
    return counts
