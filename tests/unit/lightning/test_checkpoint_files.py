"""Plain data in torch's checkpoints, read from untrusted files."""

from __future__ import annotations

import argparse
import enum
import io
import pickle
import struct
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
from dist_wandb.lightning.checkpoints import plain_content

MIB = 2**20


class Color(enum.Enum):
    RED = 1


PLAIN = {"epoch": 3, "ids": {"0": "exp"}, "list": [1.5, None, True, (1, "é")], "ordered": OrderedDict(a=1)}
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
}


def saved(content: Any, **arguments: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **arguments)
    return file.getvalue()


def read(data: bytes) -> Any:
    return plain_content(io.BytesIO(data), len(data))


def zipped(content: bytes, compression: int = zipfile.ZIP_STORED, names: tuple[str, ...] = ("x/data.pkl",)) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name in names:
            archive.writestr(name, content)
    return file.getvalue()


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_plain_data_is_read_despite_other_content(protocol: int, *, is_zip: bool) -> None:
    optimizer = torch.optim.Adam(torch.nn.Linear(2, 2).parameters())  # the first one in a process takes a second
    content = {**OTHERS, "optimizer": optimizer.state_dict(), **PLAIN}
    data = saved(content, pickle_protocol=protocol, _use_new_zipfile_serialization=is_zip)
    found = read(data)
    assert {name: found[name] for name in PLAIN} == PLAIN
    assert found.keys() == content.keys()


def frames(count: int, order: bytes) -> bytes:
    return pickle.PROTO + b"\x02" + pickle.NONE + order * count + pickle.STOP


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
    "deep tuples": ("its objects are nested deeper than 500", lambda: zipped(frames(10**6, pickle.TUPLE1))),
    "deep lists": (None, lambda: zipped(pickle.PROTO + b"\x02" + b"(" * 10**5 + b"l" * 10**5 + b".")),
    "a far place": (
        "of the memo, far beyond the others",
        lambda: zipped(pickle.NONE + pickle.LONG_BINPUT + struct.pack("<I", 2**31) + b"."),
    ),
    "a place below all": (None, lambda: zipped(pickle.NONE + pickle.PUT + b"-1\n.")),
    "too much taken": ("it takes more objects from the stack", lambda: zipped(pickle.NONE + pickle.TUPLE3 + b".")),
    "no mark": (None, lambda: zipped(pickle.NONE + pickle.TUPLE + b".")),
    "an unknown place": (None, lambda: zipped(pickle.BINGET + b"\x07.")),
    "an extension": (None, lambda: zipped(pickle.EXT1 + b"\x01.")),
    "no end": (None, lambda: zipped(pickle.dumps(PLAIN)[:-1])),
    "no key": (None, lambda: zipped(b"}]Ns.")),
    "a number of a million digits": (None, lambda: zipped(pickle.LONG + b"9" * 10**6 + b"L\n.")),
    "nothing": (None, lambda: b""),
    "one pickle": (None, lambda: pickle.dumps(PLAIN)),
    "a pickle that is not torch's": (None, lambda: pickle.dumps(PLAIN) * 5),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_are_refused_quickly_and_without_much_memory(kind: str) -> None:
    reason, data = HOSTILE[kind][0], HOSTILE[kind][1]()
    tracemalloc.start()
    began = time.thread_time()
    try:
        with pytest.raises(ReadError, match=reason):
            read(data)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(data) + 32 * MIB
        assert time.thread_time() - began < 10
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("content", "name", "most", "message"),
    [
        (PLAIN, "MOST_BYTES", 100, r"data\.pkl has \d+ bytes; more than 100 are not read"),
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
