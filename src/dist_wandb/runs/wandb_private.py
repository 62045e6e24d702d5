"""The private names of wandb that are used, because it has no public ones. Versions without them are supported."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun, Run

LOST_SERVICE = frozenset({"MailboxClosedError", "HandleAbandonedError", "SockClientClosedError"})  # wandb's, private
_SETUP = "wandb.sdk.wandb_setup"


def detach_service() -> None:
    """Make the next run start a wandb process of its own, because the current one holds the id of a failed run.

    Runs that are open keep the current one. Without wandb's private name for it, nothing is done.
    """
    setup = sys.modules.get(_SETUP)
    if hasattr(setup, "_singleton"):
        setup._singleton = None  # type: ignore[union-attr]  # noqa: SLF001  # no public way
        os.environ.pop("WANDB_SERVICE", None)


def uses_current_service(run: AnyRun) -> bool:
    """Whether new runs would be written by the same wandb process as `run`; also if that is not known."""
    mine, now = getattr(run, "_wl", None), getattr(sys.modules.get(_SETUP), "_singleton", None)
    return mine is None or now is None or mine is now


def is_finished(run: AnyRun) -> bool:
    """Whether a run has been finished, by us or by the user."""
    return bool(run) and bool(getattr(run, "_is_finished", False))


def disarm_exit_hooks() -> None:
    """In a forked process: cancel wandb's exit hooks, which would end the parent's resources.

    They remove the parent's directory for media and, before 0.20, stop the parent's wandb process.
    """
    media = getattr(sys.modules.get("wandb.sdk.data_types._private"), "MEDIA_TMP", None)
    with suppress(AttributeError):
        atexit.unregister(media.cleanup)  # type: ignore[union-attr]
        media._finalizer.detach()  # type: ignore[union-attr]  # noqa: SLF001  # no public way
    singleton = getattr(sys.modules.get(_SETUP), "_singleton", None)
    with suppress(AttributeError):
        unregister = singleton._connection._cleanup  # type: ignore[union-attr]  # noqa: SLF001
        if unregister is not None:
            unregister()


def code_of_exit() -> int | None:
    """The argument of `sys.exit`, if wandb has seen it: it replaces `sys.exit`."""
    noticed = getattr(getattr(sys.exit, "__self__", None), "exit_code", None)
    return noticed if isinstance(noticed, int) else None


def fill_config(run: Run, values: Mapping[str, Any]) -> None:
    """Put values into the config of an attached run, which wandb leaves empty, without sending them.

    W&B has them already, perhaps with newer values that another child has set.
    """
    update = getattr(run.config, "_update", None)
    if update is not None:
        update(dict(values), allow_val_change=True, ignore_locked=True)
