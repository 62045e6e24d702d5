"""Tensors of a device in rows, and timed sections: on a CUDA device by `make test-gpu`, else on a stand-in for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from devices import Device
from processes import wait_until

import dist_wandb

Rows = Callable[[], list[dict[str, Any]]]

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
]
WORK = 0.2  # seconds of the device
# what a device may not support: those that it cannot fill are left out
RARE = ("uint16", "uint32", "uint64", *(f"float8_{of}" for of in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")))


def dtypes_of(device: Device) -> list[torch.dtype]:
    found = list(DTYPES)
    for name in RARE:
        try:
            device.tensor(1, getattr(torch, name))
        except (AttributeError, RuntimeError):
            continue
        found.append(getattr(torch, name))
    return found


def test_numbers_and_vectors_of_every_dtype_arrive(device: Device, session: dist_wandb.Session, rows: Rows) -> None:
    dtypes = dtypes_of(device)
    assert torch.float8_e4m3fn in dtypes
    numbers = {f"{dtype}": device.tensor(1, dtype) for dtype in dtypes}
    vectors = {f"of {dtype}": device.tensor(1, dtype).expand(2) for dtype in dtypes}
    with device.no_waiting():
        session.log({**numbers, **vectors})
    (row,) = rows()
    assert {name: row[name] for name in numbers} == dict.fromkeys(numbers, 1)
    assert {name: row[name] for name in vectors} == {name: [1, 1] for name in vectors}


def test_views_graphs_and_containers_arrive(device: Device, session: dist_wandb.Session, rows: Rows) -> None:
    values = torch.stack([device.tensor(number) for number in range(6)]).reshape(2, 3)
    weight = device.tensor(2).requires_grad_()
    with torch.inference_mode():
        inferred = device.tensor(5) * 2
    logged = {
        "element": values[1, 1],
        "one": values[:1, 2:],
        "column": values[:, 1],
        "transposed": values.t()[::2],
        "graph": weight * 3,
        "graph of a vector": weight * values[0],
        "inferred": inferred,
        "nested": {"list": [values[0, 1], 0.5, (values[1, ::2],)]},
    }
    with device.no_waiting(), torch.no_grad():
        session.log(logged)
    (row,) = rows()
    assert {name: row[name] for name in row if name in {*logged, "nested.list"}} == {
        "element": 4,
        "one": 2,
        "column": [1, 4],
        "transposed": [[0, 3], [2, 5]],
        "graph": 6,
        "graph of a vector": [0, 2, 4],
        "inferred": 10,
        "nested.list": [1, 0.5, [[3, 5]]],
    }


def test_log_waits_for_no_device_and_rows_keep_values_and_order(
    device: Device, session: dist_wandb.Session, rows: Rows
) -> None:
    total, step = device.tensor(0), device.tensor(1)
    session.log({"total": total, "at": -1})  # the first copy allocates memory for copies
    session.flush()
    with device.occupied(), device.no_waiting():
        for at in range(20):
            total += step
            session.log({"total": total, "vector": total.expand(2), "at": at})
            session.log({"host": at})
    found = rows()
    assert [(row["at"], row["total"]) for row in found if "at" in row] == [(at, at + 1) for at in range(-1, 20)]
    assert [row["vector"] for row in found if "vector" in row] == [[at + 1] * 2 for at in range(20)]
    assert [row["host"] for row in found if "host" in row] == list(range(20))


def test_values_of_several_streams_arrive(device: Device, session: dist_wandb.Session, rows: Rows) -> None:
    for at in range(4):
        with device.stream(), device.occupied(), device.no_waiting():
            value = device.tensor(at) * 2
            session.log({"value": value, "vector": value.expand(3)})
            del value
    found = rows()
    assert [(row["value"], row["vector"]) for row in found] == [(2 * at, [2 * at] * 3) for at in range(4)]


def metrics_on(device: Device) -> Any:
    import torchmetrics  # here, because it takes seconds in each process that collects tests

    kinds = {"mean": torchmetrics.MeanMetric(), "max": torchmetrics.MaxMetric(), "cat": torchmetrics.CatMetric()}
    both = torchmetrics.MetricCollection(dict(kinds), compute_groups=False)
    both.update(7.0)
    for metric in both.values():
        for name, value in metric.metric_state.items():
            number = device.tensor(float(value[0] if isinstance(value, list) else value))
            setattr(metric, name, [number] if isinstance(value, list) else number)
    return both


def test_states_of_metrics_are_not_read_by_log(device: Device, session: dist_wandb.Session, rows: Rows) -> None:
    both = metrics_on(device)
    for step in range(5):
        with device.no_waiting():
            session.log({"metrics": both}, step=step)
    assert [row["metrics/mean"] for row in rows()] == [7] * 5


def test_metrics_and_gathered_tables_of_a_device(device: Device, session: dist_wandb.Session, rows: Rows) -> None:
    both = metrics_on(device)
    cells = [[device.tensor(1).expand(2), "text"], [device.tensor(2), "more"]]
    session.flush()
    with device.occupied(), device.no_waiting():
        session.log({"metrics": both, "table": dist_wandb.gathered(cells, ["tensor", "text"])})
    (row,) = rows()
    assert (row["metrics/mean"], row["metrics/max"], row["metrics/cat"]) == (7, 7, 7)
    assert (row["table.nrows"], row["table.ncols"]) == (2, 3)


def test_the_time_of_the_device_counts(device: Device, session: dist_wandb.Session, rows: Rows) -> None:
    with device.no_waiting():
        with session.timed("host"):
            pass
        with session.timed("forward"):
            device.work(WORK)
        session.log({"loss": 1}, step=0)
    wait_until(device.is_idle, 60)
    session.log({"loss": 2}, step=1)
    first, second = rows()
    assert "time/forward" not in first
    assert WORK / 2 < second["time/forward"] < 100 * WORK
    assert {**first, **second}["time/host"] < second["time/forward"]  # a busy machine may interrupt an empty block


def test_a_section_that_ends_on_another_stream_is_counted(
    device: Device, session: dist_wandb.Session, rows: Rows
) -> None:
    with device.no_waiting():
        section = session.timed("forward")
        with device.occupied():
            section.__enter__()
            with device.stream():
                section.__exit__(None, None, None)
                session.log({"loss": 1}, step=0)
    wait_until(device.is_idle, 60)
    session.log({"loss": 2}, step=1)
    assert "time/forward" in rows()[1]
