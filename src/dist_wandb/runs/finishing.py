"""End a run, and report missing data and how to upload it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_wandb.runs.console import sets_verbosity, with_warnings_alone
from dist_wandb.runs.run_metadata import is_disabled, is_offline
from dist_wandb.wandb_files.debug_log import log_of, untaken, unwritten

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun
    from dist_wandb.settings.plan import RunPlan
    from dist_wandb.topology.model import Topology


def quiet_finish(run: AnyRun, plan: RunPlan, init_arguments: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Limit wandb to warnings at the end of a run with several writers, or one of the runs of all ranks.

    This applies to all ranks except one, and offline to that one too if several write into its run, because W&B's hint
    to "wandb sync" is wrong for it. The user's own verbosity takes precedence.
    """
    is_quiet = (plan.has_writers and is_offline(run)) or (plan.is_one_of_several and not plan.announces)
    return with_warnings_alone(on=bool(run) and is_quiet and not sets_verbosity(init_arguments))


def upload_hint(run: AnyRun, plan: RunPlan, topology: Topology) -> str | None:
    """Return a line for one rank on how to upload a shared run on disk; `None` for other runs and ranks."""
    if not run or not plan.has_writers or not plan.announces or is_disabled(run) or not is_offline(run):
        return None
    directory = Path(run.dir).parent.parents[2] if plan.shared else Path(run.dir).parent.parent
    has_nodes = plan.rank_scope == "global" and (topology.num_nodes or 1) > 1
    return (
        f"dist_wandb: the run {run.id} is on disk, in several files{' on all nodes' if has_nodes else ''}. Upload "
        f"{'all of them together' if has_nodes else 'it'} with: dist-wandb sync {directory}"
    )


def finish(run: AnyRun, exit_code: int | None) -> str | None:
    """End a run; without an exit code, with that of the process.

    Returns the problem and what to do, as a sentence; `None` if the run is complete. Raises `OSError` if wandb's own
    process is lost.
    """
    if not hasattr(run, "finish"):  # a mock of a run
        return None
    run.finish(exit_code=exit_code)
    if not run or is_disabled(run):
        return None
    directory = Path(str(run.dir)).parent
    given_up = (unwritten if is_offline(run) else untaken)(log_of(directory))
    if not given_up:
        return None
    reasons = "; ".join(f"{what}: {reason}" for what, reason in given_up.items())
    if is_offline(run):
        return f"not all of the run {run.id} could be written to disk ({reasons}). Missing data is lost."
    return (
        f"W&B's server did not accept all of the run {run.id} ({reasons}). It is on disk. Once the server answers, "
        f"upload it with: dist-wandb sync {directory}"
    )
