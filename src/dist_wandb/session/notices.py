"""Messages of a session to its user: the line at the start, and warnings, each once.

wandb prints only warnings while ranks other than the first open and end their runs, and while the primary of a
shared run on disk ends its run, where W&B's advice to run "wandb sync" is wrong. Instead, `OwnRun.end` prints how to
upload it. The user's own settings for wandb's output take precedence.

The line at the start is printed when the runs are open. Lightning's is printed when the ranks are certain: in a world
of one, which may still grow, that is at the first row.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from dist_wandb.errors import ConfigurationError
from dist_wandb.exchange.reports import report_lost
from dist_wandb.exchange.rows import Reductions
from dist_wandb.job.model import Topology
from dist_wandb.job.ranges import named
from dist_wandb.notices import Line, Notices, named_line, users_line, warn
from dist_wandb.runs import run_metadata, wandb_private
from dist_wandb.runs.null_run import AnyRun
from dist_wandb.session.job_link import JobLink
from dist_wandb.settings.plan import RunPlan
from dist_wandb.settings.reduction import ALREADY_REDUCED, check_patterns, check_per_rank, matches_any
from dist_wandb.wandb_files.stragglers import Timing, findings


class SessionNotices:
    """The messages of one session."""

    def __init__(self, link: JobLink) -> None:
        self._link = link
        self._given = Notices()
        self._dropped = 0  # number of values

    def announce(self, run: AnyRun, run_id: str | None, where: str | None, group_url: str | None) -> None:
        """Print, on a unit's primary, one line about what was decided and where the runs are (`None`: determine it)."""
        plan = replace(self._link.plan, run_id=run_id)
        place = where or run_metadata.location(run, plan)
        print_line(announcement(self._link.topology, plan, place, group_url, self._link.options.unit_ranks))

    def returned_again(self, line: Line | None, run_id: str | None, caller: str) -> None:
        """Print, once for each line of the script, that it gets the open run, as wandb prints each time."""
        place = named_line(line)
        if self._link.plan.announces and self._given.is_first(("again", place)):
            unless, end = ("", "finish()") if caller == "init" else (" but config", "tracker.finish() on all ranks")
            print_line(
                f"dist_wandb: {caller} was called at {place} while the run {run_id} is open, and gets it; arguments of "
                f"this call{unless} have no effect. For another run, call {end} first, or pass "
                "reinit='finish_previous' or reinit='create_new'."
            )

    def moved(self) -> None:
        rank = self._link.topology.global_rank
        if self._link.plan.primary:
            self._given.warn(
                "moved",
                f"the rank that should write the run has not opened a session, so rank {rank} writes it. Pass "
                f"primary_rank={rank} to init on all ranks, and it does so from the start.",
            )

    def logged_nested_too(self, name: str) -> None:
        self._given.warn(
            "nested too",
            f"rank {self._link.topology.global_rank} logged {name!r} both as this name and nested. W&B shows both as "
            f"{name!r}, and here they are one metric. Rename one of them.",
        )

    def row_dropped(self, values: int) -> None:
        self._dropped += values
        self._given.warn(
            "dropped",
            f"rank {self._link.topology.global_rank} called log after its run was finished on the rank that has "
            "it. This and later rows are not written. Call log on all ranks before the run is finished.",
        )

    def too_early(self) -> None:
        self._given.warn(
            "too early",
            f"rank {self._link.topology.global_rank} logs in a session that was opened before Lightning had connected "
            "the ranks. Rank 0 opened its run without the others, and what they log there is not written. Log with "
            "DistWandbLogger, or start the script with torchrun.",
        )

    def at_end(self) -> None:
        dropped, self._dropped = self._dropped, 0
        report_lost(self._link.topology.global_rank, {"that were logged after the run was finished": dropped})

    def not_gathered(self) -> None:
        plan = self._link.plan
        if plan.run_mode == "auto":
            raise ConfigurationError(
                f"Rank {self._link.topology.global_rank} logs a table or images of all ranks, but reduce=None "
                "disables gathering, so those of the other ranks would be lost. Leave out reduce=None or the gathering."
            )
        if plan.announces:
            self._given.warn(
                "not gathered",
                f"run_mode={plan.run_mode!r} without a reduction does not gather tables and images. Each has the rows "
                "of one rank only, in the run or under the label of that rank. To gather them, pass reduce='mean'.",
            )

    def unused_names(self, reductions: Reductions) -> None:
        link, options, known = self._link, self._link.options, reductions.known
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

    def slow_ranks(self, timings: Mapping[str, Timing]) -> None:
        """Print, on the rank that writes them, what the rows say of ranks that take longer than the others."""
        for finding in findings(timings, self._link.unit.size):
            print_line(f"dist_wandb: {finding}")


def print_line(line: str) -> None:
    """Print a line as wandb does: visible without configured logging, unless the user has silenced wandb."""
    if not wandb_private.is_silent():
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
