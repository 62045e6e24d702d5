"""Both ends of the exchange: the calls of a rank, and rows of the unit's finished values.

Values that are not numbers, or are reduced by ``"first"``, stay on the primary, with the call that they belong to. In a
shared run, a rank's own numbers are written under its label: the primary's in the reduced row, those of other ranks at
once.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dist_wandb.exchange.attachments.attachment import ATTACHED, Attachments
from dist_wandb.exchange.attachments.gathers import FusedGathers
from dist_wandb.exchange.attachments.metrics import FusedMetrics
from dist_wandb.exchange.attachments.spreads import Spreads
from dist_wandb.exchange.held import Held, Own, Reductions, RowWriter
from dist_wandb.exchange.protocol.lanes import (
    NO_NUMBER,
    Lanes,
    Number,
    lanes_of,
    lanes_of_floats,
    number_at,
    number_of,
    reduced_numbers,
)
from dist_wandb.exchange.protocol.rounds import Rounds
from dist_wandb.exchange.protocol.table import Row
from dist_wandb.notices import Notices
from dist_wandb.payloads.devices import Later, LaterValue, known
from dist_wandb.payloads.media.gathers import Gathered
from dist_wandb.payloads.scalars import checked_weight, is_number
from dist_wandb.payloads.torchmetrics.metrics import Snapshot
from dist_wandb.reading.stragglers import RANK, Stragglers, Timing
from dist_wandb.settings.reduction import (
    BUSY,
    DEGRADED,
    STEP,
    TIMES,
    WITHOUT_NANS,
    PerRankNames,
    Reduction,
    matches_any,
)

_FLOATS = {float}
_log = logging.getLogger("dist_wandb")
_LEFT_OPEN = 2.0  # seconds after which a row is ended that a call with a step left open for more values of this step


class Contribution(NamedTuple):
    """The values of one `log` call on one rank."""

    metrics: Mapping[str, Any]  # as from `scalars.copied_row`
    step: int | None  # position on the x axis
    commit: bool | None = None  # as in `wandb.Run.log`; `None` leaves it to wandb
    weight: Any = None  # of the values in means: a number, a mapping of names to numbers, or `None` for 1
    x: int = -1  # position of its row, as in `protocol.calls.Call`
    in_order: bool = True  # whether it is of the first thread that logged, and so follows all earlier ones of that
    follows: int = 0  # how many writes of the user into the summary it follows

    def is_ready(self) -> bool:
        """Return whether it can be sent without waiting for a device, or for the encoding of images."""
        weights = self.weight.values() if isinstance(self.weight, dict) else (self.weight,)
        values = (*self.metrics.values(), *weights)
        return all(value.is_ready() for value in values if isinstance(value, (Later, LaterValue, *ATTACHED)))

    def is_copied(self) -> bool:
        """Return whether a thread can write it as this rank's own row without waiting for a device."""
        return all(
            value.is_copied() if isinstance(value, Gathered) else value.is_ready()
            for value in self.metrics.values()
            if isinstance(value, (Later, LaterValue, *ATTACHED))
        )

    def has_arrived(self) -> bool:
        """Return whether that is certain: then the training thread may write it."""
        return all(
            value.has_arrived() for value in self.metrics.values() if isinstance(value, (Later, LaterValue, *ATTACHED))
        )


class Posting:
    """Turns contributions into calls; writes this rank's own values, or keeps them."""

    def __init__(self, held: Held, per_rank: PerRankNames, *, is_first: bool) -> None:
        self._writer = held.writer
        self._writes = held.writer.is_primary
        self._held = held
        self._per_rank = per_rank
        self._is_first = is_first  # in the unit
        self._usual = Own({}, None)

    def write_own(self, contribution: Contribution) -> None:
        """Write a contribution as a row without other ranks; plain names are written by the first rank of a unit."""
        metrics = known(contribution.metrics)
        if any(isinstance(value, ATTACHED) for value in metrics.values()):
            alone = [self._held.attachments.alone(name, value) for name, value in metrics.items()]
            metrics = {name: value for values in alone for name, value in values.items()}
        row = metrics
        if self._writer.label is not None:
            labelled = self._labelled(metrics)
            row = {**metrics, **labelled} if self._writes else self._with_axes(labelled, metrics)
        self._held.act(contribution.follows)
        if row or not metrics:
            self._writer.write(row, contribution.step, commit=contribution.commit)
        if row:  # the end of an open row replaces what was written into the summary meanwhile, as in wandb
            is_open = contribution.commit is False
            self._held.keep_summary(row, contribution.follows, contribution.step, is_open=is_open)

    def post(self, contribution: Contribution, rounds: Rounds, now: float) -> Iterable[str]:
        """Post a contribution whose values are computed, and return its names; write own values, or keep them."""
        rounds.side_data.interleaved = rounds.side_data.interleaved or not contribution.in_order
        step, x, commit = contribution.step, contribution.x, contribution.commit
        own = self._own_of(contribution) if self._writes else None
        if (lanes := self._lanes(contribution)) is not None:
            return rounds.post(contribution.metrics, lanes, step, x, now, own).names
        values = known(contribution.metrics)
        unit, others, mine = self._sorted(values, self._weights(contribution.weight, values), rounds)
        if self._writes and mine:
            own, mine = Own(mine, commit, contribution.follows), {}
        if unit or others or own:
            numbers = [*unit.values(), *(NO_NUMBER for _ in others)]
            call = rounds.post([*unit, *others], lanes_of(numbers), step, x, now, own)
            for key in call.cells() if others else ():
                if key.name in others:
                    self._held.attachments.of(others[key.name]).keep(key, others[key.name])
        if mine:
            self._held.act(contribution.follows)
            self._writer.write(self._with_axes(mine, values), self._held.x(x), commit=True)
            self._held.keep_summary(mine, contribution.follows, step, is_open=False)
        return unit

    def _own_of(self, contribution: Contribution) -> Own | None:
        """Return what tells a row's place among the writes into the summary; most calls share one object."""
        commit, follows = contribution.commit, contribution.follows
        if commit is not None:
            return Own({}, commit, follows)
        if self._usual.follows != follows:
            self._usual = Own({}, None, follows)
        return self._usual if contribution.metrics else None

    def _lanes(self, contribution: Contribution) -> Lanes | None:
        """Return the numbers of the most common call, floats with one weight, all of which are reduced; else `None`."""
        metrics, weight = contribution.metrics, contribution.weight
        if set(map(type, metrics.values())) != _FLOATS or not (weight is None or type(weight) in (int, float)):
            return None
        if self._writer.label is not None or "first" in self._held.reductions.of_all((*metrics,)):
            return None
        return lanes_of_floats([*metrics.values()], 1.0 if weight is None else float(weight))

    def _with_axes(self, labelled: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        """Add the x axes of their call to values under this rank's label: otherwise W&B fills in the last ones."""
        if not labelled:
            return {}
        names = (*self._held.own_axes(), self._writer.step_metric)
        axes = {name: values[name] for name in names if name is not None and name in values}
        return {**axes, **labelled}

    def _sorted(
        self, values: Mapping[str, Any], weights: Any, rounds: Rounds
    ) -> tuple[dict[str, Number], dict[str, Any], dict[str, Any]]:
        """Split values into numbers to reduce, attachments to combine, and own values, with those under a label."""
        unit: dict[str, Number] = {}
        others: dict[str, Any] = {}
        mine: dict[str, Any] = {}
        by_name = isinstance(weights, dict)
        for name, value in values.items():
            if is_number(value) and (kind := self._held.reductions.of(name)) != "first":
                weight = weights.get(name, 1.0) if by_name else weights
                unit[name] = number_of(value, weight, ignores_nan=kind in WITHOUT_NANS)
            elif value is None and self._held.reductions.of(name) != "first":
                unit[name] = NO_NUMBER  # the other ranks need not wait for this one
            elif is_number(value) and self._writer.has_own_run:  # all runs get the number of the unit's first rank
                unit[name] = number_of(value) if self._is_first else NO_NUMBER
            elif isinstance(value, ATTACHED):
                others[self._held.attachments.of(value).series(name, value, rounds.table.names)] = value
            elif self._writes:
                mine[name] = value
        return unit, others, {**mine, **self._labelled(values)}

    def _labelled(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values under this rank's label in a shared run: numbers and, except on the primary, all others."""
        label, names, axis = self._writer.label, self._per_rank, self._writer.step_metric
        if label is None or not names.patterns:
            return {}
        labelled, axes = {}, {axis, *self._held.own_axes()}
        for name, value in values.items():
            self._held.reductions.of(name)  # it is a logged name, also if it is not reduced
            if name in axes or value is None or isinstance(value, ATTACHED):
                continue
            number = is_number(value)
            if (number or not self._writes) and names.has(name, is_number=number):
                labelled[f"{label}/{name}"] = value
        return labelled

    def _weights(self, weight: Any, values: Mapping[str, Any]) -> Any:
        if weight is None or isinstance(weight, (int, float)):
            return 1.0 if weight is None else float(weight)
        if isinstance(weight, Later):
            return float(checked_weight("weight", weight.number(), self._held.rank))
        self._held.reductions.weighted.update(weight.keys() - values.keys())
        return {name: self._weights(value, values) for name, value in weight.items()}


class _OpenRow(NamedTuple):
    """A row that was left open for further values of its step."""

    values: Mapping[str, Any]
    x: int | None  # its position
    since: float  # the time of its last value, in seconds


_NONE = _OpenRow({}, None, 0.0)


class Writing:
    """Turns finished rows into rows of this rank's run, if this rank writes the rows of its unit."""

    def __init__(self, held: Held) -> None:
        self.is_over = False  # whether the run is being finished: nothing more is written
        self.due: int = 0  # how many rows are being written
        self.last_position: str = "the start"  # of the last row, for messages
        self.global_rank_of: Any = lambda index: index  # in the job, given that in the unit
        self._writer = held.writer
        self._held = held
        self._notices = Notices()
        self._stragglers = Stragglers()
        self.timings: dict[str, Timing] = defaultdict(Timing)  # by name
        self._open = _NONE

    def write(self, rows: Sequence[Row]) -> None:
        """Write finished rows."""
        try:
            for index, row in enumerate(rows):
                self.due = len(rows) - index
                if self._writer.is_primary or row.own:
                    try:
                        self._write_row(row)
                    except Exception as error:  # noqa: BLE001  # in the making of the row
                        self._lose(error, len(row.names))
        finally:
            self.due = 0
        if rows:
            step, x = rows[-1].step, rows[-1].x
            self.last_position = f"row {-x}" if step is None and x < 0 else f"step {self._held.x(x)}"

    def end_row(self, now: float = math.inf) -> None:
        """End a row that was left open, if that is some time ago."""
        if self._open.values and now - self._open.since >= _LEFT_OPEN:
            self._write({}, None, commit=None)

    def _write_row(self, row: Row) -> None:
        values: dict[str, Any] = {}
        missing = row.missing
        if self._writer.is_primary and row.names:
            values, missing = self._values(row)
        own, commit = {}, row.step is None
        for one in row.own:
            own.update(one.values)
            commit = commit if one.commit is None else one.commit
        values.update(own)
        if not values:
            return
        follows = max((one.follows for one in row.own), default=None)
        self._held.act(follows)
        axes = {name: value for name, value in row.axes.items() if name not in own}
        if row.corrects or not self._fits(values, axes):
            self.end_row()
        values.update(axes)
        if missing:
            values[DEGRADED] = missing
            self._held.marked[DEGRADED] += 1
        if BUSY in values:
            values.update(self._stragglers.detect(values.get(STEP)))
            if RANK in values:
                self.timings[RANK].counts[values[RANK]] += 1
        # As in wandb, a row left open without a step takes a framework's axis from the call that ends it.
        is_open = commit is False and row.step is None and not (self._held.counts or row.corrects)
        x = None if is_open else self._held.x(row.x)
        self._write(values, x, commit=True if row.corrects else commit)
        self._held.keep_summary(values, follows, x, is_open=not commit, corrects=row.corrects)

    def _fits(self, values: Mapping[str, Any], axes: Mapping[str, Any]) -> bool:
        """Return whether the open row may hold a call too: no name of it yet, and the same place on the user's axes."""
        same = all(self._open.values.get(name, value) == value for name, value in axes.items())
        return same and self._open.values.keys().isdisjoint(values.keys() - axes.keys())

    def _values(self, row: Row) -> tuple[dict[str, Any], int]:
        """Return the reduced values of a row, and how many ranks are missing."""
        names, held = row.names, self._held
        numbers = reduced_numbers(*row.lanes, held.reductions.of_all(names), row.ranks[0])
        values = dict(zip(names, numbers, strict=True))
        missing = row.missing
        counts = row.lanes[0][-len(names) :]
        for index, key in enumerate(row.cells()) if counts.count(0.0) else ():
            if not counts[index]:  # it has no number, but what the ranks attached
                del values[key.name]
                added, lacks = held.attachments.pop_values(key, row.ranks[index], corrects=row.corrects)
                values.update(added)
                if lacks:
                    values[DEGRADED] = lacks  # also if the row has nothing else
                missing = max(missing, lacks)
        if held.spreads.found:
            self._add_spreads(values, row)
        return values, missing

    def _add_spreads(self, values: dict[str, Any], row: Row) -> None:
        for index, key in enumerate(row.cells()):
            spread = self._held.spreads.found.pop(key, None)
            if spread is None or self._held.reductions.of(key.name) == "first":
                continue
            name, number = key.name, number_at(*row.lanes, index, len(row.names))
            values.update({f"{name}/{kind}": number.reduced(kind) for kind in ("min", "max")})
            values[f"{name}/std"] = math.sqrt(spread.squares / number.weight)
            values[f"{name}/argmax_rank"] = self.global_rank_of(spread.largest_at)
            if name.startswith(TIMES) and row.ranks[index] > 1:
                rank, largest, ranks = values[f"{name}/argmax_rank"], values[f"{name}/max"], row.ranks[index]
                self.timings[name].add(rank, largest, values[name], values[f"{name}/min"])
                if name == BUSY:
                    self._stragglers.add(rank, largest, (ranks * values[name] - largest) / (ranks - 1))

    def _write(self, row: Mapping[str, Any], x: int | None, *, commit: bool | None) -> None:
        if self.is_over:
            return
        if commit is not False:
            self._open = _NONE
        else:
            before = self._open.values if x == self._open.x else {}
            self._open = _OpenRow({**before, **row}, x, time.monotonic())
        try:
            self._writer.write(row, x, commit=commit)
        except Exception as error:  # noqa: BLE001  # of W&B
            self._lose(error, len(row))

    def _lose(self, error: Exception, values: int) -> None:
        """Report a row that could not be written, once for each kind of error: it must not stop the later ones."""
        self._writer.lost["that W&B refused"] += values
        text = "dist_wandb: rank %d could not write a row; it is lost. More errors of this kind are not reported"
        if self._notices.is_first(type(error)):
            _log.error(text, self._held.rank, exc_info=error)


class Rows:
    """Processes the contributions and the finished rows of one rank."""

    def __init__(
        self,
        writer: RowWriter,
        reduce: Mapping[str, Reduction] | None,  # by name pattern; the first match applies
        per_rank: PerRankNames = PerRankNames(),  # noqa: B008  # immutable; what ranks also write under their label
        spread: Sequence[str] = (),  # patterns of names whose spread over ranks is wanted
        own_axes: Callable[[], Collection[str]] = tuple,  # see `Held`, also for the following
        keep_summary: Callable[..., None] = lambda *_, **__: None,  # `runs.summary.SummaryWrites.keep`
        act: Callable[..., None] = lambda *_: None,  # `runs.summary.SummaryWrites.act`
        *,
        counts: bool = True,
        first: int = 0,
        rank: int = 0,  # in the job, for messages
        index: int = 0,  # in the unit
    ) -> None:
        self.writes: bool = writer.is_primary
        metrics = FusedMetrics(rank, merges=self.writes, lost=writer.lost)
        gathers = FusedGathers(rank, merges=self.writes, lost=writer.lost)
        attachments = Attachments({Snapshot: metrics, Gathered: gathers})
        spreads = Spreads(index, lambda name: matches_any(name, spread))
        parts = (Reductions(reduce), attachments, spreads)
        self.held: Held = Held(writer, rank, *parts, own_axes, keep_summary, act, counts, first)
        self.posting: Posting = Posting(self.held, per_rank, is_first=not index)
        self.writing: Writing = Writing(self.held)
        self.lost: Counter[str] = writer.lost  # how many values of this rank, by the cause in words

    @property
    def has_run(self) -> bool:
        """Whether there is a run to write to."""
        return self.held.writer.has_run
