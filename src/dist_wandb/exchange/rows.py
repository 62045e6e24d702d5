"""Both ends of the exchange: totals made of what a rank logs, and rows made of what the unit finished.

`post` makes `Totals` of numbers. Values that are no numbers, or are reduced by ``"first"``, stay on the primary, tied
to the first number of the same call. In a shared run a rank's own numbers are written under its label: the primary's in
the reduced row, those of others at once. `write_finished`, on ranks that write, makes one row of the values of one
position, which `x_axis` knows.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dist_wandb.exchange.attachments.gathers import FusedGathers, is_gathered_name
from dist_wandb.exchange.attachments.metrics import FusedMetrics, is_metric_name
from dist_wandb.exchange.protocol.aggregates import Totals
from dist_wandb.exchange.protocol.cells import Finished, Key
from dist_wandb.exchange.protocol.rounds import Rounds
from dist_wandb.exchange.x_axis import MOST_CALLS, XAxis
from dist_wandb.notices import Notices
from dist_wandb.payloads.checks import checked_weight
from dist_wandb.payloads.devices import Later, LaterValue, known
from dist_wandb.payloads.media.gathers import Gathered
from dist_wandb.payloads.scalars import is_number
from dist_wandb.payloads.torchmetrics.metrics import Snapshot
from dist_wandb.settings.reduction import PerRankNames, Reduction, reduction_of

_log = logging.getLogger("dist_wandb")

DEGRADED = "dist_wandb/degraded"
_NO_NUMBER = Totals(contributors=1)  # what metrics, tables and images are in the rounds, and numbers that do not count


@dataclass(frozen=True)
class Contribution:
    """What one rank says in one call of `log`.

    Args:
        metrics: Values by name.
        step: Place on the x axis; `None` for none.
        commit: As in `wandb.Run.log`; `None` leaves it to wandb.
        weight: Of the values in means: a number, a mapping of names to numbers, or `None` for 1.
        calls: How often this rank had called `log` before, or `calls_at` the step it was at: the x axis of rows without
            a step.
        in_order: Whether it comes from the thread that logs first, so that it is behind all that this one said before.
    """

    metrics: Mapping[str, Any]
    step: int | None
    commit: bool | None = None
    weight: Any = None
    calls: int = 0
    in_order: bool = True

    def is_ready(self) -> bool:
        """Whether all of it can be sent without waiting for a device, or for the encoding of images."""
        weights = self.weight.values() if isinstance(self.weight, dict) else (self.weight,)
        return all(
            value.is_ready()
            for values in (self.metrics.values(), weights)
            for value in values
            if isinstance(value, (Later, LaterValue, Snapshot, Gathered))
        )

    def has_arrived(self) -> bool:
        """Whether all of it can be written, as this rank's own, without waiting for a device."""
        return all(
            value.has_arrived()
            for value in self.metrics.values()
            if isinstance(value, (Later, LaterValue, Snapshot, Gathered))
        )


class RowWriter(Protocol):
    """Writes rows into the run of one rank.

    Attributes:
        label: This rank's label in a shared run; `None` in any other.
        is_primary: Whether the plain names are this rank's to write.
        has_own_run: Whether each rank has a run of its own.
        step_metric: Name of the x axis in every row; `None` for none.
    """

    label: str | None
    is_primary: bool
    has_own_run: bool
    step_metric: str | None

    @property
    def has_run(self) -> bool:
        """Whether there is a run to write into."""

    def write_plain(self, row: Mapping[str, Any], x: int | None) -> None:
        """Write one row as it is, at `x` on the x axis; `None` leaves the x axis out of the row."""

    def write(self, metrics: Mapping[str, Any], step: int | None, *, commit: bool | None = None) -> None:
        """Write one row at `step` on the x axis; `commit` as in `wandb.Run.log`."""


class Reductions:
    """How the ranks' numbers of each name become one.

    Args:
        reduce: Name patterns and reductions, the first that matches counts; `None` for no reduction.

    Attributes:
        unused: The patterns that no name has matched yet.
    """

    def __init__(self, reduce: Mapping[str, Reduction] | None) -> None:
        self.unused = dict.fromkeys(reduce or ())
        self._reduce = reduce or {}
        self._known: dict[str, Reduction] = {}

    def of(self, name: str) -> Reduction:
        """How the ranks' numbers of a name become one: by the first pattern that matches, else their mean."""
        if name not in self._known:
            pattern, self._known[name] = reduction_of(name, self._reduce)
            self.unused.pop(pattern, None)
        return self._known[name]


class Rows:
    """Turns contributions into totals, and finished values into rows of this rank's run.

    Args:
        writer: Writes rows into this rank's run.
        reduce: Name patterns and reductions, the first that matches counts; `None` for no reduction.
        per_rank: Names that each rank of a shared run also writes under its label.
        counts: Whether rows without a step lie at the count of calls on the x axis.
        first: Place on the x axis of the first row without a step, in this rank's run.
        rank: This rank's index in the job, for messages.
        is_first: Whether it is the first of its unit.
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
        self.writes = writer.is_primary
        self.is_over = False  # the run is being finished: nothing more is written
        self.unwritten = 0  # rows that came later than that
        self.last_place = "the start"
        self.global_rank_of: Any = lambda index: index
        self.reductions = Reductions(reduce)
        self.metrics = FusedMetrics(rank, computes=self.writes)
        self.gathers = FusedGathers(rank, collects=self.writes)
        self._writer = writer
        self._per_rank = per_rank
        self._x_axis = XAxis(counts=counts, first=first)
        self._rank = rank
        self._is_first = is_first
        self._extras: OrderedDict[Key, tuple[dict[str, Any], int | None]] = OrderedDict()
        self._notices = Notices()

    @property
    def has_run(self) -> bool:
        """Whether there is a run to write into."""
        return self._writer.has_run

    # What this rank says

    def write_own(self, contribution: Contribution) -> None:
        """Write what this rank says as a row, without other ranks: the first of a unit under plain names."""
        metrics = known(contribution.metrics)
        if any(isinstance(value, (Snapshot, Gathered)) for value in metrics.values()):
            metrics = {
                key: number for name, value in metrics.items() for key, number in self._alone(name, value).items()
            }
        row = metrics
        if self._writer.label is not None:
            labelled, axis = self._labelled(metrics), self._writer.step_metric
            plain = {name: value for name, value in metrics.items() if self.writes or name == axis}
            row = {**plain, **labelled} if self.writes or labelled else {}
        if row or not metrics:
            self._writer.write(row, contribution.step, commit=contribution.commit)

    def _alone(self, name: str, value: Any) -> dict[str, Any]:
        """What this rank alone writes of a value, by the names it has in the row."""
        if isinstance(value, Snapshot):
            return self.metrics.alone(name, value)
        if isinstance(value, Gathered):
            value = self.gathers.alone(name, value)
        return {} if value is None else {name: value}

    def post(self, contribution: Contribution, rounds: Rounds) -> Iterable[str]:
        """Hand what this rank says to the rounds; write, or keep for its row, what is this rank's own.

        Returns:
            The names that were handed over.
        """
        values = known(contribution.metrics)
        unit, others, mine = self._sorted(values, self._weights(contribution.weight), rounds)
        calls = min(contribution.calls, MOST_CALLS)
        rounds.mingles = rounds.mingles or not contribution.in_order
        keys = rounds.post({**unit, **dict.fromkeys(others, _NO_NUMBER)}, contribution.step, calls)
        if calls == MOST_CALLS and self.writes:
            self._x_axis.keep_far(keys, contribution.calls)
        for key in keys[len(unit) :]:
            (self.gathers if is_gathered_name(key.name) else self.metrics).keep(key, others[key.name])
        if mine and keys and self.writes:
            self._extras[keys[0]] = mine, self._x_axis.x(contribution.step, contribution.calls)
        elif mine:
            self._writer.write_plain(mine, self._x_axis.x(contribution.step, contribution.calls))
        return unit

    def settle(self, rounds: Rounds) -> None:
        """After the ranks agreed on names: what waits for a cell that has another key by this goes with it."""
        for old, new in self.metrics.settle(rounds.outbox, rounds.ledger.names):
            if old in self._extras:
                self._extras[new] = self._extras.pop(old)

    def _sorted(
        self, values: Mapping[str, Any], weights: Any, rounds: Rounds
    ) -> tuple[dict[str, Totals], dict[str, Any], dict[str, Any]]:
        """What is to be brought together with other ranks', numbers and what has none, and what is this rank's own.

        This rank's own is on the primary what is not brought together, in a shared run what has its label: the numbers
        of every rank, and of ranks other than the primary also what is no number.
        """
        unit: dict[str, Totals] = {}
        others: dict[str, Any] = {}
        mine: dict[str, Any] = {}
        by_name = isinstance(weights, dict)
        for name, value in values.items():
            if is_number(value) and self.reductions.of(name) != "first":
                unit[name] = Totals.of(value, weights.get(name, 1.0) if by_name else weights)
            elif is_number(value) and self._writer.has_own_run:  # all runs get the number of the unit's first rank
                unit[name] = Totals.of(value) if self._is_first else _NO_NUMBER
            elif isinstance(value, Snapshot):
                others[self.metrics.name_of(name, value, rounds.ledger.names)] = value
            elif isinstance(value, Gathered):
                self.gathers.check(name, value)
                others[self.gathers.name_of(name, value)] = value
            elif self.writes:
                mine[name] = value
        return unit, others, {**mine, **self._labelled(values)}

    def _labelled(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank writes under its label in a shared run: numbers, and unless it is the primary all else."""
        label, names, axis = self._writer.label, self._per_rank, self._writer.step_metric
        if label is None or not names.patterns:
            return {}
        labelled = {}
        for name, value in values.items():
            if name == axis or isinstance(value, (Snapshot, Gathered)):
                continue
            number = is_number(value)
            if (number or not self.writes) and names.has(name, is_number=number):
                labelled[f"{label}/{name}"] = value
        return labelled

    def _weights(self, weight: Any) -> Any:
        if weight is None or isinstance(weight, (int, float)):
            return 1.0 if weight is None else float(weight)
        if isinstance(weight, Later):
            return float(checked_weight("weight", weight.number(), self._rank))
        return {name: self._weights(value) for name, value in weight.items()}

    # What the unit finished

    def write_finished(self, values: Sequence[Finished]) -> None:
        """Write finished values: those of one place as one row, unless a name comes twice."""
        if values and self.writes:
            row: dict[str, Any] = {}
            last, place = values[0], self._x_axis.row_of(values[0])
            for value in values:
                here = self._x_axis.row_of(value)
                if here != place or value.key.name in row:
                    self._write(row, last)
                    row = {}
                last, place = value, here
                self._add(row, value)
            self._write(row, last)
        if values:
            self.last_place = self._x_axis.shown(values[-1])

    def write_left_over(self) -> None:
        """Write what waited for numbers that never came."""
        for own, x in self._extras.values():
            self._writer.write_plain(own, x)
        self._extras.clear()

    def _add(self, row: dict[str, Any], value: Finished) -> None:
        name, totals = value.key.name, value.totals
        if self._extras:
            row.update(self._extras.pop(value.key, ({}, None))[0])
        missing = value.missing
        if not totals.number and (is_metric_name(name) or is_gathered_name(name)):
            others, contributors = (self.metrics if is_metric_name(name) else self.gathers).take_values(value.key)
            forgotten = totals.contributors - contributors  # parts of ranks that were lost meanwhile, or came too late
            if forgotten > 0 and value.corrects:
                if is_gathered_name(name):
                    self.gathers.tell_of_incomplete(value.key)
                return  # what was written before it is better
            row.update(others)
            missing = max(missing, forgotten if others else 0)
        if totals.number:
            row[name] = totals.reduced(self.reductions.of(name))
        if missing:
            row[DEGRADED] = max(missing, row.get(DEGRADED, 0))
        if value.spread is not None and totals.number and self.reductions.of(name) != "first":
            reduced = {"min": totals.reduced("min"), "max": totals.reduced("max")}
            row.update({f"{name}/{kind}": number for kind, number in reduced.items()})
            row[f"{name}/std"] = math.sqrt(value.spread.squares / totals.weight)
            row[f"{name}/argmax_rank"] = self.global_rank_of(value.spread.largest_at)

    def _write(self, row: dict[str, Any], value: Finished) -> None:
        if not row:
            return
        if self.is_over:
            self.unwritten += 1
            return
        try:
            self._writer.write_plain(row, self._x_axis.x_of(value))
        except Exception as error:  # noqa: BLE001  # a row that W&B does not take must not end the others
            if self._notices.is_first(type(error)):
                _log.exception(
                    "dist_wandb: rank %d could not write a row; it is lost. More errors of this kind are not reported",
                    self._rank,
                )
