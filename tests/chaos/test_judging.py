"""The judge of random jobs detects planted violations. Otherwise no seed would show them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from drawing import AXIS, Fault, Spec, draw, value_of
from driving import Evidence, RunFile
from judging import Verdict, judge
from ledger import Entry
from row_rules import DEGRADED

ROWS = 6
CELLS = 1 + 4 * ROWS  # `early`; then in each row `loss`, `acc` and a name of each rank
PLAIN: dict[str, Any] = {
    "launcher": "processes",
    "nodes": (2,),
    "run_mode": "auto",
    "rank_scope": "global",
    "reduce": "mean",
    "spread": False,
    "per_rank": True,
    "weighted": False,
    "steps": True,
    "axis": "*",
    "axis_differs": False,
    "rows": ROWS,
    "streams": ("axis",),
    "sessions": 1,
    "nested": False,
    "guarded": False,
    "ending": "finish",
    "server": "offline",
    "nofile": 0,
    "lags": (),
    "faults": (),
}
Rows = list[dict[str, Any]]


def sound(**changes: Any) -> Evidence:
    """Return the evidence of a job without violations: two processes log on an axis, see `calls_of`."""
    spec: Spec = replace(draw(0), **{**PLAIN, **changes})
    entries: list[Entry] = []
    for rank in (0, 1):
        entries.append({"event": "opened", "session": 0, "rank": rank})
        for number, names, cell in calls_of(rank):
            values = {name: (cell, value_of(rank, cell)) for name in names}
            entries += call(rank, number, values, cell if spec.steps else None, 10.0 * cell)
        entries.append({"event": "end", "rank": rank})
    entries = [{"pid": 100 + entry["rank"], "at": float(at), **entry} for at, entry in enumerate(entries)]
    return Evidence(spec, entries, [0, 0], files=[RunFile("s0", None, rows_of(steps=spec.steps))])


def calls_of(rank: int) -> list[tuple[int, list[str], int]]:
    """Return the calls of a rank: number, names and cell. Rank 1 makes one more call before all others.

    In each row they log `loss`, with a name of their own, and then `acc`.
    """
    first = [(["early"], 0)] if rank == 1 else []
    common = [(names, step) for step in range(ROWS) for names in (["loss", f"own_{rank}"], ["acc"])]
    return [(number, names, cell) for number, (names, cell) in enumerate([*first, *common])]


def call(rank: int, number: int, values: Any, step: int | None, axis: float, **more: Any) -> list[Entry]:
    """Return the entries of one call of `log`."""
    about = {"rank": rank, "number": number, **more}
    given = {"call": number, "session": 0, "weight": None, "step": step, "cells": values, "axes": {AXIS: axis}}
    return [{"event": "log", **about, **given}, {"event": "done", **about}]


def rows_of(*, steps: bool) -> Rows:
    rows = [{"early": value_of(1, 0), AXIS: 0.0, "global_step": 0}]
    for number, names, cell in calls_of(0):
        common = {name: (value_of(0, cell) + value_of(1, cell)) / 2 for name in names if name in ("loss", "acc")}
        own = {f"own_{rank}": value_of(rank, cell) for rank in (0, 1) if "loss" in names}
        rows.append({**common, **own, AXIS: 10.0 * cell, "global_step": cell if steps else number})
    return rows


def killed() -> Evidence:
    """Return the evidence of a job whose rank 1 is killed after its third row; the rows without it are marked."""
    evidence = sound(faults=(Fault("kill", 1, 3, 0.0),))
    third = next(at for at, entry in enumerate(evidence.entries) if entry["rank"] == 1 and entry.get("step") == 3)
    evidence.entries[third:] = [{**warning(1, ""), "event": "fault", "kind": "kill"}]
    for row in evidence.files[0].rows[5:]:
        cell = row["global_step"]
        row.update({name: value_of(0, cell) for name in ("loss", "acc") if name in row}, **{DEGRADED: 1})
        row.pop("own_1", None)
    evidence.files[0] = replace(evidence.files[0], exit_code=1)
    evidence.codes[1] = -9
    return evidence


def warning(rank: int, text: str, *, trace: bool = False) -> Entry:
    return {"event": "warning", "rank": rank, "pid": 100 + rank, "at": 999.0, "text": text, "trace": trace}


def kinds(evidence: Evidence) -> set[str]:
    return {violation.kind for violation in judge(evidence).violations}


@pytest.mark.parametrize("steps", [False, True], ids=["without steps", "with steps"])
def test_a_job_without_violations_has_none(steps: bool) -> None:
    assert judge(sound(steps=steps)) == Verdict([], {}, CELLS)  # type: ignore[arg-type]  # an empty counter


# --- planted violations -----------------------------------------------------------------------------------------------

Plant = Callable[[Evidence], Any]


def in_rows(change: Callable[[Rows], Any]) -> Plant:
    return lambda evidence: change(evidence.files[0].rows)


def put(items: list[Any], at: int, item: Any) -> None:
    items[at] = item


def without_an_end(evidence: Evidence) -> None:
    evidence.entries[:] = [entry for entry in evidence.entries if (entry["event"], entry["rank"]) != ("end", 1)]


def holding_more_each_time(evidence: Evidence) -> None:
    for session in range(6):
        held = {"event": "held", "descriptors": 40 + 7 * session, "threads": 3}
        evidence.entries.append({**warning(0, ""), **held})


def apart(rows: Rows, name: str) -> None:
    """Put a number of the fourth row into a row of its own."""
    of = rows[3]
    rows.append({name: of.pop(name), AXIS: of[AXIS], "global_step": of["global_step"]})


def swap(rows: Rows, name: str) -> None:
    rows[5][name], rows[7][name] = rows[7][name], rows[5][name]


def join(rows: Rows, at: int) -> None:
    """Write the `acc` of a row into the sixth one."""
    rows[5].update(acc=rows.pop(at)["acc"])


def one_place_further(rows: Rows) -> None:
    for row in rows:
        row["global_step"] += 1


def correct(rows: Rows, lacking: str, **marked: int) -> None:
    """Write the sixth row first without rank 1, and again without a value."""
    right = dict(rows[5])
    rows[5].update(loss=value_of(0, 2), **marked)
    del rows[5]["own_1"]
    rows.append({name: value for name, value in right.items() if name != lacking})


TRACEBACK = "Traceback (most recent call last):\n  File 'dist_wandb/exchange/rows.py', line 3\nKeyError: 1\n"
LOST = "dist_wandb: Lost rank 0 after step 3; continuing without it."
PLANTED: dict[str, tuple[Plant, str]] = {
    "a row is lost": (in_rows(lambda rows: rows.pop(5)), "lost"),
    "there is no run": (lambda job: job.files.clear(), "no run"),
    "another value": (in_rows(lambda rows: rows[5].update(loss=301.8)), "wrong value"),
    "a rank is left out": (in_rows(lambda rows: rows[5].update(loss=value_of(0, 2))), "silently wrong"),
    "a flag": (in_rows(lambda rows: rows[5].update({DEGRADED: 1})), "flag without a fault"),
    "a row in two files": (lambda job: job.files.append(RunFile("s0", None, job.files[0].rows[-1:])), "twice"),
    "a process fails": (lambda job: put(job.codes, 1, 1), "exit code"),
    "the run fails": (lambda job: put(job.files, 0, replace(job.files[0], exit_code=1)), "exit code"),
    "a process stays": (lambda job: job.alive.append("wandb-core"), "process left"),
    "a file stays": (lambda job: job.left.append("pymp-1/listener-2"), "file left"),
    "a process hangs": (lambda job: put(job.codes, 0, None), "hang"),
    "a rank ends early": (without_an_end, "rank ended early"),
    "a traceback": (lambda job: setattr(job, "output", TRACEBACK), "traceback"),
    "a logged traceback": (lambda job: job.entries.append(warning(0, "dist_wandb: no row", trace=True)), "traceback"),
    "a warning": (lambda job: job.entries.append(warning(1, LOST)), "warning without a reason"),
    "more descriptors each time": (holding_more_each_time, "growth"),
    "a part elsewhere": (in_rows(lambda rows: apart(rows, "own_0")), "torn row"),
    "a value beside those of another call": (in_rows(lambda rows: swap(rows, "own_0")), "mixed row"),
    "an addition beside those of another call": (in_rows(lambda rows: swap(rows, "own_1")), "mixed row"),
    "calls of two steps are joined": (in_rows(lambda rows: join(rows, 8)), "mixed row"),
    "at the place of another call": (in_rows(lambda rows: one_place_further(rows[5:6])), "wrong place"),
    "at the place of a higher rank": (in_rows(lambda rows: one_place_further(rows[1:])), "wrong place"),
    "the axis of another call": (in_rows(lambda rows: rows[5].update({AXIS: rows[3][AXIS]})), "wrong axis"),
    "no axis": (in_rows(lambda rows: rows[5].pop(AXIS)), "wrong axis"),
    "the sum of an axis": (in_rows(lambda rows: rows[5].update({AXIS: 2 * rows[5][AXIS]})), "wrong axis"),
    "the axis alone": (in_rows(lambda rows: rows.append({AXIS: 20.0, "global_step": 2})), "axis-only row"),
    "nothing": (in_rows(lambda rows: rows.append({"global_step": 3})), "empty row"),
    "a row twice": (in_rows(lambda rows: rows.append(dict(rows[5]))), "repeated row"),
    "a correction of a part": (in_rows(lambda rows: correct(rows, "own_0", **{DEGRADED: 1})), "torn row"),
    "an early row without a mark": (in_rows(lambda rows: correct(rows, "")), "unmarked early row"),
}


@pytest.mark.parametrize("steps", [False, True], ids=["without steps", "with steps"])
@pytest.mark.parametrize("name", PLANTED)
def test_planted_violations_are_found(name: str, steps: bool) -> None:
    plant, kind = PLANTED[name]
    evidence = sound(steps=steps)
    plant(evidence)
    assert kind in kinds(evidence)


@pytest.mark.parametrize(
    "name", ["a row is lost", "another value", "a process stays", "a process hangs", "a traceback"]
)
def test_a_fault_excuses_nothing_that_it_does_not_cause(name: str) -> None:
    evidence = killed()
    PLANTED[name][0](evidence)
    assert kinds(evidence)


def test_a_row_without_a_killed_rank_must_be_marked() -> None:
    evidence = killed()
    for row in evidence.files[0].rows:
        row.pop(DEGRADED, None)
    assert kinds(evidence) == {"silently wrong"}
    evidence.entries.append(warning(1, "dist_wandb: what rank 1 logged after step 1 may be lost: no one is there."))
    verdict = judge(evidence)
    assert verdict.violations == []
    assert verdict.excused["said to be lost"] == 2
