"""Real processes, strategies and wandb, offline: the runs on disk afterwards match the policy's test vectors."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from history import history_of
from processes import Finished, clean_environment, run_job, torchrun
from stored import COMBINATIONS, ROWS, check_runs, display_name, ended_runs, vector

SCRIPTS = Path(__file__).parent / "scripts"
SUPPORT = Path(__file__).parents[1] / "support"


def environment() -> dict[str, str]:
    return clean_environment(PYTHONPATH=str(SUPPORT))


def run(*commands: list[str | Path], cwd: Path, timeout: float = 240) -> Finished:
    return run_job(*commands, cwd=cwd, environment=environment(), timeout=timeout).check()


PLAIN_STEPS = {"global_step": ROWS - 1}
LIGHTNING_STEPS = {"trainer/global_step": ROWS}  # the step of the row that trainer.test adds


def check_all_combinations(directory: Path, layout: str, last_step: Mapping[str, int] = PLAIN_STEPS) -> None:
    for run_mode, rank_scope in COMBINATIONS:
        ranks = vector(layout, run_mode, rank_scope)
        check_runs(directory / f"{run_mode}-{rank_scope}", ranks, last_step=last_step)


def check_generated_ids(finished: Finished, directory: Path, world_size: int) -> None:
    seen = [json.loads(line.removeprefix("SAW ")) for line in finished.lines("SAW ")]
    assert sorted(fact["rank"] for fact in seen) == list(range(world_size))
    (base_id,) = {fact["base_id"] for fact in seen}
    ids = {stored.run_id for stored in ended_runs(directory / "generated", world_size)}
    assert ids == {f"{base_id}-rank-{rank}" for rank in range(world_size)}


def test_plain_pytorch_on_two_nodes(tmp_path: Path) -> None:
    """For other launchers, and for sessions opened before the process group, see test_launchers.py."""
    finished = run(*torchrun(SCRIPTS / "plain_loop.py", tmp_path, "after", nodes=2), cwd=tmp_path)
    check_all_combinations(tmp_path, "2x2")
    check_generated_ids(finished, tmp_path, 4)
    check_announcements(finished)


def test_ranks_share_a_run_before_and_after_their_process_group(tmp_path: Path) -> None:
    finished = run(*torchrun(SCRIPTS / "meet_late.py", tmp_path), cwd=tmp_path)
    (run_id,) = {stored.run_id for stored in ended_runs(tmp_path, 2)}
    assert finished.lines("SAW ") == [f"SAW {run_id}"] * 2


def check_announcements(finished: Finished) -> None:
    """Check that each unit prints one line: one for the job in global scope, one for each node in worker scope."""
    lines = finished.lines("dist_wandb: run_mode=")
    job_lines = len([scope for _, scope in COMBINATIONS if scope == "global"]) + 1  # and the run with a generated id
    node_lines = len([scope for _, scope in COMBINATIONS if scope == "worker"]) * 2
    assert len(lines) == job_lines + node_lines
    assert all("4 ranks on 2 nodes" in line and "(offline, " in line for line in lines)
    # At the end of each shared run one line, and no lines of W&B, which would be wrong there.
    uploads = [line.partition("dist-wandb sync ")[2] for line in finished.lines("dist_wandb: the run ")]
    assert len(uploads) == 3
    assert len(finished.lines("dist_wandb: ")) == len(lines) + len(uploads)
    shared = {directory for directory in uploads if directory}
    assert not [
        line for line in finished.output.splitlines() if "wandb: wandb sync" in line for d in shared if d in line
    ]


# For the other modes see test_lightning_everything.py.


def test_lightning_ddp_fit_then_test_is_one_run(tmp_path: Path) -> None:
    finished = run([sys.executable, SCRIPTS / "fit_and_test.py", str(tmp_path), "ddp", "auto", "global"], cwd=tmp_path)
    check_lightning(finished, tmp_path, "auto")


def test_lightning_ddp_spawn_fit_then_test(tmp_path: Path) -> None:
    """The new processes of each stage open runs of the same ids again."""
    command: list[str | Path] = [sys.executable, SCRIPTS / "fit_and_test.py", str(tmp_path), "ddp_spawn", "shared"]
    finished = run([*command, "worker"], cwd=tmp_path)
    check_lightning(finished, tmp_path, "shared", openings=2)


def check_lightning(finished: Finished, directory: Path, run_mode: str, openings: int = 1) -> None:
    """Check the ids seen by the ranks, that each row of fit and test exists once, and that one line was printed."""
    assert finished.output.count("dist_wandb: run_mode=") == 1
    ranks = [rank for rank in vector("1x2", run_mode, "global") if rank["opens_run"]]
    stored = ended_runs(directory, openings * len(ranks))
    assert {found.run_id for found in stored} == {rank["run_id"] for rank in ranks}
    for rank in ranks:
        prefix = f"{rank['label']}/" if rank["shared"] else ""
        mine = [
            found
            for found in stored
            if found.run_id == rank["run_id"] and (not prefix or f"rank-{rank['global_rank']}" in str(found.path))
        ]
        assert sum(found.metrics[f"{prefix}loss"].count for found in mine if f"{prefix}loss" in found.metrics) == ROWS
        assert sum(found.metrics[f"{prefix}tested"].count for found in mine if f"{prefix}tested" in found.metrics) == 1
        assert {found.name for found in mine} == {display_name(rank, "nm")}
        assert all(found.config["lr"] == 0.1 for found in mine)
    for stage in ("fit", "test"):
        for rank in vector("1x2", run_mode, "global"):
            run_id = rank["run_id"] or "exp"
            assert f"{stage} rank {rank['global_rank']} run {rank['opens_run']} id {run_id}" in finished.output


def test_lightning_experiment_used_early_opens_the_run_of_the_job(tmp_path: Path) -> None:
    finished = run([sys.executable, SCRIPTS / "early_experiment.py", str(tmp_path), "auto"], cwd=tmp_path)
    (stored,) = ended_runs(tmp_path, 1)
    assert {name: stored.config[name] for name in ("lr", "width", "bias")} == {"lr": 0.1, "width": 8, "bias": True}
    assert stored.metrics["loss"].count == ROWS
    files = str(stored.path.parent / "files")
    about = [stored.run_id, "tests", "nm", "g", ("a",), "train", f"tests/{stored.run_id}", files]
    assert finished.lines("EARLY ") == [f"EARLY {[0.1, 8, True, 3, *about]}"] * 2  # both ranks train alike
    for rank in (0, 1):
        assert f"fit rank {rank} run {rank == 0} id {stored.run_id}\n" in finished.output


def test_lightning_after_an_init_before_fit_has_that_run_alone(tmp_path: Path) -> None:
    finished = run([sys.executable, SCRIPTS / "init_before_fit.py", str(tmp_path)], cwd=tmp_path)
    (stored,) = ended_runs(tmp_path, 1)
    history = history_of(stored, "trainer/global_step")
    assert (history.values("rank"), history.values("after")) == ([0.5] * 3, [1.5])
    assert (stored.config["width"], history.is_flagged) == (3, False)
    assert "Traceback" not in finished.output
    assert not [line for line in finished.lines("dist_wandb: ") if "run_mode=auto" not in line]


def test_lightning_experiment_used_too_early_for_the_mode_ends_all_ranks(tmp_path: Path) -> None:
    command: list[str | Path] = [sys.executable, SCRIPTS / "early_experiment.py", str(tmp_path), "new"]
    finished = run_job(command, cwd=tmp_path, environment=environment(), timeout=240)
    assert finished.exit_codes == (1,)
    assert "was opened by logger.experiment before the Trainer started its processes" in finished.output
    assert "Use logger.experiment from setup() on" in finished.output


def test_lightning_on_two_nodes(tmp_path: Path) -> None:
    run(*torchrun(SCRIPTS / "lightning_loop.py", tmp_path, 2, nodes=2), cwd=tmp_path, timeout=240)
    check_all_combinations(tmp_path, "2x2", LIGHTNING_STEPS)


@pytest.mark.parametrize(
    ("how", "where", "nodes"), [("attach", "everywhere", 1), ("name", "main", 1), ("instance", "everywhere", 2)]
)
def test_accelerate(tmp_path: Path, how: str, where: str, nodes: int) -> None:
    """For trackers by instance, on one node, see test_accelerate.py."""
    run(*torchrun(SCRIPTS / "accelerate_loop.py", tmp_path, how, where, nodes=nodes), cwd=tmp_path)
    check_all_combinations(tmp_path, f"{nodes}x2")
