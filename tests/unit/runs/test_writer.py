"""The rows that a writer writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from opened_runs import FIRST, SECOND, opened

from dist_wandb.runs import axes
from dist_wandb.runs.null_run import NullRun
from dist_wandb.runs.writer import RunWriter
from dist_wandb.settings.plan import RunPlan, plan_run
from dist_wandb.topology.model import Topology

if TYPE_CHECKING:
    from tests.conftest import FakeWandb


pytestmark = pytest.mark.usefixtures("bare_environment")


class Recorder:
    """A run that only records calls of `log`."""

    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def log(self, row: dict[str, Any], **kwargs: Any) -> None:
        self.calls.append((row, kwargs))


def plan_of(topology: Topology, mode: str) -> RunPlan:
    return plan_run(topology, mode, "global", "exp")


def written(
    plan: RunPlan,
    metrics: dict[str, Any],
    step: int | None = 7,
    *,
    step_metric: str | None = "global_step",
    commit: bool | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    run: Any = Recorder()
    RunWriter(run, plan, step_metric).write(metrics, step, commit=commit)
    (call,) = run.calls
    return call  # type: ignore[no-any-return]  # a Recorder


PLAIN = plan_of(FIRST, "new")


def test_a_row_has_its_step_and_the_logged_mapping_is_not_changed() -> None:
    metrics = {"loss": 0.5}
    assert written(PLAIN, metrics) == ({"loss": 0.5, "global_step": 7}, {})
    assert metrics == {"loss": 0.5}


def test_without_a_step_or_a_step_metric_the_row_has_no_x_axis() -> None:
    assert "global_step" not in written(PLAIN, {"loss": 0.5}, None)[0]
    assert not {"global_step", None} & set(written(PLAIN, {"loss": 0.5}, 7, step_metric=None)[0])


def test_an_x_axis_among_the_metrics_stays_in_the_row() -> None:
    assert written(PLAIN, {"loss": 0.5, "global_step": 3}, None)[0] == {"loss": 0.5, "global_step": 3}


@pytest.mark.parametrize("commit", [True, False, None])
def test_commit_is_passed_only_if_it_was_given(commit: bool | None) -> None:
    assert written(PLAIN, {"loss": 0.5}, commit=commit)[1] == ({} if commit is None else {"commit": commit})


def test_a_rank_without_a_run_writes_nothing() -> None:
    RunWriter(NullRun(), plan_of(SECOND, "auto"), "global_step").write({"loss": 0.5}, 7)


def test_every_writer_defines_the_same_x_axis(fake_wandb: FakeWandb) -> None:
    for topology in (FIRST, SECOND):
        axes.define_step_metric(opened(topology, "shared", {}), "global_step")
    assert [run.defined for run in fake_wandb.runs] == [
        [("global_step", {}), ("*", {"step_metric": "global_step", "step_sync": False})]
    ] * 2
