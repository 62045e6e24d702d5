"""What the package keeps for the whole process."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from dist_wandb.job import leftovers
from dist_wandb.notices import Notices
from dist_wandb.runs import interception, null_run, requested
from dist_wandb.session import api, inherited_rank, job_description, registry, remote_session, restart

_KEPT: tuple[tuple[object, str, Callable[[], object]], ...] = (
    (api, "_notices", Notices),
    (requested, "_notices", Notices),
    (inherited_rank, "_announced", list),
    (inherited_rank, "_notes", dict),
    (interception, "_values", list),
    (job_description, "_behind", set),
    (job_description, "_opened", Counter),
    (leftovers, "_leftovers", list),
    (null_run, "_notices", Notices),
    (registry, "shutdowns", dict),
    (remote_session, "_notices", Notices),
    (restart, "_notices", Notices),
)


def begin_new_process(patch: pytest.MonkeyPatch) -> None:
    """Continue as a process in which nothing has happened, until the patch is undone."""
    for owner, name, make in _KEPT:
        patch.setattr(owner, name, make())
    registry.opened_in.clear()


def forget_notes() -> None:
    """Close what this process has told those that it starts."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if "dist-wandb-" in descriptor.readlink().name:
                os.close(int(descriptor.name))
