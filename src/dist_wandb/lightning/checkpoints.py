"""Write the base id of a logger's runs into the checkpoints that the Trainer saves, and read it from them.

A logger needs its ids before it knows the Trainer or the checkpoint, so a resumed training cannot find its run
automatically: `id_in` reads the id for the user. The callback that writes it has no state, because Lightning warns
about states without a callback.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dist_wandb.errors import ConfigurationError, ReadError
from dist_wandb.lightning.checkpoint_files import plain_content
from dist_wandb.lightning.name_spaces import OfLightning, loaded
from dist_wandb.runs.argument_checks import check_id
from dist_wandb.wandb_files.small_files import open_ordinary

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

KEY = "dist_wandb"
_IS_OURS = "_dist_wandb_writes_base_ids"
_SHARDED = "meta.pt"  # Lightning's file for everything but the parameters, in checkpoints that are directories


class _BaseIds(OfLightning):
    """Writes base ids into a checkpoint. Without a state, because a Trainer without it would warn about that."""

    stock = "Callback"

    def __init__(self, ids: Mapping[str, str]) -> None:
        self._ids = ids

    def on_save_checkpoint(
        self,
        trainer: Trainer,  # noqa: ARG002  # Lightning's signature
        pl_module: LightningModule,  # noqa: ARG002  # Lightning's signature
        checkpoint: dict[str, Any],
    ) -> None:
        checkpoint[KEY] = dict(self._ids)


def write_base_ids(ids_of: Callable[[Trainer], Mapping[str, str]]) -> None:
    """Write base ids into all checkpoints from now on, whichever Trainer of this process saves them.

    `ids_of` returns the base ids of a Trainer by the numbers of its loggers; empty without our loggers.
    """
    # Lightning does not call loggers when it saves a checkpoint. It calls callbacks, but the list of a Trainer's
    # callbacks belongs to the user (Lightning's tuner also keeps and restores it). So `Trainer.save_checkpoint`, which
    # saves all checkpoints, is wrapped in its class: our callback is in the list only while a checkpoint is saved.
    for space in loaded():
        if not hasattr(space.Trainer.save_checkpoint, _IS_OURS):
            space.Trainer.save_checkpoint = _writing(space.Trainer.save_checkpoint, ids_of)


def _writing(original: Callable[..., None], ids_of: Callable[[Trainer], Mapping[str, str]]) -> Callable[..., None]:
    @functools.wraps(original)
    def save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> None:  # a Trainer; its type lacks `callbacks`
        ids = ids_of(self)
        if not ids:
            original(self, *args, **kwargs)
            return
        callbacks: list[Any] = self.callbacks
        self.callbacks = [*callbacks, _BaseIds(ids)]
        try:
            original(self, *args, **kwargs)
        finally:
            self.callbacks = callbacks

    setattr(save_checkpoint, _IS_OURS, True)
    return save_checkpoint


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
    try:
        return check_id(base_id, f"the run id of logger {number} in {path}, {base_id!r},")
    except ConfigurationError as error:
        raise ReadError(str(error)) from None


def _load(path: Path, *, weights_only: bool) -> Any:
    try:
        # A checkpoint is often a link, like Lightning's last.ckpt; its target must be an ordinary file.
        with os.fdopen(open_ordinary(path.resolve(strict=True)), "rb") as file:
            if weights_only:
                return plain_content(file, os.fstat(file.fileno()).st_size)
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    except Exception as error:  # noqa: BLE001  # a damaged file may make its readers raise anything
        why = str(error).rstrip(".")
        raise ReadError(f"{path}: cannot be read as a checkpoint: {why}. Pass one that a Trainer saved.") from None
