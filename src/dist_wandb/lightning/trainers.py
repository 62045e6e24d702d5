"""The Trainers of this process that use our loggers: their base ids, and Lightning's advice to use `sync_dist=True`."""

from __future__ import annotations

import ast
import re
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.rank_zero import WarningCache

from dist_wandb.lightning.session_holder import holder_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_ADVICE = re.compile(r"It is recommended to use `self\.log\((.+), \.\.\., sync_dist=True\)`")
_modules: weakref.WeakSet[LightningModule] = weakref.WeakSet()  # passed to our loggers; they lead to their Trainers


def remember(module: LightningModule) -> None:
    """Remember a module, which leads to its Trainer; from now on Lightning advises `sync_dist=True` only if useful."""
    _modules.add(module)
    give_advice_only(_needs_sync_dist)


def base_ids_of(trainer: Trainer) -> dict[str, str]:
    """Base ids of a Trainer's loggers of ours whose runs are open, by their numbers."""
    holders = [holder for holder in map(holder_of, trainer.loggers) if holder is not None]
    known = {str(holder.number): holder.base_id for holder in holders if holder.session is not None}
    return {number: base_id for number, base_id in known.items() if base_id is not None}


def _needs_sync_dist(name: str) -> bool:
    """Whether Lightning's advice to log a name with `sync_dist=True` is useful.

    It is not if the name goes to our loggers alone, which reduce it over ranks, and no callback or scheduler watches
    it: those read the rank's own value, which Lightning keeps.
    """
    trainers = [trainer_of(module) for module in _modules]
    running = [trainer for trainer in trainers if trainer and trainer.state.status == TrainerStatus.RUNNING]
    return not running or any(_watches(trainer, name) or not _speak_for_all(trainer) for trainer in running)


def trainer_of(module: LightningModule) -> Trainer | None:
    """The Trainer that works with a module, if there is one."""
    with suppress(RuntimeError):  # it has none
        trainer = module.trainer
        return trainer if isinstance(trainer, Trainer) else None  # Fabric, too, calls itself the trainer of its modules
    return None


def _watches(trainer: Trainer, name: str) -> bool:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # public, but set elsewhere
    watched = [getattr(watching, "monitor", None) for watching in (*callbacks, *trainer.lr_scheduler_configs)]
    names = (name, f"{name}_epoch", f"{name}/dataloader_idx_")
    return any(isinstance(one, str) and (one == name or one.startswith(names[1:])) for one in watched)


def _speak_for_all(trainer: Trainer) -> bool:
    """Whether all loggers reduce numbers over ranks, or are to have each rank's."""
    holders = map(holder_of, trainer.loggers)
    sessions = [holder.session if holder is not None else None for holder in holders]
    return all(one and (one.plan.run_mode == "new" or one.options.reductions is not None) for one in sessions)


class _Cache(WarningCache):
    """Lightning's own cache of its warnings, which also contains the advice that is not wanted."""

    is_wanted: Callable[[str], bool]

    def __contains__(self, message: object) -> bool:
        return super().__contains__(message) or self._is_unwanted(str(message))

    def _is_unwanted(self, message: str) -> bool:
        advice = _ADVICE.match(message)
        return advice is not None and not _Cache.is_wanted(str(ast.literal_eval(advice[1])))


def give_advice_only(is_wanted: Callable[[str], bool]) -> None:
    """Let Lightning advise to log a name with `sync_dist=True` only if that is wanted.

    Lightning looks its warnings up in a cache first, from 2.2.0 to 2.6.6 in the same place. That cache gets a class
    derived from its own, so warning filters stay as they are. In a version without it Lightning gives its advice
    always, and test_lightning_advice.py fails.

    Args:
        is_wanted: Given the name that Lightning is about to advise on.
    """
    _Cache.is_wanted = staticmethod(is_wanted)
    cache = getattr(result, "warning_cache", None)
    if type(cache) is WarningCache:
        cache.__class__ = _Cache
