"""A watcher asks, tells once, and says when the training goes on. Ranks are threads, over a store in memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from counting import CountedStore, Counts
from limits import Limit
from processes import wait_until

from dist_wandb.errors import RendezvousError
from dist_wandb.job.job_store import JobStore
from dist_wandb.job.topology import Topology
from dist_wandb.runs.null_run import NullRun
from dist_wandb.session.stalls import watcher
from dist_wandb.session.stalls.verdict import Stall
from dist_wandb.session.stalls.watcher import Watcher, signs
from dist_wandb.settings.options import Options
from dist_wandb.wandb_files.sidecar import stalls_of
from dist_wandb.wandb_files.small_files import Directory

LIMIT = 1.0  # seconds
WINDOW, ANSWERS = 0.6, 2.0  # seconds


@pytest.fixture(autouse=True)
def _brief(limit: Limit) -> None:
    limit(watcher, _WINDOW=WINDOW, _ANSWERS=ANSWERS)


class Run:
    """A run that takes alerts."""

    def __init__(self, directory: Path) -> None:
        self.dir = str(directory)
        self.alerts: list[tuple[str, str]] = []

    def alert(self, title: str, text: str, level: str) -> None:
        self.alerts.append((title, text))
        assert level == "WARN"


class Job:
    """Watchers of two ranks, each of which watches a thread that waits."""

    def __init__(
        self,
        directory: Path,
        on_stall: Callable[[Stall], object],
        *,
        has_store: bool = True,
        other: Any = None,
        before: Callable[[str, Any], None] = lambda *_: None,  # as of `CountedStore`
    ) -> None:
        self.run = Run(directory / "files")
        self._gate = threading.Event()
        self._threads: list[threading.Thread] = []
        self._watchers: list[Watcher] = []
        store, counts = dist.HashStore(), Counts()
        self.store = store
        for rank in range(2):
            topology = Topology(rank, rank, 0, 2, 2, 1)
            mine = JobStore(CountedStore(store, rank, counts, before), "test", topology, 5.0)
            run = other if other is not None and rank == 1 else self.run
            limit = LIMIT if other is None or rank == 1 else 24.0  # so that rank 1 asks, on a busy machine, too
            options = Options(stall_timeout=limit, on_stall=on_stall)
            find = mock.Mock(return_value=mine, side_effect=None if has_store else RendezvousError("it is silent"))
            self._start(partial(self._train, topology, options, lambda run=run: run, directory, find))
            wait_until(lambda rank=rank: len(self._watchers) > rank, 10)  # type: ignore[misc]
            self._start(self._watchers[-1].run)
        signs.last = time.monotonic()

    def _train(self, *parts: Any) -> None:
        self._watchers.append(Watcher(*parts))
        self._gate.wait()

    def _start(self, target: Callable[[], Any]) -> None:
        self._threads.append(threading.Thread(target=target, daemon=True))
        self._threads[-1].start()

    def questions(self) -> int:
        return sum(self.store.check([f"test/watch/ask/{number}"]) for number in range(20))

    def end(self) -> None:
        self._gate.set()
        for one in self._watchers:
            one.stopped.set()
        for thread in self._threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in self._threads)


def messages_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_stall_is_told_once_and_then_that_it_is_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    on_stall = mock.Mock(side_effect=ValueError("in the user's function"))
    job = Job(tmp_path, on_stall)
    try:
        wait_until(lambda: on_stall.called, 30)
        asked = job.questions()  # on a busy machine, the first one may show threads at work
        time.sleep(2 * ANSWERS + LIMIT)  # in which the other rank would ask again
        assert job.questions() == asked > 0
        signs.last = time.monotonic()
        wait_until(lambda: "the training went on after" in caplog.text, 10)
    finally:
        job.end()
    ((stall,), _) = on_stall.call_args
    assert on_stall.call_count == 1
    assert {one.rank: one.kind for one in stall.ranks} in ({0: "call", 1: "call"}, {0: "line", 1: "line"})
    assert stall.message.startswith("Nothing moved for ")
    assert Path(stall.stacks).parent == tmp_path / "files"
    (stored,), count = stalls_of([Directory.at(tmp_path)])
    assert (stored.message, stored.path, count) == (stall.message, stall.stacks, 1)
    assert messages_of(caplog)[-1] == f"dist_wandb: the training went on after {stored.lasted} s."
    text = Path(stall.stacks).read_text(encoding="utf-8")
    assert stall.message in text
    assert __file__ in text
    assert job.run.alerts == [("Training stands still", stall.message)]
    messages = messages_of(caplog)
    assert messages[0] == (
        f"dist_wandb: {stall.message} All stacks are in {stall.stacks}. No process is ended; stall_timeout=None turns "
        "this off."
    )
    assert messages[1] in [f"dist_wandb: on_stall of rank {rank} failed" for rank in range(2)]
    assert messages[2].startswith("dist_wandb: the training went on after ")
    assert len(messages) == 3


def test_a_sign_while_the_ranks_are_asked_is_no_stall_and_another_rank_has_the_run(tmp_path: Path) -> None:
    told: list[Stall] = []
    directory = tmp_path / "offline-run-20260101_000000-exp"
    (directory / "files").mkdir(parents=True)
    other = NullRun()
    other.show_metadata(lambda: {"dir": str(directory / "files")}, None)

    def go_on(key: str, value: Any) -> None:
        if key == "test/watch/ask/1" and value is not None:
            signs.last = time.monotonic()

    job = Job(directory, told.append, other=other, before=go_on)
    try:
        wait_until(lambda: bool(told and job.run.alerts), 30)
    finally:
        job.end()
    stall = told[0]
    assert [job.store.check([f"test/watch/told/{number}"]) for number in (1, 2)] == [False, True]
    assert Path(stall.stacks).name.endswith("-rank-1.txt")
    assert Path(stall.stacks).parent == directory / "files"
    assert job.run.alerts == [("Training stands still", stall.message)]


def test_without_the_store_each_rank_tells_what_it_knows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, limit: Limit
) -> None:
    limit(watcher, _SILENT_STORE=1.0)
    told: list[Stall] = []
    job = Job(tmp_path, told.append, has_store=False)
    try:
        wait_until(lambda: len(told) == 2, 30)
        time.sleep(3 * LIMIT)  # nobody tells it again
    finally:
        job.end()
    assert sorted(one.rank for stall in told for one in stall.ranks) == [0, 1]
    assert all(
        "The job's store does not answer, so nothing is known of the other ranks." in one.message for one in told
    )
    assert len({stall.stacks for stall in told}) == 2
    assert len(caplog.records) == 2


def test_a_watcher_that_fails_says_so_and_the_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fail = mock.Mock(side_effect=ValueError("a bug"))
    topology, options = Topology(0, 0, 0, 2, 2, 1), Options(stall_timeout=LIMIT)
    Watcher(topology, options, lambda: None, tmp_path, fail).run()
    (record,) = caplog.records
    assert record.getMessage() == "dist_wandb: rank 0 does not watch for stalls any more"


@pytest.mark.parametrize(("timeout", "size", "expected"), [("auto", 2, 1), (None, 2, 0), (20.0, 1, 0)])
def test_only_jobs_of_several_ranks_are_watched_and_by_one_thread(
    timeout: Any, size: int, expected: int, tmp_path: Path
) -> None:
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "dist_wandb-stalls"}

    options, topology = Options(stall_timeout=timeout), Topology(0, 0, 0, size, size, 1)
    watcher.end()
    before = threads()
    for _ in range(2):
        watcher.begin(topology, options, lambda: None, tmp_path)
    begun = threads() - before
    assert len(begun) == expected
    watcher.end()
    assert not begun & threads()
