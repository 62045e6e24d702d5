"""A question and its answers through the job's store: only the rank that asks reads them, at a bounded cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from counting import CountedStore, Counts

from dist_wandb.job.job_store import JobStore
from dist_wandb.job.topology import Topology
from dist_wandb.session.stalls.verdict import Answer, Calls, Kind, StalledRank
from dist_wandb.session.stalls.watcher import Questions

SIZE, ON_HOST = 64, 8
TEXT = "\n".join(f'  File "/venv/lib/python3.11/site-packages/torch/f{i}.py", line {i}, in forward' for i in range(25))


class Job:
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
    job = Job(SIZE, monkeypatch)
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
    job = Job(3, monkeypatch)
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
    job = Job(12, monkeypatch, left=(2,))
    job.ask((2,))
    answers, _ = job.ask((*kinds, 2))
    assert sorted(one.place.rank for one in answers) == list(range(12))
    places = {
        rank: StalledRank(rank, kind, host=f"node{rank // ON_HOST}", pid=1000 + rank)
        for rank, kind in {**kinds, 2: "finished"}.items()
    }
    assert {one.place.rank: one for one in answers if not one.at} == {rank: Answer(places[rank]) for rank in places}


def test_an_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(8, monkeypatch)
    assert job.ranks[0].claim()
    job.ranks[0].answer(job.answer(0), TEXT * 100)
    assert job.counts.bytes[0] <= 32 * 1024


@pytest.mark.parametrize("found", [None, [], 7, "text", [1] * 11, [[1]] * 11, [[1, "call"]], [[1, "call"], *[1] * 10]])
def test_what_no_rank_can_have_written_is_no_answer(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(3, monkeypatch)
    assert job.ranks[0].claim()
    job.ranks[0].answer(job.answer(0), TEXT)
    vars(job.ranks[1])["_store"].publish("rank/1", found)
    answers, _ = job.ranks[0].gather(0.0, lambda _: None)
    assert {one.place.rank for one in answers} >= {0, 2}
    assert all(one.at == "" for one in answers if one.place.rank)
