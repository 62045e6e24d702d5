"""Pass a run to a child process, with its config: wandb attaches the run with an empty config."""

from __future__ import annotations

import logging
import pickle
from typing import TYPE_CHECKING

from dist_wandb.runs.client_settings import one_line
from dist_wandb.runs.wandb_private import fill_config
from dist_wandb.settings.config_values import decoded, encoded, given_values

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun, Run

_log = logging.getLogger("dist_wandb")


def pickled(run: AnyRun | None) -> bytes | None:
    """Pickle a run and its config for a child process; `None` if it cannot be pickled."""
    try:
        return pickle.dumps((run, encoded(given_values(getattr(run, "config", None))))) if run else None
    except (pickle.PicklingError, AttributeError, TypeError):  # a mock of a run
        return None


def unpickled(data: bytes) -> Run | None:
    """In the child: return the parent's run, attached to the parent's service; `None`, with a warning, if it fails."""
    run: Run
    run, config = pickle.loads(data)  # noqa: S301  # written by `pickled` in the parent of this very process
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
