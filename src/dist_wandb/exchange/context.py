"""The objects that all parts of one rank's exchange share."""

from __future__ import annotations

from dataclasses import dataclass

from dist_wandb.exchange.lifecycle import Lifecycle
from dist_wandb.exchange.reports import Reports
from dist_wandb.exchange.rows import Rows
from dist_wandb.settings.limits import Limits
from dist_wandb.settings.plan import Unit


@dataclass(frozen=True)
class Context:
    """The objects that all parts of one rank's exchange share."""

    unit: Unit
    limits: Limits
    rows: Rows
    reports: Reports
    lifecycle: Lifecycle

    @property
    def rank(self) -> int:
        """Index of this rank in the job."""
        return self.unit.global_rank

    def warn(self, kind: str, message: str) -> None:
        """Log a warning, once for its kind."""
        self.reports.warn(kind, message)
