"""wandb's own process (its "service"), which writes all runs of this process: its loss, its end, what it prints.

Also passes a run to a child process, which attaches to the parent's service.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_wandb.runs.client_settings import one_line
from dist_wandb.runs.interception import original
from dist_wandb.runs.requested import user_setting
from dist_wandb.runs.wandb_private import LOST_SERVICE, fill_config
from dist_wandb.settings.config_values import decoded, encoded, given_values

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun, Run

_log = logging.getLogger("dist_wandb")

_LOST_SOCKET = frozenset({errno.EBADF, errno.ENOTCONN, errno.EPIPE, errno.ESHUTDOWN})
_MEDIA_DIRECTORY = "wandb-media"  # suffix of the directory's name


def tear_down_service() -> None:
    """Stop wandb's own process, which keeps the id of a failed run in use; this ends all open runs of this process."""
    import wandb

    with suppress(Exception):  # the process may be dead
        original(wandb, "teardown")()
    os.environ.pop("WANDB_SERVICE", None)  # it names that process


def drop_inherited_service() -> None:
    """Remove another process's `WANDB_SERVICE`; call it before wandb, or its settings, are first used."""
    # Ranks whose common parent process used wandb would share the parent's service, which refuses a run id that a
    # sibling has open: "run ID X is in use".
    if inherits_service():
        del os.environ["WANDB_SERVICE"]


def inherits_service() -> bool:
    """Return whether `WANDB_SERVICE` names the wandb process of another process."""
    # The service writes the process id of its owner into the variable.
    owner = re.match(r"\d+-(\d+)-", os.environ.get("WANDB_SERVICE", ""))
    return owner is not None and int(owner[1]) != os.getpid()


def is_loss_of_service(error: Exception) -> bool:
    """Return whether a lost wandb process raises such errors; values' own code may, too: see `has_lost_service`."""
    if isinstance(error, OSError):  # older versions: BrokenPipeError; newer ones: ConnectionResetError
        return isinstance(error, ConnectionError) or error.errno in _LOST_SOCKET
    return type(error).__name__ in LOST_SERVICE


def has_lost_service(run: AnyRun, error: Exception) -> bool:
    """Return whether a call of `run` failed because wandb's own process is lost, rather than because of a value.

    In doubt the run is probed by a call that adds nothing to the row in progress: if the process is lost, it fails.
    """
    if not isinstance(error, OSError) or not is_loss_of_service(error):
        return is_loss_of_service(error)
    try:
        original(run, "log")({}, commit=False)  # the session's own handler accepts rows of a lost run
    except Exception as second:  # noqa: BLE001  # of any kind
        return is_loss_of_service(second)
    return False


def restore_media_directory(error: FileNotFoundError) -> bool:
    """Recreate wandb's directory for media if the error is about it; return whether it was missing and now exists."""
    path = Path(str(error.filename or ""))
    if not path.parent.name.endswith(_MEDIA_DIRECTORY) or path.parent.exists():
        return False
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path.parent.exists()


@contextmanager
def with_warnings_alone(*, on: bool) -> Iterator[None]:
    """Limit wandb to warnings and errors inside the block."""
    if not on:
        yield
        return
    import wandb

    settings = wandb.setup().settings
    wandb.termsetup(settings.model_copy(update={"show_info": False}), None)
    try:
        yield
    finally:
        wandb.termsetup(settings, None)  # as wandb.setup does


def sets_verbosity(init_arguments: Mapping[str, Any]) -> bool:
    """Return whether the user has set the verbosity of wandb."""
    names = ("quiet", "silent", "show_info")
    return any(
        user_setting(init_arguments, name) is not None or f"WANDB_{name.upper()}" in os.environ for name in names
    )


def is_silent() -> bool:
    """Return whether the user has silenced wandb with `WANDB_SILENT`."""
    return os.environ.get("WANDB_SILENT", "").lower() in ("true", "1", "yes")


def pickled_run(run: AnyRun | None) -> bytes | None:
    """Pickle a run and its config for a child process; `None` if it cannot be pickled."""
    try:
        return pickle.dumps((run, encoded(given_values(getattr(run, "config", None))))) if run else None
    except (pickle.PicklingError, AttributeError, TypeError):  # a mock of a run
        return None


def unpickled_run(data: bytes) -> Run | None:
    """In the child: return the parent's run, attached to the parent's service; `None`, with a warning, if it fails."""
    run: Run
    run, config = pickle.loads(data)  # noqa: S301  # written by `pickled_run` in the parent of this very process
    try:
        _ = getattr(run, "config", None)  # wandb attaches at the first use
    except Exception as error:  # noqa: BLE001  # of wandb's own types: WANDB_SERVICE is unset, or its process has ended
        _log.warning(
            "dist_wandb: this process reopens the run of its parent, because wandb could not attach to it: %s",
            one_line(error),
        )
        return None
    if config:
        fill_config(run, decoded(config))
    return run
