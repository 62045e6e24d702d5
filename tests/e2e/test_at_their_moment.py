"""Values are what they were when they were logged, and reads right after `log` answer, as with wandb 0.31.0.

The figures were seen with wandb alone, in one process: MUTABLE tables of 1, 2, 3 rows, increments of one row each, and
the title, set and picture of each step; `run.step` 1 and 2 without steps, 200 after ``step=200``; ``{'max': 0.75,
'mean': 0.5}`` after 0.25, 0.75, 0.5 with ``summary="max,mean"``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from history import history_of
from PIL import Image
from processes import Finished, clean_environment, run_job, torchrun
from stored import ended_runs

from dist_wandb.wandb_files.reading import StoredRun
from dist_wandb.wandb_files.records import read_records

SCRIPT = Path(__file__).parent / "scripts" / "at_their_moment.py"
STEPS = (100, 200, 300)
WRITERS = {"auto": 1, "shared": 2, "new": 2, "none": 1}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    directory = tmp_path_factory.mktemp("moments")
    (directory / "again").mkdir()
    for way in WRITERS:
        (directory / way).mkdir()
        (directory / f"asked-{way}").mkdir()
    environment = clean_environment(WANDB_SILENT="true")
    return directory, run_job(*torchrun(SCRIPT), cwd=directory, environment=environment).check()


def contents(run: StoredRun, row: dict[str, Any], name: str) -> Any:
    return json.loads((run.path.parent / "files" / row[f"{name}.path"]).read_text(encoding="utf-8"))


@pytest.mark.parametrize("way", WRITERS)
def test_what_a_script_changes_after_log_is_written_as_it_was(job: tuple[Path, Finished], way: str) -> None:
    runs = ended_runs(job[0] / way, WRITERS[way])
    for run in runs:
        rows = history_of(run)
        (loss,) = [name for name in rows.names if name in ("loss", "rank-1/loss")] or ["loss"]
        before = "rank-1/" if loss != "loss" else ""
        by_step = {row["global_step"]: row for row in rows.rows_with(f"{before}growing.path")}
        assert list(by_step) == list(STEPS)
        for count, (step, row) in enumerate(by_step.items(), 1):
            all_rows = [[one, one] for one in STEPS[:count]]
            assert contents(run, row, f"{before}growing")["data"] == all_rows
            assert row[f"{before}growing.nrows"] == count
            assert contents(run, row, f"{before}chart_table")["data"] == all_rows
            assert contents(run, row, f"{before}deep.steps.increments")["data"] == [[step, step]]
            assert row[f"{before}deep.steps.increments.increment_num"] == count - 1
            assert len(row[f"{before}deep.steps.increments.previous_increments_paths"]) == count - 1
            assert contents(run, row, f"{before}deep.figure")["layout"]["title"]["text"] == str(step)
            assert sorted(row[f"{before}kinds"]) == sorted(map(str, STEPS[:count]))
            picture = Image.open(run.path.parent / "files" / row[f"{before}deep.image.path"])
            assert picture.getpixel((0, 0)) == (step % 256, 0, 0)
    assert "W&B cannot write" not in job[1].output


@pytest.mark.parametrize("way", WRITERS)
def test_reads_after_log_answer_on_every_rank(job: tuple[Path, Finished], way: str) -> None:
    expected = "(1, 0.5) (2, 0.25) (200, 0.75) (200, 0.75, 0)"
    assert job[1].lines(f"SAW asked {way} ") == [f"SAW asked {way} {rank} {expected}" for rank in (0, 1)]
    expected = "0.75 0.5 0.75 0.5 2 new all of it"
    assert job[1].lines(f"SAW parts {way} ") == [f"SAW parts {way} {rank} {expected}" for rank in (0, 1)]
    for run in ended_runs(job[0] / f"asked-{way}", WRITERS[way]):
        assert f"model-{way}".encode() in run.path.read_bytes()
        assert "val" not in history_of(run).names or 200 in history_of(run).last("val")


def test_a_continued_run_starts_after_its_last_step_on_every_rank(job: tuple[Path, Finished]) -> None:
    assert job[1].lines("SAW starts ") == [
        f"SAW starts {rank} {' '.join([x] * 4)}" for rank in (0, 1) for x in ("0", "301")
    ]


@pytest.mark.parametrize("way", ["auto", "new", "none"])
def test_a_metric_is_defined_between_the_rows_of_the_calls_around_it(job: tuple[Path, Finished], way: str) -> None:
    """W&B writes a value of the new x axis, 0, into the rows that follow the definition, and into no row before it."""
    for run in ended_runs(job[0] / f"asked-{way}", WRITERS[way]):
        rows = history_of(run).rows_with("top")
        assert [(row["top"], row["epoch"]) for row in rows] == [(0.9, 1), (0.1, 1), (0.5, 0), (0.3, 0)]
        summaries = [contents["update"] for kind, contents in read_records(run.path, skipped=()) if kind == "summary"]
        last = [one["last"] for one in summaries if "last" in one]
        assert last == [{"max": 0.5}], "it was defined before the row ended"
    assert job[1].lines("SAW defined 0 ") == ["SAW defined 0 top 0.3"] * len(WRITERS)
    assert "SAW refused 0 Unhandled define_metric() arg: summary op: largest" in job[1].output
