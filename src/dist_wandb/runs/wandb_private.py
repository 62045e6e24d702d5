"""The uses of private names of wandb for which no public ones exist. Versions without these names are supported."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun, Run

LOST_SERVICE = frozenset({"MailboxClosedError", "HandleAbandonedError", "SockClientClosedError"})  # private errors
FINISH = "_finish"  # the method of a run that all ways of finishing it call
SUMMARY_WRITTEN = "_update_callback"  # what `summary_of` calls with a record of each write
_SETUP = "wandb.sdk.wandb_setup"


def detach_service() -> None:
    """Make the next run start a new wandb process, because the current one keeps the id of a failed run in use.

    Open runs keep the current process. If wandb does not have the private name, this has no effect.
    """
    setup = sys.modules.get(_SETUP)
    if hasattr(setup, "_singleton"):
        setup._singleton = None  # type: ignore[union-attr]  # noqa: SLF001  # no public way
        os.environ.pop("WANDB_SERVICE", None)


def uses_current_service(run: AnyRun) -> bool:
    """Return whether the same wandb process would write new runs as `run`; `True` if unknown."""
    mine, now = getattr(run, "_wl", None), getattr(sys.modules.get(_SETUP), "_singleton", None)
    return mine is None or now is None or mine is now


def is_finished(run: AnyRun) -> bool:
    """Return whether a run has been finished, by us or by the user."""
    return bool(run) and bool(getattr(run, "_is_finished", False))


def summary_of(run: AnyRun) -> object | None:
    """Return the object that calls its `SUMMARY_WRITTEN` with each write into a run's summary, if there is one."""
    summary = getattr(run, "summary", None)
    calls = getattr(summary, "__dict__", {}).get(SUMMARY_WRITTEN)  # other ways would ask wandb's process for the value
    return summary if callable(calls) else None


def disarm_exit_hooks() -> None:
    """In a forked process: cancel wandb's exit hooks, which would release the parent's resources.

    They remove the parent's directory for media and, before wandb 0.20, stop the parent's wandb process.
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
    """Return the argument of `sys.exit`, if wandb has recorded it: it replaces `sys.exit`."""
    recorded = getattr(getattr(sys.exit, "__self__", None), "exit_code", None)
    return recorded if isinstance(recorded, int) else None


def values_in(path: str) -> dict[str, Any]:
    """Return the values in a config file of wandb, such as an agent writes; none if it cannot be read."""
    with suppress(Exception):  # `wandb.init`, which reads it on the rank with the run, reports what is wrong
        from wandb.sdk.lib.config_util import dict_from_config_file

        return dict(dict_from_config_file(path) or {})
    return {}


def fill_config(run: Run, values: Mapping[str, Any]) -> None:
    """Put values into the config of an attached run, which wandb leaves empty, without sending them.

    W&B already has them, possibly with newer values set by another child.
    """
    update = getattr(run.config, "_update", None)
    if update is not None:
        update(dict(values), allow_val_change=True, ignore_locked=True)
