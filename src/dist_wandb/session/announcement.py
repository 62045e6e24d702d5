"""The one line that a unit's primary prints when its runs are open. Pure.

Lightning's comes when the ranks are certain: at the first row in a world of one, which may still grow before.
"""

from __future__ import annotations

from dist_wandb.settings.plan import RunPlan
from dist_wandb.topology.model import Topology


def announcement(topology: Topology, plan: RunPlan, where: str, group_url: str | None) -> str:
    """What was decided, in one line.

    Args:
        topology: Who the announcing rank is.
        plan: What it does with W&B.
        where: Where its run is: an address, or a directory.
        group_url: Address of the group's page, if there is one.

    Example:
        ``dist_wandb: run_mode=new, rank_scope=global, 4 ranks on 2 nodes: a run for each rank in the group exp; that of
        rank 0 is exp-rank-0 (https://…)``
    """
    mode = f"run_mode={plan.run_mode}, rank_scope={plan.rank_scope}, {_ranks(topology)}"
    run_id = f"{plan.run_id} " if plan.run_id else ""
    group = f" in the group {plan.group}{f' ({group_url})' if group_url else ''}" if plan.group else ""
    return f"dist_wandb: {mode}: {_runs(topology, plan, group)} {run_id}({where})"


def _ranks(topology: Topology) -> str:
    ranks = _count(topology.world_size, "rank")
    return f"{ranks} on {_count(topology.num_nodes, 'node')}" if topology.num_nodes else ranks


def _runs(topology: Topology, plan: RunPlan, group: str) -> str:
    """Which runs this unit has, as seen from its primary."""
    if topology.world_size == 1:
        return f"one run{group}:"
    by_node = plan.rank_scope == "worker" and topology.num_nodes != 1
    if plan.run_mode == "new":
        ranks = f"each rank of node {topology.node_rank}" if by_node else "each rank"
        return f"a run for {ranks}{group}; that of rank {topology.global_rank} is"
    ranks = f"the ranks of node {topology.node_rank}" if by_node else "all ranks"
    return f"one run{group}, written by {ranks}:" if plan.shared else f"one run{group} for {ranks}:"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
