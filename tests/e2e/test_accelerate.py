"""Accelerate as published scripts use it, by each of its launchers: the data that reaches the server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from processes import free_port, python, run_job
from wandb_records import RecordedRun, column
from wandb_server import WandbServer

SCRIPTS = Path(__file__).parent / "scripts"
STEPS = 4
BEHIND = {f"behind-{turn}-rank-{rank}": {0: 10.0 * turn + rank} for turn in (0, 1) for rank in (0, 1)}
OPENED_BEFORE = ("ours", "ours_main", "wandbs")
DEGRADED = "dist_wandb/degraded"


def run(server: WandbServer, directory: Path, *commands: list[str | Path]) -> None:
    run_job(*commands, cwd=directory, environment=server.environment(directory, WANDB_CONSOLE="wrap")).check()


def writes(recorded: RecordedRun, name: str) -> int:
    """Return the number of rows with a value of a name."""
    return sum(name in row for row in recorded.rows)


@pytest.fixture(scope="module")
def idioms(tmp_path_factory: pytest.TempPathFactory) -> WandbServer:
    """Return the runs of a job of two ranks by `accelerate launch` that executes all idioms."""
    directory = tmp_path_factory.mktemp("idioms")
    options = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    launch = [sys.executable, "-m", "accelerate.commands.launch", *options, f"--main_process_port={free_port()}"]
    with WandbServer() as server:
        run(server, directory, [*launch, SCRIPTS / "accelerate_idioms.py", directory])
    assert server.unknown == []
    return server


def test_every_idiom_gives_one_successful_run(idioms: WandbServer) -> None:
    codes = {key.rpartition("/")[2]: recorded.exit_codes for key, recorded in idioms.runs.items()}
    names = ("diffusers", "main_alone", "megatron", *OPENED_BEFORE, "turn-0", "turn-1", "turn-2", *BEHIND, "ended")
    assert codes == {name: [0] for name in names}
    assert [name for name in codes if name != "main_alone" and column(idioms.run(name), DEGRADED)] == []


def test_trackers_initialised_on_the_main_process_only_cover_all_ranks(idioms: WandbServer) -> None:
    recorded = idioms.run("diffusers")
    assert column(recorded, "train_loss") == {1: 1.0, 2: 3.0, 3: 5.0, 4: 7.0}  # gathered already: equal on all ranks
    assert column(recorded, "own") == dict.fromkeys(range(2 * STEPS), 0.5)
    assert STEPS <= writes(recorded, "train_loss") <= STEPS + 1  # the first row is written twice if a rank joins late


def test_logs_guarded_by_the_tracker_name_wandb_are_written(idioms: WandbServer) -> None:
    recorded = idioms.run("diffusers")
    shown = column(recorded, "validation")
    assert {step: (value["_type"], value["count"]) for step, value in shown.items()} == dict.fromkeys(
        range(1, STEPS + 1), ("html", 1)
    )
    assert column(recorded, "score") == dict.fromkeys(range(1, STEPS + 1), 0.5)
    assert column(recorded, "by_name") == {step: [step] for step in range(1, STEPS + 1)}


def test_a_run_of_the_main_process_only_has_its_numbers_without_a_mark(idioms: WandbServer) -> None:
    recorded = idioms.run("main_alone")
    assert (column(recorded, "loss"), column(recorded, DEGRADED)) == ({1: 1.0}, {}), "no other rank opened a session"


def test_with_megatron_the_last_rank_is_the_primary(idioms: WandbServer) -> None:
    recorded = idioms.run("megatron")
    assert recorded.config == {"from": 1}
    of_primary, of_other = sorted(recorded.writers.values(), key=lambda writer: "loss" not in writer.rows[0])
    assert [row["loss"] for row in of_primary.rows] == [step + 1.0 for step in range(STEPS)]
    assert {"rank-1/loss" in row for row in of_primary.rows} == {True}
    assert [row["rank-0/loss"] for row in of_other.rows] == [float(step) for step in range(STEPS)]
    assert (of_primary.completions, of_other.completions) == (1, 0)


def test_a_tracker_finished_on_the_main_process_only_ends_the_run_for_the_other_ranks(idioms: WandbServer) -> None:
    turns = [column(idioms.run(f"turn-{turn}"), "loss") for turn in range(3)]
    assert turns == [{0: 0.5}, {0: 10.5}, {0: 20.5}]


def test_all_ranks_log_to_a_run_that_the_main_process_has_opened_by_init(idioms: WandbServer) -> None:
    assert [column(idioms.run(name), "loss") for name in OPENED_BEFORE] == [{0: 0.5}, {0: 10.5}, {0: 20.5}]


def test_a_rank_that_is_behind_writes_its_own_run_of_each_turn(idioms: WandbServer) -> None:
    assert {name: column(idioms.run(name), "loss") for name in BEHIND} == BEHIND


def test_end_training_does_not_require_wait_for_everyone(idioms: WandbServer) -> None:
    assert column(idioms.run("ended"), "loss") == {0: 0.5}


def test_runs_are_complete_without_end_training_in_launched_functions(
    wandb_server: WandbServer, tmp_path: Path
) -> None:
    run(wandb_server, tmp_path, *python(SCRIPTS / "accelerate_launched.py", tmp_path))
    for name in ("debug", "notebook"):
        recorded = wandb_server.run(name)
        assert recorded.exit_codes == [0]
        assert column(recorded, "loss") == {step: step + 5.0 for step in range(STEPS)}
        for rank in (0, 1):
            assert column(recorded, f"rank-{rank}/loss") == {step: 10.0 * rank + step for step in range(STEPS)}
            assert (tmp_path / f"saw-{name}-{rank}").read_text() == f"{name} rank {rank} of 2 on 1 node"
