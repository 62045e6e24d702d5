"""The base id of a logger's runs in the checkpoints that the Trainer saves, and how it is read from them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback

from dist_wandb.errors import ReadError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import LightningModule, Trainer

KEY = "dist_wandb"
_SHARDED = "meta.pt"  # what Lightning's checkpoints that are directories keep beside the parameters


class BaseIdInCheckpoints(Callback):
    """Writes the base id of one logger into every checkpoint of a Trainer, beside the state of callbacks.

    It has no state of its own, so a Trainer without it loads the checkpoints without a word.

    Args:
        number: Which of the process's loggers it is.
        base_id: Tells the base id, once there is one.
    """

    def __init__(self, number: int, base_id: Callable[[], str | None]) -> None:
        self._number = number
        self._base_id = base_id

    @property
    def state_key(self) -> str:
        """One for each logger, as Lightning asks of callbacks of which there may be several."""
        return self._generate_state_key(number=self._number)

    def on_save_checkpoint(
        self,
        trainer: Trainer,  # noqa: ARG002  # Lightning's signature
        pl_module: LightningModule,  # noqa: ARG002  # Lightning's signature
        checkpoint: dict[str, Any],
    ) -> None:
        """Add the base id."""
        base_id = self._base_id()
        if base_id is not None:
            checkpoint.setdefault(KEY, {})[str(self._number)] = base_id

    def add_to(self, module: LightningModule) -> None:
        """Be a callback of the Trainer that works with `module`, unless its logger has one there already."""
        try:
            trainer = module.trainer
        except RuntimeError:  # it has none
            return
        callbacks = getattr(trainer, "callbacks", None)  # Fabric's stand-in for a Trainer has none
        if isinstance(callbacks, list) and all(known.state_key != self.state_key for known in callbacks):
            callbacks.insert(0, self)  # those that save checkpoints must stay the last


def base_id_in(checkpoint: str | os.PathLike[str], number: int, *, weights_only: bool) -> str:
    """Read the base id of a logger's runs from a checkpoint; for the arguments see `DistWandbLogger.id_in`."""
    path = Path(checkpoint)
    found = _load(path / _SHARDED if path.is_dir() else path, weights_only=weights_only)
    ids = found.get(KEY) if isinstance(found, Mapping) else None
    base_id = ids.get(str(number)) if isinstance(ids, Mapping) else None
    if not isinstance(base_id, str):
        raise ReadError(
            f"{path}: holds no run id of logger {number}. It must have been saved by a Trainer with a DistWandbLogger, "
            "with its callbacks (save_weights_only=False). Pass the id of the run you know."
        )
    return base_id


def _load(path: Path, *, weights_only: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise ReadError(
            f"{path}: torch does not read it as plain data ({str(error).splitlines()[0]}). If you trust the file, pass "
            "weights_only=False: then what it holds may run code."
        ) from None
    except (OSError, RuntimeError, EOFError) as error:
        raise ReadError(f"{path}: is no checkpoint that can be read: {error}. Give one that a Trainer saved.") from None
