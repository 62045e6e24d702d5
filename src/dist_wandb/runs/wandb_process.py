"""wandb's own process, which runs are written through: when it is lost, and how to do without it."""

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
_MEDIA_DIRECTORY = "wandb-media"  # the end of its name


def tear_down_service() -> None:
    """Make wandb forget its own process after that failed: otherwise the id stays taken.

    Runs of this process that are open end by it, so it is to be called only where there are none, or where they are
    lost in any case.
    """
    import wandb

    with suppress(Exception):  # it is gone, or half gone
        wandb.teardown()
    os.environ.pop("WANDB_SERVICE", None)  # of that process, which wandb names there


def drop_inherited_service() -> None:
    """Drop `WANDB_SERVICE` where another process put it, so that this rank talks to a wandb process of its own.

    To be called before the first use of wandb in this process, also before its settings are read.

    Ranks that are children of one process which used wandb would share that process's service, and it refuses a run
    id that a sibling has open: "run ID X is in use". The service writes its owner's process id into the variable.
    """
    if inherits_service():
        del os.environ["WANDB_SERVICE"]


def inherits_service() -> bool:
    """Whether `WANDB_SERVICE` names the wandb process of another process."""
    owner = re.match(r"\d+-(\d+)-", os.environ.get("WANDB_SERVICE", ""))
    return owner is not None and int(owner[1]) != os.getpid()


def is_loss_of_service(error: Exception) -> bool:
    """Whether an error says that the connection to wandb's own process is lost.

    That is no sure sign where values of the user's were written, as these have code of their own: see
    `has_lost_service`.
    """
    if isinstance(error, OSError):  # older versions: BrokenPipeError; newer ones: ConnectionResetError
        return isinstance(error, ConnectionError) or error.errno in _LOST_SOCKET
    return type(error).__name__ in LOST_SERVICE


def has_lost_service(run: AnyRun, error: Exception) -> bool:
    """Whether a call of `run` failed because wandb's own process is gone, rather than for what was written.

    In doubt the run is asked: a call that adds nothing to the row in progress fails as well if the process is gone.
    """
    if not isinstance(error, OSError) or not is_loss_of_service(error):
        return is_loss_of_service(error)
    try:
        original(run, "log")({}, commit=False)  # the session's own way takes rows of a run that is gone as well
    except Exception as second:  # noqa: BLE001  # whatever wandb makes of it
        return is_loss_of_service(second)
    return False


def restore_media_directory(error: FileNotFoundError) -> bool:
    """Make the directory again in which wandb prepares the files of tables and media, if it is what was missing.

    Returns:
        Whether it was missing, and is there again.
    """
    path = Path(str(error.filename or ""))
    if not path.parent.name.endswith(_MEDIA_DIRECTORY) or path.parent.exists():
        return False
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path.parent.exists()
