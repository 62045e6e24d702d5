"""A run that is handed on to a child process."""

from __future__ import annotations

import logging
import pickle
from typing import TYPE_CHECKING

from dist_wandb.runs.client_settings import one_line
from dist_wandb.runs.wandb_private import fill_config
from dist_wandb.settings.config_values import given_values, told, understood

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun, Run

_log = logging.getLogger("dist_wandb")


def pickled(run: AnyRun | None) -> bytes | None:
    """What a child process needs to go on writing into `run`, or `None` where the run cannot be handed on."""
    try:
        return pickle.dumps((run, told(given_values(getattr(run, "config", None))))) if run else None
    except (pickle.PicklingError, AttributeError, TypeError):  # a stand-in for a run, in somebody's tests
        return None


def unpickled(data: bytes) -> Run | None:
    """The run of the parent process, in the child, attached to the parent's service.

    Returns:
        The run; `None`, with a warning, where wandb cannot attach to it.
    """
    run: Run
    run, config = pickle.loads(data)  # noqa: S301  # written by `pickled` in the parent of this very process
    try:
        _ = getattr(run, "config", None)  # wandb attaches at the first use
    except Exception as error:  # noqa: BLE001  # one of wandb's own: WANDB_SERVICE is gone from the environment, or it
        _log.warning("dist_wandb: this process opens the run of its parent anew, as wandb says: %s", one_line(error))
        return None
    if config:
        fill_config(run, understood(config))
    return run
