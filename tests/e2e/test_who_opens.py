"""Ranks that never open a session, or open it late, or take long for it: rows are neither held back nor lost."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import wandb
from history import STEPS, History, history, history_of
from processes import Finished, clean_environment, run_job, torchrun, wait_until
from stored import ended_runs, read_history
from wandb.sdk.wandb_config import Config

import dist_wandb
from dist_wandb.job.launch import Launch

SOON = 40.0  # seconds, on a busy machine; less than join_timeout
ENOUGH = 3.0  # seconds, to learn who has opened a session; less if the ranks soon begin without rank 0
LONG = 7.0  # seconds; a rank that ends its session waits less for ranks that have not opened it


def open_some_again(directory: str) -> None:
    """A job of two ranks that is restarted once, in which rank 0 opens no session."""
    dist.init_process_group("gloo")
    attempt = Launch.detect().attempt or 0
    if dist.get_rank():
        run = dist_wandb.init("tests", dir=directory, limits={"join_timeout": 2.0})
        for step in range(attempt * STEPS, (attempt + 1) * STEPS):
            run.log({"loss": float(step)}, step=step)
        wait_until(lambda: bool(run.run), within=SOON, what="a run")
        run.flush()
        time.sleep(1.5)  # so long may a row be on its way to the disk
        if attempt:
            run.finish()
    dist.barrier()
    if not attempt:
        os._exit(1)


def end_slowly(directory: str, mode: Any, slow: str, *logged: str) -> None:
    """Sessions one after the other; W&B takes long to end the first run on rank `slow`.

    In each of them something is logged (1), or nothing (0), so that another rank is soon at the next one.
    """
    dist.init_process_group("gloo")
    rank, finish = dist.get_rank(), wandb.Run.finish

    def finish_slowly(run: wandb.Run, *args: Any, **kwargs: Any) -> None:
        time.sleep(LONG * ("exp-0" in str(run.id)))
        finish(run, *args, **kwargs)

    if rank == int(slow):
        wandb.Run.finish = finish_slowly  # type: ignore[method-assign]
    for number, is_logged in enumerate(map(int, logged)):
        options: Any = {"run_mode": mode, "reduce": "mean", "dir": directory, "mode": "offline"}
        if mode == "logger":
            logger = dist_wandb.DistWandbLogger(id=f"exp-{number}", project="tests", **{**options, "run_mode": "auto"})
            logger.log_metrics({"loss": float(rank)}, step=0)
            dist_wandb.finish()
            continue
        with dist_wandb.init("tests", id=f"exp-{number}", **options) as run:
            if is_logged:
                run.log({"loss": float(rank)}, step=0)


def die_early(directory: str, dies: str, join: str, finish: str) -> None:
    """Let rank 0 open no session, and a rank die before another one writes."""
    dist.init_process_group("gloo")
    rank, process = dist.get_rank(), Path(directory, "process")
    if rank == int(dies):
        process.write_text(str(os.getpid()))
    options: dict[str, Any] = {"limits": {"join_timeout": float(join), "finish_timeout": float(finish)}}
    options |= {"reinit": "create_new"}
    kinds: dict[str, dict[str, Any]] = {"combined": {}, "own": {"reduce": None}}
    runs = [
        dist_wandb.init("tests", id=kind, dir=str(Path(directory, kind)), **options, **of_kind)
        for kind, of_kind in kinds.items()
        if rank
    ]
    time.sleep(min(ENOUGH, float(join) / 6) if rank else 0.0)
    dist.barrier()
    if rank not in (0, int(dies)):
        wait_until(lambda: not Path("/proc", process.read_text()).exists(), within=20.0, what="the end of a rank")
        for step in range(STEPS):
            for run in runs:
                run.log({"loss": float(rank + step)})
        for run in runs:
            run.finish()
    sys.stdout.flush()
    os._exit(0)  # the process group cannot be left any more


def late(directory: Path, rank: int) -> None:
    """Rank 0 opens its session after another rank has become the primary."""
    options: dict[str, Any] = {"id": "exp", "dir": str(directory), "limits": {"join_timeout": 2.0}}
    if rank:
        run = dist_wandb.init("tests", config={"of": rank}, **options)
        for step in range(STEPS):
            run.log({"loss": float(rank + step), "text": str(rank)}, step=step)
        wait_until(lambda: bool(run.run) or rank != 1, within=SOON, what="a run")
    dist.barrier()
    if not rank:
        run = dist_wandb.init("tests", config={"of": rank}, **options)
    for step in range(STEPS, 2 * STEPS):
        run.log({"loss": float(rank + step), "text": str(rank)}, step=step)
    assert bool(run.run) == (rank == 1)
    assert (run.id, run.config["of"]) == ("exp", 1)
    run.finish()


def continued(directory: Path, rank: int) -> None:
    """Rank 1, the only one with a session, begins to write; rows have no steps."""
    if rank != 1:
        return
    limits = {"join_timeout": 2.0}
    run = dist_wandb.init("tests", id="exp", dir=str(directory), config={"lr": 0.1}, limits=limits)
    run.define_metric("loss", summary="max")
    stand_in: Any = wandb.run
    for step in range(STEPS):
        run.log({"loss": float(-step), "again": step})
    run.summary["best"] = 0.5
    run.summary["again"] = -1
    run.config.update({"written": rank})
    run.log({"best": 0.25})
    update: Any = Config.update

    def slow_update(*args: Any, **arguments: Any) -> Any:  # of what was written so far, in the run that is opened
        time.sleep(1.0)
        return update(*args, **arguments)

    Config.update = slow_update  # type: ignore[method-assign]
    wait_until(lambda: wandb.run is not None, within=SOON, what="wandb's run")
    wandb.log({"beside": 1.0})
    wait_until(lambda: bool(run.run), within=SOON, what="a run")
    Config.update = update  # type: ignore[method-assign]
    run.summary["after"] = 2
    stand_in.define_metric("late", summary="min")
    run.log({"loss": float(-STEPS), "late": 1.0})
    run.flush()
    assert (dict(run.summary["loss"]), dict(run.summary["late"])) == ({"max": 0}, {"min": 1})
    run.finish()
    with wandb.init(project="tests", dir=directory.parent) as own:
        assert own, "wandb's init returns a stand-in"


def ends(directory: Path, rank: int, **options: Any) -> None:
    """Ranks 1 and 2 end before `join_timeout`, without rank 0."""
    began = time.monotonic()
    run = dist_wandb.init("tests", id="exp", dir=str(directory), **options)
    for step in range(STEPS):
        run.log({"loss": float(rank + step), "text": str(rank)}, step=step)
    run.finish(0)
    assert time.monotonic() - began < SOON


def nested(directory: Path, rank: int) -> None:
    """Ranks 1 and 2 end a session while the run of the enclosing one is still opened on rank 0."""
    options: dict[str, Any] = {"dir": str(directory)}
    init = wandb.init

    def slow_init(*args: Any, **arguments: Any) -> Any:
        time.sleep(0.0 if rank else 4.0)
        return init(*args, **arguments)

    wandb.init = slow_init
    run = dist_wandb.init("tests", id="outer", **options)
    wandb.init = init
    time.sleep(0.0 if rank else 0.5)  # since the others have seen that it is open
    inner = dist_wandb.init("tests", id="exp", reinit="create_new", **options)
    for step in range(STEPS):
        inner.log({"loss": float(rank + step), "text": str(rank)}, step=step)
    inner.finish()
    run.finish()


def left_open(directory: Path, rank: int) -> None:
    """Rank 1, the only one with a session, ends its script while its run is opened."""
    if rank != 1:
        return
    wandb.teardown()  # so that the run starts wandb's process, which then registers for the end of this one
    init, is_opening = wandb.init, threading.Event()

    def slow_init(*args: Any, **arguments: Any) -> Any:
        opened = init(*args, **arguments)
        is_opening.set()
        time.sleep(1.5)
        return opened

    wandb.init = slow_init
    run = dist_wandb.init("tests", id="exp", dir=str(directory), limits={"join_timeout": 2.0})
    run.log({"loss": 0.5}, step=7)
    assert is_opening.wait(SOON)


def open_some(directory: str) -> None:
    """Plain PyTorch on three ranks, of which some open a session, or open it late."""
    dist.init_process_group("gloo")
    rank, into = dist.get_rank(), Path(directory)
    late(into / "late", rank)
    dist.barrier()
    nested(into / "nested", rank)
    for kind, options in (("", {}), ("-alone", {"reduce": None})):
        dist.barrier()  # a rank that opens its session after the others have ended theirs is not the lowest
        if rank:
            ends(into / f"ends{kind}", rank, **options)
    continued(into / "continued", rank)
    dist.barrier()
    left_open(into / "left-open", rank)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """One job of three ranks with all scenarios, and the directory of its runs."""
    directory = tmp_path_factory.mktemp("who-opens")
    commands = torchrun(open_some, directory, processes=3)
    return directory, run_job(*commands, cwd=directory).check()


@pytest.mark.parametrize(
    ("kind", "loss", "writer"), [("ends", 1.5, "1"), ("ends-alone", 1.0, "1"), ("nested", 1.0, "0")]
)
def test_the_lowest_rank_with_a_session_writes_everything_also_if_it_still_opens_that_of_the_enclosing_one(
    job: tuple[Path, Finished], kind: str, loss: float, writer: str
) -> None:
    (directory,) = (job[0] / kind).rglob("offline-run-*-exp")
    found = history(directory)
    assert found.last("loss") == {step: step + loss for step in range(STEPS)}
    assert found.last("text") == dict.fromkeys(range(STEPS), writer)
    assert not found.is_flagged


def test_a_primary_that_comes_too_late_joins_without_a_second_run(job: tuple[Path, Finished]) -> None:
    found = history(job[0] / "late")
    alone, together = range(STEPS), range(STEPS, 2 * STEPS)
    assert found.last("loss") == {**{step: step + 1.5 for step in alone}, **{step: step + 1.0 for step in together}}
    assert found.last("text") == dict.fromkeys([*alone, *together], "1")
    assert not found.is_flagged


def test_a_rank_that_begins_to_write_has_done_so_from_the_start_for_its_script(job: tuple[Path, Finished]) -> None:
    found = history(job[0] / "continued")
    assert [row["global_step"] for row in found.rows] == list(range(STEPS + 3))
    assert found.last("beside") == {STEPS + 1: 1.0}  # logged with wandb's function while the run was opened
    (run,) = dist_wandb.read_runs(job[0] / "continued")
    expected = {"best": 0.25, "again": -1, "after": 2}
    assert {name: run.summary.get(name) for name in expected} == expected
    assert {name: run.config.get(name) for name in ("lr", "written")} == {"lr": 0.1, "written": 1}


def test_a_script_that_ends_while_its_run_is_opened_has_its_rows_in_that_run(job: tuple[Path, Finished]) -> None:
    assert history(job[0] / "left-open").values("loss") == [0.5]
    assert "could not open its run" not in job[1].output


def test_one_line_names_the_rank_that_writes(job: tuple[Path, Finished]) -> None:
    assert job[1].output.count("Pass primary_rank=1 to init on all ranks") == 5  # one for each session
    assert "has not opened a session, so the run has the numbers" not in job[1].output


def of_early_death(directory: Path, rank: int, join: float, finish: float, **environment: str) -> tuple[History, str]:
    """Run a job in which a rank dies before any writes; return the run with the numbers of all, and the output.

    Another run, without a reduction, has the rows of one rank.
    """
    command = torchrun(die_early, directory, str(rank), str(join), str(finish), processes=4)
    environment = clean_environment(**environment)
    finished = run_job(*command, cwd=directory, environment=environment, timeout=150).check()
    combined, own = history(directory / "combined"), history(directory / "own")
    assert own.values("loss") == [step + own.values("loss")[0] for step in range(STEPS)]
    assert not own.is_flagged
    assert f"so rank {own.values('loss')[0]:.0f} writes it" in finished.output
    return combined, finished.output


def test_one_rank_writes_its_rows_if_the_host_of_the_store_ends_before_any_rank_writes(tmp_path: Path) -> None:
    combined, output = of_early_death(tmp_path, 0, 60, 60, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    first = combined.values("loss")[0]
    assert combined.values("loss") == [step + first for step in range(STEPS)]
    assert set(combined.flags("loss").values()) == {3}
    others = {1, 2, 3} - {int(first)}
    assert {rank for rank in (1, 2, 3) if f"what rank {rank} logged" in output} == others


def test_ranks_that_wait_no_longer_write_their_rows_if_the_lowest_has_died(tmp_path: Path) -> None:
    combined, _ = of_early_death(tmp_path, 1, 60, 3)
    assert combined.final("loss") == [step + 2.5 for step in range(STEPS)]
    assert set(combined.flags("loss").values()) == {1}


def test_a_rank_that_dies_before_any_writes_is_missing(tmp_path: Path) -> None:
    combined, output = of_early_death(tmp_path, 2, 5, 20)
    assert combined.final("loss") == [step + 2.0 for step in range(STEPS)]
    assert set(combined.flags("loss").values()) == {1}
    assert "Rank 2 opened a session, but did not take part" in output
    assert {run.id: run.exit_code for run in dist_wandb.read_runs(tmp_path)} == {"combined": 1, "own": 0}


def test_a_restart_continues_the_run_of_a_rank_that_writes_instead_of_the_primary(tmp_path: Path) -> None:
    command = list(torchrun(open_some_again, tmp_path)[0])
    command.insert(command.index("--standalone"), "--max-restarts=1")
    environment = clean_environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    finished = run_job(command, cwd=tmp_path, environment=environment).check()
    files = sorted(tmp_path.rglob("run-*.wandb"))
    assert len({path.name for path in files}) == 1
    assert sorted(row["loss"] for path in files for row in read_history(path)) == list(range(2 * STEPS))
    assert finished.output.count("of an earlier start (restart 1 of torchrun)") == 1


SLOW = {  # run mode, the rank whose first run ends slowly, and in which sessions the ranks log
    "the session before": ("auto", 0, "11"),
    "an earlier session": ("auto", 0, "101"),
    "a run per rank": ("new", 1, "11"),
    "the logger before": ("logger", 0, "11"),
}


@pytest.mark.parametrize(("mode", "slow", "logged"), SLOW.values(), ids=SLOW)
def test_ranks_wait_for_one_that_still_ends(mode: str, slow: int, logged: str, tmp_path: Path) -> None:
    finished = run_job(*torchrun(end_slowly, tmp_path, mode, slow, *logged), cwd=tmp_path).check()
    rows = [[0.5] * int(each) for each in logged] * (2 if mode == "new" else 1)
    assert [history_of(run).values("loss") for run in ended_runs(tmp_path, len(rows))] == rows
    assert "has not opened a session" not in finished.output
