"""Common patterns as whole jobs: decorated functions, children of ranks, other kinds of parallel training."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import statistics
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
import wandb
import warm
from history import histories, history, history_of
from processes import Finished, clean_environment, free_port, python, run_job, torchrun
from stored import ended_runs
from wandb_records import RecordedRun, column
from wandb_server import WandbServer

import dist_wandb
from dist_wandb import get_run, wandb_init

SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLES = Path(__file__).parents[2] / "examples"
PATTERNS = EXAMPLES / "patterns"
STEPS = 29  # batches per epoch of each of two ranks in the examples
MEANS = {step: 2.0 * step + 0.5 for step in range(3)}
SLURM = json.loads((Path(__file__).parents[1] / "unit" / "slurm_22_05.json").read_text())["layouts"]
OF_RANKS = [{step: 2.0 * step + rank for step in range(3)} for rank in (0, 1)]

Outcome = tuple[Finished, WandbServer]

RANK = int(os.environ.get("RANK", "0"))
PROJECT = "tests"


def report(*words: object) -> None:
    sys.stdout.write("\n" + " ".join(map(str, ("SAW", *words))) + "\n")


def log_rows(first: int = 0, number: int = 3) -> None:
    for step in range(first, first + number):
        get_run().log({"loss": 2.0 * step + RANK}, step=step)


@wandb_init(project=PROJECT, id="before", run_mode="shared")
def called_before_the_process_group() -> None:
    log_rows(0, 2)
    dist.init_process_group("gloo")
    log_rows(2, 1)


@wandb_init
def inner() -> None:
    log_rows(1)


@wandb_init(project=PROJECT, id="nested")
def outer() -> None:
    run = get_run()
    report("nested", RANK, bool(run), bool(run.run), run.id)
    log_rows(0, 1)
    inner()
    assert get_run() is run


def decorated() -> None:
    called_before_the_process_group()
    outer()
    report("outside", RANK, bool(get_run()))


def measured_on_all_nodes() -> None:
    settings = wandb.Settings(x_stats_sampling_interval=1)
    with dist_wandb.init(PROJECT, id="measured", system_metrics="all-nodes", settings=settings) as run:
        assert bool(run.run) == bool(wandb.run) == (RANK == 0)
        for step in range(3):
            run.log({"loss": 2.0 * step + RANK}, step=step)
            time.sleep(1)


def play_patterns(directory: str, examples: str) -> None:
    """Two ranks, started as two nodes: decorated functions, and the examples.

    Scenarios run one after the other, each with its own run id.
    """
    decorated()
    measured_on_all_nodes()
    for pattern in runpy.run_path(f"{examples}/who_writes.py")["PATTERNS"].values():
        pattern()
    loggers = runpy.run_path(f"{examples}/loggers.py")["WAYS"]
    loggers["torchtitan"]()
    runpy.run_path(f"{examples}/ray_train.py")["train"]({"lr": 0.5, "dir": directory})  # without Ray
    os.environ["DIST_WANDB_RUN_MODE"] = "shared"  # so that each rank's numbers are visible in addition to their mean
    for way in runpy.run_path(f"{examples}/parallel.py")["WAYS"].values():
        way(RANK, 2)
    del os.environ["DIST_WANDB_RUN_MODE"]
    loggers["torchtune"]()  # which opens a run on rank 0 alone: the last one of a job
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One job of two ranks on two nodes that runs all scenarios."""
    directory = tmp_path_factory.mktemp("patterns")
    with WandbServer() as server:
        environment = server.environment(directory, PYTHONPATH=str(PATTERNS), WANDB_RUN_GROUP="night")
        job = torchrun(play_patterns, directory, PATTERNS, processes=1, nodes=2)
        finished = run_job(*job, cwd=directory, environment=environment).check()
    assert server.unknown == []
    return finished, server


def named(server: WandbServer, name: str) -> RecordedRun:
    (run,) = [run for run in server.runs.values() if run.display_name == name]
    return run


def check_ended_well(run: RecordedRun, writers: int = 1) -> None:
    assert (run.exit_codes, run.completions, len(run.writers)) == ([0], 1, writers)
    assert not column(run, "dist_wandb/degraded")


# --- decorated functions ----------------------------------------------------------------------------------------------


def test_a_decorated_function_may_create_the_process_group(outcome: Outcome) -> None:
    run = outcome[1].run("before")
    assert column(run, "loss") == MEANS
    assert [column(run, f"worker-{rank}-rank-0/loss") for rank in (0, 1)] == OF_RANKS
    check_ended_well(run, writers=2)


def test_nested_functions_join_the_run_and_get_run_returns_it_on_all_ranks(outcome: Outcome) -> None:
    finished, server = outcome
    run = server.run("nested")
    assert column(run, "loss") == {step: 2.0 * step + 0.5 for step in range(4)}
    check_ended_well(run)
    assert finished.lines("SAW nested") == ["SAW nested 0 True True nested", "SAW nested 1 True False nested"]
    assert finished.lines("SAW outside") == ["SAW outside 0 False", "SAW outside 1 False"]


def test_one_run_has_the_hardware_metrics_of_all_nodes_and_no_series_of_ranks(outcome: Outcome) -> None:
    run = outcome[1].run("measured")
    assert (column(run, "loss"), len(run.rows)) == (MEANS, 3)
    check_ended_well(run, writers=2)
    measured = [{name for event in writer.events for name in event} for writer in run.writers.values()]
    of_nodes = [{name.partition("/l:")[2] for name in names if name.startswith("system.")} for names in measured]
    assert sorted(of_nodes, key=min) == [{"worker-0"}, {"worker-1"}]
    assert not any("rank-" in name for row in run.rows for name in row)


# --- the examples -----------------------------------------------------------------------------------------------------


def test_example_who_writes_has_the_described_runs(outcome: Outcome) -> None:
    server = outcome[1]
    own = [column(named(server, f"group-rank-{rank}"), "loss") for rank in (0, 1)]
    mean = {step: statistics.mean(losses[step] for losses in own) for step in range(STEPS)}
    assert column(named(server, "mean"), "loss") == pytest.approx(mean)
    assert column(named(server, "rank-0"), "loss") == pytest.approx(own[0])
    curves = named(server, "curves")
    assert column(curves, "loss") == pytest.approx(mean)
    assert [column(curves, f"rank-{rank}/loss") for rank in (0, 1)] == [pytest.approx(losses) for losses in own]
    farthest = {step: abs(own[1][step] - mean[step]) for step in range(STEPS)}
    assert column(curves, "loss/std") == pytest.approx(farthest)
    shared = named(server, "shared")
    assert column(shared, "loss") == pytest.approx(mean)
    nodes = [column(named(server, f"node-worker-{node}"), "loss") for node in (0, 1)]
    labelled = [column(shared, f"worker-{node}-rank-0/loss") for node in (0, 1)]
    assert nodes == labelled == [pytest.approx(losses) for losses in own]
    check_ended_well(shared, writers=2)
    for name in ("mean", "rank-0", "curves", "group-rank-0", "group-rank-1", "node-worker-0", "node-worker-1"):
        check_ended_well(named(server, name))


@pytest.mark.parametrize(
    ("way", "name"), [("torchtune", "loss"), ("torchtitan", "loss_metrics/local_loss"), ("ray", "loss")]
)
def test_loggers_for_other_frameworks_have_means_of_all_ranks(outcome: Outcome, way: str, name: str) -> None:
    run = named(outcome[1], way)
    assert column(run, name) == pytest.approx(column(named(outcome[1], "mean"), "loss"), rel=1e-5)
    if way == "torchtitan":
        assert set(column(run, "rank").values()) == {0.5}
    else:
        assert run.config["lr"] == 0.5
    check_ended_well(run)


def test_all_runs_have_the_group_of_the_environment(outcome: Outcome) -> None:
    assert {run.group for run in outcome[1].runs.values()} == {"night"}


def of_ranks(run: RecordedRun, name: str) -> list[dict[int, float]]:
    return [column(run, f"worker-{rank}-rank-0/{name}") for rank in (0, 1)]


@pytest.mark.parametrize(("way", "rows"), [("fsdp2", STEPS), ("accumulate", 8)])
def test_other_kinds_of_parallel_training_have_means_of_all_ranks(outcome: Outcome, way: str, rows: int) -> None:
    run = named(outcome[1], way)
    losses, own = column(run, "loss"), of_ranks(run, "loss")
    assert list(losses) == list(range(rows))
    assert losses == pytest.approx({step: (own[0][step] + own[1][step]) / 2 for step in range(rows)})
    assert losses[rows - 1] < losses[0]
    if way == "fsdp2":
        norms = column(run, "gradient_norm")
        assert list(norms) == list(range(rows))
        assert of_ranks(run, "gradient_norm") == [pytest.approx(norms)] * 2
    check_ended_well(run, writers=2)


def test_with_uneven_inputs_the_mean_covers_ranks_with_data(outcome: Outcome) -> None:
    run = named(outcome[1], "join")
    losses, own = column(run, "loss"), of_ranks(run, "loss")
    until = STEPS - 5  # rank 1's last batch, of 2 samples where rank 0 has 32
    mean = {step: (own[0][step] + own[1][step]) / 2 for step in range(until - 1)}
    mean[until - 1] = (32 * own[0][until - 1] + 2 * own[1][until - 1]) / 34
    assert losses == pytest.approx({**mean, **{step: own[0][step] for step in range(until, STEPS)}})
    check_ended_well(run, writers=2)


# --- separate jobs ----------------------------------------------------------------------------------------------------


def test_child_processes_log_into_the_run_passed_to_them(tmp_path: Path) -> None:
    """Children with each of Python's start methods, the workers of a pool, and those of a DataLoader."""
    run_job(*python(SCRIPTS / "children.py", tmp_path), cwd=tmp_path).check()
    found = history(tmp_path)
    for method in ("spawn", "fork", "forkserver"):
        assert found.last(f"{method}/child") == {step: float(step) for step in range(3)}
        assert sorted(found.values(f"{method}/pool")) == [0.0, 1.0, 2.0, 3.0]
    assert (found.last("in_worker"), found.values("after")) == ({index: float(index) for index in range(8)}, [1.0])


def test_example_workers_log_into_the_run_of_their_parent(tmp_path: Path) -> None:
    run_job(*python(PATTERNS / "workers.py", "pool", "child"), cwd=tmp_path).check()
    runs = {run.name: history_of(run) for run in ended_runs(tmp_path, 2)}
    assert sorted(runs["pool"].values("C")) == [0.01, 0.1, 1.0, 10.0]
    assert max(runs["pool"].values("accuracy")) > 0.9
    for name in ("parent/accuracy", "child/accuracy"):
        assert list(runs["child"].last(name)) == list(range(5))


def test_gradients_averaged_by_hand_give_means_of_all_ranks(tmp_path: Path) -> None:
    environment = clean_environment(DIST_WANDB_RUN_MODE="shared")
    run_job(*python(PATTERNS / "by_hand.py"), cwd=tmp_path, environment=environment).check()
    found = histories(tmp_path, 2)
    own = [found[rank].last(f"rank-{rank}/loss") for rank in (0, 1)]
    losses = found[0].last("loss")
    assert losses == pytest.approx({step: (own[0][step] + own[1][step]) / 2 for step in range(STEPS)})
    assert losses[STEPS - 1] < losses[0]
    assert not found[0].is_flagged


def test_a_requeued_slurm_job_continues_its_run(tmp_path: Path) -> None:
    """Stand-ins for SLURM's commands start a task on each of two nodes, with the variables that SLURM 22.05 sets."""
    tasks = SLURM["sbatch -N2 -n2 --ntasks-per-node=1: srun"]
    environment = clean_environment(
        PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        SLURM_SUBMIT_DIR=str(PATTERNS),
        SLURM_JOB_ID=str(free_port() - 20_000),  # the script's port depends on it
        SLURM_JOB_NODELIST="na,nb",
    )
    of_job = {name: environment[name] for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST")}
    starts = [
        f"env {shlex.join(f'{name}={value}' for name, value in {**task, **of_job}.items())} SLURM_JOBID=$SLURM_JOB_ID "
        '"$@" & tasks="$tasks $!"\n'
        for task in tasks
    ]
    commands = {
        "python": f'exec {warm.interpreter(clean_environment())} "$@"\n',
        "scontrol": 'case $1 in show) echo 127.0.0.1 ;; requeue) echo "SAW requeue $2" ;; esac\n',
        "srun": f"shift\n{''.join(starts)}for task in $tasks; do wait $task || code=1; done\nexit ${{code:-0}}\n",
    }
    (tmp_path / "bin").mkdir()
    for name, text in commands.items():
        command = tmp_path / "bin" / name
        command.write_text(f"#!/bin/sh\n{text}")
        command.chmod(0o755)

    job: list[str | Path] = ["bash", PATTERNS / "elastic.sbatch", "--epochs", "2", "--fail-in", "0"]
    failed = run_job(job, cwd=tmp_path, environment=environment)
    assert failed.exit_codes == (1,), failed.output
    assert failed.lines("SAW") == [f"SAW requeue {environment['SLURM_JOB_ID']}"]
    run_job(job, cwd=tmp_path, environment={**environment, "SLURM_RESTART_COUNT": "1"}).check()
    first, second = ended_runs(tmp_path, 2)
    assert first.run_id == second.run_id
    assert (first.exit_code, second.exit_code) == (1, 0)
    assert list(history_of(first).last("loss")) == list(range(STEPS))
    assert list(history_of(second).last("loss")) == list(range(STEPS, 2 * STEPS))


def test_a_notebook_starts_processes_and_reads_their_run(tmp_path: Path) -> None:
    notebook = json.loads((PATTERNS / "notebook.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    (tmp_path / "cells.py").write_text("\n\n\n".join(cells))
    environment = clean_environment(NOTEBOOK_PORT=str(free_port()))
    finished = run_job(*python(tmp_path / "cells.py"), cwd=tmp_path, environment=environment).check()
    assert re.search(rf"^{STEPS} rows; loss 2\.\d\d at first and [01]\.\d\d at last$", finished.output, re.MULTILINE)
    (run,) = ended_runs(tmp_path, 1)
    assert set(history_of(run).values("rank")) == {0.5}


def test_lightning_on_two_nodes_known_only_from_lightnings_variables(tmp_path: Path) -> None:
    """As on two machines without a launcher: the same command on both, with a different NODE_RANK."""
    script = EXAMPLES / "lightning" / "train_digits.py"
    flags = ["--strategy", "ddp", "--devices", "1", "--num-nodes", "2", "--rank-scope", "worker", "--epochs", "1"]
    nodes: list[list[str | Path]] = [["env", f"NODE_RANK={node}", sys.executable, script, *flags] for node in (0, 1)]
    environment = clean_environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    finished = run_job(*nodes, cwd=tmp_path, environment=environment).check()
    runs = {run.name: history_of(run, "trainer/global_step") for run in ended_runs(tmp_path, 2)}
    assert runs.keys() == {"lightning-worker-0", "lightning-worker-1"}
    assert all(len(found.values("val/accuracy")) == 1 and not found.is_flagged for found in runs.values())
    assert all("2 ranks on 2 nodes" in line for line in finished.lines("dist_wandb: "))
