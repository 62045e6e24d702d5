"""Histograms of `watch` are in the rows in which wandb alone writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from history import history_of
from processes import clean_environment, python, run_job, torchrun
from stored import ended_runs

HOW = ["steps", "counted", "axis"]
WRITERS = {"auto": 1, "shared": 2, "new": 2, "unreduced": 1, "alone": 1, "stock": 1}
ARGUMENTS: dict[str, dict[str, Any]] = {
    **{mode: {"run_mode": mode} for mode in ("auto", "shared", "new")},
    "unreduced": {"reduce": None},
}


def watch(*kinds: str) -> None:
    """Watch gradients, each the number of its step, in a run of its own for each kind and way of logging."""
    if kinds == ("stock",):
        import wandb as module
    else:
        import dist_wandb as module  # type: ignore[no-redef]

        if kinds != ("alone",):
            dist.init_process_group("gloo")
    wandb: Any = module
    for kind in kinds:
        for how in ("steps", "counted", "axis"):
            model = torch.nn.Linear(1, 1, bias=False)
            wandb.init(project="p", dir=f"{kind}/{how}", **ARGUMENTS.get(kind, {}))
            wandb.watch(model, log="gradients", log_freq=1)
            for step in range(1, 9):
                for _ in range(2):  # two backward passes for each call
                    model.zero_grad()
                    (model(torch.ones(1, 1)) * step).sum().backward()
                axis = {"global_step": step} if how == "axis" else {}
                wandb.log({"loss": float(step), **axis}, **({"step": step} if how == "steps" else {}))
            wandb.unwatch(model)
            wandb.finish()
    if dist.is_initialized():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        sharded: Any = torch.nn.Sequential(torch.nn.Linear(1, 4, bias=False))
        with torch.no_grad():
            sharded[0].weight.copy_(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
        for part in (sharded[0], sharded):
            fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
        wandb.init(project="p", dir="sharded")
        wandb.watch(sharded, log="all", log_freq=1)
        sharded(torch.ones(1, 1)).sum().backward()
        wandb.log({"loss": 1.0})
        wandb.finish()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("watched")
    *kinds, alone, stock = WRITERS
    for kind in WRITERS:
        for how in HOW:
            (directory / kind / how).mkdir(parents=True)
    (directory / "sharded").mkdir()
    for commands in python(watch, alone), python(watch, stock), torchrun(watch, *kinds):
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
