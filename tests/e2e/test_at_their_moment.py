"""Values are what they were when they were logged, and reads right after `log` answer, as with wandb 0.31.0.

The figures were seen with wandb alone, in one process: MUTABLE tables of 1, 2, 3 rows, increments of one row each, and
the title, set and picture of each step; `run.step` 1 and 2 without steps, 200 after ``step=200``; ``{'max': 0.75,
'mean': 0.5}`` after 0.25, 0.75, 0.5 with ``summary="max,mean"``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from history import history_of
from PIL import Image
from processes import Finished, clean_environment, run_job, torchrun
from stored import ended_runs

import dist_wandb as wandb
from dist_wandb.wandb_files.reading import StoredRun
from dist_wandb.wandb_files.records import read_records

STEPS = (100, 200, 300)
WRITERS = {"auto": 1, "shared": 2, "new": 2, "none": 1}
RANK = int(os.environ.get("RANK", "0"))
WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "shared": {"run_mode": "shared"},
    "new": {"run_mode": "new"},
    "none": {"reduce": None},
}


def saw(*facts: object) -> None:
    sys.stdout.write(f"SAW {' '.join(map(str, facts))}\n")
    sys.stdout.flush()


def log_what_changes(way: str) -> None:
    growing = wandb.Table(columns=["x", "y"], log_mode="MUTABLE")
    increments = wandb.Table(columns=["x", "y"], log_mode="INCREMENTAL")
    charted = wandb.Table(columns=["x", "y"], log_mode="MUTABLE")
    figure = go.Figure(go.Scatter(x=[0, 1], y=[0, 1]))
    kinds: set[str] = set()
    picture = Path(f"{way}-{RANK}.png")
    for step in STEPS:
        for table in (growing, increments, charted):
            table.add_data(step, step)
        figure.update_layout(title=str(step))
        kinds.add(str(step))
        Image.new("RGB", (2, 2), (step % 256, 0, 0)).save(picture)
        row = {
            "growing": growing,
            "chart": wandb.plot.scatter(charted, "x", "y"),
            "kinds": kinds,
            "deep": {"image": wandb.Image(str(picture)), "figure": figure, "steps": {"increments": increments}},
        }
        wandb.log({"loss": RANK + step, **row}, step=step)
        figure.update_layout(title="changed")
    picture.unlink()


def ask(way: str) -> None:
    run = wandb.run
    assert run is not None
    asked: list[tuple[Any, ...]] = []
    for loss in (0.5, 0.25):
        wandb.log({"loss": loss})
        asked.append((run.step, run.summary.get("loss")))
    wandb.log({"acc": 0.75}, step=200)
    asked.append((run.step, run.summary["acc"]))
    asked.append((run.run.step, run.run.summary["acc"], run.run.starting_step))
    run.log(data={"val": 1}, step=run.step)
    run.log_model(path=__file__, name=f"model-{way}")
    saw("asked", way, RANK, *asked)
    for name in ("top1", "eval.top5"):
        run.define_metric(name, summary="max")
        run.define_metric(name, summary="mean")  # W&B adds it
    for top in (0.25, 0.75, 0.5):
        wandb.log({"top1": top, "eval": {"top5": top}})
    run.summary["best"] = {"epoch": 1}
    run.summary["best"]["epoch"] = 2
    run.tags += ("new",)
    run.notes = "all of it"
    tops = [tops[name] for tops in (run.summary["top1"], run.summary["eval"]["top5"]) for name in ("max", "mean")]
    saw("parts", way, RANK, *tops, run.summary["best"]["epoch"], *run.tags, run.notes)


def define_between_rows() -> None:
    for step, top in enumerate((0.9, 0.1), 300):
        wandb.log({"top": top, "epoch": 1}, step=step, commit=True)
    metric = wandb.define_metric("top", step_metric="epoch")
    try:
        wandb.define_metric("top", summary="largest")
    except wandb.Error as error:
        saw("refused", RANK, error)
    for step, top in enumerate((0.5, 0.3), 302):
        wandb.log({"top": top}, step=step, commit=True)
    last = wandb.summary.get("top")  # the refused summary does not count
    wandb.define_metric("never")
    wandb.log({"last": 0.5}, step=304)  # its row is open until the end
    wandb.define_metric("last", summary="max")
    saw("defined", RANK, getattr(metric, "name", None), last)


def change_and_ask() -> None:
    """What a script logs and then changes, and what it asks of its run right after `log`, on two ranks."""
    for way, options in WAYS.items():
        with wandb.init(project="p", name=f"changed-{way}", dir=way, **options):
            log_what_changes(way)
        with wandb.init(project="p", name=f"asked-{way}", dir=f"asked-{way}", **options):
            ask(way)
            define_between_rows()
    for _ in range(2):
        with wandb.init(project="p", id="again", resume="allow", dir="again") as run:
            saw("starts", RANK, run.starting_step, run.step, run.run.starting_step, run.run.step)
            wandb.log({"loss": 1.0}, step=300)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    directory = tmp_path_factory.mktemp("moments")
    (directory / "again").mkdir()
    for way in WRITERS:
        (directory / way).mkdir()
        (directory / f"asked-{way}").mkdir()
    environment = clean_environment(WANDB_SILENT="true")
    return directory, run_job(*torchrun(change_and_ask), cwd=directory, environment=environment).check()


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
