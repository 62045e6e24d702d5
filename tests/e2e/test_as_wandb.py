"""``import dist_wandb as wandb`` in whole jobs: W&B's idioms, and example scripts changed by that line."""

from __future__ import annotations

import csv
import multiprocessing
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import wandb as stock
from history import History, history, history_of
from processes import Finished, clean_environment, python, run_job, torchrun, words_of
from stored import ended_runs
from wandb_records import RecordedRun, column
from wandb_server import WandbServer

import dist_wandb as wandb

EXAMPLES = Path(__file__).parents[2] / "examples" / "as_wandb"
THE_LINE = re.compile(r"^( *)import dist_wandb as wandb$", re.MULTILINE)

Outcome = tuple[Finished, dict[str, RecordedRun]]

LIMITS = {"join_timeout": 30}
PROJECT: dict[str, Any] = {"project": "tests", "settings": {"silent": True}}
RANK = int(os.environ.get("RANK", "0"))
MASTER = RANK == 0


def saw(*facts: object) -> None:
    sys.stdout.write(f"SAW {' '.join(map(str, facts))}\n")
    sys.stdout.flush()


def train_model(model: torch.nn.Module) -> None:
    for step in range(3):
        model(torch.ones(2, 4)).sum().backward()
        if wandb.run is not None:
            wandb.log({"loss": 2.0 * step + RANK}, step=step)
        if wandb.run is not None and MASTER:
            wandb.log({"guarded": step}, step=step, commit=False)
        wandb.log({"val/accuracy": 0.5, "epoch": step}, step, True)


def use_all_of_it(model: torch.nn.Module) -> None:
    wandb.define_metric("val/*", step_metric="epoch", summary="max")
    wandb.config.update({"parameters": 20}, allow_val_change=True)
    wandb.config.depth = 2
    wandb.config["width"] = 3
    wandb.watch(model, log="all", log_freq=1)
    train_model(model)
    wandb.unwatch(model)
    wandb.log({"image": wandb.Image(np.zeros((2, 2, 3), dtype=np.uint8), caption="black")})
    wandb.log({"table": wandb.Table(columns=["x"], data=[[1]]), "histogram": wandb.Histogram([1.0, 2.0])})
    wandb.log({"plot": wandb.plot.line(wandb.Table(columns=["x", "y"], data=[[1, 2]]), "x", "y")})
    Path("notes.txt").write_text("notes", encoding="utf-8")
    wandb.save("notes.txt", policy="now")
    artifact = wandb.Artifact("weights", type="model")
    with artifact.new_file("weights.txt") as file:
        file.write("1.0")
    wandb.log_artifact(artifact, aliases=["best"])
    wandb.alert(title="trained", text="all of it", level=wandb.AlertLevel.INFO)
    wandb.mark_preempting()
    wandb.summary["best"] = 0.5
    assert wandb.run is not None
    wandb.run.summary.update({"last": 0.25})


def use_idioms() -> None:
    """Use wandb before, during and after a run; then a run in a block."""
    saw("before", RANK, wandb.run)
    config = {"lr": 0.1, "rank": RANK}
    run = wandb.init(project="tests", name="early", config=config, tags=["a"], settings=wandb.Settings(silent=True))
    assert wandb.run is not None
    wandb.run.name = "all-of-it"
    wandb.run.tags += ("b",)
    use_all_of_it(torch.nn.Linear(4, 4))
    saw("run", RANK, wandb.run is run, run.project, wandb.config.lr, wandb.config["lr"], wandb.config.get("none", 1))
    saw("ids", wandb.run.id == run.id, run.id)
    wandb.finish(exit_code=0)
    saw("after", RANK, wandb.run)

    with wandb.init(project="tests", name="block", reinit=True, settings={"silent": True}) as block:
        block.log({"note": "of the next call"}, commit=False)
        block.log({"acc": float(RANK), "global_step": 5})
        block.log({"loss": float(RANK)}, step=0)
        wandb.log({"loss": float(RANK)}, step=1, weight=1 + 2 * RANK)
    saw("after", RANK, wandb.run)

    if MASTER:  # the most common start
        wandb.init(project="tests", name="guarded", config=config, settings=wandb.Settings(silent=True))
    if wandb.run is not None:
        wandb.log({"loss": 1.0})
    if MASTER:
        wandb.finish()


def evaluate(step: int) -> None:
    wandb.init(**PROJECT, name="ignored", config={"lr": 2}).log({"acc": float(dist.get_rank())}, step=step)


def refused(**arguments: Any) -> str:
    try:
        wandb.init(**PROJECT, **arguments)
    except (ValueError, wandb.Error) as error:
        return type(error).__name__
    return "accepted"


def train(name: str, who: str) -> None:
    """Train; the helper is called on all ranks, or on one. Rank 0 opens a run beside, too."""
    rank = dist.get_rank()
    for step in range(4):
        wandb.log({"loss": 1.0 + rank}, step=step)
        if step == 2 and who in ("all", str(rank)):
            begun = time.monotonic()
            evaluate(step)
            sys.stdout.write(f"HELPER {name} {rank} {time.monotonic() - begun:.3f}\n")
    if who == "0" and rank == 0:
        with wandb.init(**PROJECT, name="beside", config={"lr": 1}, reinit="create_new") as beside:
            beside.log({"acc": 1.0})
    dist.barrier()


def init_again() -> None:
    """Two ranks: a helper, on all ranks or one, calls `init` once more, in folds that only rank 0 finishes."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for who in ("all", "0", "1"):
        wandb.init(**PROJECT, name=f"fold-{who}", config={"lr": 1})
        train(f"fold-{who}", who)
        if rank == 0:
            time.sleep(0.5)  # it saves a checkpoint: the other rank is ahead
            wandb.finish()
    wandb.init(**PROJECT, name="last", config={"lr": 1})
    train("last", "")
    sys.stdout.write(f"REFUSED {rank} {refused(mode='bogus')} {refused(config='missing.yaml')}\n")
    wandb.finish()
    for turn in range(2):  # without an end; rank 0 ends the run long before the other rank begins its second turn
        wandb.init(**PROJECT, name=f"turn-{turn}", config={"lr": 1})
        wandb.log({"loss": 1.0 + rank}, step=turn)
        time.sleep(rank)
    wandb.finish()
    for turn in range(2):  # rank 1 calls `init` again before rank 0 has opened the first one
        time.sleep(0.0 if rank else 1.0)
        wandb.init(**PROJECT, name=f"ahead-{turn}", config={"lr": 1})
        wandb.log({"loss": 1.0 + rank}, step=turn)
        if rank == 0:
            wandb.finish()
    wandb.finish()
    sys.stdout.write(f"AFTER {rank} {wandb.run}\n")
    if rank == 0:
        wandb.init(**PROJECT, name="alone", config={"lr": 1})
        evaluate(0)
        wandb.finish()
    dist.barrier()
    dist.destroy_process_group()


def log_apart(name: str) -> None:
    begun = time.monotonic()
    run = wandb.init(project="tests", name=name, limits=LIMITS, settings={"silent": True})
    run.log({"acc": 0.9}, step=10)
    run.finish()
    sys.stdout.write(f"EVALUATED {name} {time.monotonic() - begun:.1f}\n")
    sys.stdout.flush()


def start(kind: str) -> int:
    """Evaluate in another process; return its exit code."""
    if kind == "program":
        return subprocess.run([sys.executable, *words_of(log_apart, kind)], check=False).returncode
    context: Any = multiprocessing.get_context(kind)
    process = context.Process(target=log_apart, args=(kind,))
    process.start()
    process.join()
    return process.exitcode or 0


def start_processes() -> None:
    """Two ranks train, and start processes that log: another program, a spawned process, and a forked one."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    wandb.init(project="tests", name="train", limits=LIMITS, settings={"silent": True})
    codes = []
    for step in range(12):
        wandb.log({"loss": 1.0 + rank}, step=step)
        if step == 4:
            codes = [start(kind) for kind in (("program", "fork") if rank == 0 else ("spawn",))]
        dist.barrier()
    wandb.finish()
    sys.stdout.write(f"CODES {rank} {codes}\n")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    directory = tmp_path_factory.mktemp("as_wandb")
    with WandbServer() as server:
        job = torchrun(use_idioms)
        finished = run_job(*job, cwd=directory, environment=server.environment(directory)).check()
    assert server.unknown == []
    return finished, {str(run.display_name): run for run in server.runs.values()}


def test_each_init_is_one_run_with_what_all_ranks_or_the_guarded_one_have_logged(outcome: Outcome) -> None:
    _, runs = outcome
    assert runs.keys() == {"all-of-it", "block", "guarded"}
    assert {name: (run.exit_codes, run.completions) for name, run in runs.items()} == dict.fromkeys(runs, ([0], 1))
    run, block = runs["all-of-it"], runs["block"]
    assert column(run, "loss") == {0: 0.5, 1: 2.5, 2: 4.5}
    assert column(run, "guarded") == {0: 0, 1: 1, 2: 2}
    assert column(run, "val/accuracy") == dict.fromkeys(range(3), 0.5)
    assert column(block, "loss") == {0: 0.5, 1: 0.75}
    (row,) = [row for row in block.rows if {"note", "acc"} & row.keys()]
    assert {**row, "note": "of the next call", "acc": 0.5, "global_step": 5} == row
    assert column(runs["guarded"], "loss") == {0: 1.0}
    assert not [row for each in runs.values() for row in each.rows if "dist_wandb/degraded" in row]
    assert run.tags == ("a", "b")
    config = {name: run.config[name] for name in ("lr", "parameters", "depth", "width")}
    assert config == {"lr": 0.1, "parameters": 20, "depth": 2, "width": 3}
    assert {name: run.summary[name] for name in ("best", "last")} == {"best": 0.5, "last": 0.25}
    assert run.summary["val/accuracy"] == {"max": 0.5}
    kinds = {name: run.summary[name]["_type"] for name in ("image", "table", "histogram")}
    assert kinds == {"image": "image-file", "table": "table-file", "histogram": "histogram"}
    assert any(name.startswith("gradients/") for name in run.summary)


def test_all_ranks_see_the_same_run_and_none_before_and_afterwards(outcome: Outcome) -> None:
    finished, _ = outcome
    assert sorted(finished.lines("SAW before")) == [f"SAW before {rank} None" for rank in (0, 1)]
    assert sorted(finished.lines("SAW run")) == [f"SAW run {rank} True tests 0.1 0.1 1" for rank in (0, 1)]
    first, second = finished.lines("SAW ids")
    assert first == second
    assert first.startswith("SAW ids True ")
    assert sorted(finished.lines("SAW after")) == [f"SAW after {rank} None" for rank in (0, 0, 1, 1)]


# --- one process ------------------------------------------------------------------------------------------------------


def made(*names: str) -> str:
    path = Path(*names)
    path.mkdir(parents=True)
    return str(path)


def leave_open(run: Any) -> None:
    run.log({"a": 1}, step=1)
    run.log({"b": 2}, step=1)


def end_in_all_ways() -> None:
    """End runs with an open row in all ways, below ``ends/NAME``, and the process with an exception."""
    leave_open(wandb.init(dir=made("ends", "wandb.finish")))
    stock.finish()
    with stock.init(dir=made("ends", "block of wandb")):
        leave_open(wandb.init())
    session = wandb.init(dir=made("ends", "block of the run"))
    with session.run:
        leave_open(session)
    leave_open(wandb.init(dir=made("ends", "new run")))
    stock.init(dir=made("beside"), reinit="finish_previous").finish()
    leave_open(wandb.init(dir=made("ends", "teardown")))
    stock.teardown()
    assert wandb.run is None
    leave_open(wandb.init(dir=made("ends", "exception")))
    raise ValueError("at the end")


# For the rows of one process see test_stock_oracle.py.
ENDS = ("wandb.finish", "block of wandb", "block of the run", "new run", "teardown", "exception")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("one_process")
    job = python(end_in_all_ways)
    finished = run_job(*job, cwd=directory, environment=clean_environment(WANDB_SILENT="true"))
    assert finished.exit_codes == (1,), finished.output
    assert "ValueError: at the end" in finished.output
    return directory


@pytest.mark.parametrize("end", ENDS)
def test_the_row_that_is_open_at_the_end_is_written(one_process: Path, end: str) -> None:
    rows = history(one_process / "ends" / end).rows
    assert [{name: value for name, value in row.items() if name[0] != "_"} for row in rows] == [
        {"a": 1, "b": 2, "global_step": 1}
    ]


# --- the examples -----------------------------------------------------------------------------------------------------


def of_example(script: Path, directory: Path, *arguments: str) -> tuple[History, dict[str, Any]]:
    """Return rows and metadata of the only run of a script with two processes."""
    directory.mkdir()
    environment = clean_environment(WANDB_SILENT="true")
    run_job(*torchrun(script, *arguments), cwd=directory, environment=environment).check()
    (run,) = ended_runs(directory, 1)
    assert run.exit_code == 0
    return history_of(run), {"name": run.name, "project": run.project}


def with_the_line_as_it_was(script: Path, directory: Path) -> Path:
    text, changed = THE_LINE.subn(r"\1import wandb", script.read_text(encoding="utf-8"))
    assert changed == 1
    assert "dist_wandb" not in text.split('"""', 2)[2], "the change is more than one line"
    before = directory / f"stock_{script.name}"
    before.write_text(text, encoding="utf-8")
    return before


@pytest.mark.cold  # a forked rank without a session was sometimes aborted at its exit, on a busy machine
def test_a_script_like_nanogpt_gives_the_same_run_as_before(tmp_path: Path) -> None:
    stock = with_the_line_as_it_was(EXAMPLES / "train_gpt.py", tmp_path)
    before, facts_before = of_example(stock, tmp_path / "before")
    now, facts = of_example(EXAMPLES / "train_gpt.py", tmp_path / "now")
    assert facts == facts_before == {"name": "mini-gpt", "project": "gpt"}
    assert now.names == before.names == {"iter", "lr", "train/loss", "val/loss"}
    for name in now.names:
        assert now.values(name) == pytest.approx(before.values(name)), name
    assert now.values("iter") == [0, 10, 20, 30, 40]
    assert now.values("val/loss")[-1] < 0.7 * now.values("val/loss")[0]


def test_a_script_like_timms_gives_a_run_that_matches_its_summary_file(tmp_path: Path) -> None:
    script = EXAMPLES / "train_images.py"
    with_the_line_as_it_was(script, tmp_path)
    now, facts = of_example(script, tmp_path / "now", "--log-wandb", "--wandb-tags", "small", "quick")
    assert facts == {"name": "digits", "project": "images"}
    with (tmp_path / "now" / "output" / "digits" / "summary.csv").open(encoding="utf-8") as file:
        summary = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    assert len(summary) == 3
    assert now.names == summary[0].keys() == {"epoch", "train_loss", "eval_loss", "eval_top1", "lr"}
    for name in now.names:
        assert now.values(name) == pytest.approx([row[name] for row in summary]), name
    assert summary[-1]["eval_top1"] > 60


def test_init_while_a_run_is_open_returns_it_on_all_ranks(tmp_path: Path) -> None:
    """As wandb 0.31 does in one process. A rank that calls it alone does not wait for long."""
    finished = run_job(
        *torchrun(init_again),
        cwd=tmp_path,
        environment=clean_environment(WANDB_MODE="offline"),
        timeout=120,
    ).check()
    stored = {run.name: run for run in ended_runs(tmp_path, 9)}
    assert stored.keys() == {"fold-all", "fold-0", "fold-1", "last", "turn-0", "ahead-0", "ahead-1", "alone", "beside"}
    assert {name: run.config["lr"] for name, run in stored.items()} == dict.fromkeys(stored, 1)
    rows = {name: history_of(run) for name, run in stored.items()}
    folds = ("fold-all", "fold-0", "fold-1", "last")
    assert [rows[name].final("loss") for name in folds] == [[1.5] * 4] * 4
    assert {name: rows[name].final("acc") for name in rows} == {
        "fold-all": [0.5],
        "fold-0": [0],
        "fold-1": [1],
        "last": [],
        "turn-0": [],
        "ahead-0": [],
        "ahead-1": [],
        "alone": [0],
        "beside": [1],
    }
    assert rows["turn-0"].final("loss") == [1.5] * 2
    assert [rows[f"ahead-{turn}"].last("loss") for turn in range(2)] == [{0: 1.5}, {1: 1.5}]
    assert {rows[name].flags("loss").get(3) for name in folds} == {0}
    assert sorted(finished.lines("AFTER ")) == ["AFTER 0 None", "AFTER 1 None"]
    assert sorted(finished.lines("REFUSED ")) == [f"REFUSED {rank} ConfigurationError ConfigError" for rank in (0, 1)]
    waited = {tuple(line.split()[1:3]): float(line.split()[3]) for line in finished.lines("HELPER ")}
    assert waited.keys() == {("fold-all", "0"), ("fold-all", "1"), ("fold-0", "0"), ("fold-1", "1")}
    assert waited["fold-1", "1"] < 30  # a limit is a minute
    assert finished.output.count("no other rank has opened a session") == 2  # once for "alone", once for "beside"


def test_processes_that_ranks_start_log_to_runs_of_their_own(tmp_path: Path) -> None:
    """They inherit RANK and the job's store. Stock wandb 0.31 opens a run for each of them, at once."""
    variables = {"WANDB_MODE": "offline", "TMPDIR": str(tmp_path)}
    environment = clean_environment(**variables)
    job = torchrun(start_processes)
    finished = run_job(*job, cwd=tmp_path, environment=environment, timeout=200).check()
    assert sorted(finished.lines("CODES ")) == ["CODES 0 [0, 0]", "CODES 1 [0]"]
    stored = {run.name: history_of(run) for run in ended_runs(tmp_path, 4)}
    assert {name: stored[name].last("acc") for name in ("program", "spawn", "fork")} == {
        name: {10: 0.9} for name in ("program", "spawn", "fork")
    }
    assert stored["train"].last("loss") == dict.fromkeys(range(12), 1.5)
    assert not any(stored[name].is_flagged for name in stored)
    seconds = {line.split()[1]: float(line.split()[2]) for line in finished.lines("EVALUATED ")}
    assert max(seconds.values()) < 25  # less than the time for which a rank waits for others
    assert finished.output.count("which holds the rank whose variables") == 3
    assert not list(tmp_path.glob("dist-wandb-rank-*"))
