"""Histograms of `watch` are in the rows in which wandb alone writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from history import history_of
from processes import clean_environment, python, run_job, torchrun
from stored import ended_runs

SCRIPT = Path(__file__).parent / "scripts" / "watched.py"
HOW = ["steps", "counted", "axis"]
WRITERS = {"auto": 1, "shared": 2, "new": 2, "unreduced": 1, "alone": 1, "stock": 1}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("watched")
    *kinds, alone, stock = WRITERS
    for kind in WRITERS:
        for how in HOW:
            (directory / kind / how).mkdir(parents=True)
    (directory / "sharded").mkdir()
    for commands in python(SCRIPT, alone), python(SCRIPT, stock), torchrun(SCRIPT, *kinds):
        run_job(*commands, cwd=directory, environment=clean_environment(WANDB_SILENT="true")).check()
    return directory


def gradients(directory: Path, kind: str, how: str, label: str = "") -> list[list[tuple[Any, Any]]]:
    """Return loss and gradient by place on the x axis, in order, of each run."""
    loss, found = f"{label}loss", []
    histories = [history_of(run) for run in ended_runs(directory / kind / how, WRITERS[kind])]
    for history in histories:
        if loss in history.names:
            (bins,) = [name for name in history.names if name.startswith(f"{label}gradients/") and ".bins" in name]
            places: dict[Any, list[Any]] = {}  # rank 1 of a shared run writes media in a row of their own
            for number, row in enumerate(history.rows):
                at = places.setdefault(row.get("global_step", number), [None, None])
                at[:] = [row.get(loss, at[0]), row.get(bins, [at[1]])[0]]
            found.append([(one, gradient) for one, gradient in places.values() if (one, gradient) != (None, None)])
    return found


@pytest.mark.parametrize("how", HOW)
def test_watched_gradients_are_in_the_rows_that_wandb_gives_them(how: str, jobs: Path) -> None:
    (expected,) = gradients(jobs, "stock", how)
    assert sum(None not in row for row in expected) >= 7
    for kind in ("auto", "unreduced", "alone"):
        assert gradients(jobs, kind, how) == [expected], kind
    assert gradients(jobs, "shared", how, "rank-1/") == [expected]
    assert gradients(jobs, "new", how) == [expected] * 2


def test_a_sharded_models_parameters_are_this_ranks_part(jobs: Path) -> None:
    """Nothing waits for rank 1, which watches nothing. Rank 0's part of the values 1 to 4 is 1 and 2."""
    (run,) = ended_runs(jobs / "sharded", 1)
    (row,) = history_of(run).rows
    (bins,) = [row[name] for name in row if name.endswith("0.weight.bins")]
    assert (bins[0], bins[-1]) == (1.0, 2.0)
