"""Rows of sessions of several ranks, of which some may be late, or not contribute. Ranks are threads."""

from __future__ import annotations

import functools
import logging
import math
import re
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from fakes import TWO, FakeWandb, Job, Meeting, on_ranks, open_rank, ranks
from limits import Limit
from simulation import Store, World, simulated
from units import SOON, eventually, live_exchanges, waiting_for

import dist_wandb
from dist_wandb.errors import ConfigurationError, DistWandbError
from dist_wandb.exchange.membership import generations
from dist_wandb.job.timed_caller import STORE_PATIENCE
from dist_wandb.job.topology import Topology
from dist_wandb.payloads.gathers import gathered_table
from dist_wandb.session import opener
from dist_wandb.session.session import Session
from dist_wandb.settings.options import Limits, Options
from dist_wandb.transformers import without_second_sum


class Raising(dict[str, Any]):
    """Raises `KeyError` for any attribute."""

    __getattr__ = dict.__getitem__


PATIENT = {"join_timeout": 600, "finish_timeout": 600}
SOON_ALONE = {"join_timeout": 0.1, "finish_timeout": 600}


def all_flushed(sessions: list[Session]) -> bool:
    return sum(session.flush() for session in sessions) == len(sessions)


def test_with_a_run_per_rank_collected_values_are_in_that_of_the_first_one(
    job: Job, fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = job(TWO, run_mode="new", reduce="mean")
    runs = sorted(fake_wandb.runs, key=lambda run: str(run.id))
    for rank, session in enumerate(sessions):
        metric = torchmetrics.CatMetric()
        metric.update(float(rank))
        collected = {"states": metric, "table": dist_wandb.gathered([[rank]], ["x"])}
        session.log({"loss": float(rank), **collected}, step=0, commit=True)
    eventually(lambda: all(run.rows and run.rows[-1]["loss"] == 0.5 for run in runs))
    first, second = (run.rows[-1] for run in runs)
    assert (first["loss"], first["states"], first["table"].data) == (0.5, [0.0, 1.0], [[0, 0], [1, 1]])
    assert second == {"loss": 0.5, "global_step": 0}
    assert "is left out of its row" not in caplog.text


def test_in_third_place_a_bool_is_commit_and_a_number_the_weight(job: Job, fake_wandb: FakeWandb) -> None:
    for rank, session in enumerate(job(TWO)):
        session.log({"loss": 1.0 + 2 * rank}, 1, np.bool_(True), weight=rank == 0)  # type: ignore[arg-type]
        session.log({"loss": 1.0 + 2 * rank}, 2, 3 - 2 * rank, commit=1)  # type: ignore[arg-type]
    eventually(lambda: [row["loss"] for row in fake_wandb.runs[0].rows] == [1.0, 1.5])


def test_two_open_sessions_do_not_mix_and_end_in_any_order(job: Job, fake_wandb: FakeWandb) -> None:
    one = job(TWO)

    def work(rank: int) -> None:
        two = open_rank(rank, number=2, reduce="sum", limits={"finish_timeout": 30.0, "heartbeat": 0.05})
        for step in range(5):
            for session in (one[rank], two) if rank else (two, one[rank]):
                session.log({"loss": float(step + rank)}, step=step, commit=True)
        for session in (one[rank], two) if rank else (two, one[rank]):
            session.finish()

    on_ranks(2, work)
    means, sums = ([row["loss"] for row in run.rows] for run in fake_wandb.runs)
    assert (means, sums) == ([step + 0.5 for step in range(5)], [2.0 * step + 1 for step in range(5)])


def test_the_numbers_of_all_ranks_become_one_row(job: Job, fake_wandb: FakeWandb) -> None:
    sessions = job(TWO, reduce={"tokens": "sum", "lr": "first"}, spread="loss")
    for rank, session in enumerate(sessions):
        loss = torch.tensor(float(rank), requires_grad=True)
        session.define_metric("epoch")
        session.log(
            {"loss": loss, "tokens": np.int64(3 + rank), "lr": 0.1 * rank, "text": f"of {rank}"}, 7, [3, 1][rank]
        )
    assert all_flushed(sessions)
    (run,) = fake_wandb.runs
    spread = {"loss/min": 0.0, "loss/max": 1.0, "loss/std": pytest.approx(math.sqrt(3) / 4), "loss/argmax_rank": 1}
    assert run.rows == [{"loss": 0.25, "tokens": 7, "lr": 0.0, "text": "of 0", **spread, "global_step": 7}]


@pytest.mark.usefixtures("store")
def test_a_rank_without_a_run_reads_a_frameworks_x_axis() -> None:
    """As on the rank with the run."""
    axis = "trainer/global_step"
    limits = {"finish_timeout": 30.0, "heartbeat": 0.05}
    sessions = on_ranks(2, lambda rank: open_rank(rank, step_metric=axis, limits=limits))
    for session in sessions:
        session.log({"loss": 0.5}, 3)
    assert dict(sessions[1].summary) == {"loss": 0.5, axis: 3}
    on_ranks(2, lambda rank: sessions[rank].finish())


def test_nested_values_are_nested_in_the_run_whichever_rank_logs_them(job: Job, fake_wandb: FakeWandb) -> None:
    """As with wandb alone, whose summary has a dictionary then. Names with a dot stay as they are."""
    sessions = job(TWO, reduce={"d.n.tokens": "sum"})
    for rank, session in enumerate(sessions):
        session.log({"d": {"x": float(rank), "n": {"tokens": 3, "text": "a"}}, "f.g": 1}, 7, {"d.x": [3, 1][rank]})
    sessions[1].log({"only": {"here": 2.0}}, 8)
    assert sessions[1].summary["d"]["n"] == {"tokens": 3, "text": "a"}
    assert dict(sessions[1].summary) == {
        "d": {"x": 1.0, "n": {"tokens": 3, "text": "a"}},
        "f.g": 1,
        "only": {"here": 2.0},
    }
    on_ranks(2, lambda rank: sessions[rank].finish())
    assert fake_wandb.runs[0].rows == [
        {"d": {"x": 0.25, "n": {"tokens": 6, "text": "a"}}, "f.g": 1, "global_step": 7},
        {"only": {"here": 2.0}, "global_step": 8},
    ]


@pytest.mark.usefixtures("fake_wandb")
def test_text_that_the_primary_never_logs_is_named(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    sessions = job(TWO, reduce={"own": "first", "*": "mean"})
    sessions[0].log({"loss": 0.5, "note": "a", "other": "b"}, step=0)
    sessions[1].log({"loss": 0.5, "own": 1, "note": "c", "sample": "d", "nested": {"list": [1, 2]}}, step=0)
    on_ranks(2, lambda rank: sessions[rank].finish())
    (message,) = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert "rank 1 logged values of 'nested.list' (and 1 more) that are not reduced, and rank 0 did not" in message


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7), True, 2**31 - 1, 2**31, 2**40, 2**53], ids=repr)
def test_a_step_may_be_any_integer_and_as_large_as_token_counts(job: Job, fake_wandb: FakeWandb, step: Any) -> None:
    sessions = job(TWO)
    for rank, session in enumerate(sessions):
        session.log({"loss": rank}, step=step)
        session.log({"val": rank})
    assert all_flushed(sessions)
    (row,) = fake_wandb.runs[0].rows
    assert row == {"loss": 0.5, "val": 0.5, "global_step": int(step)}  # as in wandb
    assert type(row["global_step"]) is int


def test_calls_of_one_step_are_one_row_also_if_another_thread_was_the_first_to_log(
    job: Job, fake_wandb: FakeWandb
) -> None:
    sessions = job(TWO)
    for rank, session in enumerate(sessions):
        first = threading.Thread(target=session.log, args=({"first": 1.0}, 0))
        first.start()
        first.join()
        session.log({"loss": 2.0, f"own_{rank}": 1.0}, step=1)  # such a name is awaited of the other rank
        session.log({"acc": 3.0}, step=1)
        session.log({"next": 4.0}, step=2, commit=True)
    eventually(lambda: any("next" in row for row in fake_wandb.runs[0].rows))
    on_ranks(2, lambda rank: sessions[rank].finish())
    rows = {frozenset(row) - {"global_step"} for row in fake_wandb.runs[0].rows}
    assert rows == {frozenset(names) for names in (["first"], ["loss", "own_0", "own_1", "acc"], ["next"])}


def test_a_step_among_the_metrics_determines_the_row(job: Job, fake_wandb: FakeWandb) -> None:
    first, second = sessions = job(TWO)
    first.log({"loss": 1.0, "global_step": 40})
    second.log({"loss": 2.0}, step=40)
    assert all_flushed(sessions)
    assert fake_wandb.runs[0].rows == [{"loss": 1.5, "global_step": 40}]


def test_a_flush_may_leave_the_row_open(job: Job, fake_wandb: FakeWandb) -> None:
    sessions = job(TWO)
    for session in sessions:
        session.log({"loss": 1.0})
        session.log({"open": 2.0}, commit=False)
    assert all(on_ranks(2, lambda rank: sessions[rank].flush(together=True, commit=False)))
    assert [{*row} for row in fake_wandb.runs[0].rows] == [{"loss", "global_step"}]
    for session in sessions:
        session.log({"last": 3.0})
    assert all_flushed(sessions)
    assert [{*row} for row in fake_wandb.runs[0].rows][1:] == [{"open", "last", "global_step"}]


@pytest.mark.usefixtures("store")
def test_rank_0_alone_writes_its_own_numbers_and_warns(fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture) -> None:
    with open_rank(0, limits={"join_timeout": 0.1, "finish_timeout": 20.0}) as session:
        session.log({"loss": 0.5, "text": "a"}, step=3)
        assert session.flush()
    (run,) = fake_wandb.runs
    assert run.rows == [{"loss": 0.5, "text": "a", "global_step": 3}]
    assert run.exit_codes == [None]
    (message,) = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert "no other rank has opened a session" in message


@pytest.mark.usefixtures("store", "fake_wandb")
def test_rank_0_alone_does_not_warn_of_its_own_numbers_if_it_logs_none(caplog: pytest.LogCaptureFixture) -> None:
    with open_rank(0, limits={"join_timeout": 0.1, "finish_timeout": 20.0}) as session:
        session.summary["best"] = 3
    assert not [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("by_run", [False, True])
def test_rank_0_alone_does_not_wait_for_other_ranks(fake_wandb: FakeWandb, by_run: bool) -> None:
    session = open_rank(0, limits=PATIENT)
    session.log({"loss": 0.5}, step=3)
    (session.run if by_run else session).finish()
    (run,) = fake_wandb.runs
    assert run.rows == [{"loss": 0.5, "global_step": 3}]


@pytest.mark.usefixtures("store")
def test_a_rank_that_opens_a_finished_session_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    apart: Any = {"reduce": None}  # without an exchange no rank waits, so being late makes no difference
    for number, (options, logs, count) in enumerate([({}, True, 1), ({}, False, 0), (apart, True, 0)]):
        caplog.clear()
        for rank in (0, 1):
            with open_rank(rank, number=number, limits=SOON_ALONE, **options) as session:
                if logs or rank == 0:  # the other one may only end its tracker, which the primary has ended
                    session.log({"loss": 0.5})
                session.flush()
        assert caplog.text.count("rank 1 opened its session after the other ranks had ended theirs") == count


LATE = [  # exit code of rank 0, how long others wait for rank 1, and what it says
    (1, 600, "rank 1 opened its session after the other ranks had ended theirs, so what it logs is lost"),
    (None, 1e-9, "rank 1 stalled, or was disconnected, after the start, and returned after the other ranks had"),
]


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(("exit_code", "peer_timeout", "said"), LATE, ids=["ended before", "gave it up"])
def test_a_rank_whose_primary_ended_before_any_exchange_says_so_and_does_not_wait(
    caplog: pytest.LogCaptureFixture, exit_code: int | None, peer_timeout: float, said: str
) -> None:
    open_rank(0).finish(exit_code)
    eventually(lambda: not live_exchanges())
    with open_rank(1, limits={**PATIENT, "peer_timeout": peer_timeout}) as session:
        session.log({"loss": 0.5})
    assert caplog.text.count(said) == 1


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(("scope", "arguments"), [("worker", {}), ("global", {"id": "abc"})])
def test_a_primary_that_comes_after_the_others_have_ended_writes_a_run_of_its_own(
    fake_wandb: FakeWandb, arguments: dict[str, Any], scope: str
) -> None:
    """Of two nodes, it is that of the second one: ranks 2 and 3."""
    topologies = TWO if scope == "global" else [Topology(2 + rank, rank, 1, 4, 2, 2) for rank in range(2)]

    def play(rank: int) -> None:
        with open_rank(topologies[rank], wandb_init=arguments, rank_scope=scope, limits=SOON_ALONE) as session:
            session.log({"loss": float(rank)}, step=rank)
        eventually(lambda: not live_exchanges())

    play(1)
    with pytest.warns(UserWarning, match=r"rank [02] opened its session after the other ranks had ended theirs"):
        play(0)
    assert [run.rows for run in fake_wandb.runs] == [[{"loss": float(rank), "global_step": rank}] for rank in (1, 0)]
    assert len({run.id for run in fake_wandb.runs}) == 2, "the second would replace the first"


def test_a_rank_does_not_write_the_run_because_the_store_stands_still(
    fake_wandb: FakeWandb, meeting: Meeting, limit: Limit
) -> None:
    """Nothing is known of the primary then."""
    limit(generations, APART=0.0)
    answers = threading.Event()
    meeting.store_of = waiting_for(answers, meeting.store, "/opening", reads=True)
    second = open_rank(1, limits={"join_timeout": SOON, "finish_timeout": SOON})
    second.log({"loss": 1.0}, step=0)
    ending = threading.Thread(target=second.finish)
    ending.start()
    time.sleep(STORE_PATIENCE + 0.5)
    with open_rank(0) as first:
        answers.set()
        first.log({"loss": 0.0}, step=0)
    ending.join(SOON)
    assert [run.rows for run in fake_wandb.runs] == [[{"loss": 0.5, "global_step": 0}]]


INVALID_ROWS: list[tuple[tuple[Any, ...], str]] = [
    (([("loss", 0.5)],), "log was given list on rank 1, but it takes a mapping"),
    ((None,), "log was given NoneType on rank 1"),
    (({"loss": 0.5, 7: 1},), "log was given the name 7 (int) on rank 1, but names are text, without NUL"),
    (({"a\ud800b": 1},), "but names are text, without NUL characters and lone"),
    (({"loss": 0.5}, -1), "step=-1 on rank 1 is negative"),
    (({"loss": 0.5}, 1.5), "step=1.5 on rank 1 is not an integer"),
    (({"loss": 0.5}, "3"), "step='3' on rank 1 is not an integer"),
    (({"loss": 0.5}, 1_763_737_200_123_456_789), "step=1763737200123456789 on rank 1 is beyond 2**53"),
    (({"a": {"b\0c": 1}},), "log was given the name 'a.b\\x00c' (str) on rank 1"),
    (({"loss": 0.5}, 0, -1), "weight=-1 on rank 1 is negative or not finite"),
    (({"loss": 0.5}, 0, {"loss": "3"}), "weight['loss'] was given '3' on rank 1"),
    (({"loss": 0.5}, 0, {"loss": Raising()}), "weight['loss'] was given {} on rank 1"),
]


@pytest.mark.parametrize("options", [{}, {"run_mode": "new"}], ids=["together", "alone"])
def test_invalid_rows_are_refused_as_a_whole(job: Job, fake_wandb: FakeWandb, options: dict[str, Any]) -> None:
    """And not counted. What is no row is a `TypeError`, too, as in wandb."""
    sessions = job(TWO, **options)
    for arguments, message in INVALID_ROWS:
        with pytest.raises(ConfigurationError, match=re.escape(message)) as raised:
            sessions[1].log(*arguments)
        assert isinstance(raised.value, TypeError) or not message.startswith("log was given")
    for session in sessions:
        session.log({"loss": 2.0})
    assert all_flushed(sessions)
    assert [run.rows for run in fake_wandb.runs] == [[{"loss": 2.0, "global_step": 0}]] * (2 if options else 1)


@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
def test_vectors_are_those_of_the_primary_at_the_time_of_the_call(job: Job, mode: Any) -> None:
    sessions = job(TWO, run_mode=mode, reduce="mean", per_rank=["logits"])
    for rank, session in enumerate(sessions):
        logits, counts = torch.tensor([rank, 2.0]), [np.full(2, rank)]
        row = {"loss": float(rank), "logits": logits, "counts": counts, "z": 1j + rank, "sparse": logits.to_sparse()}
        session.log(row, step=0)
        logits += 7
        counts[0] += 7
    assert all_flushed(sessions)
    rows: list[dict[str, Any]] = [{}, {}]
    for rank, session in enumerate(sessions):
        for row in getattr(session.run, "rows", ()):
            rows[rank] |= row
    assert (rows[0]["loss"], rows[0]["logits"].tolist(), rows[0]["z"]) == (0.5, [0, 2], 1j)
    assert rows[0]["counts"][0].tolist() == [0, 0]
    own = {"loss", "logits", "counts", "z", "sparse"}
    others = {"auto": set[str](), "shared": {"rank-1/logits"}, "new": own}[mode]
    assert rows[1].keys() - {"global_step"} == others
    if mode == "shared":
        assert rows[1]["rank-1/logits"].tolist() == [1, 2]


# --- patterns ---------------------------------------------------------------------------------------------------------

MISSPELT = {"los": "sum", "loss": "mean", "*": "max"}
UNUSED = "has patterns that apply to no name that rank 0 has logged or combined:"


def warned_at_the_end(sessions: list[Session]) -> list[str]:
    """Return the warnings of patterns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks(2, lambda rank: sessions[rank].finish())
        sessions[0].finish()
    return sorted(str(warning.message) for warning in caught if "patterns" in str(warning.message))


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({"reduce": "sum", "per_rank": ["los"]}, {"spread": "'los'", "weight": "'los'"}),
        (
            {"run_mode": "shared", "per_rank": ["los", "loss", "note", "acc*", "step"]},
            {"per_rank": "'los'", "spread": "'los'", "weight": "'los'"},
        ),
        ({"run_mode": "shared", "per_rank": ["los", "loss", "note"], "reduce": None}, {"per_rank": "'los'"}),
        ({"run_mode": "shared", "per_rank": "auto", "reduce": None}, {}),
        (
            {"reduce": {**MISSPELT, "tokenz": "sum"}},
            {"reduce": "'los', 'tokenz'", "spread": "'los'", "weight": "'los'"},
        ),
    ],
)
def test_misspelt_names_warn_once_at_the_end(job: Job, named: dict[str, Any], told: dict[str, str]) -> None:
    sessions = job(TWO, spread=["los", "accuracy*"], **named)
    for session in sessions:
        session.log({"loss": 0.5, "accuracy": 0.5, "note": "a", "step": None}, 0, {"los": 3, "loss": 2})
    messages = [message.partition(". ")[0] for message in warned_at_the_end(sessions)]
    assert messages == [f"{argument} {UNUSED} {names}" for argument, names in told.items()]


def test_warnings_turned_into_errors_do_not_prevent_finishing(
    job: Job, fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = job(TWO, reduce=MISSPELT)
    for session in sessions:
        session.log({"loss": 0.5}, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_ranks(2, lambda rank: sessions[rank].finish())
    assert fake_wandb.runs[0].exit_codes == [None]
    assert caplog.text.count(f"reduce {UNUSED} 'los'.") == 1


LOSS = {"loss": 0.5}


@pytest.mark.parametrize(
    ("reduce", "logged"),
    [
        (MISSPELT, ({}, {})),
        ({"loss": "sum"}, (LOSS, LOSS)),
        ({"loss": "sum", "*": "mean"}, (LOSS, LOSS)),
        ("mean", (LOSS, LOSS)),
        ("sum", ({}, {})),
        (without_second_sum("sum"), (LOSS, LOSS)),  # the callback's patterns are not the user's
        ({"tokens": "sum"}, (LOSS, {**LOSS, "tokens": 3})),
    ],
    ids=["nothing was logged", "all matched", "but the star", "one for all", "one, nothing", "callback", "of rank 1"],
)
def test_patterns_do_not_warn_if_used_or_if_nothing_was_logged(
    job: Job, reduce: Any, logged: tuple[dict[str, float], ...]
) -> None:
    sessions = job(TWO, reduce=reduce)
    for session, metrics in zip(sessions, logged, strict=True):
        if metrics:
            session.log(metrics, 0)
    assert warned_at_the_end(sessions) == []


# --- units of a mesh --------------------------------------------------------------------------------------------------


FOUR = ranks(4)


def log_ranks(sessions: list[Session]) -> None:
    for rank, session in enumerate(sessions):
        session.log({"loss": 2.0**rank}, step=1)
    assert sum(session.flush() for session in sessions) == len(sessions)


def test_the_mean_is_that_of_the_unit_and_other_ranks_open_no_run(job: Job, fake_wandb: FakeWandb) -> None:
    sessions = job(FOUR, unit=[0, 2], spread="loss")
    log_ranks(sessions)
    (run,) = fake_wandb.runs
    spread = {"loss/min": 1.0, "loss/max": 4.0, "loss/std": 1.5, "loss/argmax_rank": 2}
    assert run.rows == [{"loss": 2.5, **spread, "global_step": 1}]
    assert [bool(session.run) for session in sessions] == [True, False, False, False]
    assert {session.id for session in sessions} == {run.id}
    assert [session.reduces for session in sessions] == [True, False, True, False]


@pytest.mark.parametrize(("run_mode", "ids"), [("shared", {"exp"}), ("new", {"exp-rank-1", "exp-rank-3"})])
def test_only_ranks_of_the_unit_write(job: Job, fake_wandb: FakeWandb, run_mode: str, ids: set[str]) -> None:
    sessions = job(FOUR, lambda _: {"id": "exp"}, unit=[1, 3], primary_rank=-1, run_mode=run_mode)
    log_ranks(sessions)
    assert len(fake_wandb.runs) == 2
    assert {run.id for run in fake_wandb.runs} == ids
    assert [bool(session.run) for session in sessions] == [False, True, False, True]


def test_a_failed_rank_outside_of_the_unit_fails_the_run(job: Job, fake_wandb: FakeWandb) -> None:
    sessions = job(FOUR, unit=[0, 2])
    sessions[1].finish(exit_code=7)
    for session in (sessions[3], sessions[2], sessions[0]):
        session.finish(exit_code=1)
    assert fake_wandb.runs[0].exit_codes == [7]


def test_rows_of_ranks_outside_of_the_unit_are_checked_but_not_written(job: Job, fake_wandb: FakeWandb) -> None:
    sessions = job(FOUR, unit=[0])
    with pytest.raises(DistWandbError):
        sessions[3].log({"loss": 1.0}, step=-1)
    sessions[3].log({"rows": gathered_table(["x"], [[1]])}, step=1)
    sessions[3].log({"loss": 9.0}, step=1)
    sessions[0].log({"loss": 1.0}, step=1)
    assert sum(session.flush() for session in sessions) == len(sessions)
    assert fake_wandb.runs[0].rows == [{"loss": 1.0, "global_step": 1}]


def test_a_primary_outside_of_its_unit_is_refused(job: Job) -> None:
    with pytest.raises(ConfigurationError, match=r"Rank 0 is the primary of the job, but it is not in unit=\[2, 3\]"):
        job(FOUR, unit=[2, 3])


def test_the_announcement_names_the_unit(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job(FOUR, unit=[0, 2])
    assert "4 ranks on 1 node: one run for ranks 0, 2:" in capsys.readouterr().err


# --- what all this asks the store, on a simulated clock ---------------------------------------------------------------


SIZE = 32
PER_NODE = 4


def of_nodes(rank: int) -> Topology:
    return Topology(rank, rank % PER_NODE, rank // PER_NODE, SIZE, PER_NODE, SIZE // PER_NODE)


def of_unknown_nodes(rank: int) -> Topology:
    return Topology(rank, None, None, SIZE, None, None)


@pytest.mark.parametrize(
    ("mode", "scope", "place", "most"),  # keys of a rank, on average; a tenth of one for each other rank is too many
    [
        ("auto", "global", of_nodes, 65),
        ("auto", "worker", of_nodes, 60),
        ("shared", "global", of_unknown_nodes, 82),
        ("new", "global", of_nodes, 24),
    ],
)
def test_store_requests_per_rank_are_independent_of_the_number_of_ranks(
    meeting: Meeting, mode: str, scope: str, place: Callable[[int], Topology], most: int
) -> None:
    world, values, counts, ended = World(message=1e-4, call=2e-4), dict[str, bytes](), Counter[str](), list[int]()
    meeting.store_of = lambda _: Store(values, counts)  # type: ignore[assignment, return-value]
    options = Options(run_mode=mode, rank_scope=scope, limits=Limits())  # type: ignore[arg-type]

    def use(rank: int) -> None:
        session = opener.open_session(options, {}, integration="test", topology=place(rank), number=1)
        for step in range(10):
            session.log({"loss": 1.0}, step=step)
        session.flush()
        session.finish()
        ended.append(rank)

    with simulated(world):
        for rank in range(SIZE):
            world.start(rank, functools.partial(use, rank))
        world.run(lambda: len(ended) == SIZE)
    assert counts["keys"] / SIZE <= most
