"""What only a CUDA device shows: synchronisations, streams, graphs, compiled code, memory, system metrics."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from devices import Cuda
from processes import wait_until
from stored import find_runs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.profiler import ProfilerActivity, profile

import dist_wandb
from dist_wandb.errors import ConfigurationError
from dist_wandb.wandb_files.records import read_records

Rows = Callable[[], list[dict[str, Any]]]

# functions of the CUDA runtime and driver in which the host may wait for the device
WAITING = ("Synchronize", "cudaMemcpy", "cudaMemset", "cudaFree", "cuMemFree", "cuMemcpy")


def test_log_calls_nothing_that_waits(session: dist_wandb.Session, rows: Rows, tmp_path: Path) -> None:
    device = Cuda()
    metric = torchmetrics.MeanMetric().to("cuda")
    metric.update(torch.ones(3, device="cuda"))

    def log(step: int) -> None:
        number = device.tensor(step)
        row = {"bf16": number.bfloat16(), "half": number.half(), "vector": number.expand(3), "metric": metric}
        with session.timed("forward"):
            device.work(0.001)
        session.log(row, step=step, weight=number)

    log(0)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled, device.no_waiting():
        for step in range(1, 101):
            log(step)
    profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    calls = [event for event in events if event.get("cat") in {"cuda_runtime", "cuda_driver"}]
    mine = [event["name"] for event in calls if event["tid"] == threading.get_native_id()]
    assert mine.count("cudaMemcpyAsync") >= 300, sorted(set(mine))
    waiting = [name for name in mine if any(part in name for part in WAITING) and "Async" not in name]
    after_the_block = ["cudaDeviceSynchronize"]  # of the profiler itself, once
    assert waiting in ([], after_the_block), Counter(mine)
    assert [row["bf16"] for row in rows()] == list(range(101))


def test_nothing_of_the_package_synchronises_on_any_thread(session: dist_wandb.Session, rows: Rows) -> None:
    device = Cuda()
    kinds = {"accuracy": torchmetrics.classification.MulticlassAccuracy(4), "curve": torchmetrics.CatMetric()}
    kinds |= {"moments": torchmetrics.PearsonCorrCoef(), "auroc": torchmetrics.classification.MulticlassAUROC(4)}
    for metric in kinds.values():
        metric.to("cuda")
    labels = torch.arange(4, device="cuda")
    kinds["accuracy"].update(labels, labels)
    kinds["curve"].update(labels.float())
    kinds["moments"].update(labels.float(), labels.float() * 2)
    kinds["auroc"].update(torch.eye(4, device="cuda"), labels)
    image = torch.ones(3, 4, 4, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        session.log({**kinds, "loss": device.tensor(1)})
        session.log({"images": dist_wandb.gathered([image]), "histogram": image.reshape(-1)})
        found = rows()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (found[0]["accuracy"], found[0]["curve"], found[0]["loss"]) == (1, [0, 1, 2, 3], 1)
    assert found[0]["moments"] == pytest.approx(1)
    assert found[0]["auroc"] == pytest.approx(1)
    assert found[1]["images.count"] == 1


def test_autocast(session: dist_wandb.Session, rows: Rows) -> None:
    weight = torch.eye(8, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output = weight @ torch.ones(8, 8, device="cuda")
        with Cuda().no_waiting():
            session.log({"mean": output.mean(), "element": output[0, 0], "row": output[0]})
    (row,) = rows()
    assert (output.dtype, row["mean"], row["element"], row["row"]) == (torch.bfloat16, 1, 1, [1] * 8)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inside_and_beside_compiled_code(mode: str, session: dist_wandb.Session, rows: Rows) -> None:
    def training_step(x: torch.Tensor) -> torch.Tensor:
        loss = (x * 2).sum()
        session.log({"inside": loss})
        return loss + 1

    compiled = torch.compile(training_step, mode=mode)
    for step in range(6):
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        x = torch.full((4,), float(step), device="cuda")
        session.log({"beside": compiled(x)})
    found = rows()
    assert [row["inside"] for row in found if "inside" in row] == [8 * step for step in range(6)]
    assert [row["beside"] for row in found if "beside" in row] == [8 * step + 1 for step in range(6)]


def test_replays_of_a_graph(session: dist_wandb.Session, rows: Rows) -> None:
    device = Cuda()
    x, total = device.tensor(0), device.tensor(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        device.work(0.01)
        total += x
    for step in range(20):
        x.fill_(step)
        graph.replay()
        with device.no_waiting():
            session.log({"total": total})
    assert [row["total"] for row in rows()] == [sum(range(step + 1)) for step in range(20)]


def test_a_graph_can_be_captured_while_rows_wait_for_the_device(session: dist_wandb.Session, rows: Rows) -> None:
    device = Cuda()
    x = device.tensor(1)
    for attempt in range(5):
        with device.stream():
            device.work(0.3)
            session.log({"value": x + attempt, "vector": x.expand(2)})  # its event is polled during the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            threading.Event().wait(0.1)
            y = x * 2
            session.log({"host": attempt})
        graph.replay()
        assert y.item() == 2
    found = rows()
    assert [row["value"] for row in found if "value" in row] == [1 + attempt for attempt in range(5)]
    assert [row["host"] for row in found if "host" in row] == list(range(5))


def test_in_a_capture_values_are_refused_and_sections_use_the_clock(session: dist_wandb.Session, rows: Rows) -> None:
    device = Cuda()
    x = device.tensor(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with session.timed("captured"):
            y = x * 2
        session.log({"number": 1}, step=0)
        for value in (y, y.expand(2), [y]):
            with pytest.raises(ConfigurationError, match="'y' was logged on rank 0 while a CUDA graph is captured"):
                session.log({"y": value})
    graph.replay()
    session.log({"y": y, "number": 2}, step=1)
    found = rows()
    assert [row["number"] for row in found] == [1, 2]
    assert found[1]["y"] == 2
    assert any("time/captured" in row for row in found)


def test_replicated_and_sharded_dtensors(session: dist_wandb.Session, rows: Rows) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        whole = DTensor.from_local(torch.ones(4, device="cuda"), mesh, [Replicate()], run_check=False)
        part = DTensor.from_local(torch.ones(4, device="cuda"), mesh, [Shard(0)], run_check=False)
        with Cuda().no_waiting():
            session.log({"sum": whole.sum(), "vector": whole})
            with pytest.raises(ConfigurationError, match="full_tensor"):
                session.log({"part": part})
        (row,) = rows()
        assert (row["sum"], row["vector"]) == (4, [1] * 4)
    finally:
        torch.distributed.destroy_process_group()


def test_rows_leave_no_memory_of_the_device_behind(session: dist_wandb.Session) -> None:
    device = Cuda()

    def log(number: int) -> None:
        for step in range(number):
            value = device.tensor(step)
            session.log({"loss": value, "bf16": value.bfloat16(), "vector": value.expand(8)})
        torch.cuda.synchronize()
        assert session.flush(60)

    log(1000)
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), pinned()
    log(10_000)
    after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), pinned()
    assert after[0] == before[0]
    assert after[1] - before[1] <= 4 << 20
    assert after[2] - before[2] <= 16 << 20, "memory of the host for copies"


def pinned() -> int:
    with contextlib.suppress(AttributeError, KeyError):
        return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])
    return 0


@pytest.mark.usefixtures("bare_environment")
def test_system_metrics_of_the_device_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_X_STATS_SAMPLING_INTERVAL", "0.5")
    session = dist_wandb.init(project="gpu", dir=tmp_path)
    Cuda().work(3)
    session.log({"loss": 1})
    threading.Event().wait(5)
    session.finish()
    found: set[str] = set()

    def has_ended() -> bool:
        for path in find_runs(tmp_path):
            for kind, contents in read_records(path, skipped=()):
                found.update(contents["item"] if kind == "stats" else ())
        return bool(found)

    wait_until(has_ended, 20)
    assert any(key.startswith("gpu.0.") for key in found), sorted(found)
