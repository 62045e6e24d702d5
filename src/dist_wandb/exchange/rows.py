"""Both ends of the exchange: the calls of a rank, and rows of the unit's finished values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from dist_wandb.exchange.attachments.attachment import Attachments
from dist_wandb.exchange.attachments.gathers import FusedGathers
from dist_wandb.exchange.attachments.metrics import FusedMetrics
from dist_wandb.exchange.attachments.spreads import Spreads
from dist_wandb.exchange.held import Held, Reductions, RowWriter, keep_nothing
from dist_wandb.exchange.posting import Posting
from dist_wandb.exchange.writing import Writing
from dist_wandb.payloads.media.gathers import Gathered
from dist_wandb.payloads.torchmetrics.metrics import Snapshot
from dist_wandb.settings.reduction import PerRankNames, Reduction, matches_any


class Rows:
    """Processes the contributions and the finished rows of one rank.

    Args:
        writer: Writes rows into this rank's run.
        reduce: Name patterns and reductions; the first match applies. `None` for no reduction.
        per_rank: Names that each rank of a shared run also writes under its label.
        spread: Patterns of names whose spread over ranks is wanted.
        own_axes: Returns the names that are x axes of the user in this rank's run.
        keep_summary: Called after each row; see `runs.summary.SummaryWrites.keep`.
        act: Called before each row; see `runs.summary.SummaryWrites.act`.
        counts: Whether rows without a step lie at the number of calls on the x axis.
        first: Position on the x axis of the first row without a step, in this rank's run.
        rank: This rank's index in the job, for messages.
        index: This rank's index in its unit.

    Attributes:
        writes: Whether this rank writes the rows of its unit.
        held: The values that wait for their row.
        posting: Processes contributions.
        writing: Processes finished rows.
        lost: How many values of this rank are lost, by the cause in words.
    """

    def __init__(
        self,
        writer: RowWriter,
        reduce: Mapping[str, Reduction] | None,
        per_rank: PerRankNames = PerRankNames(),  # noqa: B008  # immutable
        spread: Sequence[str] = (),
        own_axes: Callable[[], Collection[str]] = tuple,
        keep_summary: Callable[..., None] = keep_nothing,
        act: Callable[..., None] = keep_nothing,
        *,
        counts: bool = True,
        first: int = 0,
        rank: int = 0,
        index: int = 0,
    ) -> None:
        self.writes: bool = writer.is_primary
        self.held: Held = Held(
            Reductions(reduce),
            Attachments(
                {
                    Snapshot: FusedMetrics(rank, computes=self.writes, lost=writer.lost),
                    Gathered: FusedGathers(rank, collects=self.writes, lost=writer.lost),
                }
            ),
            Spreads(index, lambda name: matches_any(name, spread)),
            own_axes,
            keep_summary,
            act,
            counts,
            first,
        )
        self.posting: Posting = Posting(writer, self.held, per_rank, rank, is_first=not index)
        self.writing: Writing = Writing(writer, self.held, rank)
        self.lost: Counter[str] = writer.lost
        self._writer = writer

    @property
    def has_run(self) -> bool:
        """Whether there is a run to write to."""
        return self._writer.has_run
