"""Compare the runs that test jobs wrote to disk with the policy's test vectors."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dist_wandb.errors import ReadError
from dist_wandb.settings.plan import RANK_SCOPES, RUN_MODES, RankScope, RunMode
from dist_wandb.wandb_files import reading
from dist_wandb.wandb_files.finding import find_files
from dist_wandb.wandb_files.reading import StoredRun, read_each
from dist_wandb.wandb_files.small_files import Directory

VECTORS = Path(__file__).parents[1] / "unit" / "modes.json"
COMBINATIONS: list[tuple[RunMode, RankScope]] = [(mode, scope) for mode in RUN_MODES for scope in RANK_SCOPES]
EACH_ONCE: list[tuple[RunMode, RankScope]] = [("auto", "global"), ("shared", "worker"), ("new", "worker")]
ROWS = 3
PATIENT = 4.0  # s, a heartbeat: the first row of a name waits five heartbeats for all ranks, so it is not written twice
Rank = dict[str, Any]  # of a test vector: global, local and node rank, and what the plan decides


def vector(layout: str, run_mode: str, rank_scope: str) -> list[Rank]:
    """Return the ranks of one test vector, with base id `exp`."""
    cases: list[dict[str, Any]] = json.loads(VECTORS.read_text())
    wanted = {"layout": layout, "run_mode": run_mode, "rank_scope": rank_scope}
    ranks: list[Rank] = next(case["ranks"] for case in cases if wanted.items() <= case.items())
    return ranks


def vector_of(
    ranks_per_node: Sequence[int], run_mode: str, rank_scope: str, local_ranks: Sequence[int] = ()
) -> list[Rank]:
    """Return the ranks of a test vector; `local_ranks` are not always in ascending order on each node."""
    cases: list[dict[str, Any]] = json.loads(VECTORS.read_text())
    (layout,) = {case["layout"] for case in cases if case["ranks_per_node"] == list(ranks_per_node)}
    ranks = vector(layout, run_mode, rank_scope)
    at = {(rank["node_rank"], rank["local_rank"]): rank for rank in ranks}
    placed: list[Rank] = []
    for rank, local in zip(ranks, local_ranks or [rank["local_rank"] for rank in ranks], strict=True):
        there = at[rank["node_rank"], local]
        decided = there if rank_scope == "worker" else rank
        placed.append({**decided, "global_rank": rank["global_rank"], "local_rank": local, "label": there["label"]})
    return placed


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def find_runs(directory: Path | str) -> list[Path]:
    found, _ = find_files(Path(directory))
    return list(found)


def read_run(path: Path, metrics: Iterable[str] | None = ("*",)) -> StoredRun:
    return reading.read_run(path, Directory.at(path.parent), metrics)


def read_files(paths: Iterable[Path]) -> tuple[list[StoredRun], dict[Path, ReadError]]:
    runs, errors = read_each({path: Directory.at(path.parent) for path in paths}, reading.read_run)
    return runs, dict(errors)


def ended_runs(directory: Path, number: int) -> list[StoredRun]:
    """Wait for `number` ended runs below `directory` and return them, by rank, then by start.

    wandb continues to write after `finish`. Names of directories do not give the order: they have whole seconds.
    """
    deadline = time.monotonic() + 30
    while True:
        runs, errors = read_files(find_runs(directory))
        if len(runs) == number and not errors and all(run.exit_code is not None for run in runs):
            return sorted(runs, key=lambda run: (run.sidecar.global_rank if run.sidecar else 0, run.started))
        found = [(str(run.path), run.exit_code) for run in runs]
        assert time.monotonic() < deadline, f"expected {number} ended runs, found {found} and {errors}"
        time.sleep(0.2)


def read_history(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file in the order of writing. Raises `ReadError`."""
    return list(reading.rows_in(path))


def rows_in(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's file, which may still be written; none if it has just been created."""
    try:
        return read_history(path)
    except ReadError:
        return []


def check_runs(directory: Path, ranks: list[Rank]) -> None:
    """Check that the runs on disk are those of a test vector, written by jobs that log ``loss = 10 * rank + row``.

    Under the plain name the runs of each unit have the mean over its ranks; in the mode `new`, the rank's own numbers.
    """
    opening = [rank for rank in ranks if rank["opens_run"]]
    runs = {_sidecar(run).global_rank: run for run in ended_runs(directory, len(opening))}
    assert sorted(runs) == [rank["global_rank"] for rank in opening]
    for rank in opening:
        run = runs[rank["global_rank"]]
        sidecar = _sidecar(run)
        assert run.run_id == rank["run_id"]
        assert run.group == rank["group"]
        assert (sidecar.shared, sidecar.label, sidecar.primary) == (rank["shared"], rank["label"], rank["primary"])
        assert run.exit_code == 0
        assert run.name == display_name(rank, "nm")
        assert list(map(without_own, read_history(run.path))) == expected_rows(rank, unit_of_run(rank, ranks))


def display_name(rank: Rank, name: str) -> str:
    """Return the display name of a rank's run: base id and display name have the same suffixes."""
    run_id: str = rank["run_id"]
    return name + run_id.removeprefix("exp")


def unit_of_run(rank: Rank, ranks: list[Rank]) -> list[int]:
    """Return the global ranks whose numbers are reduced into this rank's run."""
    if rank["run_id"] is not None and sum(other["run_id"] == rank["run_id"] for other in ranks) > 1:  # shared
        return [other["global_rank"] for other in ranks if other["run_id"] == rank["run_id"]]
    if "rank-" in str(rank["run_id"]):
        return [rank["global_rank"]]
    by_node = "worker-" in str(rank["run_id"])
    return [other["global_rank"] for other in ranks if not by_node or other["node_rank"] == rank["node_rank"]]


def expected_rows(rank: Rank, unit: list[int], *, meet: bool = True) -> list[dict[str, Any]]:
    """Return the rows that a rank writes: the unit's mean if it is the primary, and its own numbers under its label.

    If the ranks do not `meet`, each has only its own numbers, and the rows of a unit are marked as degraded.
    """
    missing = 0 if meet else len(unit) - 1
    unit = unit if meet else [rank["global_rank"]]
    rows = []
    for step in range(ROWS):
        row: dict[str, Any] = {"global_step": step}
        if rank["primary"]:
            row["loss"] = 10.0 * statistics.mean(unit) + step
            row |= {"dist_wandb/degraded": missing} if missing else {}
        if rank["shared"]:
            row[f"{rank['label']}/loss"] = 10.0 * rank["global_rank"] + step
        rows.append(row)
    return rows


def without_own(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without the values that W&B adds."""
    return {name: value for name, value in row.items() if not name.startswith("_")}


def _sidecar(run: StoredRun) -> Any:
    assert run.sidecar is not None, f"{run.path} has no sidecar"
    return run.sidecar
