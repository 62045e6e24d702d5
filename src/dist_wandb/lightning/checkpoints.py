"""Write the base id of a logger's runs into the checkpoints that the Trainer saves, and read it from them.

A logger needs its ids before it knows the Trainer or the checkpoint, so a resumed training cannot find its run
automatically: `id_in` reads the id for the user. The callback that writes it has no state, because Lightning warns
about states without a callback.

Checkpoints are untrusted files, of which only the plain data is read (`plain_content`). Nothing in them is executed.
Tensors and objects of any class become placeholders: their classes are not imported, and their bytes are not read.
Python's unpickler creates whatever a pickle requests, so its opcodes are checked first: the number of objects, their
depth (hashing a deep tuple overflows the stack), and their positions in the memo.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from dist_wandb.errors import ConfigurationError, ReadError
from dist_wandb.lightning.name_spaces import OfLightning, loaded
from dist_wandb.runs.requested import check_id
from dist_wandb.wandb_files.small_files import open_ordinary

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

KEY = "dist_wandb"
_IS_OURS = "_dist_wandb_writes_base_ids"
_SHARDED = "meta.pt"  # Lightning's file for everything but the parameters, in checkpoints that are directories

MOST_BYTES = 64 * 2**20
"""Bytes of a pickle, without the data of tensors: names and shapes of 100,000 tensors are about 20 MiB."""
MOST_OPCODES = 5_000_000
"""Opcodes in a pickle. Each creates an object of at most 100 bytes, in addition to its text."""
_MOST_DEPTH = 500
_MOST_DIRECTORY = 16 * 2**20  # bytes of a zip's directory
_PIECE = 2**20
_PICKLE = "data.pkl"
_LEGACY = (0x1950A86A20F9469CFC6C, 1001)  # magic number and version of torch's older files, which were not zips
_REFUSED = frozenset({"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"})  # they refer to objects of the process


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
    """Write base ids (`ids_of`: by the loggers' numbers) into all checkpoints that any Trainer saves from now on."""
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


def plain_content(file: BinaryIO, size: int) -> Any:
    """Return the object in a checkpoint, placeholders for what is not plain data; `ReadError` if it is none."""
    try:
        start = file.read(4)
        file.seek(0)
        return _of_zip(_Bounded(file), size) if start == b"PK\x03\x04" else _of_stream(file)
    except ReadError:
        raise
    except Exception as error:  # noqa: BLE001  # a pickle may make Python raise anything
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

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True


def _of_zip(file: _Bounded, size: int) -> Any:
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
            return _unpickled(io.BytesIO(b"".join(iter(lambda: inner.read(_PIECE), b""))))


def _of_stream(file: BinaryIO) -> Any:
    pickles = io.BytesIO(file.read(MOST_BYTES))  # the data of tensors follows them
    for expected in _LEGACY:
        if _unpickled(pickles) != expected:
            raise ReadError("it is not a file that torch has saved")
    _unpickled(pickles)  # describes the system it was saved on
    return _unpickled(pickles)


def _unpickled(file: io.BytesIO) -> Any:
    """Load one pickle, after a check of its opcodes with a stack that holds the depth of each object instead of it."""
    start = file.tell()
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    for number, (opcode, argument, _) in enumerate(pickletools.genops(file)):
        name = opcode.name
        if number > MOST_OPCODES:
            raise ReadError(f"it holds more than {MOST_OPCODES:,} objects")
        if name in _REFUSED:
            raise ReadError(f"it has the opcode {name}, which torch does not write")
        if name == "MARK":
            marks.append(len(stack))
        elif name in {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}:
            position = len(memo) if argument is None else int(argument)  # MEMOIZE has no argument
            if not 0 <= position <= number:  # Python allocates all positions before it
                raise ReadError(f"it keeps an object at position {position:,} of the memo, far beyond the others")
            memo[position] = stack[-1]
        elif name in {"GET", "BINGET", "LONG_BINGET"}:
            stack.append(memo[int(argument or 0)])
        elif name == "DUP":
            stack.append(stack[-1])
        else:
            depth = max(_pop_arguments(opcode, stack, marks), default=0) + 1
            if depth > _MOST_DEPTH:
                raise ReadError(f"its objects are nested deeper than {_MOST_DEPTH}")
            stack += [depth] * len(opcode.stack_after)
    file.seek(start)
    return _Reader(file, encoding="utf-8", errors="replace").load()


def _pop_arguments(opcode: pickletools.OpcodeInfo, stack: list[int], marks: list[int]) -> list[int]:
    number = len(opcode.stack_before)
    if pickletools.markobject in opcode.stack_before:
        number = opcode.stack_before.index(pickletools.markobject) + len(stack) - marks.pop()
    if number > len(stack):
        raise ReadError("it takes more objects from the stack than it has put there")
    taken = stack[len(stack) - number :]
    del stack[len(stack) - number :]
    return taken


class _Placeholder:
    """Stands for every class and function that a pickle names, and for their objects."""

    __slots__ = ()

    def __new__(cls, *_: Any, **__: Any) -> _Placeholder:  # noqa: PYI034  # nothing is made from it
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        """Ignore all arguments."""

    def __call__(self, *_: Any, **__: Any) -> _Placeholder:
        return self

    def append(self, *_: Any) -> None:
        """Ignore what the unpickler adds to the object."""

    extend = add = __setitem__ = __setstate__ = append


class _Ordered(dict[Any, Any]):
    """Stands for an `OrderedDict`. That of a model also has attributes."""

    def __setstate__(self, _: Any) -> None:
        """Ignore the attributes."""


class _Reader(pickle.Unpickler):
    """Creates only plain data."""

    def find_class(self, module: str, name: str, /) -> Any:
        return _Ordered if (module, name) == ("collections", "OrderedDict") else _Placeholder

    def persistent_load(self, _: Any, /) -> Any:
        return _Placeholder  # in older files: for classes and the data of tensors
