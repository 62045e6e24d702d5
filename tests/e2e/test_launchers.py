"""Jobs under every launcher: the runs on the server match the policy's test vectors and the doctor's prediction.

Every mode and scope occurs: test_hosts.py has all combinations. `launchers.LAUNCHERS` lists the jobs, and the table in
``docs/evidence.md`` is generated from it: a test fails if it does not check each of its statements about the launcher.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from launchers import JOBS, Launcher
from processes import run_job
from stored import EACH_ONCE, Rank, display_name, expected_rows, unit_of_run, vector_of, without_own
from wandb_records import PLAIN, RecordedRun, WriterRecord
from wandb_server import WandbServer

SCRIPT = Path(__file__).parent / "scripts" / "launched.py"
COLD = ("accelerate launch",)  # Lightning: see test_examples.py
Reports = list[dict[str, Any]]


@pytest.mark.parametrize(
    "launcher",
    [pytest.param(job, marks=[pytest.mark.cold] if job.name in COLD else [], id=job.name) for job in JOBS],
)
def test_runs_of_every_mode_and_scope_match_the_test_vectors(
    wandb_server: WandbServer, launcher: Launcher, tmp_path: Path
) -> None:
    environment = wandb_server.environment(tmp_path, WANDB_CONSOLE="wrap", WANDB_RUN_ID="exp")
    commands = launcher.commands(SCRIPT, tmp_path)
    finished = run_job(*commands, cwd=tmp_path, environment=environment).check()
    (layout,) = launcher.layouts
    reports: Reports = [json.loads((tmp_path / f"reports-{rank}.json").read_text()) for rank in range(sum(layout))]
    checked = set()
    for when in launcher.when:
        meet = when == "after" or launcher.meets
        for mode, scope in EACH_ONCE:
            recorded = runs_of(wandb_server, f"{when}-{mode}-{scope}")
            if layout == (2, 3):
                check_invariants(recorded, reports, when, mode, scope)
            else:
                check_runs(recorded, vector_of(layout, mode, scope, launcher.local_ranks), meet=meet)
            check_predicted(reports, when, f"{mode}-{scope}")
            checked.add((when, mode, scope))
        made = runs_of(wandb_server, f"{when}-generated")
        check_generated(made, reports, when, agree=meet or launcher.names_job)
    assert checked == launcher.cells(), finished.output


def runs_of(server: WandbServer, project: str) -> dict[str, RecordedRun]:
    return {run.key.split("/")[2]: run for run in server.runs.values() if f"/{project}/" in run.key}


def check_runs(recorded: dict[str, RecordedRun], ranks: list[Rank], *, meet: bool = True) -> None:
    """Compare the runs of one project with the test vector of its mode and scope.

    If the ranks do not `meet`, each has only its own numbers, and the rows of a unit are marked as degraded.
    """
    writing: dict[str, list[Rank]] = defaultdict(list)
    for rank in ranks:
        if rank["run_id"] is not None:
            writing[rank["run_id"]].append(rank)
    assert recorded.keys() == writing.keys()
    for run_id, writers in writing.items():
        run, primary = recorded[run_id], next(rank for rank in writers if rank["primary"])
        assert (run.exit_codes, run.group) == ([0], primary["group"])
        assert (run.display_name, run.tags, run.config) == (display_name(primary, "nm"), ("online",), {"lr": 0.1})
        found = {label_of(writer): writer for writer in run.writers.values()}
        assert found.keys() == {rank["label"] for rank in writers}
        assert (PLAIN in run.writers) is not primary["shared"]
        for rank in writers:
            rows = list(map(without_own, found[rank["label"]].rows))
            assert rows == expected_rows(rank, unit_of_run(rank, ranks), meet=meet), (run_id, rank, rows)


def label_of(writer: WriterRecord) -> str | None:
    """Return the one label of a writer's console lines; `None` for a plain run."""
    (label,) = {json.loads(line).get("label") for line in writer.console}
    return label if label is None else str(label)


def check_predicted(reports: Reports, when: str, combination: str) -> None:
    """Check that each rank's session is as predicted by the doctor, as far as a single rank can know."""
    for rank, facts in enumerate(reports):
        predicted, session = facts["predicted"][combination], facts[when][combination]
        assert session["error"] is None
        assert (predicted["code"], predicted["errors"]) == (0, [])
        known = {name: value for name, value in predicted["topology"].items() if value is not None}
        assert known["global_rank"] == rank
        assert known.items() <= session["topology"].items()
        assert predicted["plan"] in (None, session["plan"])
        if predicted["plan"] is None:
            assert len(known) < len(predicted["topology"]), "only an unknown layout leaves the plan open"


def check_generated(recorded: dict[str, RecordedRun], reports: Reports, when: str, *, agree: bool) -> None:
    """Check that all ranks generate the same id, or get an error with a remedy."""
    made = [facts[when]["generated"] for facts in reports]
    if agree:
        assert [session["error"] for session in made] == [None] * len(made)
        (base_id,) = {session["plan"]["base_id"] for session in made}
        assert recorded.keys() == {f"{base_id}-rank-{rank}" for rank in range(len(reports))}
        return
    assert recorded == {}
    for rank, session in enumerate(made):
        assert f"Rank {rank} of {len(reports)} (" in session["error"]
        assert "Call init_process_group first, or pass id=" in session["error"]


def check_invariants(recorded: dict[str, RecordedRun], reports: Reports, when: str, mode: str, scope: str) -> None:
    """Check the properties of a job with two ranks on one node and three on the other, which no test vector covers."""
    sessions = [facts[when][f"{mode}-{scope}"] for facts in reports]
    nodes: dict[int, list[int]] = defaultdict(list)
    for rank, session in enumerate(sessions):
        nodes[session["topology"]["node_rank"]].append(rank)
        assert session["topology"]["num_nodes"] == 2
        assert session["topology"]["local_rank"] == nodes[session["topology"]["node_rank"]].index(rank)
    assert sorted(map(len, nodes.values())) == [2, 3]
    units = [list(range(5))] if scope == "global" else list(nodes.values())
    assert len(recorded) == (5 if mode == "new" else len(units))
    assert all(run.exit_codes == [0] for run in recorded.values())
    for unit in units:
        of_unit = {sessions[rank]["plan"]["run_id"] for rank in unit} - {None}
        runs = [recorded[run_id] for run_id in of_unit]
        assert len(runs) == (len(unit) if mode == "new" else 1)
        assert len({run.group for run in runs}) == 1
        primaries = [rank for rank in unit if sessions[rank]["plan"]["primary"]]
        assert primaries == (unit if mode == "new" else unit[:1])
        if mode == "shared":
            check_writers(runs[0], unit, sessions)
    groups = {run.group for run in recorded.values()}
    assert (len(groups), None in groups) == ((len(units), False) if mode == "new" else (1, True))


def check_writers(run: RecordedRun, unit: list[int], sessions: Reports) -> None:
    """Check that each rank writes under its own label, and only the first one under plain names: the mean."""
    writers = {label_of(writer): writer for writer in run.writers.values()}
    assert PLAIN not in run.writers
    assert len(run.writers) == len(unit)
    assert writers.keys() == {sessions[rank]["plan"]["label"] for rank in unit}
    for rank in unit:
        label = sessions[rank]["plan"]["label"]
        rows = writers[label].rows
        assert [row[f"{label}/loss"] for row in rows] == [10.0 * rank + step for step in range(3)]
        mean = 10.0 * sum(unit) / len(unit)
        assert [row.get("loss") for row in rows] == [mean + step if rank == unit[0] else None for step in range(3)]
