"""What a rank sees of its own thread, and of other processes; what it accepts from others."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from processes import wait_until
from torch._C import _distributed_c10d

from dist_wandb.stalls import evidence
from dist_wandb.stalls.evidence import Thread, Work, decoded, encoded, encoded_stack, has_moved
from dist_wandb.stalls.verdict import Answer, Calls, Frame, Worker


@contextmanager
def running(target: Any) -> Iterator[Thread]:
    """Run a function on a thread until it has begun to wait, or compute."""
    found: list[Thread] = []

    def run() -> None:
        found.append(Thread.current())
        target()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not found:
        time.sleep(0.01)
    time.sleep(0.2)
    yield found[0]
    thread.join()


def test_the_innermost_line_has_the_name_of_its_call() -> None:
    gate = threading.Lock()
    gate.acquire()

    def wait() -> None:
        gate.acquire()

    with running(wait) as thread:
        frames = evidence.stack_of(thread.ident)
        text = evidence.all_stacks(thread)
        gate.release()
    innermost = frames[-1]
    assert (innermost.function, innermost.is_users, innermost.file) == ("wait", True, __file__)
    if sys.version_info >= (3, 11):
        assert innermost.called == "acquire"
    assert not frames[0].is_users  # threading
    assert text.partition("\n")[0].startswith("Thread Thread-")
    assert f'File "{__file__}", line {innermost.line}, in wait' in text


def test_a_thread_that_waits_has_not_moved_and_one_that_computes_or_wakes_up_has() -> None:
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(1000))

    def wake_up() -> None:
        while not stop.is_set():
            time.sleep(0.05)

    def work(thread: Thread) -> tuple[Work | None, Work | None]:
        before = thread.work()
        time.sleep(1.0)
        return before, thread.work()

    with running(stop.wait) as waiting:
        before, after = work(waiting)
        stop.set()
    assert not has_moved(before, after)
    for target in (compute, wake_up):
        stop.clear()
        with running(target) as moving:
            before, after = work(moving)
            stop.set()
        assert has_moved(before, after)


def test_without_proc_nothing_is_said_to_move() -> None:
    assert not has_moved(None, None)


def test_processes_are_described_by_what_they_do() -> None:
    scripts = {"busy": "while True: pass", "sleeping": "import time; time.sleep(60)", "stopped": "input()"}
    jobs = {
        kind: subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
        for kind, script in scripts.items()
    }
    try:
        time.sleep(1.0)
        jobs["stopped"].send_signal(signal.SIGSTOP)
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        found = evidence.looked_at([gone.pid, *(job.pid for job in jobs.values())])
        assert found == {gone.pid: "gone", **{job.pid: kind for kind, job in jobs.items()}}
    finally:
        for job in jobs.values():
            job.kill()
            job.communicate()


def test_children_are_listed_and_have_moved_or_not() -> None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    try:
        wait_until(lambda: evidence.children()[child.pid or 0][1] == "hrtimer_nanosleep", 60)
        before = evidence.children()
        (worker,) = [one for one in evidence.workers(before) if one.pid == child.pid]
        assert (worker.state, worker.waits_in, worker.moves) == ("S", "hrtimer_nanosleep", False)
    finally:
        child.kill()
        child.join()


ANSWER = Answer(
    *(3, "gpu-7", os.getpid(), 312.5, 0.25, 1, True),
    (Frame("/home/me/data.py", 41, "read", "data", called="sleep"),),
    {"0": Calls(12, 11, "barrier")},
    (Worker(71, "pt_data_worker", "S", "hrtimer_nanosleep", moves=False),),
    uses_device=True,
)


def test_an_answer_survives_the_store() -> None:
    found, stack = json.loads(json.dumps([encoded(ANSWER), encoded_stack(ANSWER.frames)]))
    assert decoded(found, stack) == ANSWER


@pytest.mark.parametrize("found", [None, [], 7, "text", [1] * 10, [[1]] * 10, encoded(ANSWER)[:-1], {"a": 1}])
def test_what_no_rank_can_have_written_is_no_answer(found: Any) -> None:
    assert decoded(found, encoded_stack(ANSWER.frames)) is None
    assert decoded(encoded(ANSWER), [[{}] * 6]) is None
    assert decoded(encoded(ANSWER), 5) is None


def test_a_deep_stack_keeps_its_ends() -> None:
    found: list[tuple[Frame, ...]] = []

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
from dist_wandb.stalls import evidence

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
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "ended\n"
