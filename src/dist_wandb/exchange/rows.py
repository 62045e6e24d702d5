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
    """Processes the contributions and the finished rows of one rank."""

    def __init__(
        self,
        writer: RowWriter,
        reduce: Mapping[str, Reduction] | None,  # by name pattern; the first match applies
        per_rank: PerRankNames = PerRankNames(),  # noqa: B008  # immutable; what ranks also write under their label
        spread: Sequence[str] = (),  # patterns of names whose spread over ranks is wanted
        own_axes: Callable[[], Collection[str]] = tuple,  # see `Held`, also for the following
        keep_summary: Callable[..., None] = keep_nothing,  # `runs.summary.SummaryWrites.keep`
        act: Callable[..., None] = keep_nothing,  # `runs.summary.SummaryWrites.act`
        *,
        counts: bool = True,
        first: int = 0,
        rank: int = 0,  # in the job, for messages
        index: int = 0,  # in the unit
    ) -> None:
        self.writes: bool = writer.is_primary
        self.held: Held = Held(
            Reductions(reduce),
            Attachments(
                {
                    Snapshot: FusedMetrics(rank, merges=self.writes, lost=writer.lost),
                    Gathered: FusedGathers(rank, merges=self.writes, lost=writer.lost),
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
        self.lost: Counter[str] = writer.lost  # how many values of this rank, by the cause in words
        self._writer = writer

    @property
    def has_run(self) -> bool:
        """Whether there is a run to write to."""
        return self._writer.has_run
