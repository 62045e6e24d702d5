"""What is said of jobs that stand still, from evidence made by hand: ranks and lines of every cause."""

from __future__ import annotations

from typing import Any

import pytest

from dist_wandb.session.stalls.verdict import Answer, Calls, Frame, Stall, StalledRank, judge, located

SITE = "/venv/lib/python3.11/site-packages"
C10D = f"{SITE}/torch/distributed/distributed_c10d.py"
WRAPPER = Frame(f"{SITE}/torch/distributed/c10d_logger.py", 83, "wrapper", "torch.distributed.c10d_logger", False)
MAIN = Frame("/home/me/train.py", 120, "<module>", "__main__", called="train")
STEP = Frame("/home/me/train.py", 88, "train", "__main__", called="all_reduce")
READ = Frame("/home/me/data.py", 41, "read_batch", "data", called="sleep")
EVALUATE = Frame("/home/me/evaluate.py", 12, "score", "evaluate", called="barrier")


def torchs(function: str, called: str = "wait") -> tuple[Frame, ...]:
    return WRAPPER, Frame(C10D, 3252, function, "torch.distributed.distributed_c10d", False, called)


def library(package: str, file: str, line: int, function: str, called: str = "") -> Frame:
    return Frame(f"{SITE}/{package}/{file}", line, function, f"{package}.{file[:-3]}", False, called)


def answer(rank: int, *frames: Frame, does: str = "sleeping", **known: Any) -> Answer:
    here = StalledRank(rank, "silent", host="gpu-7", pid=1000 + rank)
    known = {"quiet": 312.0, "moves": does != "sleeping", **known}
    return located(Answer(here, **known), (MAIN, *frames), does)


def waiting(rank: int, line: Frame = STEP, op: str = "all_reduce", **known: Any) -> Answer:
    return answer(rank, line, *torchs(op), **known)


def absent(rank: int, kind: Any) -> Answer:
    return Answer(StalledRank(rank, kind, host="gpu-7", pid=1000 + rank))


def judged(*answers: Answer, is_final: bool = False) -> Stall | None:
    return judge(answers, 312.4, 300.0, is_final=is_final)


def said(*answers: Answer, slow: bool = False) -> str:
    """Return the message without its first sentence; one that is slow is told only in the end."""
    assert (judged(*answers) is None) == slow
    stall = judged(*answers, is_final=True)
    assert stall is not None
    assert stall.is_slow == slow
    start = "Slow, not stalled: no sign for 312 s. " if slow else "Nothing moved for 312 s. "
    assert stall.message.startswith(start)
    return stall.message.removeprefix(start)


def more(pid: int) -> str:
    return f" To see more: `py-spy dump --pid {pid}` on gpu-7."


def test_a_rank_asleep_in_the_data_set_is_named_with_its_call_or_its_line() -> None:
    ranks = [waiting(rank) for rank in (0, 1, 2, 4, 5, 6, 7)]
    assert said(*ranks, answer(3, READ)) == (
        "Ranks 0-2, 4-7 wait in all_reduce (train.py:88); rank 3 is calling sleep at data.py:41, read_batch."
        + more(1003)
    )
    assert said(waiting(0), answer(1, READ._replace(called=""))) == (
        "Rank 0 waits in all_reduce (train.py:88); rank 1 stands at data.py:41, read_batch." + more(1001)
    )


DDP = library("torch", "nn.parallel.distributed.py", 1600, "forward")
MODEL = Frame("/home/me/model.py", 9, "forward", "model", called="sleep")
SAVE = library("torch", "serialization.py", 900, "save", "write")
BEGUN = {"0": Calls(7, 6, "all_reduce")}


@pytest.mark.parametrize(
    ("stands", "known", "text"),
    [
        ((STEP, DDP, MODEL), {}, "is calling sleep at model.py:9, forward."),
        # A collective has begun, and the rank sleeps in its own code, or calls what needs no other rank.
        ((READ,), {"calls": BEGUN}, "is calling sleep at data.py:41"),
        ((STEP._replace(called="save"), SAVE), {"calls": BEGUN}, "is calling save at train.py:88"),
    ],
    ids=["inside DDP", "asleep", "saving"],
)
def test_the_users_innermost_call_is_named(stands: tuple[Frame, ...], known: dict[str, Any], text: str) -> None:
    assert f"rank 1 {text}" in said(waiting(0), answer(1, *stands, **known))


@pytest.mark.parametrize(
    ("stands", "known", "text"),
    [
        ((Frame("/home/me/train.py", 90, "spin", "__main__"),), {"does": "busy"}, "is computing at train.py:90, spin."),
        ((READ,), {"does": "waking"}, "wakes up again and again at data.py:41, read_batch."),  # a loop over one line
        ((READ,), {"moves": True}, "is calling sleep at data.py:41"),
        (
            (STEP._replace(called="item"),),
            {"does": "busy", "uses_device": True},  # without a pending collective
            "waits for its device in item at train.py:88, train.",
        ),
    ],
    ids=["computes", "wakes up", "has moved", "device"],
)
def test_a_rank_that_may_only_be_slow_is_told_in_the_end(
    stands: tuple[Frame, ...], known: dict[str, Any], text: str
) -> None:
    assert f"rank 1 {text}" in said(waiting(0), answer(1, *stands, **known), slow=True)


def test_a_backward_pass_waits_in_what_pytorch_counts() -> None:
    engine = library("torch", "autograd.graph.py", 979, "_engine_run_backward", "run_backward")
    backward = STEP._replace(called="backward"), engine
    calls = {"0": Calls(7, 6, "all_reduce")}
    still = answer(0, *backward, calls=calls)
    assert said(still, answer(1, READ)).startswith("Rank 0 waits in all_reduce (train.py:88); rank 1 is calling sleep")
    computing = answer(0, *backward, calls=calls, does="busy")
    assert "Rank 0 is computing at train.py:88, train" in said(computing, answer(1, READ), slow=True)
    handle = answer(0, STEP._replace(called="wait"), calls=calls)
    assert said(handle, answer(1, READ)).startswith("Rank 0 waits in all_reduce (train.py:88); rank 1 is calling sleep")
    for none_pending in ({}, {"0": Calls(7, 7, "all_reduce")}):
        ended = answer(0, *backward, calls=none_pending)
        assert "Rank 0 is calling backward at train.py:88" in said(ended, answer(1, READ))


def test_a_call_that_was_left_out_is_told_by_the_number_of_the_call() -> None:
    calls = {0: Calls(12, 11, "barrier"), 1: Calls(12, 11, "all_reduce"), 2: Calls(12, 11, "barrier")}
    stands = {0: (EVALUATE, "barrier"), 1: (STEP, "all_reduce"), 2: (EVALUATE, "barrier")}
    assert said(*(waiting(rank, *stands[rank], calls={"0": calls[rank]}) for rank in range(3))) == (
        "Ranks 0, 2 wait in barrier (evaluate.py:12); rank 1 waits in all_reduce (train.py:88): they do not make the "
        "same calls (call 12 of the default group: barrier on ranks 0, 2, all_reduce on rank 1)."
    )
    assert said(*(waiting(rank, *stands[rank]) for rank in range(3))).endswith(": they do not make the same calls.")


def test_a_rank_at_the_same_line_that_is_a_call_behind_is_told_by_the_counts() -> None:
    counts = {0: 4, 1: 3, 2: 4}
    ranks = [
        waiting(rank, calls={"0": Calls(9, 8, f"all_reduce_{rank}"), "3": Calls(made, 3, "all_reduce")})
        for rank, made in counts.items()
    ]
    assert said(*ranks) == (
        "Ranks 0-2 wait in all_reduce (train.py:88): they have not made the same calls (calls in the group 3: 4 of "
        "ranks 0, 2, 3 of rank 1)."
    )


def test_where_the_counts_are_equal_nobody_is_blamed() -> None:
    ranks = [waiting(rank, calls={"0": Calls(9, 8, "all_reduce")}) for rank in range(2)]
    assert said(*ranks) == "Ranks 0, 1 wait in all_reduce (train.py:88); they have made the same calls."
    assert said(waiting(0), waiting(1)) == "Ranks 0, 1 wait in all_reduce (train.py:88)."


def test_under_a_framework_its_innermost_line_is_added() -> None:
    fit = STEP._replace(called="fit")
    framework = library("lightning", "trainer.py", 500, "fit"), library("lightning", "ddp.py", 415, "barrier")
    assert said(answer(0, fit, *framework, *torchs("barrier")), answer(1, READ)).startswith(
        "Rank 0 waits in barrier (train.py:88, inside lightning ddp.py:415); rank 1 is"
    )


def test_on_a_device_the_counts_tell_who_is_behind() -> None:
    item = STEP._replace(called="item")
    ahead = [
        answer(rank, item, does="busy", uses_device=True, calls={"0": Calls(4711, 4709, "all_reduce")})
        for rank in range(3)
    ]
    behind = answer(3, READ, uses_device=True, calls={"0": Calls(4710, 4710, "all_reduce")})
    assert said(*ahead, behind) == (  # they only spin
        "Ranks 0-2 wait in all_reduce (train.py:88); rank 3 is calling sleep at data.py:41, read_batch (calls in the "
        "default group: 4711 of ranks 0-2, 4710 of rank 3)." + more(1003)
    )


def test_workers_of_a_dataloader_are_listed_with_their_states() -> None:
    loader = library("torch", "utils.data.dataloader.py", 1464, "_get_data")
    poll = Frame("/usr/lib/python3.11/selectors.py", 415, "select", "selectors", False, "poll")
    workers = dict.fromkeys(("71", "72"), ("S, hrtimer_nanosleep", "sleeping"))
    stack, known = (STEP._replace(called="next"), loader, poll), {"does": "waking"}  # it wakes up every 5 s
    assert said(waiting(0), answer(1, *stack, workers=workers, **known)) == (
        "Rank 0 waits in all_reduce (train.py:88); rank 1 waits for DataLoader workers at train.py:88, train. "
        "Workers of rank 1: 71 (S, hrtimer_nanosleep), 72 (S, hrtimer_nanosleep). To see more: "
        "`py-spy dump --pid 71` on gpu-7, `py-spy dump --pid 72` on gpu-7."
    )
    assert said(waiting(0), answer(1, READ, workers=workers)).endswith("read_batch." + more(1001))
    assert judged(waiting(0), answer(1, *stack, workers=workers, quiet=149.0, **known)) is None
    for does in ("busy", "waking"):
        assert judged(waiting(0), answer(1, *stack, workers={**workers, "72": ("R", does)}, **known)) is None


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("stopped", "rank 1 does not answer: its process is stopped"),
        ("gone", "rank 1 does not answer: its process is gone"),
        ("sleeping", "rank 1 does not answer: its process sleeps, perhaps in native code that holds the GIL"),
        ("busy", "rank 1 does not answer: its process is computing, perhaps in native code that holds the GIL"),
        ("silent", "rank 1 does not answer"),
        ("finished", "rank 1 has finished its session"),
    ],
)
def test_of_a_rank_that_does_not_answer_its_process_is_described(kind: Any, text: str) -> None:
    with_command = more(1001) if kind not in ("gone", "finished") else ""
    expected = f"Rank 0 waits in all_reduce (train.py:88); {text}.{with_command}"
    assert said(waiting(0), absent(1, kind), slow=kind == "finished") == expected


def test_nothing_is_told_after_a_recent_sign_if_nobody_waits_and_of_a_debugger() -> None:
    assert judged(waiting(0), waiting(1, quiet=149.0)) is None
    assert judged(waiting(0), waiting(1, quiet=151.0)) is not None
    busy = [answer(rank, READ, does="busy") for rank in range(2)]
    assert judged(*busy, is_final=True) is None
    assert judged(busy[0], absent(1, "stopped"), is_final=True) is None
    prompt = Frame("/usr/lib/python3.11/cmd.py", 126, "cmdloop", "pdb", False)
    assert judged(waiting(0), answer(1, STEP, prompt), is_final=True) is None
    assert judged(waiting(0), answer(1, STEP), is_final=True) is not None


def test_the_verdict_is_also_data() -> None:
    stall = judged(absent(2, "stopped"), answer(1, READ), waiting(0))
    assert stall is not None
    assert [(one.rank, one.kind, one.call, one.line, one.function) for one in stall.ranks] == [
        (0, "collective", "all_reduce", 88, "train"),
        (1, "call", "sleep", 41, "read_batch"),
        (2, "stopped", "", 0, ""),
    ]
    assert (stall.ranks[1].file, stall.ranks[1].pid, stall.ranks[2].host) == ("/home/me/data.py", 1001, "gpu-7")
    assert (stall.seconds, stall.is_slow) == (312.4, False)
