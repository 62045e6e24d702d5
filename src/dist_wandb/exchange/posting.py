"""The calls of `log` of a rank, on their way to the other ranks.

Values that are not numbers, or are reduced by ``"first"``, stay on the primary, with the call that they belong to. In a
shared run, a rank's own numbers are written under its label: the primary's in the reduced row, those of other ranks at
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dist_wandb.exchange.attachments.attachment import ATTACHED
from dist_wandb.exchange.held import Held, Own, RowWriter
from dist_wandb.exchange.protocol.calls import Call
from dist_wandb.exchange.protocol.lanes import NO_NUMBER, Lanes, Number, lanes_of, lanes_of_floats, number_of
from dist_wandb.exchange.protocol.rounds import Rounds
from dist_wandb.payloads.devices import Later, LaterValue, known
from dist_wandb.payloads.media.gathers import Gathered
from dist_wandb.payloads.scalars import checked_weight, is_number
from dist_wandb.settings.reduction import WITHOUT_NANS, PerRankNames

_FLOATS = {float}


@dataclass(frozen=True)
class Contribution:
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
        return all(
            value.is_ready()
            for values in (self.metrics.values(), weights)
            for value in values
            if isinstance(value, (Later, LaterValue, *ATTACHED))
        )

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
    """Turns contributions into calls; writes this rank's own values, or keeps them. Arguments as of `Rows`."""

    def __init__(self, writer: RowWriter, held: Held, per_rank: PerRankNames, rank: int, *, is_first: bool) -> None:
        self._writes = writer.is_primary
        self._writer = writer
        self._held = held
        self._per_rank = per_rank
        self._rank = rank
        self._is_first = is_first
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
            self._keep_summary(row, contribution, is_open=contribution.commit is False)

    def post(self, contribution: Contribution, rounds: Rounds, now: float) -> Iterable[str]:
        """Post a contribution whose values are computed; write this rank's own values, or keep them for their row.

        Returns the names that were posted.
        """
        rounds.side_data.interleaved = rounds.side_data.interleaved or not contribution.in_order
        step, x, commit = contribution.step, contribution.x, contribution.commit
        own = self._own_of(contribution) if self._writes else None
        if (lanes := self._lanes(contribution)) is not None:
            return rounds.post(contribution.metrics, lanes, step, x, now, own).names
        values = known(contribution.metrics)
        unit, others, mine = self._sorted(values, self._weights(contribution.weight), rounds)
        if self._writes and mine:
            own, mine = Own(mine, commit, contribution.follows), {}
        if unit or others or own:
            numbers = [*unit.values(), *(NO_NUMBER for _ in others)]
            call = rounds.post([*unit, *others], lanes_of(numbers), step, x, now, own)
            self._keep(call, others)
        if mine:
            self._held.act(contribution.follows)
            self._writer.write(self._with_axes(mine, values), self._held.x(x), commit=True)
            self._keep_summary(mine, contribution, is_open=False)
        return unit

    def _own_of(self, contribution: Contribution) -> Own | None:
        """Return what tells a row's place among the writes into the summary; most calls share one object."""
        commit, follows = contribution.commit, contribution.follows
        if commit is not None:
            return Own({}, commit, follows)
        if self._usual.follows != follows:
            self._usual = Own({}, None, follows)
        return self._usual if contribution.metrics else None

    def _keep_summary(self, row: Mapping[str, Any], contribution: Contribution, *, is_open: bool) -> None:
        self._held.keep_summary(row, contribution.follows, contribution.step, is_open=is_open)

    def _keep(self, call: Call, others: Mapping[str, Any]) -> None:
        if others:
            for key in call.cells():
                if key.name in others:
                    self._held.attachments.keep(key, others[key.name])

    def _lanes(self, contribution: Contribution) -> Lanes | None:
        """Return the numbers of the most common call, floats with one weight, all of which are reduced; else `None`."""
        metrics, weight = contribution.metrics, contribution.weight
        if set(map(type, metrics.values())) != _FLOATS or not (weight is None or type(weight) in (int, float)):
            return None
        if self._writer.label is not None or "first" in self._held.reductions.of_all((*metrics,)):
            return None
        return lanes_of_floats([*metrics.values()], 1.0 if weight is None else float(weight))

    def settle(self, rounds: Rounds) -> None:
        """Move the values whose cell got another key when the ranks agreed on names."""
        self._held.attachments.settle(rounds.outbox, rounds.table.names)

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
        """Split values into numbers to reduce, attachments to combine, and this rank's own values.

        The primary's own values are those that are not combined with other ranks. In a shared run, the values under
        this rank's label are added: on every rank its numbers, on ranks other than the primary also its other values.
        """
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
                others[self._held.attachments.series(name, value, rounds.table.names)] = value
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
            if name in axes or value is None or isinstance(value, ATTACHED):
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
        self._held.reductions.weighted.update(weight)
        return {name: self._weights(value) for name, value in weight.items()}
