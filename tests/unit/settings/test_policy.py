"""Which ranks open which runs: invariants for any layout of ranks over nodes; `test_cli.py` has the table."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_wandb.errors import ConfigurationError, TopologyError
from dist_wandb.job.topology import Topology
from dist_wandb.settings.plan import (
    RANK_SCOPES,
    RUN_MODES,
    RunMode,
    RunPlan,
    needs_layout,
    plan_run,
    unit_run_id,
)

Planned = list[tuple[Topology, RunPlan]]

TABLE: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "modes.json").read_text())


layouts = st.lists(st.integers(1, 8), min_size=1, max_size=6)
several_ranks = layouts.filter(lambda layout: sum(layout) > 1)
modes = st.sampled_from(RUN_MODES)
scopes = st.sampled_from(RANK_SCOPES)
ids = st.text("abz059-_.", min_size=1, max_size=8)
groups = st.none() | ids


def ranks(layout: list[int], primary: int | None = None) -> list[Topology]:
    """Return all ranks of a job; `layout` has the number of ranks of each node."""
    places = [(node, local_rank) for node, size in enumerate(layout) for local_rank in range(size)]
    return [
        Topology(rank, local_rank, node, len(places), layout[node], len(layout)).led_by(primary)
        for rank, (node, local_rank) in enumerate(places)
    ]


def plan_all(layout: list[int], mode: str, scope: str) -> Planned:
    return [(rank, plan_run(rank, mode, scope, "exp")) for rank in ranks(layout)]


# --- invariants for any layout ----------------------------------------------------------------------------------------


@given(modes, scopes, st.none() | ids, groups)
def test_a_world_of_one_is_always_one_ordinary_run(
    mode: str, scope: str, base_id: str | None, group: str | None
) -> None:
    plan = plan_run(Topology.single(), mode, scope, base_id, group=group)
    assert (plan.opens_run, plan.run_id, plan.group, plan.primary) == (True, base_id, group, True)
    assert (plan.shared, plan.label, plan.name_suffix, plan.own_directory) == (False, None, "", False)


@given(several_ranks, modes, scopes)
def test_several_runs_have_different_names(layout: list[int], mode: str, scope: str) -> None:
    opened = [plan for _, plan in plan_all(layout, mode, scope) if plan.opens_run]
    assert len({plan.name_suffix for plan in opened}) == len({plan.run_id for plan in opened})


# --- required information ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "mode", "scope"),
    [(0, "auto", "global"), (2, "auto", "worker"), (1, "shared", "global"), (3, "new", "worker")],
)
def test_a_plan_without_the_base_id_it_needs_is_refused(rank: int, mode: str, scope: str) -> None:
    message = f"run_mode='{mode}' makes the run id of rank {rank} from a base id, but none was given"
    with pytest.raises(ConfigurationError, match=message):
        plan_run(ranks([2, 2])[rank], mode, scope, None)


NO_NODES, NO_NODE = Topology(1, 1, None, 4, 2, None), Topology(1, 1, None, 4, 2, 2)
NO_LOCAL_RANK, NO_SIZE = Topology(3, None, 1, 6, 2, 3), Topology(5, 1, 1, 8, None, 2)
NO_LAYOUT = Topology(1, None, None, 4, None, None)


@pytest.mark.parametrize(
    ("topology", "mode", "scope", "needed"),
    [
        *((NO_NODES, mode, "worker", "num_nodes of rank 1 of 4 (given)") for mode in RUN_MODES),
        *((NO_NODE, mode, "worker", "node_rank of rank 1") for mode in RUN_MODES),
        (NO_LOCAL_RANK, "shared", "global", "local_rank of rank 3 of 6"),
        *((NO_LOCAL_RANK, mode, "worker", "local_rank of rank 3 of 6") for mode in RUN_MODES),
        *((NO_SIZE, mode, "worker", "local_world_size of rank 5 of 8") for mode in RUN_MODES),
        *((NO_SIZE.led_by(-1), mode, "worker", "local_world_size of rank 5 of 8") for mode in RUN_MODES),
        (NO_LAYOUT, "auto", "all nodes", "num_nodes of rank 1"),
    ],
)
def test_a_place_that_is_needed_and_unknown_is_not_guessed(
    topology: Topology, mode: str, scope: str, needed: str
) -> None:
    where = "global" if scope == "all nodes" else scope
    with pytest.raises(TopologyError, match=re.escape(f"needs the {needed}")) as refused:
        plan_run(topology, mode, where, "exp", all_nodes=where != scope)
    assert "Initialise torch.distributed" in str(refused.value)


def test_a_node_of_unknown_size_has_labels() -> None:
    assert plan_run(NO_SIZE, "shared", "global", "exp").label == "worker-1-rank-1"


@pytest.mark.parametrize("mode", ["auto", "new"])
def test_the_global_rank_alone_is_enough_for_global_scope(mode: RunMode) -> None:
    assert needs_layout(NO_LAYOUT, "auto", "global", all_nodes=True)
    assert not needs_layout(NO_LAYOUT, mode, "global")
    assert plan_run(NO_LAYOUT, mode, "global", "exp").run_id == (None if mode == "auto" else "exp-rank-1")


# --- the last rank leads, as under Megatron-LM ------------------------------------------------------------------------


@pytest.mark.parametrize("case", TABLE, ids=lambda case: f"{case['layout']}-{case['run_mode']}-{case['rank_scope']}")
def test_the_last_rank_of_each_unit_opens_the_runs_of_the_table(case: dict[str, Any]) -> None:
    topologies = ranks(case["ranks_per_node"], primary=-1)
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
    plans = [plan_run(topology, "auto", "global", "exp", all_nodes=True) for topology in ranks([2, 2], primary=-1)]
    assert [plan.hardware for plan in plans] == [None, "worker-0", None, "worker-1"]
    assert [plan.attaches for plan in plans] == [False, True, False, False]


# --- a job that a sweep's agent has started ---------------------------------------------------------------------------


@given(layouts, modes, scopes, st.data())
def test_only_the_run_of_the_jobs_primary_is_the_trial(
    layout: list[int], mode: str, scope: str, data: st.DataObject
) -> None:
    topologies = ranks(layout, data.draw(st.integers(-1, sum(layout) - 1)))
    alone = [plan_run(topology, mode, scope, "t7") for topology in topologies]
    plans = [plan_run(topology, mode, scope, "t7", in_sweep=True) for topology in topologies]
    before, now = (list(map(unit_run_id, of)) for of in (alone, plans))
    renamed = before[topologies[0].coordinator]
    assert now == ["t7" if run_id == renamed else run_id for run_id in before]
    assert [plan.is_trial for plan in plans] == [run_id == renamed for run_id in before]
    assert [replace(plan, run_id=None, is_trial=False) for plan in plans] == [
        replace(plan, run_id=None) for plan in alone
    ]
