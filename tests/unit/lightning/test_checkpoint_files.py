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

from dist_wandb.errors import ReadError
from dist_wandb.lightning import checkpoints
from dist_wandb.lightning.checkpoints import plain_content

MIB = 2**20


def test_a_file_that_no_trainer_saved_is_reported(tmp_path: Path) -> None:
    (tmp_path / "notes.ckpt").write_text("not a checkpoint", encoding="utf-8")
    with pytest.raises(ReadError, match=r"notes\.ckpt: cannot be read as a checkpoint: .*\. Pass one that a Trainer"):
        checkpoints.base_id_in(tmp_path / "notes.ckpt", 0, weights_only=True)


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


HOSTILE: dict[str, Callable[[], bytes]] = {
    "a zip bomb": lambda: zipped(pickle.dumps(b"\0" * 64 * MIB), zipfile.ZIP_DEFLATED),
    "compressed": lambda: zipped(pickle.dumps(PLAIN), zipfile.ZIP_DEFLATED),
    "no pickle": lambda: zipped(b"", names=("x/other",)),
    "two pickles": lambda: zipped(pickle.dumps(PLAIN), names=("x/data.pkl", "y/data.pkl")),
    "a pickle too deep in the zip": lambda: zipped(pickle.dumps(PLAIN), names=("x/y/data.pkl",)),
    "no zip": lambda: b"PK\x03\x04" + bytes(100),
    "deep tuples": lambda: zipped(frames(10**6, pickle.TUPLE1)),
    "deep lists": lambda: zipped(pickle.PROTO + b"\x02" + b"(" * 10**5 + b"l" * 10**5 + b"."),
    "a far place": lambda: zipped(pickle.NONE + pickle.LONG_BINPUT + struct.pack("<I", 2**31) + b"."),
    "a place below all": lambda: zipped(pickle.NONE + pickle.PUT + b"-1\n."),
    "too much taken": lambda: zipped(pickle.NONE + pickle.TUPLE3 + b"."),
    "no mark": lambda: zipped(pickle.NONE + pickle.TUPLE + b"."),
    "an unknown place": lambda: zipped(pickle.BINGET + b"\x07."),
    "an extension": lambda: zipped(pickle.EXT1 + b"\x01."),
    "no end": lambda: zipped(pickle.dumps(PLAIN)[:-1]),
    "no key": lambda: zipped(b"}]Ns."),
    "a number of a million digits": lambda: zipped(pickle.LONG + b"9" * 10**6 + b"L\n."),
    "nothing": lambda: b"",
    "one pickle": lambda: pickle.dumps(PLAIN),
    "a pickle that is not torch's": lambda: pickle.dumps(PLAIN) * 5,
}


REASONS = {
    "compressed": "is compressed, which torch does not do",
    "no pickle": "where torch writes one",
    "two pickles": "the zip holds 2 files 'data.pkl', where torch writes one",
    "deep tuples": "its objects are nested deeper than 500",
    "a far place": "of the memo, far beyond the others",
    "too much taken": "it takes more objects from the stack",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_are_refused_quickly_and_without_much_memory(kind: str) -> None:
    data = HOSTILE[kind]()
    tracemalloc.start()
    began = time.thread_time()
    try:
        with pytest.raises(ReadError, match=REASONS.get(kind)):
            read(data)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(data) + 32 * MIB
        assert time.thread_time() - began < 10
    finally:
        tracemalloc.stop()


def test_a_pickle_over_the_limit_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(PLAIN)
    monkeypatch.setattr(checkpoints, "MOST_BYTES", 100)
    monkeypatch.setattr(checkpoints, "_unpickled", None)  # fails if anything is read
    with pytest.raises(ReadError, match=r"data\.pkl has \d+ bytes; more than 100 are not read"):
        read(data)


def test_a_pickle_with_too_many_objects_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "MOST_OPCODES", 1000)
    assert read(saved({"a": list(range(100))}))
    with pytest.raises(ReadError, match="holds more than 1,000 objects"):
        read(saved({"a": list(range(1000))}))


def test_a_zip_directory_over_the_limit_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved({"a": [torch.zeros(1) for _ in range(100)]})
    monkeypatch.setattr(checkpoints, "_MOST_DIRECTORY", 1000)
    with pytest.raises(ReadError, match="directory of more than"):
        read(data)
