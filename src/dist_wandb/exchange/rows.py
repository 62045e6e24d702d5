"""Both ends of the exchange: totals made of what a rank logs, and rows made of what the unit finished."""

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
    """What becomes of contributions and of finished values on one rank.

    Args:
        writer: Writes rows into this rank's run.
        reduce: Name patterns and reductions, the first that matches counts; `None` for no reduction.
        per_rank: Names that each rank of a shared run also writes under its label.
        counts: Whether rows without a step lie at the count of calls on the x axis.
        first: Place on the x axis of the first row without a step, in this rank's run.
        rank: This rank's index in the job, for messages.
        is_first: Whether it is the first of its unit.

    Attributes:
        writes: Whether this rank writes the rows of its unit.
        held: What waits for its row.
        posting: Takes contributions.
        writing: Takes finished values.
    """

    def __init__(
        self,
        writer: RowWriter,
        reduce: Mapping[str, Reduction] | None,
        per_rank: PerRankNames = PerRankNames(),  # noqa: B008  # cannot be changed
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
        """Whether there is a run to write into."""
        return self._writer.has_run
