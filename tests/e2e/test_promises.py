"""The exchange's guarantees with real processes: the contents of rows, despite differences between ranks."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from history import STEPS, History, at, history
from lightning_trainers import Layer, trainer_of_two
from processes import Finished, run_job, torchrun, wait_until
from stored import PATIENT
from torch.utils.data import DataLoader

import dist_wandb
from dist_wandb import DistWandbLogger, Limits, Session

Scenario: TypeAlias = Callable[[Session, int], None]
THROUGH = Path("rank-0-is-through")  # a file
SCENARIOS: dict[str, tuple[dict[str, Any], Scenario]] = {}


MANY = 3_000
BEHIND, LAG = 30, 0.15  # rows of scenarios in which a rank is behind now and then, and by how many seconds
Batches = list[list[float]]  # the values of each batch


def loader(batches: Batches) -> DataLoader[torch.Tensor]:
    return DataLoader([torch.tensor(batch) for batch in batches], batch_size=None)  # type: ignore[arg-type]


class Model(Layer):
    """Logs the mean of each batch of the data: `training` and `validation` contain batches by rank."""

    def __init__(self, training: Sequence[Batches], validation: Sequence[Batches]) -> None:
        super().__init__(inputs=1)
        self.training_batches, self.validation_batches = training, validation

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return loader(self.training_batches[self.global_rank])

    def val_dataloader(self) -> Any:
        return loader(self.validation_batches[self.global_rank])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:  # type: ignore[override]
        self.log("loss", batch.mean(), on_step=True, on_epoch=True, batch_size=len(batch))
        self.log(f"only_on_{self.global_rank}", float(batch_idx))
        return super().training_step([batch[:, None]], batch_idx)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # noqa: ARG002  # Lightning passes it
        self.log("val", batch.mean(), on_step=True, on_epoch=True, batch_size=len(batch))
        for reduction in ("sum", "min", "max"):
            self.log(reduction, batch.mean(), reduce_fx=reduction)
        self.log("synced", batch.mean(), reduce_fx="sum", sync_dist=True)


def fit(directory: Path, model: Model, *, epochs: int = 1, prefix: str = "") -> None:
    limits = Limits(heartbeat=PATIENT)
    logger = DistWandbLogger(
        save_dir=str(directory), id="exp", project="tests", offline=True, prefix=prefix, limits=limits
    )
    trainer_of_two(logger, max_epochs=epochs, num_sanity_val_steps=0, use_distributed_sampler=False).fit(model)
    logger.experiment.finish()


def fit_uneven(directory: Path) -> None:
    """Two epochs, with three validation batches on rank 0 and five on rank 1."""
    training: list[Batches] = [[[2.0 * step + rank] * 2 for step in range(2)] for rank in (0, 1)]
    validation: Batches = [[10.0 * index] for index in range(5)]
    fit(directory, Model(training, [validation[:3], validation]), epochs=2)


def fit_weighted(directory: Path) -> None:
    """Rank 0: two samples of value 1, rank 1: one of value 3; in training in one batch, in validation in one each."""
    training: list[Batches] = [[[1.0, 1.0]], [[3.0]]]
    validation: list[Batches] = [[[1.0], [1.0]], [[3.0]]]
    fit(directory, Model(training, validation), prefix="fold")


TRAININGS: tuple[Callable[[Path], None], ...] = (fit_uneven, fit_weighted)


def play_lightning(directory: str) -> None:
    """Lightning on two ranks whose logger calls differ: one Trainer after another, each with its own logger."""
    for scenario in TRAININGS:
        begin = time.monotonic()
        scenario(Path(directory) / scenario.__name__)
        sys.stdout.write(f"\nTOOK {scenario.__name__} {time.monotonic() - begin:.1f}\n")


def scenario(**options: Any) -> Callable[[Scenario], Scenario]:
    def register(function: Scenario) -> Scenario:
        SCENARIOS[function.__name__] = options, function
        return function

    return register


@scenario()
def guarded_without_step(run: Session, rank: int) -> None:
    for step in range(STEPS):
        if rank == 0 and step % 3 == 0:
            run.log({"extra": float(step)})
        if rank == 1 and step % 2 == 0:
            run.log({"extra_on_1": float(step)})
        run.log({"loss": 2.0 * step + rank})


@scenario()
def behind(run: Session, rank: int) -> None:
    """Rank 0 is behind now and then, and logs one more name; the x axis is the user's."""
    run.define_metric("samples")
    run.define_metric("*", step_metric="samples")
    for step in range(BEHIND):
        time.sleep(0.01 + LAG * (rank == 0 and step % 7 == 3))
        own = {"lr": step / 8} if rank == 0 else {}
        run.log({"loss": 2.0 * step + rank, **own, "samples": 10 * step}, step=step)


@scenario(limits=dist_wandb.Limits(peer_timeout=60, heartbeat=1.0))
def sleeper(run: Session, rank: int) -> None:
    """Rank 1 sleeps for many heartbeats, but less than any limit, and until rank 0 has logged all its rows."""
    run.log({"loss": float(rank)}, step=0)
    assert run.flush(timeout=20)
    dist.barrier()
    if rank == 1:
        time.sleep(6.0)
        wait_until(THROUGH.exists, within=30, what="the end of rank 0's loop")
    for step in range(1, STEPS):
        run.log({"loss": 2.0 * step + rank, f"own_{rank}": 1.0}, step=step)
    if rank == 0:
        THROUGH.touch()


@scenario()
def many(run: Session, rank: int) -> None:
    for step in range(MANY):
        run.log({"loss": 2.0 * step + rank, "other": 1.0}, step=step)


def again_and_again(rank: int) -> None:
    """Open sessions in turn; report the resources of this process and the job's store after some and after more."""
    gc.disable()  # so that only objects freed by reference counting are released
    store = dist.distributed_c10d._get_default_store()
    held, keys = [], deque[int](maxlen=5)  # the last three sessions have 10 to 60 keys more
    for number in range(26):
        with dist_wandb.init(
            "tests", id=f"again-{number}", mode="disabled", limits=dist_wandb.Limits(heartbeat=0.05)
        ) as run:
            for step in range(3):
                run.log({"loss": float(step + rank)}, step=step)
        dist.barrier()  # a rank that is sessions behind needs their keys
        keys.append(store.num_keys())
        if number in (5, 25):
            wait_until(lambda: not [t for t in threading.enumerate() if "dist_wandb" in t.name], within=60, what="end")
            dist.barrier()
            open_files, threads = ([*Path(f"/proc/self/{what}").iterdir()] for what in ("fd", "task"))
            held.append((len(open_files), len(threads), min(keys)))
    gc.enable()
    sys.stdout.write(f"\nHELD {rank} {[after - before for before, after in zip(*held, strict=True)]}\n")


def play_plain(directory: str) -> None:
    """Plain PyTorch on two ranks: consecutive sessions, in each of which the ranks behave differently."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name, (options, function) in SCENARIOS.items():
        sys.stdout.write(f"\nBEGIN {name} on rank {rank}\n")
        into = str(Path(directory) / name)
        with dist_wandb.init("tests", id="exp", dir=into, **{"limits": {"heartbeat": PATIENT}, **options}) as run:
            function(run, rank)
        run.finish()  # to no effect
    again_and_again(rank)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """One job of two ranks that runs all scenarios of plain PyTorch, and the directory of its runs."""
    directory = tmp_path_factory.mktemp("plain")
    return directory, run_job(*torchrun(play_plain, directory), cwd=directory).check()


MEANS = {step: 2.0 * step + 0.5 for step in range(STEPS)}  # of 2 * step + rank


def rows_at_steps(**columns: dict[int, Any]) -> list[dict[str, Any]]:
    """Return the rows of calls that log all of these names at the steps at which they have values."""
    steps = sorted({step for values in columns.values() for step in values})
    named = ({name: values[step] for name, values in columns.items() if step in values} for step in steps)
    return [{**row, "global_step": step} for row, step in zip(named, steps, strict=True)]


def test_logs_without_step_are_matched_by_their_count_despite_other_logs(plain: tuple[Path, Finished]) -> None:
    found = history(plain[0] / "guarded_without_step")
    assert found.values("loss") == list(MEANS.values())
    assert found.values("extra") == [0.0, 3.0, 6.0, 9.0]
    assert found.values("extra_on_1") == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    calls_of_0 = [step + 1 + step // 3 for step in range(STEPS)]  # rank 0's earlier calls, including extra ones
    assert [row["global_step"] for row in found.rows_with("loss")] == calls_of_0
    common = [{"loss": MEANS[step], "global_step": calls_of_0[step]} for step in range(STEPS)]
    extra = [{"extra": float(step), "global_step": calls_of_0[step] - 1} for step in range(0, STEPS, 3)]
    extra += [{"extra_on_1": float(step), "global_step": step + step // 2} for step in range(0, STEPS, 2)]
    assert found.unlike([*common, *extra]) == []
    assert not found.is_flagged


def test_with_a_step_each_call_is_one_row_on_the_axis_of_the_user_although_a_rank_is_behind(
    plain: tuple[Path, Finished],
) -> None:
    found = history(plain[0] / "behind")
    calls = [
        {"loss": 2.0 * step + 0.5, "lr": step / 8, "samples": 10 * step, "global_step": step} for step in range(BEHIND)
    ]
    assert found.unlike(calls) == []


def test_thousands_of_rows_in_a_tight_loop_are_complete(plain: tuple[Path, Finished]) -> None:
    found = history(plain[0] / "many")
    assert found.values("loss") == [2.0 * step + 0.5 for step in range(MANY)]
    assert [row["global_step"] for row in found.rows_with("other")] == list(range(MANY))
    columns = {"loss": {step: 2.0 * step + 0.5 for step in range(MANY)}, "other": at(range(MANY), 1)}
    assert found.unlike(rows_at_steps(**columns)) == []
    assert not found.is_flagged


def test_consecutive_sessions_leave_no_resources_behind(plain: tuple[Path, Finished]) -> None:
    """Without Python's cyclic garbage collector. Of 20 sessions one key each remains."""
    lines = plain[1].lines("HELD")
    assert len(lines) == 2
    for line in lines:
        descriptors, threads, keys = json.loads(line.split(" ", 2)[2])
        assert descriptors < 10, line
        assert threads < 5, line
        assert keys < 45, line


def test_a_rank_that_sleeps_does_not_delay_others_and_its_rows_are_correct(plain: tuple[Path, Finished]) -> None:
    """Rank 1 does not continue before rank 0's loop has ended: if `log` waited for it, neither would end."""
    found = history(plain[0] / "sleeper")
    assert found.last("loss") == MEANS
    assert found.written("loss") == Counter(range(STEPS))
    own = {f"own_{rank}": at(range(1, STEPS), 1) for rank in (0, 1)}
    assert found.unlike(rows_at_steps(loss=MEANS, **own)) == []
    assert not found.is_flagged


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the runs of a job of two ranks, one Trainer after another. No rank waits long for another."""
    directory = tmp_path_factory.mktemp("lightning")
    finished = run_job(*torchrun(play_lightning, directory), cwd=directory).check()
    took = [float(line.split()[2]) for line in finished.lines("TOOK ")]
    assert len(took) == 4
    assert max(took) < 45, "a limit is a minute"
    return directory


def lightning_history(directory: Path) -> History:
    return history(directory, "trainer/global_step")


def test_what_lightning_logs_at_once_is_one_row_with_values_of_one_rank_too(lightning: Path) -> None:
    found = lightning_history(lightning / "fit_uneven")
    for step, row in enumerate(found.rows_with("loss_step")):
        own = {"only_on_0": step % 2, "only_on_1": step % 2}
        assert {
            "loss_step": 2.0 * (step % 2) + 0.5,
            **own,
            "epoch": step // 2,
            "trainer/global_step": step,
        }.items() <= row.items()
    assert len(found.rows_with("loss_step")) == 4


def test_lightning_validation_loaders_may_be_uneven(lightning: Path) -> None:
    found = lightning_history(lightning / "fit_uneven")
    of_0, of_1 = [10.0 * batch for batch in range(3)] * 2, [10.0 * batch for batch in range(5)] * 2
    of_both = {step: (a + b) / 2 for step, (a, b) in enumerate(zip(of_0, of_1, strict=False))}
    assert found.last("val_step") == {**dict(enumerate(of_1)), **of_both}
    assert found.final("val_epoch") == [130.0 / 8] * 2
    assert found.last("loss_epoch") == {1: 1.5, 3: 1.5}
    assert not found.is_flagged


def test_lightning_epoch_means_are_those_of_all_samples(lightning: Path) -> None:
    found = lightning_history(lightning / "fit_weighted")
    assert found.final("fold-loss_epoch") == found.final("fold-val_epoch") == [pytest.approx(5 / 3, abs=1e-12)]
    assert found.values("fold-loss_step") == [2.0]


def test_lightning_names_with_another_reduce_fx_have_it_over_ranks_too(lightning: Path) -> None:
    names = ("sum", "min", "max", "synced")
    prefixed, found = lightning_history(lightning / "fit_weighted"), lightning_history(lightning / "fit_uneven")
    assert [prefixed.final(f"fold-{name}") for name in names] == [[5.0], [1.0], [3.0], [5.0]]
    assert [found.values(name) for name in names] == [[130.0] * 2, [0.0] * 2, [40.0] * 2, [130.0] * 2]
