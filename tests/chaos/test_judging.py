"""The judge of random jobs detects planted violations. Otherwise no seed would show them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import Any

import pytest
from drawing import AXIS, Fault, Spec, draw, from_json, value_of
from driving import Evidence, RunFile
from judging import judge, kind_of, kinds
from ledger import Entry
from row_rules import DEGRADED

ROWS = 6


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
        "axis": "",
        "axis_differs": False,
        "rows": ROWS,
        "streams": ("lockstep",),
        "sessions": 1,
        "nested": False,
        "guarded": False,
        "ending": "finish",
        "server": "offline",
        "nofile": 0,
        "lags": (),
        "faults": (),
    }
    return replace(draw(0), **{**plain, **changes})


def entries_of(spec: Spec, rank: int, until: int = ROWS) -> list[Entry]:
    """Return the entries of a rank that logs its rows and ends; without the end if there are fewer rows."""
    about = {"rank": rank, "pid": 100 + rank}
    entries: list[Entry] = [{"event": "opened", "session": 0}]
    for step in range(until):
        cells = {"loss": [step, value_of(rank, step)]}
        call = {"number": step, "call": step, "session": 0, "cells": cells, "weight": None, "step": step, "axes": {}}
        entries.append({"event": "log", **call})
        entries.append({"event": "done", "number": step})
    if until == spec.rows:
        entries.append({"event": "end"})
    return [{**about, "at": float(number), **entry} for number, entry in enumerate(entries)]


def whole_job(*, steps: bool = False, **changes: Any) -> Evidence:
    """Return the evidence of a job whose ranks log `loss`, and each a name of its own, in one call, on an axis.

    After each such call they log `acc`. The numbers of rank 1's calls are larger by one.
    """
    spec = job(steps=steps, axis="*", streams=("axis",), **changes)
    entries: list[Entry] = []
    for rank in (0, 1):
        entries.append({"event": "opened", "session": 0, "rank": rank})
        for at, names, cell in calls_of_whole_job(rank):
            call = {"number": at, "call": at, "session": 0, "weight": None, "step": cell if steps else None}
            values = {"cells": {name: [cell, value_of(rank, cell)] for name in names}, "axes": {AXIS: 10.0 * cell}}
            entries.append({"event": "log", "rank": rank, **call, **values})
            entries.append({"event": "done", "rank": rank, "number": at})
        entries.append({"event": "end", "rank": rank})
    entries = [{"pid": 100 + entry["rank"], "at": float(at), **entry} for at, entry in enumerate(entries)]
    return Evidence(spec, entries, [0, 0], files=[RunFile("s0", None, rows_of_whole_job(steps=steps))])


def calls_of_whole_job(rank: int) -> list[tuple[int, list[str], int]]:
    """Return the calls of a rank: number, names and cell. Rank 1 makes one more call before all others."""
    first = [(["early"], 0)] if rank == 1 else []
    common = [(names, step) for step in range(ROWS) for names in (["loss", f"own_{rank}"], ["acc"])]
    return [(number, names, cell) for number, (names, cell) in enumerate([*first, *common])]


def rows_of_whole_job(*, steps: bool) -> list[dict[str, Any]]:
    rows = [{"early": value_of(1, 0), AXIS: 0.0, "global_step": 0}]
    for number, names, cell in calls_of_whole_job(0):
        common = {name: (value_of(0, cell) + value_of(1, cell)) / 2 for name in names if name in ("loss", "acc")}
        own = {f"own_{rank}": value_of(rank, cell) for rank in (0, 1) if "loss" in names}
        rows.append({**common, **own, AXIS: 10.0 * cell, "global_step": cell if steps else number})
    return rows


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


def put(items: list[Any], at: int, item: Any) -> None:
    items[at] = item


def without_an_end(evidence: Evidence) -> None:
    evidence.entries[:] = [entry for entry in evidence.entries if (entry["event"], entry["rank"]) != ("end", 1)]


def holding_more_each_time(evidence: Evidence) -> None:
    for session in range(6):
        held = {"event": "held", "descriptors": 40 + 7 * session, "threads": 3}
        evidence.entries.append({**warning_entry(0, ""), **held})


TRACEBACK = "Traceback (most recent call last):\n  File 'dist_wandb/exchange/rows.py', line 3\nKeyError: 1\n"
LOST = "dist_wandb: Lost rank 0 after step 3; continuing without it."
PLANTED: dict[str, tuple[Callable[[Evidence], Any], str]] = {
    "a row is lost": (lambda job: job.files[0].rows.pop(2), "lost"),
    "there is no run": (lambda job: job.files.clear(), "no run"),
    "another value": (lambda job: job.files[0].rows[2].update(loss=301.8), "wrong value"),
    "a rank is left out": (lambda job: put(job.files[0].rows, 2, row(2, (0,))), "silently wrong"),
    "a flag": (lambda job: put(job.files[0].rows, 2, row(2, (0,), **{DEGRADED: 1})), "flag without a fault"),
    "another place": (lambda job: job.files[0].rows[2].update(global_step=0), "wrong place"),
    "a row in two files": (lambda job: job.files.append(RunFile("s0", None, [row(5)])), "twice"),
    "a process fails": (lambda job: put(job.codes, 1, 1), "exit code"),
    "the run fails": (lambda job: put(job.files, 0, replace(job.files[0], exit_code=1)), "exit code"),
    "a process stays": (lambda job: job.alive.append("wandb-core"), "process left"),
    "a file stays": (lambda job: job.left.append("pymp-1/listener-2"), "file left"),
    "a process hangs": (lambda job: put(job.codes, 0, None), "hang"),
    "a rank ends early": (without_an_end, "rank ended early"),
    "a traceback": (lambda job: setattr(job, "output", TRACEBACK), "traceback"),
    "a logged traceback": (lambda job: job.entries.append(warning_entry(0, "dist_wandb: no row", True)), "traceback"),
    "a warning": (lambda job: job.entries.append(warning_entry(1, LOST)), "warning without a reason"),
    "more descriptors each time": (holding_more_each_time, "growth"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_violations_are_found(name: str) -> None:
    plant, kind = PLANTED[name]
    evidence = sound()
    plant(evidence)
    assert kind in found(evidence)


Rows = list[dict[str, Any]]


def apart(rows: Rows, name: str, further: int) -> None:
    """Put a number of the fourth row into a row of its own."""
    of = rows[3]
    rows.append({name: of.pop(name), AXIS: of[AXIS], "global_step": of["global_step"] + further})


def swap(rows: Rows, name: str) -> None:
    rows[5][name], rows[7][name] = rows[7][name], rows[5][name]


def join(rows: Rows, at: int) -> None:
    """Write the `acc` of a row into the sixth one."""
    rows[5].update(acc=rows.pop(at)["acc"])


def one_place_further(rows: Rows) -> None:
    for row in rows:
        row["global_step"] += 1


def correct_a_part(rows: Rows) -> None:
    right = dict(rows[5])
    rows[5].update(loss=value_of(0, 2), **{DEGRADED: 1})
    rows.append({name: value for name, value in right.items() if name != "own_0"})


def write_early_without_a_mark(rows: Rows) -> None:
    right = dict(rows[5])
    rows[5].update(loss=value_of(0, 2))
    del rows[5]["own_1"]
    rows.append(right)


TORN: dict[str, tuple[Callable[[Rows], Any], str]] = {
    "a part elsewhere": (lambda rows: apart(rows, "own_0", 0), "torn row"),
    "an addition elsewhere": (lambda rows: apart(rows, "own_1", 1), "torn row"),
    "a value beside those of another call": (lambda rows: swap(rows, "own_0"), "mixed row"),
    "an addition beside those of another call": (lambda rows: swap(rows, "own_1"), "mixed row"),
    "calls of two steps are joined": (lambda rows: join(rows, 8), "mixed row"),
    "at the place of another call": (lambda rows: one_place_further(rows[5:6]), "wrong place"),
    "at the place of a higher rank": (lambda rows: one_place_further(rows[1:]), "wrong place"),
    "the axis of another call": (lambda rows: rows[5].update({AXIS: rows[3][AXIS]}), "wrong axis"),
    "no axis": (lambda rows: rows[5].pop(AXIS), "wrong axis"),
    "the sum of an axis": (lambda rows: rows[5].update({AXIS: 2 * rows[5][AXIS]}), "wrong axis"),
    "the axis alone": (
        lambda rows: rows.append({AXIS: rows[5][AXIS], "global_step": rows[5]["global_step"]}),
        "axis-only row",
    ),
    "nothing": (lambda rows: rows.append({"global_step": 3}), "empty row"),
    "a row twice": (lambda rows: rows.append(dict(rows[5])), "repeated row"),
    "a correction of a part": (correct_a_part, "torn row"),
    "an early row without a mark": (write_early_without_a_mark, "unmarked early row"),
}


@pytest.mark.parametrize("steps", [False, True], ids=["without steps", "with steps"])
@pytest.mark.parametrize("name", TORN)
def test_rows_that_are_not_whole_or_elsewhere_are_found(name: str, steps: bool) -> None:
    plant, kind = TORN[name]
    evidence = whole_job(steps=steps)
    assert found(evidence) == set()
    plant(evidence.files[0].rows)
    assert kind in found(evidence)


@pytest.mark.parametrize("steps", [False, True], ids=["without steps", "with steps"])
def test_calls_are_one_row_only_at_the_same_step(steps: bool) -> None:
    evidence = whole_job(steps=steps)
    join(evidence.files[0].rows, 6)
    assert found(evidence) == (set() if steps else {"mixed row"})


def test_calls_at_the_same_step_with_other_values_of_the_axis_are_two_rows() -> None:
    evidence = whole_job(steps=True)
    for entry in evidence.entries:
        if entry["event"] == "log" and "acc" in entry["cells"]:
            entry["axes"] = {AXIS: entry["axes"][AXIS] + 1}
    for written in evidence.files[0].rows:
        if "acc" in written:
            written[AXIS] += 1
    assert found(evidence) == set()
    join(evidence.files[0].rows, 6)
    assert found(evidence) == {"mixed row"}


def test_calls_with_other_values_of_the_axis_are_not_joined_by_one_without_it() -> None:
    evidence = whole_job(steps=True)
    for entry in evidence.entries:
        if entry["event"] == "log" and "early" in entry["cells"]:
            entry["axes"] = {AXIS: -1.0}
        elif entry["event"] == "log" and "acc" in entry["cells"]:
            entry["axes"] = {}
    rows = evidence.files[0].rows
    rows[0][AXIS] = -1.0
    for written in rows:
        if "acc" in written:
            del written[AXIS]
    assert found(evidence) == set()
    first = {**rows.pop(0), **rows.pop(0), **rows.pop(0)}
    rows.append(first)
    assert found(evidence) == {"wrong axis"}


@pytest.mark.parametrize("name", ["a rank is left out", "a flag"])
def test_rows_may_lack_a_rank_that_says_that_it_was_left_alone(name: str) -> None:
    evidence = whole_job()
    PLANTED[name][0](evidence)
    assert found(evidence) != set()
    said = "opened its session after the other ranks had ended theirs, so nothing that it logs is combined"
    evidence.entries.append(warning_entry(0 if name == "a flag" else 1, f"dist_wandb: rank 1 {said}"))
    assert "silently wrong" not in found(evidence)
    assert "flag without a fault" not in found(evidence)


def test_a_run_may_lack_what_only_a_rank_logged_that_says_that_it_was_left_alone() -> None:
    spec = job(run_mode="new")
    entries = [entry for rank in (0, 1) for entry in entries_of(spec, rank)]
    cells = {"own_1": [0, value_of(1, 0)]}
    call = {"number": ROWS, "call": ROWS, "session": 0, "cells": cells, "weight": None, "step": 0, "axes": {}}
    at = next(number for number, entry in enumerate(entries) if entry["event"] == "end" and entry["rank"] == 1)
    entries.insert(at, {"event": "log", "rank": 1, "pid": 101, "at": 50.0, **call})
    entries.insert(at + 1, {"event": "done", "rank": 1, "pid": 101, "at": 50.0, "number": ROWS})
    own = [row(step) for step in range(ROWS)]
    files = [RunFile("s0-rank-0", 0, own), RunFile("s0-rank-1", 1, [{**own[0], "own_1": value_of(1, 0)}, *own[1:]])]
    evidence = Evidence(spec, entries, [0, 0], files=files)
    assert found(evidence) == {"lost"}
    said = "opened its session after the other ranks had ended theirs, so nothing that it logs is combined"
    evidence.entries.append(warning_entry(1, f"dist_wandb: rank 1 {said}"))
    assert "lost" not in found(evidence)


def test_a_marked_row_may_be_corrected_as_a_whole_once() -> None:
    evidence = whole_job(faults=(Fault("stop", 1, 3, 9.0),))
    rows = evidence.files[0].rows
    rows.append(dict(rows[5]))
    rows[5].update(loss=value_of(0, 2), **{DEGRADED: 1})
    verdict = judge(evidence)
    assert (verdict.violations, verdict.excused) == ([], {"corrected rows": 1})


def test_a_call_of_the_axis_alone_may_share_its_row_with_calls_at_its_step() -> None:
    evidence = whole_job(steps=True)
    rows = evidence.files[0].rows
    for entry in evidence.entries:
        if entry["event"] == "log" and "acc" in entry["cells"]:
            entry["axes"] = {}
    about = {"event": "log", "session": 0, "weight": None, "cells": {}}
    for written in (one for one in rows if "acc" in one):
        for rank in range(2):
            call = {
                "rank": rank,
                "pid": 100 + rank,
                "at": 999.0,
                "number": 99,
                "call": 99,
                "step": written["global_step"],
            }
            evidence.entries.append({**about, **call, "axes": {AXIS: written[AXIS]}})
    assert found(evidence) == set()
    next(one for one in rows if "acc" in one)[AXIS] += 1
    assert found(evidence) == {"wrong axis"}


def test_what_a_higher_rank_adds_may_stand_elsewhere_if_the_lower_rank_logs_the_name_itself() -> None:
    evidence = whole_job(steps=True)
    rows = evidence.files[0].rows
    apart(rows, "own_1", 0)
    assert found(evidence) == {"torn row"}
    about = {"event": "log", "rank": 0, "pid": 100, "at": 999.0, "number": 99, "call": 99, "session": 0, "weight": None}
    call = {"step": 50, "cells": {"own_1": [50, value_of(0, 50)]}, "axes": {AXIS: 500.0}}
    evidence.entries.extend([{**about, **call}, {**about, "event": "done"}])
    rows.append({"own_1": value_of(0, 50), AXIS: 500.0, "global_step": 50})
    assert found(evidence) == set()


def test_sums_are_compared() -> None:
    evidence = sound(job(reduce="sum"))
    for step, each in enumerate(evidence.files[0].rows):
        each["loss"] = value_of(0, step) + value_of(1, step)
    assert found(evidence) == set()


def test_a_call_without_a_step_ends_the_row_of_the_call_before_it() -> None:
    evidence = whole_job(steps=True)
    for entry in evidence.entries:
        if entry["event"] == "log" and "acc" in entry["cells"]:
            entry["step"] = None
    assert found(evidence) == set()
    rows = evidence.files[0].rows
    separate = [dict(each) for each in rows]
    join(rows, 6)
    assert found(evidence) == set()
    rows[:] = separate
    join(rows, 8)
    assert "mixed row" in found(evidence)


def test_a_call_of_the_axis_alone_has_a_row() -> None:
    evidence = whole_job()
    number = len(calls_of_whole_job(0))
    call = {"number": 99, "call": number, "session": 0, "weight": None, "step": None, "cells": {}, "axes": {AXIS: 7.0}}
    about = {"rank": 0, "pid": 100, "at": 999.0}
    evidence.entries.extend([{"event": "log", **about, **call}, {"event": "done", **about, "number": 99}])
    assert found(evidence) == {"lost"}
    evidence.files[0].rows.append({AXIS: 7.0, "global_step": number})
    assert found(evidence) == set()


LABELLED: dict[str, tuple[Callable[[Rows], Any], set[str]]] = {
    "without the axis": (lambda rows: rows[5].pop(AXIS), {"wrong axis"}),
    "with the last axis": (lambda rows: rows[5].update({AXIS: rows[3][AXIS]}), {"wrong axis"}),
    "without a part": (lambda rows: rows[5].pop("rank-1/own_1"), {"torn row", "lost"}),
    "with the place of rank 0": (lambda rows: rows[5].update(global_step=rows[4]["global_step"]), {"wrong place"}),
}


@pytest.mark.parametrize("name", LABELLED)
def test_rows_of_a_rank_under_its_label_are_whole_and_at_their_place(name: str) -> None:
    plant, kinds_found = LABELLED[name]
    evidence = whole_job(run_mode="shared")
    files = [RunFile("s0", rank, rows_of_whole_job(steps=False) if rank == 0 else []) for rank in (0, 1)]
    evidence.files[:] = files
    for rank in (0, 1):
        for number, names, cell in calls_of_whole_job(rank):
            own = {f"rank-{rank}/{name}": value_of(rank, cell) for name in names}
            if rank == 0:
                files[0].rows[number + 1].update(own)
            else:
                files[1].rows.append({**own, AXIS: 10.0 * cell, "global_step": number})
    assert found(evidence) == set()
    plant(files[1].rows)
    assert found(evidence) == kinds_found


def test_a_number_under_the_label_of_the_primary_stands_in_the_row_of_its_call() -> None:
    evidence = sound(job(run_mode="shared"))
    evidence.files[:] = [
        RunFile("s0", 0, [{**row(step), "rank-0/loss": value_of(0, step)} for step in range(ROWS)]),
        RunFile("s0", 1, [{"global_step": step, "rank-1/loss": value_of(1, step)} for step in range(ROWS)]),
    ]
    assert found(evidence) == set()
    rows = evidence.files[0].rows
    rows.append({"rank-0/loss": rows[2].pop("rank-0/loss"), "global_step": 2})
    assert found(evidence) == {"torn row"}


@pytest.mark.parametrize(
    "name",
    ["a row is lost", "another value", "a process stays", "a process hangs", "a traceback", "a logged traceback"],
)
def test_a_fault_excuses_nothing_that_it_does_not_cause(name: str) -> None:
    evidence = killed()
    PLANTED[name][0](evidence)
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


def test_unequal_counts_are_told_only_of_names_that_have_them() -> None:
    evidence = whole_job()
    last = next(entry for entry in reversed(evidence.entries) if entry["event"] == "log" and entry["rank"] == 1)
    assert list(last.pop("cells")) == ["acc"]
    evidence.entries.append(last | {"cells": {}})
    evidence.entries.remove(last)
    evidence.files[0].rows[-1]["acc"] = value_of(0, ROWS - 1)
    assert found(evidence) == set()
    text = "was logged without a step 5 times by rank 1, 6 times by rank 0. Pass step= to log."
    evidence.entries.append(warning_entry(0, f"dist_wandb: 'acc' {text}"))
    assert found(evidence) == set()
    evidence.entries.append(warning_entry(0, f"dist_wandb: 'loss' {text}"))
    assert found(evidence) == {"warning without a reason"}


def test_the_same_message_for_each_name_is_a_flood() -> None:
    evidence = killed()
    texts = [f"dist_wandb: rank 1 has not logged 'name_{number}' at step {number}." for number in range(20)]
    evidence.entries.extend(warning_entry(0, text) for text in texts)
    assert found(evidence) == {"flood"}
    assert len({kind_of(text) for text in texts}) == 1


@pytest.mark.parametrize(
    ("text", "is_true"),
    [
        ("Lost rank 1 after step 2; continuing without it.", True),
        ("Rank 1 failed after step 2; continuing without it.", False),  # it was killed
        ("Lost ranks 0, 1 after step 2; continuing without them.", False),
        ("Lost rank 1 after step 2 and rank 0 failed after step 2; continuing without them.", False),
        ("what rank 0 logged after step 2 may be lost: the rank that writes it cannot be reached.", False),
    ],
)
def test_messages_are_compared_with_what_has_happened(text: str, is_true: bool) -> None:
    evidence = killed()
    evidence.entries.append(warning_entry(0, f"dist_wandb: {text}"))
    assert found(evidence) == (set() if is_true else {"untrue message"})


def test_a_mean_tells_which_ranks_are_in_it() -> None:
    for cell, weighted in product(range(3), (0, 1)):
        given = [(value_of(rank, cell), 1.0 + weighted * ((rank + cell) % 3)) for rank in range(5)]
        chosen = [some for size in range(1, 6) for some in combinations(given, size)]
        means = sorted(sum(value * weight for value, weight in some) / sum(w for _, w in some) for some in chosen)
        assert all(after > before * (1 + 2e-6) for before, after in pairwise(means))


def test_the_spread_is_compared() -> None:
    right = {"loss/min": 101.0, "loss/max": 102.125, "loss/std": 0.5625, "loss/argmax_rank": 1}
    evidence = sound(job(spread=True))
    evidence.files[0].rows[0].update(right)
    assert found(evidence) == set()
    for name, wrong in (("loss/argmax_rank", -1), ("loss/std", 0.1), ("loss/min", 102.125)):
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


@pytest.mark.parametrize("seed", range(10))
def test_a_description_survives_a_json_round_trip(seed: int) -> None:
    spec = draw(seed)
    assert from_json(spec.to_json()) == spec == draw(seed)
