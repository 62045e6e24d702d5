"""If a framework's main process is the last rank, that rank has the role of the first one elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dist_wandb.errors import TopologyError
from dist_wandb.job.model import Leader, Topology
from dist_wandb.session.session import Session
from dist_wandb.settings.plan import RUN_MODES, plan_run

if TYPE_CHECKING:
    from tests.conftest import FakeWandb, OnRanks

MODES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "modes.json").read_text())
THREE = [Topology(rank, rank, 0, 3, 3, 1, leader="last") for rank in range(3)]


def ranks(layout: list[int]) -> list[Topology]:
    return [
        Topology(sum(layout[:node]) + local, local, node, sum(layout), size, len(layout), leader="last")
        for node, size in enumerate(layout)
        for local in range(size)
    ]


@pytest.mark.parametrize("case", MODES, ids=lambda case: f"{case['layout']}-{case['run_mode']}-{case['rank_scope']}")
def test_the_last_rank_of_each_unit_opens_the_runs_of_the_table(case: dict[str, Any]) -> None:
    topologies = ranks(case["ranks_per_node"])
    plans = [plan_run(topology, case["run_mode"], case["rank_scope"], "exp") for topology in topologies]
    expected = {(rank["run_id"], rank["group"]) for rank in case["ranks"] if rank["run_id"]}
    assert {(plan.run_id, plan.group) for plan in plans if plan.run_id} == expected
    assert [plan.label for plan in plans] == [rank["label"] for rank in case["ranks"]]
    by_node = case["rank_scope"] == "worker"
    for topology, plan in zip(topologies, plans, strict=True):
        size = topology.local_world_size if by_node else topology.world_size
        is_last = (topology.local_rank if by_node else topology.global_rank) == (size or 0) - 1
        assert plan.announces is is_last
        assert plan.primary is (is_last or plan.run_mode == "new")
        assert plan.opens_run is (is_last or plan.run_mode != "auto")


def test_hardware_of_a_node_is_recorded_by_its_last_rank() -> None:
    plans = [plan_run(topology, "auto", "global", "exp", all_nodes=True) for topology in ranks([2, 2])]
    assert [plan.hardware for plan in plans] == [None, "worker-0", None, "worker-1"]
    assert [plan.attaches for plan in plans] == [False, True, False, False]


@pytest.mark.parametrize("mode", RUN_MODES)
@pytest.mark.parametrize("leader", ["first", "last"])
def test_a_node_of_unknown_size_is_no_unit(mode: str, leader: Leader) -> None:
    unknown = Topology(5, 1, 1, 8, None, 2, leader=leader)
    with pytest.raises(TopologyError, match="needs the local_world_size of rank 5 of 8"):
        plan_run(unknown, mode, "worker", "exp")


def test_a_label_needs_no_size_of_a_node_unless_its_last_rank_leads() -> None:
    unknown = Topology(5, 1, 1, 8, None, 2)
    assert plan_run(unknown, "shared", "global", "exp").label == "worker-1-rank-1"
    with pytest.raises(TopologyError, match="needs the local_world_size"):
        plan_run(replace(unknown, leader="last"), "shared", "global", "exp")


def test_a_job_is_described_led_and_ended_by_the_last_rank(
    job: Callable[..., list[Session]], on_ranks: OnRanks, fake_wandb: FakeWandb
) -> None:
    arguments: list[dict[str, Any]] = [{"name": f"of-{rank}", "config": {"from": rank}} for rank in range(3)]
    sessions = job(THREE, lambda rank: arguments[rank], spread=True, config_sync="off")
    for rank, session in enumerate(sessions):
        session.log({"loss": float(rank)}, step=1)
    assert [session.config["from"] for session in sessions] == [2] * 3
    assert on_ranks(3, lambda rank: sessions[rank].flush()) == [True] * 3
    sessions[0].fail(3)
    for session in sessions:
        session.finish()
    (run,) = fake_wandb.runs
    assert (run.name, run.exit_codes) == ("of-2", [3])
    assert [session.id for session in sessions] == [run.id] * 3
    written = {name: value for row in run.rows for name, value in row.items()}
    assert (written["loss"], written["loss/max"], written["loss/argmax_rank"]) == (1.0, 2.0, 2)
