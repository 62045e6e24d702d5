"""The totals of a rank's logged values, on their way to the other ranks.

Values that are not numbers, or are reduced by ``"first"``, stay on the primary, attached to the first number of the
same call. In a shared run, a rank's own numbers are written under its label: the primary's in the reduced row, those of
other ranks at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dist_wandb.exchange.attachments.attachment import ATTACHED
from dist_wandb.exchange.held import Held, RowWriter
from dist_wandb.exchange.protocol.aggregates import Totals
from dist_wandb.exchange.protocol.rounds import Rounds
from dist_wandb.exchange.x_axis import MOST_CALLS
from dist_wandb.payloads.checks import checked_weight
from dist_wandb.payloads.devices import Later, LaterValue, known
from dist_wandb.payloads.scalars import is_number
from dist_wandb.settings.reduction import WITHOUT_NANS, PerRankNames

_NO_NUMBER = Totals(contributors=1)  # stands for metrics, tables, images, and numbers that do not count


@dataclass(frozen=True)
class Contribution:
    """The values of one `log` call on one rank.

    Args:
        metrics: Values by name.
        step: Position on the x axis; `None` for none.
        commit: As in `wandb.Run.log`; `None` leaves it to wandb.
        weight: Weight of the values in means: a number, a mapping of names to numbers, or `None` for 1.
        calls: Number of earlier `log` calls on this rank, or `calls_at` its last step: the x axis of rows without a
            step.
        in_order: Whether it comes from the first thread that logged, and therefore follows all its earlier
            contributions.
    """

    metrics: Mapping[str, Any]
    step: int | None
    commit: bool | None = None
    weight: Any = None
    calls: int = 0
    in_order: bool = True

    def is_ready(self) -> bool:
        """Return whether it can be sent without waiting for a device, or for the encoding of images."""
        weights = self.weight.values() if isinstance(self.weight, dict) else (self.weight,)
        return all(
            value.is_ready()
            for values in (self.metrics.values(), weights)
            for value in values
            if isinstance(value, (Later, LaterValue, *ATTACHED))
        )

    def has_arrived(self) -> bool:
        """Return whether it can be written, as this rank's own row, without waiting for a device."""
        return all(
            value.has_arrived() for value in self.metrics.values() if isinstance(value, (Later, LaterValue, *ATTACHED))
        )


class Posting:
    """Turns contributions into totals; writes this rank's own values, or keeps them. Arguments as of `Rows`."""

    def __init__(self, writer: RowWriter, held: Held, per_rank: PerRankNames, rank: int, *, is_first: bool) -> None:
        self._writes = writer.is_primary
        self._writer = writer
        self._held = held
        self._per_rank = per_rank
        self._rank = rank
        self._is_first = is_first

    def write_own(self, contribution: Contribution) -> None:
        """Write a contribution as a row without other ranks; plain names are written by the first rank of a unit."""
        metrics = known(contribution.metrics)
        if any(isinstance(value, ATTACHED) for value in metrics.values()):
            alone = [self._held.attachments.alone(name, value) for name, value in metrics.items()]
            metrics = {name: value for values in alone for name, value in values.items()}
        row = metrics
        if self._writer.label is not None:
            labelled, axis = self._labelled(metrics), self._writer.step_metric
            plain = {name: value for name, value in metrics.items() if self._writes or name == axis}
            row = {**plain, **labelled} if self._writes or labelled else {}
        if row or not metrics:
            self._writer.write(row, contribution.step, commit=contribution.commit)

    def post(self, contribution: Contribution, rounds: Rounds) -> Iterable[str]:
        """Post a contribution to the rounds; write this rank's own values, or keep them for their row.

        Returns:
            The names that were posted.
        """
        values = known(contribution.metrics)
        unit, others, mine = self._sorted(values, self._weights(contribution.weight), rounds)
        calls = min(contribution.calls, MOST_CALLS)
        rounds.side_data.interleaved = rounds.side_data.interleaved or not contribution.in_order
        keys = rounds.post({**unit, **dict.fromkeys(others, _NO_NUMBER)}, contribution.step, calls)
        if calls == MOST_CALLS and self._writes:
            self._held.x_axis.keep_far(keys, contribution.calls)
        for key in keys[len(unit) :]:
            self._held.attachments.keep(key, others[key.name])
        if mine and keys and self._writes:
            self._held.extras[keys[0]] = mine, self._held.x_axis.x(contribution.step, contribution.calls)
        elif mine:
            self._writer.write_plain(mine, self._held.x_axis.x(contribution.step, contribution.calls))
        return unit

    def settle(self, rounds: Rounds) -> None:
        """Move the values whose cell got another key when the ranks agreed on names."""
        for old, new in self._held.attachments.settle(rounds.outbox, rounds.ledger.names):
            if old in self._held.extras:
                self._held.extras[new] = self._held.extras.pop(old)

    def _sorted(
        self, values: Mapping[str, Any], weights: Any, rounds: Rounds
    ) -> tuple[dict[str, Totals], dict[str, Any], dict[str, Any]]:
        """Split values into numbers to reduce, attachments to combine, and this rank's own values.

        The primary's own values are those that are not combined with other ranks. In a shared run, the values under
        this rank's label are added: on every rank its numbers, on ranks other than the primary also its other values.
        """
        unit: dict[str, Totals] = {}
        others: dict[str, Any] = {}
        mine: dict[str, Any] = {}
        by_name = isinstance(weights, dict)
        for name, value in values.items():
            if is_number(value) and (kind := self._held.reductions.of(name)) != "first":
                totals = Totals.of(value, weights.get(name, 1.0) if by_name else weights)
                unit[name] = totals.without_nan() if kind in WITHOUT_NANS else totals
            elif value is None and self._held.reductions.of(name) != "first":
                unit[name] = _NO_NUMBER  # the other ranks need not wait for this one
            elif is_number(value) and self._writer.has_own_run:  # all runs get the number of the unit's first rank
                unit[name] = Totals.of(value) if self._is_first else _NO_NUMBER
            elif isinstance(value, ATTACHED):
                others[self._held.attachments.series(name, value, rounds.ledger.names)] = value
            elif self._writes:
                mine[name] = value
        return unit, others, {**mine, **self._labelled(values)}

    def _labelled(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values under this rank's label in a shared run: numbers and, except on the primary, all others."""
        label, names, axis = self._writer.label, self._per_rank, self._writer.step_metric
        if label is None or not names.patterns:
            return {}
        labelled = {}
        for name, value in values.items():
            if name == axis or value is None or isinstance(value, ATTACHED):
                continue
            number = is_number(value)
            if (number or not self._writes) and names.has(name, is_number=number):
                labelled[f"{label}/{name}"] = value
        return labelled

    def _weights(self, weight: Any) -> Any:
        if weight is None or isinstance(weight, (int, float)):
            return 1.0 if weight is None else float(weight)
        if isinstance(weight, Later):
            return float(checked_weight("weight", weight.number(), self._rank))
        return {name: self._weights(value) for name, value in weight.items()}
