"""How a rank takes part whose script calls `init_trackers` on the main process alone.

Published scripts do so under ``if accelerator.is_main_process``, and log on all ranks. Such a rank looks in the job's
store for the session that the main process has opened next (`next_job`). Until it is there, rows wait here, and what a
script reads is a stand-in for the run. Then the rank opens its session with the options of the main process, and logs
the rows that have waited. `log` never waits for the store: a thread asks it.

At its `finish` it joins at the latest, because the main process waits for it. Sessions that the main process has
finished are passed over by a rank that had no part in them, so that the numbers of sessions stay equal.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from accelerate import PartialState

from dist_wandb.accelerate.world import current_topology
from dist_wandb.payloads.devices import copied_tensor
from dist_wandb.payloads.torchmetrics.metrics import is_metric
from dist_wandb.session.job_description import next_job
from dist_wandb.settings.config_values import given_values
from dist_wandb.settings.options import Options
from dist_wandb.store.polling import poll
from dist_wandb.store.timed_caller import Inquiry
from dist_wandb.user_lines import users_line, warn

if TYPE_CHECKING:
    from dist_wandb.session.job_description import JobDescription
    from dist_wandb.session.session import Session

INTEGRATION = "DistWandbTracker"
_PAUSE = 0.05  # seconds between two looks whether the main process has begun, at first
_MOST_ROWS = 1000  # kept on a rank that waits for the main process to call init_trackers


class LateJoin:
    """The rows of a rank that is not started yet, and its look for the session of the main process.

    Args:
        options: The rank's own options, until those of the main process are known.

    Attributes:
        options: What the session is opened with.
        rows: Values, step and further arguments of the rows that wait.
    """

    def __init__(self, options: Options) -> None:
        self.options: Options = options
        self.rows: deque[tuple[Mapping[str, Any], int | None, dict[str, Any]]] = deque(maxlen=_MOST_ROWS)
        self.await_next()

    @property
    def is_possible(self) -> bool:
        """Whether this rank may log before it is started."""
        return not PartialState().is_main_process

    def await_next(self) -> None:
        """Look for the session after the one that is open from now on."""
        self._inquiry = Inquiry(self.look_up, _PAUSE, lambda: PartialState().num_processes)

    def look_up(self) -> JobDescription | None:
        """What the main process has published of the next session, if it has begun; waits for the store."""
        return next_job(INTEGRATION, current_topology(), self.options.limits.join_timeout)

    def learns(self, within: float | None) -> bool:
        """Whether the main process has begun; its options are `options` then.

        Args:
            within: How long to wait for the answer of a thread, in seconds; `None` to ask without one.

        Raises:
            RendezvousError: The job's store is gone.
        """
        job = self.look_up() if within is None else self._inquiry.look(within)
        if job is not None:
            self.options = Options(**job["options"])
        return job is not None

    def ask_again(self) -> None:
        """Discard the last answer, because it proved wrong."""
        self._inquiry.forget()

    def keep(self, values: Mapping[str, Any], step: int | None, arguments: Mapping[str, Any]) -> None:
        """Keep a row; if there are too many, the first one is dropped."""
        if len(self.rows) == _MOST_ROWS:
            self._warn_of_dropped_rows()
        self.rows.append((_copied(values), step, _copied(arguments)))

    def drop_rows(self) -> None:
        """Drop the rows that wait, because the rank ends."""
        if self.rows:
            self._warn_of_dropped_rows()
            self.rows.clear()

    def take_over(self, other: LateJoin) -> None:
        """Take over the rows of a tracker that is replaced."""
        self.rows, other.rows = other.rows, self.rows

    def _warn_of_dropped_rows(self) -> None:
        number = f"{len(self.rows)} rows{' and more' if len(self.rows) == _MOST_ROWS else ''}"
        message = (
            f"Rank {PartialState().process_index} logged {number}, but the main process has not called "
            "accelerator.init_trackers: they are dropped. Call it before the first log."
        )
        warn(message, users_line(), may_raise=False)  # neither the training nor its end fails over it


def await_session(find_session: Callable[[], Session | None], join_timeout: float) -> Session | None:
    """The session of a rank that joins late, once the main process has begun; `None` if it does not.

    Args:
        find_session: Returns the session, once the main process has begun.
        join_timeout: How long to wait for that, in seconds; 0 to look once.
    """
    return poll(find_session, join_timeout, _PAUSE, PartialState().num_processes)


class ConfigOnceStarted:
    """The source of the config on a rank that joins late.

    Args:
        find_session: Returns the session, once the main process has begun.
        join_timeout: How long to wait for that, in seconds.
    """

    def __init__(self, find_session: Callable[[], Session | None], join_timeout: float) -> None:
        self._find_session = find_session
        self._join_timeout = join_timeout
        self._written: dict[str, Any] = {}

    def read(self, name: str | None = None) -> Mapping[str, Any]:
        """Wait for the main process, and read its config; an empty one, with a warning, if it does not begin."""
        if name in self._written:
            return self._written
        session = await_session(self._find_session, self._join_timeout)
        if session is None:
            warnings.warn(
                f"The config was read on rank {PartialState().process_index}, but the main process did not call "
                f"accelerator.init_trackers within {self._join_timeout:g} s. So it is empty.",
                stacklevel=4,
            )
            return self._written
        return {**self._written, **given_values(session.config)}

    def write(self, values: Mapping[str, Any]) -> None:
        """Keep values here."""
        self._written.update(values)


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of values that the user may change before they are logged: mappings and tensors. Waits for no device."""
    return {
        name: _copied(value) if isinstance(value, Mapping) and not is_metric(value) else copied_tensor(value)
        for name, value in values.items()
    }
