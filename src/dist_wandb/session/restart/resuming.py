"""Continuing the run of an earlier start: the arguments of `wandb.init`, the message about it, and the next row.

The next row is the position on the x axis at which a resumed, rewound or forked run continues. When a process is
killed, its wandb-core sends nothing more, not even a completion. On resume, wandb-core requests `RunResumeStatus` and
continues after the server's line count; shared writers register as new clients. The response contains the run's
summary, whose `global_step` determines where rows without a step continue. For a shared run, the primary determines
this position and publishes it, because the summaries that other writers get may already contain rows of this start.
Offline, the newest earlier file with the same id is read (about 0.5 s).

For a rewound or forked run there is no summary. There, rows without a step continue at W&B's first step, which the run
knows; offline, older versions of wandb do not.
"""

from __future__ import annotations

import glob
import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import ConfigurationError, ReadError
from dist_wandb.job.launch import Launch
from dist_wandb.job.model import Topology
from dist_wandb.runs import requested, run_metadata
from dist_wandb.runs.writer import STEP_METRIC
from dist_wandb.session.restart.store import Earlier

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun
    from dist_wandb.settings.options import Options

_started: Counter[str] = Counter()
_log = logging.getLogger("dist_wandb")
_MOST_FILES = 32  # files of one run that are searched for the last row; each takes about half a second


def session_name(integration: str, number: int | None) -> str:
    """Return a name of the integration's next session, or of its `number`-th, that is equal at every start."""
    if number is None:
        _started[integration] += 1
        number = _started[integration]
    return f"{integration}/{number}"


def continued(
    init_arguments: Mapping[str, Any], earlier: Earlier | None, topology: Topology, *, has_store: bool
) -> Mapping[str, Any]:
    """Return the arguments of `wandb.init` that continue the runs of an `earlier` start, if this rank knows one."""
    resume = requested.resume(init_arguments)
    if earlier is not None:
        given = {} if requested.continues(init_arguments) else {"resume": "allow"}
        return {**init_arguments, **given, "id": earlier.record.base_id}
    is_named_by_job = topology.world_size > 1 and not has_store and requested.run_id(init_arguments) is None
    if is_named_by_job and Launch.detect().requeues and resume is None:
        return {**init_arguments, "resume": "allow"}  # SLURM keeps the job's name, from which the id is made
    return init_arguments


def name_for_id(session: str, init_arguments: Mapping[str, Any]) -> str:
    """Return a name of the session from which its base id can be made if only the launcher's job name is known."""
    requeues = Launch.detect().requeues
    return f"{session}/{requeues}" if requeues and requested.resume(init_arguments) == "never" else session


def can_look_back(options: Options, topology: Topology, *, has_store: bool) -> bool:
    """Return whether the coordinator can choose the base id, rather than derive it from what all ranks know."""
    is_alone = topology.world_size == 1 or (options.run_mode == "auto" and options.rank_scope == "global")
    return has_store or is_alone


def check_resume(init_arguments: Mapping[str, Any], options: Options, topology: Topology, *, has_store: bool) -> None:
    """Raise `ConfigurationError` for ``resume="auto"`` if only one rank would know the run."""
    if can_look_back(options, topology, has_store=has_store) or requested.run_id(init_arguments) is not None:
        return
    if requested.resume(init_arguments) == "auto":
        raise ConfigurationError(
            f"resume='auto' takes the run id from a restart record that one process finds, but {topology.world_size} "
            "ranks need it, and have no way to agree on it yet. Call init_process_group first, or pass id= (the same "
            "at every start) with resume='allow', or set WANDB_RUN_ID."
        )


def announcement(earlier: Earlier, topology: Topology) -> str:
    """Return one line about the run that is continued, and why."""
    before = earlier.record.world_size
    change = "" if before == topology.world_size else f" It had {before} ranks, and has {topology.world_size} now."
    return f"dist_wandb: continues the run {earlier.record.base_id} of an earlier start ({earlier.reason}).{change}"


def next_row(run: AnyRun, init_arguments: Mapping[str, Any], axis: str = STEP_METRIC) -> int:
    """Return the position on the x axis of the first row without a step: 0, or after the rows of a continued run."""
    if not run or run.disabled:
        return 0
    if not run.offline:
        last = run_metadata.last_logged(run, axis)
    elif requested.continues(init_arguments):
        last = _last_on_disk(run, axis)
    else:
        last = None
    if last is not None:
        return last + 1
    starting_step: object = getattr(run, "starting_step", 0)
    return max(requested.first_step(init_arguments), starting_step if isinstance(starting_step, int) else 0)


def _last_on_disk(run: AnyRun, axis: str) -> int | None:
    """Return the largest value of the x axis in the newest earlier file of this rank's run that has any."""
    from dist_wandb.wandb_files.reading import largest_step  # most runs need no reader

    own = Path(str(run.dir)).parent
    for path in _newest_first(own, f"*run-*/run-{glob.escape(str(run.id))}.wandb")[:_MOST_FILES]:
        try:
            largest = largest_step(path, axis)
        except ReadError:  # it contains no run
            continue
        if largest is not None:
            return largest
    return None


def _newest_first(own: Path, pattern: str) -> list[Path]:
    """Return the files of this pattern next to a run's directory that belong to its user, the last changed first."""
    changed: dict[Path, float] = {}
    others: dict[int, Path] = {}
    with suppress(OSError):
        owner = own.stat().st_uid
        for path in own.parent.glob(pattern):
            with suppress(OSError):
                found = path.lstat()
                if path.parent.resolve() == own.resolve():
                    continue
                if found.st_uid == owner:
                    changed[path] = found.st_mtime
                else:
                    others[found.st_uid] = path
    for user, path in others.items():
        _log.warning(
            "dist_wandb: %s belongs to user %d, so rows without a step do not continue after its last row. Give "
            "every row a step, or copy its directory.",
            path,
            user,
        )
    return sorted(changed, key=lambda path: changed[path], reverse=True)
