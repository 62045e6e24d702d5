"""The base ids in Lightning's checkpoints, which are untrusted files, and of jobs that are restarted."""

from __future__ import annotations

import argparse
import enum
import inspect
import io
import os
import pickle
import time
import tracemalloc
import warnings
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeWandb
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_trainers import quiet_trainer
from limits import Limit

from dist_wandb import DistWandbLogger
from dist_wandb.errors import ReadError
from dist_wandb.job.topology import Topology
from dist_wandb.lightning import checkpoints
from dist_wandb.lightning.checkpoints import KEY, ids_in
from dist_wandb.session.restart import DIRECTORY, RestartStore
from dist_wandb.settings.options import Options

NOTES = Path("wandb") / DIRECTORY


@pytest.fixture(autouse=True)
def fresh_process(
    fake_wandb: FakeWandb,  # noqa: ARG001  # must run first
    begin_script: Callable[..., None],
) -> Callable[..., None]:
    """Reset the process, as if no logger had been created; call the result to do so again, as in a restarted job."""
    begin_script()
    return begin_script


def trainer(logger: DistWandbLogger | list[DistWandbLogger] | bool, **more: Any) -> Trainer:
    return quiet_trainer(logger, max_steps=1, limit_val_batches=0, enable_checkpointing="callbacks" in more, **more)


# --- in checkpoints ---------------------------------------------------------------------------------------------------


def test_checkpoints_hold_the_run_ids(tmp_path: Path) -> None:
    callbacks = [ModelCheckpoint(tmp_path, filename="step", every_n_train_steps=1)]
    first = trainer([DistWandbLogger(), DistWandbLogger(id="b")], callbacks=callbacks)
    before, listed = first.callbacks, list(first.callbacks)  # type: ignore[attr-defined]
    first.fit(BoringModel())
    first.save_checkpoint(tmp_path / "by-hand.ckpt")
    for name in ("step.ckpt", "by-hand.ckpt"):
        assert DistWandbLogger.id_in(tmp_path / name) == "made-by-wandb-0"
        assert DistWandbLogger.id_in(str(tmp_path / name), logger=1) == "b"
    with pytest.raises(TypeError):
        first.save_checkpoint()  # type: ignore[call-arg]
    assert first.callbacks is before  # type: ignore[attr-defined]
    assert before == listed
    wrapped: Any = Trainer.save_checkpoint
    assert not hasattr(wrapped.__wrapped__, "__wrapped__"), "for two loggers, once"
    assert list(inspect.signature(wrapped).parameters)[:4] == ["self", "filepath", "weights_only", "storage_options"]


def test_checkpoints_of_other_trainers_and_of_loggers_without_a_run_hold_no_id(tmp_path: Path) -> None:
    first, other = trainer(DistWandbLogger()), trainer(False)
    first.fit(BoringModel())
    first.save_checkpoint(tmp_path / "x.ckpt")
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        other.fit(BoringModel(), ckpt_path=tmp_path / "x.ckpt")
    assert not [warning for warning in messages if "callbacks" in str(warning.message)], "it loads it without ours"
    both: tuple[list[Any], ...] = ([], [DistWandbLogger(id="b")])
    for loggers in both:
        other.loggers = loggers
        other.save_checkpoint(tmp_path / "x.ckpt")
        assert KEY not in torch.load(tmp_path / "x.ckpt")


@pytest.mark.parametrize("kind", ["sharded", "link"])
def test_the_id_is_read_from_a_directory_and_through_a_link(tmp_path: Path, kind: str) -> None:
    torch.save({KEY: {"0": "exp"}}, tmp_path / "meta.pt")
    (tmp_path / "last.ckpt").symlink_to("meta.pt")  # as Lightning's last.ckpt may be
    assert DistWandbLogger.id_in(tmp_path if kind == "sharded" else tmp_path / "last.ckpt") == "exp"


WITHOUT_AN_ID: list[Any] = [{}, {KEY: {"1": "exp"}}, {KEY: {"0": 7}}, {KEY: "exp"}, []]
INVALID_IDS = ["../../x", "a\x1b[31m", "", "x" * 10**6]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((content, r"x\.ckpt: holds no run id of logger 0") for content in WITHOUT_AN_ID),
        *(({KEY: {"0": base_id}}, "run id of logger 0") for base_id in INVALID_IDS),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_checkpoint_without_a_valid_id_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(ReadError, match=message) as refused:
        DistWandbLogger.id_in(tmp_path / "x.ckpt")
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 2000


OTHER_PLACES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "directory with a pipe": lambda path: path.mkdir() or os.mkfifo(path / "meta.pt"),  # type: ignore[func-returns-value]
    "directory": Path.mkdir,
    "nothing": lambda _path: None,
    "text": lambda path: path.write_text("x" * 100, encoding="utf-8"),
}


@pytest.mark.parametrize("kind", OTHER_PLACES)
def test_what_is_no_checkpoint_is_refused_immediately(tmp_path: Path, kind: str) -> None:
    OTHER_PLACES[kind](tmp_path / "x.ckpt")
    message = r"x\.ckpt: cannot be read as a checkpoint: .*\. Pass one that a Trainer" if kind == "text" else None
    with pytest.raises(ReadError, match=message):
        DistWandbLogger.id_in(tmp_path / "x.ckpt")


class Executed:
    """Makes a directory when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = str(place)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.place,)


def test_code_in_a_checkpoint_is_executed_only_if_trusted(tmp_path: Path) -> None:
    path, place = tmp_path / "x.ckpt", tmp_path / "executed"
    content = {"model": torch.nn.Linear(2, 2), KEY: {"0": "exp"}, "hyper_parameters": Executed(place)}
    torch.save(content, path)
    assert DistWandbLogger.id_in(path) == "exp"
    assert not place.exists()
    assert DistWandbLogger.id_in(path, weights_only=False) == "exp"
    assert place.exists()


# --- before the ranks are known ---------------------------------------------------------------------------------------


def leave_note(base_id: str, *, world_size: int = 2, session: str = "DistWandbLogger/0", **arguments: Any) -> None:
    topology = Topology(0, 0, 0, world_size, world_size, 1)
    RestartStore(session, Options("new"), topology, {"dir": ".", "project": "digits", **arguments}).leave(base_id)


def test_a_logger_that_may_continue_knows_the_id_before_the_ranks_are_known(
    fresh_process: Callable[..., None],
) -> None:
    """Its children, which ddp starts from the script, get the id from their parent."""
    leave_note("earlier")
    DistWandbLogger(project="digits", run_mode="new", resume="auto")
    leave_note("another one")
    fresh_process(parent=os.getpid())
    assert DistWandbLogger(project="digits", run_mode="new", resume="auto").version == "earlier"


@pytest.mark.parametrize("arguments", [{}, {"resume": "auto", "id": "exp"}, {"resume": "never"}])
def test_other_loggers_do_not_use_the_recorded_id(arguments: dict[str, Any]) -> None:
    leave_note("earlier", world_size=1)
    assert DistWandbLogger(project="digits", run_mode="new", **arguments).experiment.id != "earlier"
    assert len(list(NOTES.iterdir())) == 1


def test_a_world_of_one_continues_the_recorded_run(fake_wandb: FakeWandb) -> None:
    leave_note("earlier", world_size=1)
    logger = DistWandbLogger(project="digits", run_mode="new", resume="auto")
    assert logger.experiment.id == "earlier"
    assert fake_wandb.arguments[0]["resume"] == "allow"  # W&B would follow its own record, whoever owns it


# --- untrusted files --------------------------------------------------------------------------------------------------


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
