"""The base ids in torch's checkpoints, read from untrusted files."""

from __future__ import annotations

import argparse
import enum
import io
import pickle
import time
import tracemalloc
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import Limit

from dist_wandb.errors import ReadError
from dist_wandb.lightning import checkpoints
from dist_wandb.lightning.checkpoints import KEY, ids_in

MIB = 2**20
MANY = 250_000  # 16 MiB, if a reader kept a tuple of each


class Color(enum.Enum):
    RED = 1


PLAIN = {"epoch": 3, KEY: {"0": "exp", "1": "other"}}
OTHERS = {
    "tensor": torch.ones(3),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "module": torch.nn.Linear(2, 2),
    "dtype": torch.bfloat16,
    "namespace": argparse.Namespace(lr=0.1),
    "path": Path("x"),
    "enum": Color.RED,
    "set": {1, 2},
    "frozenset": frozenset({(1, 2)}),
    "defaultdict": defaultdict(list, a=[1]),
    "complex": 1j,
    "range": range(3),
    "large": 2**200,
    "ordered": OrderedDict(a="exp"),
    "hyper_parameters": {KEY: {"0": 7}, "project": KEY, "nested": {KEY: {"0": "of the user"}}},
}


def saved(content: Any, **arguments: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **arguments)
    return file.getvalue()


def read(data: bytes) -> dict[str, str]:
    return ids_in(io.BytesIO(data), len(data))


def zipped(content: bytes, compression: int = zipfile.ZIP_STORED, names: tuple[str, ...] = ("x/data.pkl",)) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name in names:
            archive.writestr(name, content)
    return file.getvalue()


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_ids_are_read_despite_other_content(protocol: int) -> None:
    optimizer = torch.optim.Adam(torch.nn.Linear(2, 2).parameters())  # the first one in a process takes a second
    for ids in ({"0": "exp"}, {"0": "exp", "1": "other"}, {}):
        content = {**OTHERS, "optimizer": optimizer.state_dict(), KEY: ids, "later": {"0": "of another"}}
        assert read(saved(content, pickle_protocol=protocol)) == ids


HOSTILE: dict[str, tuple[str | None, Callable[[], bytes]]] = {
    "a zip bomb": (None, lambda: zipped(pickle.dumps(b"\0" * 64 * MIB), zipfile.ZIP_DEFLATED)),
    "compressed": (
        "is compressed, which torch does not do",
        lambda: zipped(pickle.dumps(PLAIN), zipfile.ZIP_DEFLATED),
    ),
    "no pickle": ("where torch writes one", lambda: zipped(b"", names=("x/other",))),
    "two pickles": (
        "the zip holds 2 files 'data.pkl', where torch writes one",
        lambda: zipped(pickle.dumps(PLAIN), names=("x/data.pkl", "y/data.pkl")),
    ),
    "a pickle too deep in the zip": (None, lambda: zipped(pickle.dumps(PLAIN), names=("x/y/data.pkl",))),
    "no zip": (None, lambda: b"PK\x03\x04" + bytes(100)),
    "an unknown opcode": ("opcode", lambda: zipped(b"\xff.")),
    "no end": (None, lambda: zipped(pickle.dumps(PLAIN)[:-1])),
    "a number of a million digits": (None, lambda: zipped(pickle.LONG + b"9" * 10**6 + b"L\n.")),
    "nothing": (None, lambda: b""),
    "no file of torch": (None, lambda: pickle.dumps(PLAIN)),
}
HARMLESS: dict[str, Callable[[], bytes]] = {
    "deep tuples": lambda: zipped(pickle.NONE + pickle.TUPLE1 * MANY + b"."),
    "many places": lambda: zipped(pickle.NONE + pickle.MEMOIZE * MANY + b"."),
    "an unknown place": lambda: zipped(pickle.BINGET + b"\x07."),
    "code": lambda: zipped(b"cos\nsystem\n(X\x04\0\0\0exittR."),
}


@pytest.mark.parametrize("kind", [*HOSTILE, *HARMLESS])
def test_hostile_files_are_refused_or_skipped_quickly_and_without_much_memory(kind: str) -> None:
    reason, make = HOSTILE[kind] if kind in HOSTILE else (None, HARMLESS[kind])
    data = make()
    tracemalloc.start()
    began = time.thread_time()
    try:
        if kind in HARMLESS:
            assert read(data) == {}
        else:
            with pytest.raises(ReadError, match=reason):
                read(data)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(data) + 8 * MIB
        assert time.thread_time() - began < 10
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("content", "name", "most", "message"),
    [
        ({"a": "x" * 100}, "MOST_BYTES", 100, r"data\.pkl has \d+ bytes; more than 100 are not read"),
        ({"a": list(range(1000))}, "MOST_OPCODES", 1000, "holds more than 1,000 objects"),
        ([torch.zeros(1) for _ in range(100)], "_MOST_DIRECTORY", 1000, "directory of more than"),
    ],
)
def test_content_over_a_limit_is_refused(limit: Limit, content: Any, name: str, most: int, message: str) -> None:
    data = saved(content)
    assert read(data) is not None
    limit(checkpoints, **{name: most})
    with pytest.raises(ReadError, match=message):
        read(data)
