"""Jobs that are larger than what W&B recommends for a run mode, and the mode to take instead. Pure.

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
    """Why a job is too large for its run mode, and what to use instead; `None` if it is not.

    Args:
        topology: Any rank of the job.
        plan: What that rank does; one that opens a run, where there is one.
        largest_node: Number of ranks on the node that has most of them; `None` if it is not known.
        unit: Global ranks of the unit; `None` for all ranks, or those of each node.

    Example:
        ``"shared"`` in global scope on 512 ranks, 8 on each node: a run with 512 writers. In worker scope a run has 8.
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
