"""Both ends of the exchange: totals made of what a rank logs, and rows made of what the unit finished."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dist_wandb.fused_gathers import FusedGathers, is_gathered_name
from dist_wandb.fused_metrics import FusedMetrics, computed_alone, is_metric_name
from dist_wandb.gathers import Gathered
from dist_wandb.metrics import Snapshot, is_metric
from dist_wandb.reduction import Reduction, Totals, matches_any, reduction_of
from dist_wandb.rounds import Finished, Key, Rounds
from dist_wandb.run import RunWriter
from dist_wandb.values import Later, checked_weight, is_number

_log = logging.getLogger("dist_wandb")

DEGRADED = "dist_wandb/degraded"
_NO_NUMBER = Totals(voices=1)  # what metrics, tables and images are in the rounds


@dataclass(frozen=True)
class Contribution:
    """What one rank says in one call of `log`.

    Args:
        metrics: Values by name.
        step: Place on the x axis; `None` for none.
        commit: As in `wandb.Run.log`; `None` leaves it to wandb.
        weight: Of the values in means: a number, a mapping of names to numbers, or `None` for 1.
        calls: How often this rank had called `log` before: the x axis of rows without a step.
    """

    metrics: Mapping[str, Any]
    step: int | None
    commit: bool | None = None
    weight: Any = None
    calls: int = 0

    def is_ready(self) -> bool:
        """Whether all of it can be had without waiting for a device."""
        weights = self.weight.values() if isinstance(self.weight, dict) else (self.weight,)
        return all(
            value.is_ready()
            for values in (self.metrics.values(), weights)
            for value in values
            if isinstance(value, (Later, Snapshot, Gathered))
        )


class Rows:
    """Turns contributions into totals, and finished values into rows of this rank's run.

    Args:
        writer: Writes rows into this rank's run.
        reduce: Name patterns and reductions, the first that matches counts; `None` for no reduction.
        per_rank: Patterns of names that each rank of a shared run also writes under its label.
        counts: Whether rows without a step lie at the count of calls on the x axis.
        first: Place on the x axis of the first row without a step, in this rank's run.
        rank: This rank's index in the job, for messages.
    """

    def __init__(
        self,
        writer: RunWriter,
        reduce: Mapping[str, Reduction] | None,
        per_rank: Sequence[str] = ("*",),
        *,
        counts: bool = True,
        first: int = 0,
        rank: int = 0,
    ) -> None:
        self.writes = writer.is_primary
        self.last_place = "the start"
        self.global_rank_of: Any = lambda index: index
        self.unused = dict.fromkeys(reduce or ())  # patterns that no name has matched yet
        self.metrics = FusedMetrics(rank, computes=self.writes)
        self.gathers = FusedGathers(rank, collects=self.writes)
        self._writer = writer
        self._reduce = reduce or {}
        self._per_rank = tuple(per_rank)
        self._counts = counts
        self._first = first
        self._rank = rank
        self._reductions: dict[str, Reduction] = {}
        self._extras: OrderedDict[Key, tuple[dict[str, Any], int | None]] = OrderedDict()

    # What this rank says

    def write_own(self, contribution: Contribution) -> None:
        """Write what this rank says as a row, without other ranks: the first of a unit under plain names."""
        metrics: Mapping[str, Any] = contribution.metrics
        if any(is_metric(value) or isinstance(value, Gathered) for value in metrics.values()):
            metrics = {
                key: number for name, value in metrics.items() for key, number in self._alone(name, value).items()
            }
        self._writer.write(metrics, contribution.step, commit=contribution.commit)

    def _alone(self, name: str, value: Any) -> dict[str, Any]:
        """What this rank alone writes of a value, by the names it has in the row."""
        if is_metric(value):
            return computed_alone(name, value)
        if isinstance(value, Gathered):
            value = self.gathers.alone(name, value)
        return {} if value is None else {name: value}

    def post(self, contribution: Contribution, rounds: Rounds) -> Iterable[str]:
        """Hand what this rank says to the rounds; write, or keep for its row, what is this rank's own.

        Returns:
            The names that were handed over.
        """
        values = contribution.metrics
        if any(type(value) is Later for value in values.values()):
            values = {name: value.number() if type(value) is Later else value for name, value in values.items()}
        unit, others, mine = self._sorted(values, self._weights(contribution.weight), rounds)
        keys = rounds.post({**unit, **dict.fromkeys(others, _NO_NUMBER)}, contribution.step, contribution.calls)
        for key in keys[len(unit) :]:
            (self.gathers if is_gathered_name(key.name) else self.metrics).keep(key, others[key.name])
        if mine and keys and self.writes:
            self._extras[keys[0]] = mine, self._x(contribution.step, contribution.calls)
        elif mine:
            self._writer.write_plain(mine, self._x(contribution.step, contribution.calls))
        return unit

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
            if is_number(value) and self.reduction(name) != "first":
                unit[name] = Totals.of(value, weights.get(name, 1.0) if by_name else weights)
            elif isinstance(value, Snapshot):
                others[self.metrics.name_of(name, value, rounds.names)] = value
            elif isinstance(value, Gathered):
                self.gathers.check(name, value)
                others[self.gathers.name_of(name, value)] = value
            elif self.writes:
                mine[name] = value
            elif not is_number(value):
                mine.update(self._under_label(name, value))
        return unit, others, {**mine, **self._labelled(values)}

    def reduction(self, name: str) -> Reduction:
        """How the ranks' numbers of a name become one: by the first pattern that matches, else their mean."""
        if name not in self._reductions:
            pattern, self._reductions[name] = reduction_of(name, self._reduce)
            self.unused.pop(pattern, None)
        return self._reductions[name]

    def _labelled(self, values: Mapping[str, Any]) -> dict[str, Any]:
        if self._writer.label is None or not self._per_rank:
            return {}
        labelled: dict[str, Any] = {}
        for name, value in values.items():
            if is_number(value):
                labelled.update(self._under_label(name, value))
        return labelled

    def _under_label(self, name: str, value: Any) -> dict[str, Any]:
        label = self._writer.label
        return {} if label is None or not matches_any(name, self._per_rank) else {f"{label}/{name}": value}

    def _weights(self, weight: Any) -> Any:
        if weight is None or isinstance(weight, (int, float)):
            return 1.0 if weight is None else float(weight)
        if isinstance(weight, Later):
            return float(checked_weight("weight", weight.number(), self._rank))
        return {name: self._weights(value) for name, value in weight.items()}

    # What the unit finished

    def write_finished(self, values: Sequence[Finished]) -> None:
        """Write finished values: those of one place as one row, unless a name comes twice."""
        row: dict[str, Any] = {}
        last: Finished | None = None
        for value in values:
            name = value.key.name
            if last is not None and (name in row or self._place(value) != self._place(last)):
                self._write(row, last)
                row = {}
            last = value
            if self.writes:
                self._add(row, value)
        if last is not None:
            self._write(row, last)
            self.gathers.written()
            place = last.key.place
            self.last_place = f"row {last.calls + 1}" if place.counted else f"step {place.step}"

    def write_left_over(self) -> None:
        """Write what waited for numbers that never came."""
        for own, x in self._extras.values():
            self._writer.write_plain(own, x)
        self._extras.clear()

    @property
    def has_pending(self) -> bool:
        """Whether something waits for its row."""
        return bool(self._extras)

    def _place(self, value: Finished) -> tuple[int, int]:
        place = value.key.place
        return (1, value.calls) if place.counted else (0, place.step)

    def _add(self, row: dict[str, Any], value: Finished) -> None:
        name, totals = value.key.name, value.totals
        row.update(self._extras.pop(value.key, ({}, None))[0])
        missing = value.missing
        if not totals.number and (is_metric_name(name) or is_gathered_name(name)):
            others, voices = (self.metrics if is_metric_name(name) else self.gathers).take_values(value.key)
            forgotten = totals.voices - voices  # parts of ranks that were lost meanwhile, or came too late
            if forgotten > 0 and value.corrects:
                if is_gathered_name(name):
                    self.gathers.tell_of_incomplete(value.key)
                return  # what was written before it is better
            row.update(others)
            missing = max(missing, forgotten if others else 0)
        if totals.number:
            row[name] = totals.reduced(self.reduction(name))
        if missing:
            row[DEGRADED] = max(missing, row.get(DEGRADED, 0))
        if value.spread is not None and totals.number:
            reduced = {"min": totals.reduced("min"), "max": totals.reduced("max")}
            row.update({f"{name}/{kind}": number for kind, number in reduced.items()})
            row[f"{name}/std"] = math.sqrt(value.spread.squares / totals.number)
            row[f"{name}/argmax_rank"] = self.global_rank_of(value.spread.largest_at)

    def _write(self, row: dict[str, Any], value: Finished) -> None:
        if not row:
            return
        place = value.key.place
        try:
            self._writer.write_plain(row, self._x(None if place.counted else place.step, value.calls))
        except Exception:  # noqa: BLE001  # a row that W&B does not take must not end the others
            _log.exception("dist_wandb: rank %d could not write a row; it is lost", self._rank)

    def _x(self, step: int | None, calls: int) -> int | None:
        return self._first + calls if step is None and self._counts else step
