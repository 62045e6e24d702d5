"""The position on the x axis at which a resumed, rewound or forked run continues.

When a process is killed, its wandb-core sends nothing more, not even a completion. On resume, wandb-core requests
`RunResumeStatus` and continues after the server's line count; shared writers register as new clients. The response
contains the run's summary, whose `global_step` determines where rows without a step continue. For a shared run, the
primary determines this position and publishes it, because the summaries that other writers get may already contain rows
of this start. Offline, the newest earlier file with the same id is read (about 0.5 s).

For a rewound or forked run there is no summary. There, rows without a step continue at W&B's first step, which the run
knows; offline, older versions of wandb do not.
"""

from __future__ import annotations

import glob
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import ReadError, UnsupportedVersionError
from dist_wandb.runs import requested, run_metadata
from dist_wandb.runs.axes import STEP_METRIC
from dist_wandb.wandb_files.reading import largest_step

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun

_log = logging.getLogger("dist_wandb")

_MOST_FILES = 32  # files of one run that are searched for the last row; each takes about half a second


def next_row(run: AnyRun, init_arguments: Mapping[str, Any], axis: str = STEP_METRIC) -> int:
    """Return the position on the x axis of the first row without a step, after the rows of a continued run.

    It is 0 for a new run.
    """
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
    own = Path(str(run.dir)).parent
    for path in _newest_first(own, f"*run-*/run-{glob.escape(str(run.id))}.wandb")[:_MOST_FILES]:
        try:
            largest = largest_step(path, axis)
        except ReadError:  # it contains no run
            continue
        except UnsupportedVersionError as error:
            _log.warning("dist_wandb: rows without a step are counted from 0 again in the run %s: %s", run.id, error)
            return None
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
