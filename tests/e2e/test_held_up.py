"""A process, or the host of the job's store, stalls for seconds: nothing is considered lost because of it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fakes import TWO, FakeWandb, Job
from processes import started

from dist_wandb.job.job_store import JobStore

ASKS = """
import time
from concurrent.futures import ThreadPoolExecutor
from dist_wandb.job.timed_caller import call_or_default
from dist_wandb.job.timed_caller import TimedCaller
answer = lambda: [time.sleep(0.1) for _ in range(10)] and "answer"
print("asks", flush=True)
with ThreadPoolExecutor(2) as pool:
    asked = [pool.submit(call_or_default, answer, "none", 2.0), pool.submit(TimedCaller(2.0).call, answer)]
    print(*(one.result() for one in asked), flush=True)
"""


@pytest.mark.cold  # otherwise the stand-in would stall, not its child
def test_a_stalled_process_checks_for_the_stores_answer_once_more(tmp_path: Path) -> None:
    with started([sys.executable, "-c", ASKS], cwd=tmp_path) as job:
        (process,) = job.processes
        assert process.stdout is not None
        assert process.stdout.readline() == "asks\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        process.send_signal(signal.SIGCONT)
        assert job.wait(60).check().output == "answer answer\n"


def note_end(run: Any, rank: int, ended: list[int]) -> None:
    finish = run.finish

    def finish_and_note(exit_code: int | None = None) -> None:
        ended.append(rank)
        finish(exit_code)

    run.finish = finish_and_note


def test_a_primary_waits_for_its_writers_even_if_the_store_lists_them_slowly(
    job: Job, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    asked = threading.Event()
    try_get = JobStore.try_get

    def slowly(self: JobStore, key: str, *, soon: bool = False) -> Any:
        if key.endswith("/writers/count") and not asked.is_set():
            asked.set()
            time.sleep(2.5)
        return try_get(self, key, soon=soon)

    sessions = job(TWO, run_mode="shared", reduce=None)
    monkeypatch.setattr(JobStore, "try_get", slowly)
    for rank, session in enumerate(sessions):
        note_end(session.run, rank, ended)
    assert len(fake_wandb.runs) == 2

    def finish(rank: int) -> None:
        if rank == 1:
            assert asked.wait(20)
            time.sleep(2.4)  # longer than other calls wait for the store
        sessions[rank].finish()

    threads = [threading.Thread(target=finish, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == [1, 0]
