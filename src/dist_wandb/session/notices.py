"""Messages of a session to its user: the line at the start, and what it says of its options at the end.

wandb prints only warnings while ranks other than the first open and end their runs, and while the primary of a
shared run on disk ends its run, where W&B's advice to run "wandb sync" is wrong. Instead, `OwnRun.end` prints how to
upload it. The user's own settings for wandb's output take precedence.

The line at the start is printed when the runs are open. Lightning's is printed when the ranks are certain: in a world
of one, which may still grow, that is at the first row.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

from dist_wandb.exchange.rows import Reductions
from dist_wandb.job.ranges import named
from dist_wandb.job.topology import Topology
from dist_wandb.notices import users_line, warn
from dist_wandb.runs import wandb_private
from dist_wandb.runs.null_run import AnyRun
from dist_wandb.session.job_link import JobLink
from dist_wandb.settings.plan import RunPlan
from dist_wandb.settings.reduction import ALREADY_REDUCED, check_patterns, check_per_rank, matches_any


def print_line(line: str, run: AnyRun | None = None) -> None:
    """Print a line as wandb does: visible without configured logging, unless the user has silenced wandb or the run."""
    if not wandb_private.is_silent(run):
        with suppress(OSError, ValueError):  # nobody reads it any more
            # One write, also with ``python -u`` (torchrun): else the lines of two ranks run into each other.
            print(f"{line}\n", end="", file=sys.stderr, flush=True)  # noqa: T201


def announcement(
    topology: Topology, plan: RunPlan, where: str, group_url: str | None, unit: Sequence[int] | None = None
) -> str:
    """Return one line about what was decided; `unit` is `None` for all ranks or those of a node."""
    nodes = f" on {_count(topology.num_nodes, 'node')}" if topology.num_nodes else ""
    mode = f"run_mode={plan.run_mode}, rank_scope={plan.rank_scope}, {_count(topology.world_size, 'rank')}{nodes}"
    run_id = f"{plan.run_id} " if plan.run_id else ""
    group = f" in the group {plan.group}{f' ({group_url})' if group_url else ''}" if plan.group else ""
    members = None if unit is None or len(unit) == topology.world_size else named(unit)
    return f"dist_wandb: {mode}: {_runs(topology, plan, group, members)} {run_id}({where})"


def _runs(topology: Topology, plan: RunPlan, group: str, members: str | None) -> str:
    """Describe the runs of this unit from its primary's point of view."""
    if topology.world_size == 1:
        return f"one run{group}:"
    by_node = plan.rank_scope == "worker" and topology.num_nodes != 1
    if plan.run_mode == "new":
        of = f" of node {topology.node_rank}" if by_node else ""
        ranks = f"each of {members}" if members else f"each rank{of}"
        return f"a run for {ranks}{group}; that of rank {topology.global_rank} is"
    ranks = f"the ranks of node {topology.node_rank}" if by_node else members or "all ranks"
    return f"one run{group}, written by {ranks}:" if plan.shared else f"one run{group} for {ranks}:"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def unused_names(link: JobLink, reductions: Reductions) -> None:
    """Warn, on a unit's primary, of options that name what nobody has logged."""
    options, known = link.options, reductions.known
    if not link.plan.primary:
        return

    def unmatched(patterns: Sequence[str]) -> list[str]:
        return [pattern for pattern in patterns if not any(matches_any(name, (pattern,)) for name in known)]

    unused: dict[str, list[str]] = {}
    if link.reduces:
        unused["reduce"] = [one for one in reductions.unused if one not in ALREADY_REDUCED]
        unused["spread"] = unmatched(check_patterns("spread", options.spread))
        unused["weight"] = sorted(reductions.weighted - known.keys())
    if link.plan.shared:
        unused["per_rank"] = unmatched(check_per_rank(options.per_rank).patterns)
    for argument, patterns in unused.items():
        names = [repr(pattern) for pattern in patterns if pattern != "*"]
        if names:
            message = (
                f"{argument} has patterns that apply to no name that rank {link.topology.global_rank} has logged "
                f"or combined: {', '.join(names)}. Check for a misspelt name, or an earlier pattern that matches "
                "the same names."
            )
            warn(message, users_line(), may_raise=False)  # the run must still be ended
