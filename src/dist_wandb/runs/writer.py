"""Rows of one rank, written into its run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dist_wandb.notices import Notices
from dist_wandb.runs.rescue import Rescue
from dist_wandb.runs.wandb_media import has_merged, is_media, made_of_merged

if TYPE_CHECKING:
    from dist_wandb.runs.axes import Axes
    from dist_wandb.runs.null_run import AnyRun
    from dist_wandb.runs.record import Record
    from dist_wandb.settings.plan import RunPlan


class RunWriter:
    """Writes the rows of one rank into its run.

    Args:
        run: The run, or what stands for it; a `NullRun` on a rank without one.
        plan: Tells whether the plain names are this rank's to write, and its label in a shared run.
        step_metric: Name of the x axis in every row; `None` for none.
        rank: This rank's index in the job, for messages.
    """

    def __init__(self, run: AnyRun | Record | Axes, plan: RunPlan, step_metric: str | None, rank: int = 0) -> None:
        self.label = plan.label
        self.is_primary = plan.primary
        self.has_own_run = plan.run_mode == "new"
        self._run = run
        self.step_metric = step_metric
        self._rescue = Rescue(is_media, rank)
        self._notices = Notices()

    @property
    def has_run(self) -> bool:
        """Whether there is a run to write into."""
        return bool(self._run)

    def write_plain(self, row: Mapping[str, Any], x: int | None) -> None:
        """Write one row. Tables and images of the ranks that W&B refuses are left out, with a warning.

        Args:
            row: Values by the names they are to have.
            x: Its place on the x axis; `None` leaves the x axis out of the row.
        """
        if not self._run:
            return
        axis = {} if self.step_metric is None or x is None else {self.step_metric: x}
        if not has_merged(row):
            self._log({**row, **axis})
            return
        with made_of_merged(row, self._warn) as made:
            if made:
                self._log({**made, **axis})

    def write(self, metrics: Mapping[str, Any], step: int | None, *, commit: bool | None = None) -> None:
        """Write one row.

        Args:
            metrics: What this rank logged, by the names that it is to have.
            step: Its place on the x axis; `None` leaves the x axis out of the row.
            commit: As in `wandb.Run.log`; `None` leaves it to wandb.
        """
        if not self._run:
            return
        row = dict(metrics)
        if self.step_metric is not None and step is not None:
            row[self.step_metric] = step
        arguments = {} if commit is None else {"commit": commit}
        if not has_merged(row):
            self._log(row, **arguments)
            return
        with made_of_merged(row) as made:
            self._log(made, **arguments)

    def _warn(self, name: str, error: Exception) -> None:
        self._notices.warn(name, f"{name!r} could not be put together from what the ranks sent: {error!r}")

    def _log(self, row: dict[str, Any], **kwargs: Any) -> None:
        try:
            self._run.log(row, **kwargs)
        except Exception as error:  # noqa: BLE001  # raised again, if no value is the cause
            self._rescue.write(self._run.log, row, error, **kwargs)
