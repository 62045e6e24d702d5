"""Jobs that a run mode does not suit, such as jobs larger than W&B recommends, and the mode to use instead. Pure.

Sources: W&B's documentation states that 300 concurrent client connections were tested as a hard limit ("Log distributed
training experiments"), and recommends at most about 10,000 runs in a project ("How many runs can I create per
project?").
"""

from __future__ import annotations

from collections.abc import Sequence

from dist_wandb.settings.plan import RunPlan
from dist_wandb.topology.model import Topology

MOST_WRITERS = 300
MOST_RUNS = 10_000
MANY_RUNS = 1_000  # ten starts of the job reach MOST_RUNS


def too_large(
    topology: Topology, plan: RunPlan, largest_node: int | None, unit: Sequence[int] | None = None
) -> str | None:
    """Return why a job is too large for its run mode, and what to use instead; `None` if it is not too large.

    `plan` is that of any rank that opens a run, if there is one. For example, `"shared"` in global scope on 512 ranks,
    8 on each node, is a run with 512 writers; in worker scope a run has 8.
    """
    by_node = plan.rank_scope == "worker" and topology.num_nodes is not None
    members = topology.world_size if unit is None else len(unit)
    runs = members if plan.run_mode == "new" else topology.num_nodes if by_node else 1
    if runs is not None and runs > MANY_RUNS:
        return (
            f'run_mode="{plan.run_mode}" with rank_scope="{plan.rank_scope}" opens {runs:,} runs at each start of this '
            f'job, but W&B recommends at most about {MOST_RUNS:,} runs in a project. Use run_mode="auto" with '
            'rank_scope="global": one run, with the metrics of all ranks.'
        )
    writers = largest_node if by_node else members
    if not plan.shared or writers is None or writers <= MOST_WRITERS:
        return None
    worker = f'rank_scope="worker", for a run of each node with {largest_node} writers, or '
    fits = not by_node and largest_node is not None and largest_node <= MOST_WRITERS
    return (
        f'run_mode="shared" opens a run with {writers:,} writers, but W&B has tested at most {MOST_WRITERS} '
        f'connections to one. Use {worker if fits else ""}run_mode="auto": one writer, with the metrics of all ranks.'
    )


def beside_trial(topology: Topology, plan: RunPlan) -> str | None:
    """Return which runs of a job, started by a sweep's agent, do not belong to the sweep; `None` if all do.

    Topology and plan are those of the job's primary.
    """
    by_node = plan.rank_scope == "worker" and (topology.num_nodes or 1) > 1
    if not plan.is_trial or topology.world_size == 1 or not (plan.run_mode == "new" or by_node):
        return None
    whose = f"rank {topology.global_rank}" if plan.run_mode == "new" else f"node {topology.node_rank}"
    others = "ranks" if plan.run_mode == "new" else "nodes"
    where = f", and are in its group {plan.group!r}" if plan.run_mode == "new" and not by_node else ""
    return (
        f"An agent of a sweep has started this job, and W&B accepts one run as a trial: the run {plan.base_id!r} of "
        f"{whose}. The runs of the other {others} have ids derived from it and the trial's values{where}, but are "
        'not part of the sweep. With run_mode="auto" or "shared" and rank_scope="global" all ranks share one run.'
    )
