"""Write the base id of a logger's runs into the checkpoints that the Trainer saves, and read it from them.

A logger needs its ids before it knows the Trainer or the checkpoint, so a resumed training cannot find its run
automatically: `id_in` reads the id for the user. The callback that writes it has no state, because Lightning warns
about states without a callback.

Checkpoints are untrusted files. Nothing in them is executed or loaded: `ids_in` reads the opcodes of the pickle one
after another, as text, and looks for the dictionary that `_BaseIds` has added.
"""

from __future__ import annotations

import io
import os
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from dist_wandb.errors import ConfigurationError, ReadError
from dist_wandb.lightning.name_spaces import OfLightning, loaded
from dist_wandb.lightning.session_holder import holder_of
from dist_wandb.runs.interception import intercept, intercepted
from dist_wandb.runs.requested import check_id
from dist_wandb.wandb_files.small_files import open_ordinary

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

KEY = "dist_wandb"
_SHARDED = "meta.pt"  # Lightning's file for everything but the parameters, in checkpoints that are directories
MOST_BYTES = 64 * 2**20  # of a pickle, without data of tensors: names and shapes of 100,000 tensors are about 20 MiB
MOST_OPCODES = 5_000_000  # in a pickle
_MOST_DIRECTORY = 16 * 2**20  # bytes of a zip's directory
_PIECE = 2**20
_PICKLE = "data.pkl"
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})


class _BaseIds(OfLightning):
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


def write_base_ids() -> None:
    """Write base ids into all checkpoints that any Trainer saves from now on."""
    # Lightning does not call loggers when it saves a checkpoint. It calls callbacks, but the list of a Trainer's
    # callbacks belongs to the user (Lightning's tuner also keeps and restores it). So `Trainer.save_checkpoint`, which
    # saves all checkpoints, is wrapped in its class: our callback is in the list only while a checkpoint is saved.
    for space in loaded():
        if intercepted(space.Trainer, "save_checkpoint") is None:
            intercept(space.Trainer, "save_checkpoint", _save_checkpoint)


def _save_checkpoint(original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
    holders = [holder for holder in map(holder_of, trainer.loggers) if holder is not None]
    ids = {str(holder.number): holder.base_id for holder in holders if holder.session is not None}
    callbacks: list[Any] = trainer.callbacks
    trainer.callbacks = [*callbacks, _BaseIds(ids)] if ids else callbacks
    try:
        original(trainer, *args, **kwargs)
    finally:
        trainer.callbacks = callbacks


def base_id_in(checkpoint: str | os.PathLike[str], number: int, *, weights_only: bool) -> str:
    """Read the base id of a logger's runs from a checkpoint; for the arguments see `DistWandbLogger.id_in`."""
    path = Path(checkpoint)
    file = path / _SHARDED if path.is_dir() else path
    ids: Any = None
    try:
        # A checkpoint is often a link, like Lightning's last.ckpt; its target must be an ordinary file.
        with os.fdopen(open_ordinary(file.resolve(strict=True)), "rb") as opened:
            if weights_only:
                ids = ids_in(opened, os.fstat(opened.fileno()).st_size)
        if not weights_only:
            content: Any = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
            ids = content.get(KEY) if isinstance(content, Mapping) else None
    except Exception as error:  # noqa: BLE001  # a damaged file may make its readers raise anything
        why = str(error).rstrip(".")
        raise ReadError(f"{file}: cannot be read as a checkpoint: {why}. Pass one that a Trainer saved.") from None
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


def ids_in(file: BinaryIO, size: int) -> dict[str, str]:
    """Return the base ids in a checkpoint, by the loggers' numbers; `ReadError` if it is none."""
    try:
        return _written_ids(_pickle_in(_Bounded(file), size))
    except ReadError:
        raise
    except Exception as error:  # noqa: BLE001  # a damaged file may make Python raise anything
        raise ReadError(f"{type(error).__name__}: {str(error)[:200]}") from None


class _Bounded(io.RawIOBase):
    """A file with a limit on the size of one read: `zipfile` reads a zip's directory as a whole."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(size if 0 <= size <= _MOST_DIRECTORY else _MOST_DIRECTORY + 1)
        if len(content) > _MOST_DIRECTORY:
            raise ReadError(f"the zip has a directory of more than {_MOST_DIRECTORY >> 20} MiB")
        return content

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)


def _pickle_in(file: _Bounded, size: int) -> bytes:
    with zipfile.ZipFile(file) as archive:
        found = [info for info in archive.infolist() if info.filename.split("/")[1:] == [_PICKLE]]
        if len(found) != 1:
            raise ReadError(f"the zip holds {len(found)} files {_PICKLE!r}, where torch writes one")
        (info,) = found
        if info.file_size > MOST_BYTES:
            raise ReadError(f"its {_PICKLE} has {info.file_size:,} bytes; more than {MOST_BYTES:,} are not read")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > size:
            raise ReadError(f"its {_PICKLE} is compressed, which torch does not do")
        with archive.open(info) as inner:
            return b"".join(iter(lambda: inner.read(_PIECE), b""))


def _written_ids(pickled: bytes) -> dict[str, str]:
    """Find the dictionary under `KEY` in one pickle, and read its texts. Other content is skipped."""
    found: dict[str, str] = {}
    items: list[str] | None = None  # names and values of that dictionary, while its opcodes are read
    memo: dict[object, str] = {}
    puts = 0
    text = before = None  # the text that the last opcode creates, if any, and the one before
    for number, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
        name = opcode.name
        if number > MOST_OPCODES:
            raise ReadError(f"it holds more than {MOST_OPCODES:,} objects")
        if name in _PUTS:
            if text is not None:
                memo[puts if argument is None else argument] = text  # MEMOIZE has no argument
            puts += 1
            continue
        if name == "FRAME":
            continue
        before, text = text, memo.get(argument) if name in _GETS else argument if "UNICODE" in name else None
        if name == "EMPTY_DICT" and before == KEY:
            items, found = [], {}
        elif items is not None and text is not None:
            items.append(text)
        elif items and name in {"SETITEM", "SETITEMS"}:
            found, items = dict(zip(items[::2], items[1::2], strict=True)), None
        elif name != "MARK":
            items = None
    return found
