"""wandb's own process (its "service"), which writes all runs of this process: detect its loss, and tear it down."""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dist_wandb.runs.interception import original
from dist_wandb.runs.wandb_private import LOST_SERVICE

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun

_LOST_SOCKET = frozenset({errno.EBADF, errno.ENOTCONN, errno.EPIPE, errno.ESHUTDOWN})
_MEDIA_DIRECTORY = "wandb-media"  # suffix of the directory's name


def tear_down_service() -> None:
    """Stop wandb's own process after a run could not be opened: it would keep the id in use.

    This ends all open runs of this process. Call it only if no run is open, or if the open runs are lost anyway.
    """
    import wandb

    with suppress(Exception):  # the process may be dead
        original(wandb, "teardown")()
    os.environ.pop("WANDB_SERVICE", None)  # it names that process


def drop_inherited_service() -> None:
    """Remove a `WANDB_SERVICE` that another process has set, so that this rank starts its own wandb process.

    Call it before the first use of wandb in this process, also before its settings are read.
    """
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
    """Return whether a lost connection to wandb's own process raises errors of this type.

    The code of values that are written may raise such an error as well: see `has_lost_service`.
    """
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
