"""A question and its answers through the job's store: only the rank that asks reads them, at a bounded cost."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from counting import CountedStore, Counts

from dist_wandb.stalls import asking
from dist_wandb.stalls.asking import Questions
from dist_wandb.stalls.verdict import Answer, Calls, Frame
from dist_wandb.store.job_store import JobStore
from dist_wandb.topology.launch import node_identity
from dist_wandb.topology.model import Topology

SIZE = 64
STEP = Frame("/home/me/project/train.py", 88, "train", "__main__", called="all_reduce")
DEEP = tuple(Frame(f"/venv/lib/python3.11/site-packages/torch/f{i}.py", i, "forward", f"torch.f{i}") for i in range(25))
TEXT = "\n".join(f'  File "{one.file}", line {one.line}, in {one.function}' for one in DEEP)


def job(size: int, *, absent: tuple[int, ...] = ()) -> tuple[list[Questions], Counts]:
    """Return the parts of ranks that have a store in this process, and what they ask it."""
    store, counts = dist.HashStore(), Counts()
    ranks = [Questions(rank, size, lambda _: None) for rank in range(size)]
    for rank, questions in enumerate(ranks):
        topology = Topology(rank, rank, 0, size, size, 1)
        mine = JobStore(CountedStore(store, rank, counts), "test", topology, 5.0)
        assert questions.connect(lambda mine=mine: mine)  # type: ignore[misc]
        assert not questions.is_asked()
    for rank in absent:
        ranks[rank].leave()
    counts.operations.clear()
    counts.bytes.clear()
    return ranks, counts


def answer(rank: int, **given: Any) -> Answer:
    calls = {"0": Calls(12, 11, "all_reduce")}
    return replace(Answer(rank, node_identity(), os.getpid(), 9.0, 0.0, 0, False, (STEP, *DEEP), calls), **given)


def ask(ranks: list[Questions], silent: tuple[int, ...] = ()) -> asking.Found:
    assert ranks[0].claim()
    ranks[0].answer(answer(0), TEXT)
    for rank, questions in enumerate(ranks[1:], 1):
        if rank not in silent:
            assert questions.is_asked()
            questions.answer(answer(rank), TEXT)
    return ranks[0].gather(0.0)


def test_one_rank_reads_what_all_say_for_a_few_requests() -> None:
    ranks, counts = job(SIZE)
    found = ask(ranks)
    assert [one.rank for one in found.answers] == list(range(SIZE))
    assert found.answers[5] == answer(5)
    assert found.absent == []
    assert found.stacks == {TEXT: list(range(SIZE))}
    ranks[0].tell("")
    assert max(counts.operations.values()) == counts.operations[0] <= 27
    assert max(counts.bytes.values()) <= 77_000
    assert max(counts.operations[rank] for rank in range(1, SIZE)) <= 8
    assert max(counts.bytes[rank] for rank in range(1, SIZE)) <= 2_000  # the stack is there already


def test_a_rank_asks_once_and_others_find_that_it_was_told() -> None:
    ranks, _ = job(3)
    ask(ranks)
    assert not ranks[1].was_told(1)
    assert ranks[1].alert() == ""
    ranks[0].tell("They stand still.")
    assert ranks[1].was_told(1)
    assert [ranks[rank].alert() for rank in (1, 2, 1)] == ["They stand still.", "", ""]
    assert not ranks[1].is_asked()
    assert ranks[1].claim()  # the next question
    assert ranks[2].is_asked()
    assert not ranks[0].claim()


def test_a_rank_that_does_not_answer_is_looked_for_on_its_host() -> None:
    ranks, _ = job(3, absent=(2,))
    found = ask(ranks, silent=(1, 2))
    assert [(one.rank, one.pid) for one in found.absent] == [(1, os.getpid()), (2, os.getpid())]
    assert found.absent[0].kind in ("sleeping", "busy")
    assert found.absent[1].kind == "finished"


def test_an_answer_is_bounded() -> None:
    ranks, counts = job(2)
    assert ranks[0].claim()
    ranks[0].answer(answer(0, frames=DEEP * 2), TEXT * 100)
    assert counts.bytes[0] <= 32 * 1024


def test_the_lowest_rank_of_another_host_looks_at_its_processes() -> None:
    ranks, counts = job(4)
    for rank in (1, 2, 3):
        vars(ranks[rank])["_host"] = "elsewhere"
        vars(ranks[rank])["_store"].publish(f"at/{rank}", ["elsewhere", os.getpid(), True])
    assert ranks[0].claim()
    ranks[0].answer(answer(0), TEXT)
    for rank in (1, 2):
        assert ranks[rank].is_asked()
        ranks[rank].answer(answer(rank, host="elsewhere"), TEXT)
    turns: list[list[int]] = []

    def others_look(_: float) -> None:
        before = [counts.operations[rank] for rank in (1, 2)]
        for rank in (1, 2):
            ranks[rank].look_for_others()
        turns.append([counts.operations[rank] - known for rank, known in zip((1, 2), before, strict=True)])

    vars(ranks[0])["_wait"] = others_look
    found = ranks[0].gather(0.0)
    assert [(one.rank, one.host) for one in found.absent] == [(3, "elsewhere")]
    assert found.absent[0].kind in ("sleeping", "busy")
    assert turns == [[2, 1]]  # rank 1 has looked, rank 2 found that it need not
