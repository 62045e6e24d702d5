"""The exchange's guarantees with real processes: the contents of rows, despite differences between ranks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from history import BEHIND, MANY, STEPS, History, at, history
from processes import Finished, run_job, torchrun

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """One job of two ranks that runs all scenarios of plain PyTorch, and the directory of its runs."""
    directory = tmp_path_factory.mktemp("plain")
    return directory, run_job(*torchrun(SCRIPTS / "promises_plain.py", directory), cwd=directory).check()


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
    finished = run_job(*torchrun(SCRIPTS / "promises_lightning.py", directory), cwd=directory).check()
    took = [float(line.split()[2]) for line in finished.lines("TOOK ")]
    assert len(took) == 6
    assert max(took) < 45, "a limit is a minute"
    return directory


def lightning_history(directory: Path) -> History:
    return history(directory, "trainer/global_step")


def test_lightning_values_logged_on_one_rank_are_written(lightning: Path) -> None:
    found = lightning_history(lightning / "guarded")
    assert found.last("loss_step") == {step: 2.0 * step + 0.5 for step in range(8)}
    assert found.last("only_on_0") == found.last("only_on_1") == {step: float(step) for step in range(8)}
    assert found.last("guarded") == {step: 10.0 + step for step in range(8)}
    for step, row in enumerate(found.rows_with("loss_step")):
        whole = {"loss_step": 2.0 * step + 0.5, "only_on_0": step, "only_on_1": step, "guarded": 10 + step, "epoch": 0}
        assert whole.items() <= row.items(), "all that Lightning logs at once is one row"
    assert not found.is_flagged


def test_lightning_validation_loaders_may_be_uneven(lightning: Path) -> None:
    found = lightning_history(lightning / "uneven")
    of_0, of_1 = [10.0 * batch for batch in range(3)] * 2, [10.0 * batch for batch in range(5)] * 2
    of_both = {step: (a + b) / 2 for step, (a, b) in enumerate(zip(of_0, of_1, strict=False))}
    assert found.last("val_step") == {**dict(enumerate(of_1)), **of_both}
    assert found.final("val_epoch") == [130.0 / 8] * 2
    assert found.last("loss_epoch") == {1: 1.0, 3: 1.0}
    assert not found.is_flagged


def test_lightning_epoch_means_are_those_of_all_samples(lightning: Path) -> None:
    found = lightning_history(lightning / "weighted")
    assert found.final("fold-loss_epoch") == found.final("fold-val_epoch") == [pytest.approx(5 / 3, abs=1e-12)]
    assert found.values("fold-loss_step") == [2.0]


def test_lightning_names_with_another_reduce_fx_have_it_over_ranks_too(lightning: Path) -> None:
    names = ("sum", "min", "max", "synced")
    prefixed, found = lightning_history(lightning / "weighted"), lightning_history(lightning / "uneven")
    assert [prefixed.final(f"fold-{name}") for name in names] == [[5.0], [1.0], [3.0], [5.0]]
    assert [found.values(name) for name in names] == [[130.0] * 2, [0.0] * 2, [40.0] * 2, [130.0] * 2]
