"""What the Trainers of this process do with our loggers."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import TrainerStatus

from dist_wandb.lightning.advice import give_advice_only
from dist_wandb.lightning.session_holder import holder_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_modules: weakref.WeakSet[LightningModule] = weakref.WeakSet()
"""Those that our loggers were told of, and by them their Trainers."""


def remember(module: LightningModule) -> None:
    """Know the Trainer of a module by it, and have Lightning advise `sync_dist=True` only where it is of use."""
    _modules.add(module)
    give_advice_only(_needs_sync_dist)


def base_ids_of(trainer: Trainer) -> dict[str, str]:
    """Base ids of a Trainer's loggers of ours whose runs are open, by their numbers."""
    holders = [holder for holder in map(holder_of, trainer.loggers) if holder is not None]
    known = {str(holder.number): holder.base_id for holder in holders if holder.session is not None}
    return {number: base_id for number, base_id in known.items() if base_id is not None}


def _needs_sync_dist(name: str) -> bool:
    """Whether Lightning's advice to log a name with `sync_dist=True` is of use.

    It is not where the name goes to our loggers alone, which bring the ranks' numbers together, and no callback or
    scheduler watches it: those look at what Lightning keeps, which is the rank's own.
    """
    trainers = [_trainer_of(module) for module in _modules]
    running = [trainer for trainer in trainers if trainer and trainer.state.status == TrainerStatus.RUNNING]
    return not running or any(_watches(trainer, name) or not _speak_for_all(trainer) for trainer in running)


def _trainer_of(module: LightningModule) -> Trainer | None:
    """The Trainer that works with a module, if there is one."""
    with suppress(RuntimeError):  # it has none
        return module.trainer
    return None


def _watches(trainer: Trainer, name: str) -> bool:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # public, but set elsewhere
    watched = [getattr(watching, "monitor", None) for watching in (*callbacks, *trainer.lr_scheduler_configs)]
    names = (name, f"{name}_epoch", f"{name}/dataloader_idx_")
    return any(isinstance(one, str) and (one == name or one.startswith(names[1:])) for one in watched)


def _speak_for_all(trainer: Trainer) -> bool:
    """Whether all numbers go to loggers that bring those of the ranks together, or are to have each rank's."""
    holders = map(holder_of, trainer.loggers)
    sessions = [holder.session if holder is not None else None for holder in holders]
    return all(one and (one.plan.run_mode == "new" or one.options.reductions is not None) for one in sessions)
