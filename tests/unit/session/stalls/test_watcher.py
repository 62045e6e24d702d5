"""When a rank asks where the others are, at which cost, and what is told: once. Ranks are threads of this process."""

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
from dist_wandb.session.stalls.verdict import Answer, Calls, Kind, Stall, StalledRank
from dist_wandb.session.stalls.watcher import Clock, Questions, Watcher, signs
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
            wait_until(lambda rank=rank: len(self._watchers) > rank, 30)  # type: ignore[misc]
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
        wait_until(lambda: "the training went on after" in caplog.text, 30)
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


# --- when -------------------------------------------------------------------------------------------------------------


def test_auto_is_ten_times_the_longest_pause_and_at_least_300_seconds_and_a_minute_before_the_watchdog() -> None:
    clock = Clock("auto", 0.0)
    clock.hear(1700.0)  # the start is no pause
    limits = [clock.limit()]
    for heard in (1720.0, 1780.0, 1781.0):
        clock.hear(heard)
        limits.append(clock.limit())
    clock.begin(5000.0)  # a suspension is no pause
    clock.hear(5001.0)
    assert [*limits, clock.limit()] == [300.0, 300.0, 600.0, 600.0, 600.0]
    clock.watchdog = 600.0
    assert (clock.limit(), clock.limit(3)) == (540.0, 540.0)


def test_the_limit_is_the_users_once_there_was_a_sign_and_a_slow_job_is_told_after_three() -> None:
    clock = Clock(20.0, 0.0)
    assert clock.limit() == 1800.0  # a slow start
    assert clock.hear(1.0) == 1.0
    assert (clock.limit(), clock.due()) == (20.0, 21.0)
    clock.look_later(21.0)
    assert clock.due() == 31.0
    clock.look_later(21.0, 15.0)  # another rank has asked
    assert clock.due() == 36.0
    clock.watchdog = 30.0  # which "auto" would heed
    assert clock.limit(3) == 60.0
    clock.is_told, clock.has_answered, clock.told_in = True, True, "file"
    clock.look_later(400.0, 100.0)
    assert clock.hear(0.5) == 0.0  # an old sign
    assert clock.is_told
    assert clock.hear(413.0) == 412.0
    assert [clock.is_told, clock.has_answered, clock.told_in, clock.due()] == [False, False, None, 433.0]


# --- at which cost ----------------------------------------------------------------------------------------------------

SIZE, ON_HOST = 64, 8
TEXT = "\n".join(f'  File "/venv/lib/python3.11/site-packages/torch/f{i}.py", line {i}, in forward' for i in range(25))


class Asking:
    """The parts of ranks that have a store in this process, eight on each host, and what they ask it."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch, *, left: tuple[int, ...] = ()) -> None:
        self.counts = Counts()
        self.ranks: list[Questions] = []
        self.store, self._patch = dist.HashStore(), monkeypatch
        for rank in range(size):
            self.connect(rank, size)
        for questions in self.ranks:
            assert not questions.is_asked()
        for rank in left:
            self.ranks[rank].leave()
        self.counts.operations.clear()
        self.counts.bytes.clear()

    def connect(self, rank: int, size: int) -> Questions:
        self._patch.setenv("NODE_RANK", str(rank // ON_HOST))
        topology = Topology(rank, rank % ON_HOST, rank // ON_HOST, size, min(size, ON_HOST), -(-size // ON_HOST))
        mine = JobStore(CountedStore(self.store, rank, self.counts), "test", topology, 5.0)
        self.ranks.append(Questions(mine, StalledRank(rank, "silent", host=f"node{rank // ON_HOST}", pid=1000 + rank)))
        return self.ranks[-1]

    def answer(self, rank: int) -> Answer:
        """Return what a rank says, which sees the processes of its host; those from 10 on see other things."""
        stands: tuple[Any, ...] = ("collective", "all_reduce", "/home/me/train.py", 88, "train")
        here = StalledRank(rank, *stands)._replace(host=f"node{rank // ON_HOST}", pid=1000 + rank)
        seen: list[tuple[int, Kind, int]] = [
            (other, "stopped" if other == 1 else "gone" if rank > 9 else "sleeping", pid)
            for other, pid in self.ranks[rank].neighbours.items()
        ]
        return Answer(here, "train.py:88", 9.0, calls={"0": Calls(12, 11, "all_reduce")}, seen=seen)

    def ask(self, silent: tuple[int, ...] = ()) -> tuple[list[Answer], dict[str, list[int]]]:
        assert self.ranks[0].claim()
        self.ranks[0].answer(self.answer(0), TEXT)
        for rank, questions in enumerate(self.ranks[1:], 1):
            if rank not in silent:
                assert questions.is_asked()
                questions.answer(self.answer(rank), TEXT)
        return self.ranks[0].gather(0.0, lambda _: None)


def test_one_rank_reads_what_all_say_for_a_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Asking(SIZE, monkeypatch)
    answers, stacks = job.ask()
    assert [one.place.rank for one in answers] == list(range(SIZE))
    assert answers[5]._replace(question=0, stacks="", seen=[]) == job.answer(5)._replace(seen=[])
    assert stacks == {TEXT: list(range(SIZE))}
    job.ranks[0].tell("")
    operations, sizes = job.counts.operations, job.counts.bytes
    assert max(operations.values()) == operations[0] <= 12
    assert max(sizes.values()) <= 35_000
    assert max(operations[rank] for rank in range(1, SIZE)) <= 5
    assert max(sizes[rank] for rank in range(1, SIZE)) <= 1_000  # the stack is there already


def test_a_rank_asks_once_and_others_find_that_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Asking(3, monkeypatch)
    ranks = job.ranks
    job.ask()
    assert ranks[1].told() is None
    ranks[0].tell("They stand still.")
    assert [ranks[rank].told() for rank in (1, 2)] == ["They stand still."] * 2
    assert [ranks[rank].may_alert() for rank in (1, 2)] == [True, False]
    assert not ranks[1].is_asked()
    assert ranks[1].claim()  # the next question
    assert ranks[2].is_asked()
    assert not ranks[0].claim()
    late = job.connect(2, 3)
    assert not late.is_asked()  # it takes part from the next question on
    assert late.claim()


@pytest.mark.parametrize(
    "kinds", [{1: "stopped"}, {9: "sleeping"}, dict.fromkeys(range(8, 12), "silent")], ids=["lowest", "other", "all"]
)
def test_a_rank_that_does_not_answer_was_seen_by_the_lowest_rank_of_its_host(
    kinds: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Asking(12, monkeypatch, left=(2,))
    job.ask((2,))
    answers, _ = job.ask((*kinds, 2))
    assert sorted(one.place.rank for one in answers) == list(range(12))
    places = {
        rank: StalledRank(rank, kind, host=f"node{rank // ON_HOST}", pid=1000 + rank)
        for rank, kind in {**kinds, 2: "finished"}.items()
    }
    assert {one.place.rank: one for one in answers if not one.at} == {rank: Answer(places[rank]) for rank in places}


def test_an_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Asking(8, monkeypatch)
    assert job.ranks[0].claim()
    job.ranks[0].answer(job.answer(0), TEXT * 100)
    assert job.counts.bytes[0] <= 32 * 1024


@pytest.mark.parametrize("found", [None, [], 7, "text", [1] * 11, [[1]] * 11, [[1, "call"]], [[1, "call"], *[1] * 10]])
def test_what_no_rank_can_have_written_is_no_answer(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Asking(3, monkeypatch)
    assert job.ranks[0].claim()
    job.ranks[0].answer(job.answer(0), TEXT)
    vars(job.ranks[1])["_store"].publish("rank/1", found)
    answers, _ = job.ranks[0].gather(0.0, lambda _: None)
    assert {one.place.rank for one in answers} >= {0, 2}
    assert all(one.at == "" for one in answers if one.place.rank)
