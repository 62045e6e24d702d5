"""The Trainers of this process that use our loggers: their base ids, and Lightning's advice to use `sync_dist=True`."""

from __future__ import annotations

import ast
import re
import sys
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import WarningCache

from dist_wandb.lightning.name_spaces import is_a, loaded
from dist_wandb.lightning.session_holder import holder_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
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
