"""Which ranks open which runs, for any layout of ranks over nodes and any mesh; `cli/test_cli.py` has the table."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import Limit

from dist_wandb.errors import ConfigurationError, TopologyError
from dist_wandb.job.topology import Topology
from dist_wandb.job.units import ranks_along
from dist_wandb.settings import plan as plans
from dist_wandb.settings.options import Options
from dist_wandb.settings.plan import (
    RANK_SCOPES,
    RUN_MODES,
    needs_layout,
    plan_run,
    too_large,
    unit_of,
    unit_run_id,
)

TABLE: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "modes.json").read_text())

layouts = st.lists(st.integers(1, 8), min_size=1, max_size=6)
modes = st.sampled_from(RUN_MODES)
scopes = st.sampled_from(RANK_SCOPES)
ids = st.none() | st.text("abz059-_.", min_size=1, max_size=8)


def ranks(layout: list[int], primary: int | None = None) -> list[Topology]:
    """Return all ranks of a job; `layout` has the number of ranks of each node."""
    places = [(node, local_rank) for node, size in enumerate(layout) for local_rank in range(size)]
    return [
        Topology(rank, local_rank, node, len(places), layout[node], len(layout)).led_by(primary)
        for rank, (node, local_rank) in enumerate(places)
    ]


@given(modes, scopes, ids, ids)
def test_a_world_of_one_is_always_one_ordinary_run(
    mode: str, scope: str, base_id: str | None, group: str | None
) -> None:
    plan = plan_run(Topology.single(), mode, scope, base_id, group=group)
    assert (plan.opens_run, plan.run_id, plan.group, plan.primary) == (True, base_id, group, True)
    assert (plan.shared, plan.label, plan.name_suffix, plan.own_directory) == (False, None, "", False)


@given(layouts, modes, scopes, st.data())
def test_runs_have_different_names_and_only_that_of_the_jobs_primary_is_a_sweeps_trial(
    layout: list[int], mode: str, scope: str, data: st.DataObject
) -> None:
    topologies = ranks(layout, data.draw(st.integers(-1, sum(layout) - 1)))
    alone = [plan_run(topology, mode, scope, "t7") for topology in topologies]
    opened = [plan for plan in alone if plan.opens_run]
    assert len({plan.name_suffix for plan in opened}) == len({plan.run_id for plan in opened})
    plans = [plan_run(topology, mode, scope, "t7", in_sweep=True) for topology in topologies]
    before, now = (list(map(unit_run_id, of)) for of in (alone, plans))
    renamed = before[topologies[0].coordinator]
    assert now == ["t7" if run_id == renamed else run_id for run_id in before]
    assert [plan.is_trial for plan in plans] == [run_id == renamed for run_id in before]
    assert [replace(plan, run_id=None, is_trial=False) for plan in plans] == [
        replace(plan, run_id=None) for plan in alone
    ]


@pytest.mark.parametrize("case", TABLE, ids=lambda case: f"{case['layout']}-{case['run_mode']}-{case['rank_scope']}")
def test_under_megatron_the_last_rank_of_each_unit_opens_the_runs_of_the_table(case: dict[str, Any]) -> None:
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


def test_hardware_of_a_node_is_recorded_by_its_first_or_last_rank_for_any_unit() -> None:
    plans = [plan_run(topology, "auto", "global", "exp", all_nodes=True) for topology in ranks([2, 2], primary=-1)]
    assert [plan.hardware for plan in plans] == [None, "worker-0", None, "worker-1"]
    assert [plan.attaches for plan in plans] == [False, True, False, False]
    plan = plan_run(ranks([2, 2])[2], "auto", "global", "exp", all_nodes=True, unit=(0, 1))
    assert (plan.opens_run, plan.attaches, plan.hardware, plan.needs_base_id) == (False, True, "worker-1", True)


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


def test_the_layout_over_nodes_is_needed_only_by_plans_that_depend_on_it() -> None:
    of_two: list[tuple[Any, Any, bool]] = [("auto", "worker", False), ("shared", "global", False)]
    pair, alone = ranks([2])[0], Topology.single()
    assert all(needs_layout(pair, mode, scope, all_nodes=nodes) for mode, scope, nodes in of_two)
    assert needs_layout(NO_LAYOUT, "auto", "global", all_nodes=True)
    assert not needs_layout(alone, "shared", "worker", all_nodes=True)
    assert not any(needs_layout(pair, mode, "global") for mode in ("auto", "new"))
    assert [plan_run(NO_LAYOUT, mode, "global", "exp").run_id for mode in ("auto", "new")] == [None, "exp-rank-1"]
    assert plan_run(NO_SIZE, "shared", "global", "exp").label == "worker-1-rank-1"


# --- units of some of the ranks ---------------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from(["pp", "dp", "tp", "cp"]), st.integers(1, 4), min_size=1), modes, st.data())
def test_one_replica_of_each_part_of_the_data_counts_in_any_mesh(
    mesh: dict[str, int], mode: str, data: st.DataObject
) -> None:
    along, size = data.draw(st.lists(st.sampled_from(sorted(mesh)), unique=True)), math.prod(mesh.values())
    primary = data.draw(st.integers(-1, size - 1))
    found = [
        plan_run(topology, mode, "global", "exp", unit=ranks_along(mesh, along, topology.global_rank))
        for topology in ranks([size], primary)
    ]
    counting = ranks_along(mesh, along, primary % size)
    opened = [rank for rank, plan in enumerate(found) if plan.opens_run]
    assert opened == ([primary % size] if mode == "auto" and size > 1 else list(counting))
    assert [rank for rank, plan in enumerate(found) if plan.announces] == [primary % size]
    assert all(found[rank].primary == (mode == "new" or rank == primary % size) for rank in opened)
    assert not any(plan.primary for rank, plan in enumerate(found) if rank not in counting)


def test_a_unit_needs_no_base_id_outside_and_neither_worker_scope_nor_a_name_without_a_mesh() -> None:
    inside, outside = ranks([2])
    assert plan_run(inside, "new", "global", "exp", unit=(0,)).needs_base_id
    assert not plan_run(outside, "new", "global", None, unit=(0,)).needs_base_id
    assert plan_run(outside, "shared", "global", None, unit=(1,)).opens_run is False
    with pytest.raises(ConfigurationError, match="Give only one of them"):
        plan_run(inside, "auto", "worker", "exp", unit=(0, 1))
    with pytest.raises(ConfigurationError, match=r"unit=mesh\['dp'\]"):
        _ = Options(unit="dp").unit_ranks


def test_the_primary_is_the_first_of_its_unit_and_the_others_follow_in_their_order() -> None:
    job = ranks([2, 2], primary=2)
    assert [unit_of(one, "global").ranks for one in job] == [(2, 3, 0, 1)] * 4
    assert [unit_of(one, "global").index for one in job] == [2, 3, 0, 1]
    last = [Topology(rank, rank % 2, rank // 2, 4, 2, 2, leader="last") for rank in range(4)]
    assert [tuple(unit_of(one, "worker").ranks) for one in last] == [(1, 0), (1, 0), (3, 2), (3, 2)]


@pytest.mark.parametrize(
    ("topology", "ranks"),
    [
        (Topology(5, 1, 1, 8, 4, 2), 4),
        (Topology(3, 3, 0, 4, 4, 1), None),  # one node needs no name
        (Topology(3, 1, 1, 5, 3, 2), None),  # nodes are uneven
        (Topology(5, 2, 0, 8, 4, 2), None),  # ranks alternate between nodes
        (Topology(5, 1, None, 8, 4, 2), None),
    ],
)
def test_ranks_per_node_are_known_if_ranks_are_consecutive(topology: Topology, ranks: int | None) -> None:
    assert unit_of(topology, "global").ranks_per_node == ranks


# --- jobs that are larger than W&B recommends for their run mode ------------------------------------------------------


def doubt(nodes: int, ranks_per_node: int, rank_scope: str = "global", **options: Any) -> str | None:
    topology = Topology(0, 0, 0, nodes * ranks_per_node, ranks_per_node, nodes)
    return too_large(topology, plan_run(topology, "shared", rank_scope, "exp"), ranks_per_node, **options)


def test_a_shared_run_with_too_many_writers_warns_and_suggests_what_helps() -> None:
    assert doubt(64, 8) == (
        'run_mode="shared" opens a run with 512 writers, but W&B has tested at most 300 connections to one. Use '
        'rank_scope="worker", for a run of each node with 8 writers, or run_mode="auto": one writer, with the metrics '
        "of all ranks."
    )
    assert doubt(64, 8, unit=range(0, 512, 8)) is None  # only writers of the unit are counted
    unknown = Topology(0, None, None, 512, None, None)
    of_unknown = too_large(unknown, plan_run(ranks([512])[0], "shared", "global", "exp"), None)
    for found in (doubt(1, 301), doubt(2, 301, "worker"), of_unknown):
        assert found is not None
        assert "rank_scope" not in found
        assert 'Use run_mode="auto"' in found


def test_one_rank_warns_before_the_runs_are_opened(job: Callable[..., Any], fake_wandb: Any, limit: Limit) -> None:
    limit(plans, MOST_WRITERS=1)
    init, warned = fake_wandb.init, list[int]()

    def noted(**arguments: Any) -> Any:
        warned.append(len(caught))
        return init(**arguments)

    fake_wandb.init = noted
    with pytest.warns(UserWarning, match='run_mode="shared" opens a run with 2 writers') as caught:
        job(ranks([2]), run_mode="shared", rank_scope="global")
    assert warned == [1, 1]
