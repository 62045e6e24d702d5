"""The judge of random jobs detects planted violations. Otherwise no seed would show them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from drawing import Fault, Spec, draw, from_json, value_of
from driving import Evidence, RunFile
from judging import judge, kind_of, kinds
from ledger import Entry

ROWS = 6
Change = Callable[[Evidence], None]


def job(**changes: Any) -> Spec:
    """Return a job of two plain processes that log `loss` in lockstep, without a fault."""
    plain: dict[str, Any] = {
        "launcher": "processes",
        "nodes": (2,),
        "run_mode": "auto",
        "rank_scope": "global",
        "reduce": "mean",
        "spread": False,
        "per_rank": True,
        "weighted": False,
        "steps": True,
        "rows": ROWS,
        "streams": ("lockstep",),
        "sessions": 1,
        "nested": False,
        "guarded": False,
        "ending": "finish",
        "server": "offline",
        "nofile": 0,
        "faults": (),
    }
    return replace(draw(0), **{**plain, **changes})


def entries_of(spec: Spec, rank: int, until: int = ROWS) -> list[Entry]:
    """Return the entries of a rank that logs its rows and ends; without the end if there are fewer rows."""
    about = {"rank": rank, "pid": 100 + rank}
    entries: list[Entry] = [{"event": "opened", "session": 0}]
    for step in range(until):
        cells = {"loss": [step, value_of(rank, step)]}
        entries.append({"event": "log", "number": step, "session": 0, "cells": cells, "weight": None, "step": step})
        entries.append({"event": "done", "number": step})
    if until == spec.rows:
        entries.append({"event": "end"})
    return [{**about, "at": float(number), **entry} for number, entry in enumerate(entries)]


def row(step: int, ranks: tuple[int, ...] = (0, 1), **more: Any) -> dict[str, Any]:
    mean = sum(value_of(rank, step) for rank in ranks) / len(ranks)
    return {"global_step": step, "loss": mean, "_step": step, **more}


def sound(spec: Spec | None = None) -> Evidence:
    """Return the evidence of a job without violations."""
    spec = spec or job()
    entries = [entry for rank in (0, 1) for entry in entries_of(spec, rank)]
    return Evidence(spec, entries, [0, 0], files=[RunFile("s0", None, [row(step) for step in range(ROWS)])])


def killed(row_flag: dict[str, Any] | None = None) -> Evidence:
    """Return the evidence of a job whose rank 1 is killed after its third row; the others report it and mark rows."""
    flag = {"dist_wandb/degraded": 1} if row_flag is None else row_flag
    spec = job(faults=(Fault("kill", 1, 3, 0.0),))
    entries = [
        *entries_of(spec, 0),
        *entries_of(spec, 1, 3),
        {**warning_entry(1, ""), "event": "fault", "kind": "kill"},
    ]
    rows = [row(0), row(1), row(2, (0,), **flag), *(row(step, (0,), **flag) for step in range(3, ROWS))]
    return Evidence(spec, entries, [0, -9], files=[RunFile("s0", None, rows, 1)])


def warning_entry(rank: int, text: str, trace: bool = False) -> Entry:
    return {"event": "warning", "rank": rank, "pid": 100 + rank, "at": 99.0, "text": text, "trace": trace}


def found(evidence: Evidence) -> set[str]:
    return set(kinds(judge(evidence).violations))


def test_a_job_without_violations_has_none() -> None:
    verdict = judge(sound())
    assert (verdict.violations, verdict.cells, verdict.excused) == ([], ROWS, {})


def test_losses_of_a_killed_rank_are_excused_if_the_rows_are_marked() -> None:
    verdict = judge(killed())
    assert verdict.violations == []
    assert verdict.excused["flagged"] == 1


def lose_a_row(evidence: Evidence) -> None:
    del evidence.files[0].rows[2]


def lose_the_run(evidence: Evidence) -> None:
    evidence.files.clear()


def falsify(evidence: Evidence) -> None:
    evidence.files[0].rows[2]["loss"] += 0.25


def leave_a_rank_out(evidence: Evidence) -> None:
    evidence.files[0].rows[2] = row(2, (0,))


def flag(evidence: Evidence) -> None:
    evidence.files[0].rows[2] = row(2, (0,), **{"dist_wandb/degraded": 1})


def move(evidence: Evidence) -> None:
    evidence.files[0].rows[2]["global_step"] = 0


def write_again(evidence: Evidence) -> None:
    evidence.files.append(RunFile("s0", None, [row(5)]))


def end_badly(evidence: Evidence) -> None:
    evidence.codes[1] = 1


def fail_the_run(evidence: Evidence) -> None:
    evidence.files[0] = replace(evidence.files[0], exit_code=1)


def stay(evidence: Evidence) -> None:
    evidence.alive.append("wandb-core")


def litter(evidence: Evidence) -> None:
    evidence.left.append("pymp-1/listener-2")


def hang(evidence: Evidence) -> None:
    evidence.codes[0] = None


def never_end(evidence: Evidence) -> None:
    evidence.entries[:] = [entry for entry in evidence.entries if (entry["event"], entry["rank"]) != ("end", 1)]


def raise_within(evidence: Evidence) -> None:
    evidence.output = "Traceback (most recent call last):\n  File 'dist_wandb/exchange/rows.py', line 3\nKeyError: 1\n"


def log_a_traceback(evidence: Evidence) -> None:
    evidence.entries.append(warning_entry(0, "dist_wandb: rank 0 could not write a row", trace=True))


def warn(evidence: Evidence) -> None:
    evidence.entries.append(warning_entry(1, "dist_wandb: Lost rank 0 after step 3; continuing without it."))


def grow(evidence: Evidence) -> None:
    held = [
        {**warning_entry(0, ""), "event": "held", "descriptors": 40 + 7 * session, "threads": 3} for session in range(6)
    ]
    evidence.entries.extend(held)


PLANTED: list[tuple[Change, str]] = [
    (lose_a_row, "lost"),
    (lose_the_run, "no run"),
    (falsify, "wrong value"),
    (leave_a_rank_out, "silently wrong"),
    (flag, "flag without a fault"),
    (move, "wrong place"),
    (write_again, "twice"),
    (end_badly, "exit code"),
    (fail_the_run, "exit code"),
    (stay, "process left"),
    (litter, "file left"),
    (hang, "hang"),
    (never_end, "rank ended early"),
    (raise_within, "traceback"),
    (log_a_traceback, "traceback"),
    (warn, "warning without a reason"),
    (grow, "growth"),
]


@pytest.mark.parametrize(("plant", "kind"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_planted_violations_are_found(plant: Change, kind: str) -> None:
    evidence = sound()
    plant(evidence)
    assert kind in found(evidence)


@pytest.mark.parametrize("plant", [lose_a_row, falsify, stay, hang, raise_within, log_a_traceback])
def test_a_fault_excuses_nothing_that_it_does_not_cause(plant: Change) -> None:
    evidence = killed()
    plant(evidence)
    assert found(evidence)


def test_a_row_without_a_killed_rank_must_be_marked() -> None:
    assert found(killed({})) == {"silently wrong"}


def test_a_run_must_not_hide_that_a_rank_was_killed() -> None:
    evidence = killed()
    evidence.files[0] = replace(evidence.files[0], exit_code=0)
    assert found(evidence) == {"exit code"}


@pytest.mark.parametrize("warns", [True, False])
def test_a_run_may_end_as_failed_while_a_lost_rank_stalls(warns: bool) -> None:
    evidence = sound(job(faults=(Fault("stop", 1, 3, 9.0),)))
    evidence.files[0] = replace(evidence.files[0], exit_code=1)
    if warns:
        evidence.entries.append(warning_entry(0, "dist_wandb: Lost rank 1 after step 2; continuing without it."))
    assert found(evidence) == (set() if warns else {"exit code"})


def test_losses_reported_by_a_living_rank_are_excused() -> None:
    evidence = killed({})
    evidence.entries.append(
        warning_entry(1, "dist_wandb: what rank 1 logged after step 1 may be lost: nobody can be reached.")
    )
    verdict = judge(evidence)
    assert (verdict.violations, verdict.excused["said to be lost"]) == ([], 1)


def test_the_same_message_for_each_name_is_a_flood() -> None:
    evidence = killed()
    texts = [f"dist_wandb: rank 1 has not logged 'name_{number}' at step {number}." for number in range(20)]
    evidence.entries.extend(warning_entry(0, text) for text in texts)
    assert found(evidence) == {"flood"}
    assert len({kind_of(text) for text in texts}) == 1


def test_the_spread_is_compared() -> None:
    right = {"loss/min": 101.0, "loss/max": 102.0, "loss/std": 0.5, "loss/argmax_rank": 1}
    evidence = sound(job(spread=True))
    evidence.files[0].rows[0].update(right)
    assert found(evidence) == set()
    for name, wrong in (("loss/argmax_rank", -1), ("loss/std", 0.1), ("loss/min", 102.0)):
        evidence.files[0].rows[0].update({**right, name: wrong})
        assert found(evidence) == {"wrong spread"}


def test_rows_on_disk_are_compared_with_those_at_the_server() -> None:
    evidence = sound(job(server="healthy"))
    evidence.arrived["s0"] = [dict(each) for each in evidence.files[0].rows]
    assert found(evidence) == set()
    missing = evidence.arrived["s0"].pop()
    assert found(evidence) == {"not at the server"}
    evidence.arrived["s0"] += [missing, missing]
    assert found(evidence) == {"twice at the server"}


def test_rows_of_ranks_under_their_labels_are_compared() -> None:
    spec = job(run_mode="shared")
    evidence = sound(spec)
    names = ["rank-0/loss", "rank-1/loss"]
    evidence.files[:] = [
        RunFile("s0", rank, [{"global_step": step, names[rank]: value_of(rank, step)} for step in range(ROWS)])
        for rank in (0, 1)
    ]
    for step, each in enumerate(evidence.files[0].rows):
        each.update(row(step))
    assert found(evidence) == set()
    del evidence.files[1].rows[2]
    assert found(evidence) == {"lost"}


@pytest.mark.parametrize("seed", range(50))
def test_a_description_survives_a_json_round_trip(seed: int) -> None:
    spec = draw(seed)
    assert from_json(spec.to_json()) == spec == draw(seed)
