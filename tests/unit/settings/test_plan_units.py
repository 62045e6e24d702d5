"""Units of some of the ranks: which of them count, for any mesh, and which rank is the primary."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_wandb.errors import ConfigurationError
from dist_wandb.job.topology import Topology
from dist_wandb.job.units import ranks_along
from dist_wandb.settings.options import Options
from dist_wandb.settings.plan import RUN_MODES, RunPlan, needs_layout, plan_run, too_large, unit_of

sizes = st.dictionaries(st.sampled_from(["pp", "dp", "tp", "cp"]), st.integers(1, 4), min_size=1)
modes = st.sampled_from(RUN_MODES)


@st.composite
def meshes(draw: Any) -> tuple[dict[str, int], list[str], int]:
    """Draw a mesh, the dimensions along which numbers are reduced, and the primary."""
    mesh = draw(sizes)
    along = draw(st.lists(st.sampled_from(sorted(mesh)), unique=True))
    return mesh, along, draw(st.integers(-1, math.prod(mesh.values()) - 1))


def topologies(size: int, primary: int | None = None) -> list[Topology]:
    return [Topology(rank, rank, 0, size, size, 1).led_by(primary) for rank in range(size)]


def plans(mesh: dict[str, int], along: list[str], primary: int | None, mode: str) -> list[RunPlan]:
    return [
        plan_run(topology, mode, "global", "exp", unit=ranks_along(mesh, along, topology.global_rank))
        for topology in topologies(math.prod(mesh.values()), primary)
    ]


@given(meshes(), modes)
def test_one_replica_of_each_part_of_the_data_counts_in_any_mesh(
    case: tuple[dict[str, int], list[str], int], mode: str
) -> None:
    mesh, along, primary = case
    size = math.prod(mesh.values())
    found = plans(mesh, along, primary, mode)
    counting = ranks_along(mesh, along, primary % size)
    opened = [rank for rank, plan in enumerate(found) if plan.opens_run]
    assert opened == ([primary % size] if mode == "auto" and size > 1 else list(counting))
    assert [rank for rank, plan in enumerate(found) if plan.announces] == [primary % size]
    assert all(
        plan.primary == (mode == "new" or rank == primary % size) for rank, plan in enumerate(found) if plan.opens_run
    )
    assert not any(plan.primary for rank, plan in enumerate(found) if rank not in counting)


def test_ranks_outside_of_the_unit_need_no_base_id() -> None:
    inside, outside = topologies(2)
    assert plan_run(inside, "new", "global", "exp", unit=(0,)).needs_base_id
    assert not plan_run(outside, "new", "global", None, unit=(0,)).needs_base_id
    assert plan_run(outside, "shared", "global", None, unit=(1,)).opens_run is False


def test_hardware_of_other_nodes_is_recorded_for_any_unit() -> None:
    first_of_node_1 = Topology(2, 0, 1, 4, 2, 2)
    plan = plan_run(first_of_node_1, "auto", "global", "exp", all_nodes=True, unit=(0, 1))
    assert (plan.opens_run, plan.attaches, plan.hardware) == (False, True, "worker-1")
    assert plan.needs_base_id


def test_a_unit_together_with_worker_scope_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Give only one of them"):
        plan_run(topologies(2)[0], "auto", "worker", "exp", unit=(0, 1))


def test_a_dimension_name_needs_a_mesh() -> None:
    with pytest.raises(ConfigurationError, match=r"unit=mesh\['dp'\]"):
        _ = Options(unit="dp").unit_ranks


def test_only_writers_of_the_unit_are_counted() -> None:
    topology = Topology(0, 0, 0, 1024, 8, 128)
    plan = plan_run(topology, "shared", "global", "exp")
    assert "1,024 writers" in str(too_large(topology, plan, 8))
    assert too_large(topology, plan, 8, range(0, 1024, 8)) is None


# --- the unit of a rank -----------------------------------------------------------------------------------------------


def test_the_primary_is_the_first_of_its_unit_and_the_others_follow_in_their_order() -> None:
    job = [Topology(rank, rank % 2, rank // 2, 4, 2, 2, primary_rank=2) for rank in range(4)]
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
        (Topology(1, 0, 1, 6, 2, 3), None),
        (Topology(5, 1, None, 8, 4, 2), None),
    ],
)
def test_ranks_per_node_are_known_if_ranks_are_consecutive(topology: Topology, ranks: int | None) -> None:
    assert unit_of(topology, "global").ranks_per_node == ranks


@pytest.mark.parametrize(
    ("size", "mode", "scope", "all_nodes", "needs"),
    [
        *((2, "auto", "worker", False, True), (2, "shared", "global", False, True), (2, "auto", "global", True, True)),
        *(
            (2, "new", "global", False, False),
            (2, "auto", "global", False, False),
            (1, "shared", "worker", True, False),
        ),
    ],
)
def test_needs_layout_is_true_for_plans_that_depend_on_nodes(
    size: int, mode: Any, scope: Any, all_nodes: bool, needs: bool
) -> None:
    assert needs_layout(Topology(0, 0, 0, size, size, 1), mode, scope, all_nodes=all_nodes) is needs
