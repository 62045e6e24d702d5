"""The Hugging Face Trainer under torchrun, in typical scripts: the data that reaches W&B."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from processes import run_job, torchrun
from wandb_records import RecordedRun, column
from wandb_server import WandbServer

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WandbServer]:
    """The runs of one job of two ranks that trains several times."""
    directory = tmp_path_factory.mktemp("trainings")
    with WandbServer() as server:
        job = torchrun(SCRIPTS / "trainer_runs.py", directory / "out")
        run_job(*job, cwd=directory, environment=server.environment(directory)).check()
        yield server
    assert server.unknown == []


series = partial(column, x="train/global_step")


def named(server: WandbServer, name: str) -> list[RecordedRun]:
    """Return the runs of a training, and check that all ended well and have the config of model and training."""
    runs = [run for run in server.runs.values() if (run.display_name or "").startswith(name)]
    for run in runs:
        assert run.exit_codes == [0]
        assert (run.config["hidden_size"], run.config["max_steps"]) == (8, 3)
    return runs


@pytest.mark.parametrize("name", ["name", "adopt", "guarded"])
def test_own_numbers_become_means_and_the_trainers_are_unchanged(server: WandbServer, name: str) -> None:
    (run,) = named(server, name)
    assert (run.run_id in ("users", "of_session")) is (name != "name")
    assert series(run, "train/mine") == {1: 0.5, 2: 0.5, 3: 0.5}
    assert list(series(run, "train/loss")) == [1, 2, 3]
    assert list(series(run, "eval/loss")) == [2, 3]


def test_values_reduced_by_the_trainer_are_not_summed_again(server: WandbServer) -> None:
    (run,) = named(server, "sums")
    assert series(run, "train/mine") == {1: 1.0, 2: 1.0, 3: 1.0}
    assert series(run, "rank-1/train/mine") == {1: 1.0, 2: 1.0, 3: 1.0}
    assert series(run, "train/epoch") == {1: 0.125, 2: 0.25, 3: 0.375}
    assert all(loss < 2 for loss in series(run, "train/loss").values())


def test_each_rank_has_its_own_run(server: WandbServer) -> None:
    assert sorted(series(run, "train/mine")[3] for run in named(server, "new")) == [0.0, 1.0]
