"""What the parts of one rank's exchange share."""

from __future__ import annotations

from dataclasses import dataclass

from dist_wandb.exchange.lifecycle import Lifecycle
from dist_wandb.exchange.reports import Reports
from dist_wandb.exchange.rows import Rows
from dist_wandb.settings.limits import Limits
from dist_wandb.settings.plan import Unit


@dataclass(frozen=True)
class Context:
    """What all parts of one rank's exchange share.

    Args:
        unit: The unit, seen from this rank.
        limits: How long, and how much, to wait.
        rows: Makes totals of contributions, and rows of what is finished.
        reports: What this rank warns of.
        lifecycle: What is asked of the exchange, and where it is.
    """

    unit: Unit
    limits: Limits
    rows: Rows
    reports: Reports
    lifecycle: Lifecycle

    @property
    def rank(self) -> int:
        """Index in the job of this rank."""
        return self.unit.global_rank

    def warn(self, kind: str, message: str) -> None:
        """Log a warning, unless there was one of its kind."""
        self.reports.once(kind, message)
