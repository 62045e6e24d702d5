"""Messages from other ranks of the job: metric states, tables and images, pending cells, known names."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fuzzing import Target
from torchmetrics import AUROC, CatMetric, MeanMetric, MetricCollection, SumMetric

from dist_wandb.errors import ConfigurationError
from dist_wandb.exchange.membership.generations import Checkpoint
from dist_wandb.exchange.protocol.lanes import lanes_of, number_of
from dist_wandb.exchange.protocol.rounds import Rounds
from dist_wandb.payloads.framing import decode, encode, framed, unframed
from dist_wandb.payloads.gathers import Gathered, MergedTable, decoded, gathered, whole
from dist_wandb.payloads.metrics import take_snapshot
from dist_wandb.runs.wandb_media import image

_NUMBERS = (b'"float32"', b'"bool"', b'"qint8"', b'"quint4x2"', b'"bits8"', b'"complex32"', b'"float8_e5m2"', b'"load"')


def _metrics() -> list[Any]:
    mean, cat, auroc = MeanMetric(), CatMetric(), AUROC(task="binary")
    for metric in (mean, cat):
        metric.update(torch.tensor([1.0, 2.0]))
    auroc.update(torch.tensor([0.25, 0.75]), torch.tensor([0, 1]))
    return [mean, cat, auroc, MetricCollection([SumMetric(), MeanMetric()])]


def _blobs() -> list[bytes]:
    snapshots = [take_snapshot(metric) for metric in _metrics()]
    items = [
        torch.arange(6).reshape(2, 3).T,
        torch.tensor([True, False]),
        torch.empty(0, 3, dtype=torch.int8),
        [(4, 5), b"raw", "text", None, [torch.ones(2, dtype=torch.complex64)], torch.bfloat16],
    ]
    in_full = [blob for snapshot in snapshots if (blob := b"".join(snapshot.in_full(1)))]  # those with data
    return [encode(items), *in_full, *(blob for snapshot in snapshots if (blob := b"".join(snapshot.packed(1).blob)))]


def _read_blob(data: bytes) -> None:
    for item in decode(data):
        _use(item)


def _use(item: object) -> None:
    """Like the merging of states."""
    if isinstance(item, torch.Tensor):
        assert item.numel() < 2**31
        (item.to(torch.complex128).sum(), item == item, repr(item), item.reshape(-1).clone())  # noqa: PLR0124
    elif isinstance(item, (list, tuple)):
        for part in item:
            _use(part)


def _tables() -> list[bytes]:
    rows = [
        [1, "a", dt.date(2026, 1, 2)],
        [2.5, "b", dt.datetime(2026, 1, 2, 3, 4, tzinfo=dt.timezone.utc)],
        [None, [1, {"x": 2}], True],
    ]
    pixels = np.zeros((2, 2, 3), dtype=np.uint8)
    from PIL import Image

    picture = Image.fromarray(pixels)
    tables = [gathered(rows, ["a", 1, "c"]), gathered([], ["a"]), gathered([[1, picture]], ["a", "b"])]
    return [_sent(table) for table in tables]


def _read_table(data: bytes) -> None:
    part = decoded("table", data)
    merged = whole("table", [part, part._replace(rank=1), part._replace(columns=["other"], items=[[1]])])
    assert isinstance(merged, MergedTable)
    columns, rows = merged
    assert all(len(row) == len(columns) for row in rows)


def _images() -> list[bytes]:
    pixels = np.zeros((2, 2, 3), dtype=np.uint8)
    panels = [gathered([pixels]), gathered([pixels] * 2, caption=["a", "b"], grouping=[1, 2])]
    return [_sent(panel) for panel in panels]


def _sent(value: Gathered) -> bytes:
    value.use(3, image)
    return value.encoded().as_bytes(3)


def _frames() -> Sequence[bytes]:
    return [framed(), framed(b"", b"a" * 9, b"\xff" * 3), framed(json.dumps([1]).encode(), framed(b"b"))]


def _read_frames(data: bytes) -> None:
    parts = unframed(data)
    assert framed(*parts) == data


def _offers() -> list[bytes]:
    machine = Rounds(0, 2)
    machine.table.names.update(a=0, b=1, c=2, d=3)
    for step in (None, 0, 3, 6, None, 9):
        for names in ("a", "ab", "dc"):
            machine.outbox.post(names, lanes_of([number_of(1.0)] * len(names)), step, 7 if step is None else step, 0.0)
    return [machine.offer(1.0), Rounds(0, 2).offer(0.0)]


def _read_offers(data: bytes) -> None:
    machine = Rounds(0, 2)
    machine.table.names.update(a=0, b=1, c=2, d=3)
    machine.outbox.post("ab", lanes_of([number_of(1.0)] * 2), 3, 3, 0.0)
    plan = machine.plan({machine.offer(1.0): frozenset([0]), data: frozenset([1])})
    machine.unpack(plan, *plan.pack())


def _checkpoints() -> list[bytes]:
    offers = {Rounds(0, 2).offer(0.0): frozenset([0, 1])}
    checkpoints = [Checkpoint(3, offers, [1.0, -0.0], [float("inf")]), Checkpoint(0)]
    return [json.dumps(checkpoint.as_json()).encode() for checkpoint in checkpoints]


def _snapshots() -> list[bytes]:
    machine = Rounds(0, 2)
    machine.table.names.update(loss=0, acc=1)
    return [json.dumps(machine.snapshot()).encode()]


def _read_snapshot(data: bytes) -> None:
    machine = Rounds(1, 2)
    machine.restore(json.loads(data))
    machine.snapshot()


# An error of it on the exchange's thread ends the exchange, with a warning, and the rank continues alone.
_ODD = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)

TARGETS = (
    Target("blob", _read_blob, _blobs, (ConfigurationError,), _NUMBERS, examples=500, is_native=True),
    Target("table", _read_table, _tables, (ConfigurationError,)),
    Target("images", lambda data: decoded("images", data), _images, (ConfigurationError,)),
    Target("offer", _read_offers, _offers, _ODD, (b"[[0,4],0,0,1,0,1,999999999]", b"1e9", b"[]", b"[0]")),
    Target("exchange_checkpoint", lambda data: Checkpoint.from_json(json.loads(data)), _checkpoints, _ODD),
    Target("snapshot", _read_snapshot, _snapshots, _ODD),
    Target("frames", _read_frames, _frames, (ConfigurationError,)),
)
