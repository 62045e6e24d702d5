"""What a rank sees of its own thread, and of other processes; what it accepts from others."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from processes import run_python, wait_until
from torch._C import _distributed_c10d

from dist_wandb.session.stalls import evidence
from dist_wandb.session.stalls.evidence import Work, doing, works
from dist_wandb.session.stalls.verdict import Calls, Frame


@contextmanager
def running(target: Any) -> Iterator[tuple[int, int]]:
    """Run a function on a thread until it has begun to wait, or compute; yield Python's and the kernel's number."""
    found: list[tuple[int, int]] = []

    def run() -> None:
        found.append((threading.get_ident(), threading.get_native_id()))
        target()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    wait_until(lambda: bool(found) and evidence.stack_of(found[0][0])[-1].function != "run", 20)
    time.sleep(0.2)
    yield found[0]
    thread.join()


def test_the_innermost_line_has_the_name_of_its_call() -> None:
    gate = threading.Lock()
    gate.acquire()

    def wait() -> None:
        gate.acquire()

    with running(wait) as (thread, _):
        frames = evidence.stack_of(thread)
        text = evidence.all_stacks(thread)
        gate.release()
    innermost = frames[-1]
    assert (innermost.function, innermost.is_users, innermost.file) == ("wait", True, __file__)
    if sys.version_info >= (3, 11):
        assert innermost.called == "acquire"
    assert not frames[0].is_users  # threading
    assert text.partition("\n")[0].startswith("Thread Thread-")
    assert f'File "{__file__}", line {innermost.line}, in wait' in text


def test_a_thread_waits_computes_or_wakes_up_again_and_again() -> None:
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(1000))

    def wake_up() -> None:
        while not stop.is_set():
            time.sleep(0.05)

    def does(native: int) -> str:
        before = works(native)[native]
        time.sleep(1.0)
        return doing(before, works(native)[native], 1.0)

    for target, expected in ((stop.wait, "sleeping"), (compute, "busy"), (wake_up, "waking")):
        stop.clear()
        with running(target) as (_, native):
            wait_until(lambda: does(native) == expected, 20, expected)  # noqa: B023  # called at once
            stop.set()


def test_work_is_judged_by_its_share_of_the_time_and_one_wake_up_is_none() -> None:
    before = Work(7.0, 100, "S")
    assert doing(before, Work(7.05, 101, "S"), 3.0) == "sleeping"
    assert doing(before, Work(7.05, 102, "S"), 3.0) == "waking"
    waits_for_a_processor = Work(7.0, 100, "R")
    assert doing(waits_for_a_processor, Work(7.05, 101, "R"), 3.0) == "busy"
    assert doing(waits_for_a_processor, Work(7.05, 101, "S"), 3.0) == "sleeping"
    assert doing(before, Work(7.2, 100, "R"), 3.0) == "busy"
    assert doing(None, Work(7.0, 100, "R"), 3.0) == "busy"  # it is new
    assert [doing(before, Work(7.0, 100, state), 3.0) for state in "TtZX"] == ["stopped", "stopped", "gone", "gone"]


def test_without_proc_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(vars(evidence), "_PROC", tmp_path)
    assert works(1, [os.getpid()]) == {1: None, os.getpid(): None}
    assert doing(None, None, 3.0) == "silent"
    assert evidence.children() == []


@pytest.mark.parametrize("method", ["fork", "forkserver"])  # the defaults until Python 3.13, and since 3.14
def test_children_are_listed_with_what_they_wait_for(method: str) -> None:
    before = evidence.children()
    context: Any = multiprocessing.get_context(method)
    child = context.Process(target=time.sleep, args=(60,))
    child.start()
    try:
        sleeps = ("S, hrtimer_nanosleep", "S, poll_schedule_timeout")  # `time.sleep` calls `select` until 3.10
        wait_until(lambda: any(state in str(works(0, [child.pid or 0])) for state in sleeps), 60)
        assert set(evidence.children()) - set(before) == {child.pid}, "neither the fork server nor its tracker"
    finally:
        child.kill()
        child.join()


def test_a_deep_stack_keeps_its_ends() -> None:
    found: list[list[Frame]] = []

    def deeper(depth: int) -> None:
        if depth:
            deeper(depth - 1)
        else:
            found.append(evidence.stack_of(threading.get_ident()))

    deeper(200)
    assert len(found[0]) == 60
    assert [frame.function for frame in found[0][-3:-1]] == ["deeper", "stack_of"]
    assert found[0][-3].called in ("stack_of", "")


def test_nccl_has_a_flight_recorder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch 2.11 with CUDA has given on a device: the common recorder is empty there."""
    status = {"0": {"last_completed_collective": "3", "last_enqueued_collective": "4"}, "1": {}, "7": {}}
    asked: list[bool] = []
    entry = {
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": "nccl:all_reduce",
        "timeout_ms": 600000,
    }
    ours = {"pg_id": 1, "process_group": ["", ""], "profiling_name": "gloo:all_gather", "timeout_ms": 60000}

    def dump(includeCollectives: bool) -> bytes:  # noqa: N803  # torch's name
        asked.append(includeCollectives)
        return json.dumps({"pg_status": status, "entries": [entry, ours] if includeCollectives else []}).encode()

    monkeypatch.setitem(vars(_distributed_c10d), "_dump_fr_trace_json", lambda **_: b'{"pg_status": {}}')
    monkeypatch.setitem(vars(_distributed_c10d), "_dump_nccl_trace_json", dump)
    collectives = evidence.Collectives()
    assert collectives.have_moved()
    assert not collectives.have_moved()
    assert asked == [False, True, False]  # the calls of group 7 are not recorded any more, and nobody asks again
    assert collectives.groups() == {"0/nccl": Calls(4, 3, "all_reduce")}
    assert collectives.watchdog == 600
    status["0"]["last_enqueued_collective"] = "5"
    assert collectives.have_moved()
    status["1"]["last_enqueued_collective"] = "9"  # of the exchange
    assert not collectives.have_moved()


def test_without_a_flight_recorder_nothing_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        monkeypatch.delitem(vars(_distributed_c10d), name, raising=False)
    collectives = evidence.Collectives()
    assert not collectives.have_moved()
    assert collectives.groups() == {}


def test_a_garbage_collection_while_stacks_are_read_does_not_deadlock() -> None:
    """Before Python 3.11.12, a collection in `sys._current_frames` that lets go of the GIL stops a process for good."""
    script = """
import gc, os, threading, time
from dist_wandb.session.stalls import evidence

class Cycle:
    def __init__(self):
        self.own = self

    def __del__(self):
        time.sleep(0.001)  # lets go of the GIL

def start_threads():
    while True:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

for _ in range(3):
    threading.Thread(target=start_threads, daemon=True).start()
for turn in range(500):
    gc.disable()
    gc.collect()
    Cycle()
    gc.set_threshold(gc.get_count()[0] + turn % 16)  # so some collections happen while the frames are collected
    gc.enable()
    assert evidence.stack_of(threading.get_ident())
    assert gc.isenabled()
print("ended", flush=True)
os._exit(0)
"""
    assert run_python(script) == "ended"
