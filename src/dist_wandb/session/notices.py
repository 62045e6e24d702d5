"""Messages of a session to its user: the line at the start, and warnings, each once.

Writers beside the primary open and end their runs while wandb prints warnings alone; so does the primary of a shared
run on disk at its end, where W&B's advice to run "wandb sync" is wrong. Its line comes from here: how to upload it.
Settings of the user's about it hold.

The line at the start is printed when the runs are open; Lightning's when the ranks are certain: at the first row in a
world of one, which may still grow before.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from dist_wandb.errors import ConfigurationError
from dist_wandb.notices import Notices
from dist_wandb.runs import console, run_metadata
from dist_wandb.topology.ranges import named
from dist_wandb.user_lines import users_line, warn

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dist_wandb.runs.null_run import AnyRun
    from dist_wandb.session.job_link import JobLink
    from dist_wandb.settings.plan import RunPlan
    from dist_wandb.topology.model import Topology

_log = logging.getLogger("dist_wandb")


class SessionNotices:
    """The messages of one session.

    Args:
        link: To the other ranks: who this rank is.
    """

    def __init__(self, link: JobLink) -> None:
        self._link = link
        self._given = Notices()

    def announce(self, run: AnyRun, run_id: str | None, where: str | None, group_url: str | None) -> None:
        """Print in one line, on a unit's primary, what was decided and where the runs are.

        Args:
            run: This rank's run.
            run_id: Its id: in a world of one W&B has made it.
            where: Where it is; found out if `None`.
            group_url: Address of the group's page, if there is one.
        """
        plan = self._link.plan
        if plan.announces:
            plan = replace(plan, run_id=run_id)
            place = where or run_metadata.location(run, plan)
            print_line(announcement(self._link.topology, plan, place, group_url, self._link.options.unit_ranks))

    def opened_again(self, line: str, run_id: str | None) -> None:
        """Warn that `init` finishes a run which it has opened at the same line before."""
        if self._link.plan.announces:
            _log.warning(
                "dist_wandb: init is called again at %s, where it has opened the run %s, which is not finished: it is "
                "now. Call finish() where a run is to end; for several runs at a time pass reinit='create_new'.",
                line,
                run_id,
            )

    def row_dropped(self) -> None:
        """Warn that rows are dropped."""
        self._given.warn(
            "dropped",
            f"rank {self._link.topology.global_rank} logs, but the run it logs to was finished on the rank that has "
            "it. What it logs from now on is not written.",
        )

    def not_gathered(self) -> None:
        """Warn that tables and images are not gathered, as nothing is.

        Raises:
            ConfigurationError: Those of the other ranks would be lost.
        """
        plan = self._link.plan
        if plan.run_mode == "auto":
            raise ConfigurationError(
                f"Rank {self._link.topology.global_rank} logs a table or images of all ranks, but with reduce=None "
                "nothing is brought together: what the other ranks give would be lost. Leave reduce out, or gather out."
            )
        if plan.announces:
            self._given.warn(
                "not gathered",
                f"with run_mode={plan.run_mode!r} and no reduction nothing is brought together, so tables and images "
                "that are logged to be gathered have the rows of one rank only, in the run or under the label of each. "
                "To gather them, pass reduce='mean'.",
            )

    def unused_patterns(self, patterns: Iterable[str]) -> None:
        """Warn, on the primary, of patterns of `reduce` that no name has matched."""
        unused = [pattern for pattern in patterns if pattern != "*"]
        if unused and self._link.reduces and self._link.plan.primary:
            message = (
                f"reduce has patterns that decided about no name that was logged: {', '.join(map(repr, unused))}. Look "
                "for a misspelt name, or an earlier pattern that matches the same names."
            )
            warn(message, users_line(), may_raise=False)  # the run has yet to end


def print_line(line: str) -> None:
    """Print a line, as wandb prints its own: seen without any set-up, unless the user has silenced wandb."""
    if not console.is_silent():
        print(line, file=sys.stderr, flush=True)  # noqa: T201


def announcement(
    topology: Topology, plan: RunPlan, where: str, group_url: str | None, unit: Sequence[int] | None = None
) -> str:
    """What was decided, in one line.

    Args:
        topology: Who the announcing rank is.
        plan: What it does with W&B.
        where: Where its run is: an address, or a directory.
        group_url: Address of the group's page, if there is one.
        unit: Global ranks of the unit, in ascending order; `None` for all ranks, or those of a node.

    Example:
        ``dist_wandb: run_mode=new, rank_scope=global, 4 ranks on 2 nodes: a run for each rank in the group exp; that of
        rank 0 is exp-rank-0 (https://…)``
    """
    mode = f"run_mode={plan.run_mode}, rank_scope={plan.rank_scope}, {_ranks(topology)}"
    run_id = f"{plan.run_id} " if plan.run_id else ""
    group = f" in the group {plan.group}{f' ({group_url})' if group_url else ''}" if plan.group else ""
    members = None if unit is None or len(unit) == topology.world_size else named(unit)
    return f"dist_wandb: {mode}: {_runs(topology, plan, group, members)} {run_id}({where})"


def _ranks(topology: Topology) -> str:
    ranks = _count(topology.world_size, "rank")
    return f"{ranks} on {_count(topology.num_nodes, 'node')}" if topology.num_nodes else ranks


def _runs(topology: Topology, plan: RunPlan, group: str, members: str | None) -> str:
    """Which runs this unit has, as seen from its primary."""
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
