"""Compare the runs that test jobs sent to the stand-in server with the policy's test vectors."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from stored import Rank, display_name, expected_rows, unit_of_run, without_own
from wandb_records import PLAIN, RecordedRun, WriterRecord
from wandb_server import WandbServer


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
            rows = rows_of(found[rank["label"]])
            assert rows == expected_rows(rank, unit_of_run(rank, ranks), meet=meet), (run_id, rank, rows)


def label_of(writer: WriterRecord) -> str | None:
    """Return the one label of a writer's console lines; `None` for a plain run."""
    (label,) = {json.loads(line).get("label") for line in writer.console}
    return label if label is None else str(label)


def rows_of(writer: WriterRecord) -> list[dict[str, Any]]:
    """Return a writer's history, without the values that W&B adds to each row."""
    return [without_own(row) for row in writer.rows]
