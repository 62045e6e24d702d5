"""Both ends of the exchange: totals of a rank's contributions, and rows of the unit's finished values."""

from __future__ import annotations

from collections.abc import Mapping

from dist_wandb.exchange.attachments.attachment import Attachments
from dist_wandb.exchange.attachments.gathers import FusedGathers
from dist_wandb.exchange.attachments.metrics import FusedMetrics
from dist_wandb.exchange.held import Held, Reductions, RowWriter
from dist_wandb.exchange.posting import Posting
from dist_wandb.exchange.writing import Writing
from dist_wandb.exchange.x_axis import XAxis
from dist_wandb.payloads.media.gathers import Gathered
from dist_wandb.payloads.torchmetrics.metrics import Snapshot
from dist_wandb.settings.reduction import PerRankNames, Reduction


class Rows:
    """Processes the contributions and the finished values of one rank.

    Args:
        writer: Writes rows into this rank's run.
        reduce: Name patterns and reductions; the first match applies. `None` for no reduction.
        per_rank: Names that each rank of a shared run also writes under its label.
        counts: Whether rows without a step lie at the number of calls on the x axis.
        first: Position on the x axis of the first row without a step, in this rank's run.
        rank: This rank's index in the job, for messages.
        is_first: Whether it is the first rank of its unit.

    Attributes:
        writes: Whether this rank writes the rows of its unit.
        held: The values that wait for their row.
        posting: Processes contributions.
        writing: Processes finished values.
    """

    def __init__(
        self,
        writer: RowWriter,
        reduce: Mapping[str, Reduction] | None,
        per_rank: PerRankNames = PerRankNames(),  # noqa: B008  # immutable
        *,
        counts: bool = True,
        first: int = 0,
        rank: int = 0,
        is_first: bool = True,
    ) -> None:
        self.writes: bool = writer.is_primary
        self.held: Held = Held(
            Reductions(reduce),
            Attachments(
                {
                    Snapshot: FusedMetrics(rank, computes=self.writes),
                    Gathered: FusedGathers(rank, collects=self.writes),
                }
            ),
            XAxis(counts=counts, first=first),
        )
        self.posting: Posting = Posting(writer, self.held, per_rank, rank, is_first=is_first)
        self.writing: Writing = Writing(writer, self.held, rank)
        self._writer = writer

    @property
    def has_run(self) -> bool:
        """Whether there is a run to write to."""
        return self._writer.has_run
