"""If a framework's main process is the last rank, that rank has the role of the first one elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dist_wandb.errors import TopologyError
from dist_wandb.job.model import Topology
from dist_wandb.settings.plan import RUN_MODES, plan_run

if TYPE_CHECKING:
    pass

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
def test_a_node_of_unknown_size_is_no_unit(mode: str) -> None:
    unknown = Topology(5, 1, 1, 8, None, 2)
    for topology in (unknown, replace(unknown, leader="last")):
        with pytest.raises(TopologyError, match="needs the local_world_size of rank 5 of 8"):
            plan_run(topology, mode, "worker", "exp")
    assert plan_run(unknown, "shared", "global", "exp").label == "worker-1-rank-1"
