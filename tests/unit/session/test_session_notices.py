from __future__ import annotations

import pytest

from dist_wandb.job.topology import Topology
from dist_wandb.session.notices import announcement
from dist_wandb.settings.plan import plan_run

SINGLE = Topology.single()
ONE_NODE = Topology(0, 0, 0, 2, 2, 1)
FIRST_NODE = Topology(0, 0, 0, 4, 2, 2)
SECOND_NODE = Topology(2, 0, 1, 4, 2, 2)
NODES_UNKNOWN = Topology(0, None, None, 4, None, None)

EACH = "a run for each rank in the group exp; that of rank 0 is exp-rank-0 (x)"
OF_NODE = "a run for each rank of node 1 in the group exp-worker-1; that of rank 2 is exp-worker-1-rank-0 (x)"
EXPECTED = [
    (SINGLE, "shared", "worker", "1 rank on 1 node: one run: exp (x)"),
    (ONE_NODE, "auto", "worker", "2 ranks on 1 node: one run for all ranks: exp (x)"),
    (SECOND_NODE, "auto", "worker", "4 ranks on 2 nodes: one run for the ranks of node 1: exp-worker-1 (x)"),
    (FIRST_NODE, "shared", "global", "4 ranks on 2 nodes: one run, written by all ranks: exp (x)"),
    (SECOND_NODE, "shared", "worker", "4 ranks on 2 nodes: one run, written by the ranks of node 1: exp-worker-1 (x)"),
    (FIRST_NODE, "new", "global", f"4 ranks on 2 nodes: {EACH}"),
    (SECOND_NODE, "new", "worker", f"4 ranks on 2 nodes: {OF_NODE}"),
    (NODES_UNKNOWN, "new", "global", f"4 ranks: {EACH}"),
]


@pytest.mark.parametrize(("topology", "mode", "scope", "expected"), EXPECTED)
def test_the_announcement_has_mode_scope_ranks_and_place(
    topology: Topology, mode: str, scope: str, expected: str
) -> None:
    line = announcement(topology, plan_run(topology, mode, scope, "exp"), "x", None)
    assert line == f"dist_wandb: run_mode={mode}, rank_scope={scope}, {expected}"


@pytest.mark.parametrize(
    ("mode", "url", "expected"),
    [
        ("auto", None, "one run in the group night for all ranks: exp (x)"),
        ("auto", "https://w", "one run in the group night (https://w) for all ranks: exp (x)"),
        ("shared", "https://w", "one run in the group night (https://w), written by all ranks: exp (x)"),
        ("new", "https://w", "a run for each rank in the group night (https://w); that of rank 0 is exp-rank-0 (x)"),
    ],
)
def test_the_announcement_names_the_users_group_and_its_page(mode: str, url: str | None, expected: str) -> None:
    line = announcement(ONE_NODE, plan_run(ONE_NODE, mode, "global", "exp", group="night"), "x", url)
    assert line.endswith(f"2 ranks on 1 node: {expected}")


def test_an_id_that_wandb_will_generate_is_left_out() -> None:
    plan = plan_run(SINGLE, "auto", "global", None)
    assert announcement(SINGLE, plan, "https://w", None).endswith("one run: (https://w)")
