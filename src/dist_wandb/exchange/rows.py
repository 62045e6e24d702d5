"""The calls of a rank, before they are combined with those of others: what belongs to them, and where it waits.

`Rows` makes calls (`protocol.calls`) of the `Contribution` of each `log`, and has what is needed for the rows of all
ranks: the writer, reductions, attachments, spreads. `Writing` makes rows of what the rounds finish.

Values that are not numbers, or are reduced by ``"first"``, stay on the primary, with the call that they belong to. In a
shared run, a rank's own numbers are written under its label: the primary's in the reduced row, others' in their own.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from dist_wandb.exchange.attachments import ATTACHED, Attachments, FusedGathers
from dist_wandb.exchange.attachments.metrics import FusedMetrics
from dist_wandb.exchange.protocol.calls import Call, Names, Outbox, series_of
from dist_wandb.exchange.protocol.lanes import NO_NUMBER, Lanes, Number, lanes_of, lanes_of_floats, number_of
from dist_wandb.exchange.protocol.rounds import Rounds
from dist_wandb.exchange.writing import Spreads, Writing
from dist_wandb.payloads.devices import Later, LaterValue, known
from dist_wandb.payloads.gathers import Gathered
from dist_wandb.payloads.metrics import Snapshot
from dist_wandb.payloads.scalars import checked_weight, is_number
from dist_wandb.settings.reduction import (
    LARGEST_EXACT_INTEGER,
    TIMES,
    WITHOUT_NANS,
    Definitions,
    PerRankNames,
    Reduction,
    matches_any,
    reduction_of,
)

_FLOATS = {float}
_LATER = (LaterValue, *ATTACHED)
_MOST_FORMS = 4096  # tuples of names whose reductions are kept


class Contribution(NamedTuple):
    """The values of one `log` call on one rank."""

    metrics: Mapping[str, Any]  # as from `scalars.copied_row`
    step: int | None  # position on the x axis
    commit: bool | None = None  # as in `wandb.Run.log`; `None` leaves it to wandb
    weight: Any = None  # of the values in means: a number, a mapping of names to numbers, or `None` for 1
    x: int = -1  # position of its row, as in `protocol.calls.Call`
    in_order: bool = True  # whether it is of the first thread that logged, and so follows all earlier ones of that
    writes_before: int = 0  # how many writes of the user into the summary came before it
    is_value: bool = False  # whether its step is only a value, by the name of the axis: it continues an open row

    def is_ready(self) -> bool:
        """Return whether it can be sent without waiting for a device, or for the encoding of images."""
        weights = self.weight.values() if isinstance(self.weight, dict) else (self.weight,)
        for value in (*self.metrics.values(), *weights):
            if isinstance(value, _LATER) and not value.is_ready():
                return False
        return True

    def is_copied(self) -> bool:
        """Return whether a thread can write it as this rank's own row without waiting for a device."""
        return all(
            value.is_copied() if isinstance(value, Gathered) else value.is_ready()
            for value in self.metrics.values()
            if isinstance(value, _LATER)
        )

    def has_arrived(self) -> bool:
        """Return whether that is certain, without values on a device: then the training thread may write it."""
        later = [value for value in self.metrics.values() if isinstance(value, _LATER)]
        return all(isinstance(value, ATTACHED) and value.has_arrived() for value in later)


class RowWriter(Protocol):
    """Writes rows into the run of one rank."""

    label: str | None  # this rank's label in a shared run; `None` in any other
    is_primary: bool  # whether this rank writes the plain names
    has_own_run: bool  # whether each rank has a run of its own
    step_metric: str | None  # name of the x axis in every row; `None` for none
    lost: Counter[str]  # how many values were accepted and are not in the run, by the cause in words

    @property
    def has_run(self) -> bool:
        """Whether there is a run to write to."""

    def write(self, metrics: Mapping[str, Any], step: int | None, *, commit: bool | None = None) -> None:
        """Write a row at `step` on the x axis, or add to the open row; `commit` as in `wandb.Run.log`."""


class Own(NamedTuple):
    """What this rank alone keeps for the row of one of its calls."""

    values: Mapping[str, Any]  # those that are not combined with other ranks, by final name
    commit: bool  # whether its call ends the row
    writes_before: int = 0  # as in `Contribution`
    # numbers that a float64 does not hold as they are, booleans and large integers: written if the result equals them
    exact: Mapping[str, int] = MappingProxyType({})
    is_value: bool = False  # as in `Contribution`
    part: int = 0  # its number among the calls that left a row open without a step, if it is one
    after: int = 0  # the number of the call whose row it continues, if it does


class Reductions:
    """The reduction of each name, by patterns as in `Rows`."""

    def __init__(self, reduce: Mapping[str, Reduction] | None) -> None:
        self.unused: dict[str, Any | None] = dict.fromkeys(reduce or ())  # patterns that no name has matched yet
        self.reduce = reduce or {}
        self.chosen: dict[str, Reduction] = {one: kind for one, kind in self.reduce.items() if one != "*"}
        self.known: dict[str, Reduction] = {}  # of the names that were logged
        self.defaults: dict[str, Reduction] = {}  # of names that match no pattern, where it is not the mean
        self.unreduced: set[str] = set()  # names that this rank has logged of values that only the primary writes
        self.weighted: set[str] = set()  # names that this rank has given weights, but not in their row
        self.of_all = lru_cache(_MOST_FORMS)(lambda names: tuple(map(self.of, names)))

    def of(self, name: str) -> Reduction:
        """Return the reduction of a name: that of the first matching pattern, or its default."""
        if name not in self.known:
            is_time = name.startswith(TIMES)  # general patterns do not apply to times
            reduce = {one: kind for one, kind in self.reduce.items() if not is_time or one.startswith(TIMES)}
            pattern, kind = reduction_of(name, reduce)
            self.known[name] = kind if pattern else self.defaults.get(name, kind)
            self.unused.pop(pattern, None)
        return self.known[name]


class _Axes:
    """The x axes in the calls of a rank: those of the open row so far, and those that a row lacks.

    W&B adds the values that were written last: those of later calls, if their rows were written before.
    """

    def __init__(self, rows: Rows) -> None:
        self.place: tuple[int | None, int] | None = None  # step and position of the open row
        self.of_row: dict[str, Any] = {}  # its x axes so far
        self.has_values = False  # whether it has values under this rank's label
        self._rows = rows
        self._needed: set[str | None] = set()  # the axes of its metrics
        self._last: dict[str, Any] = {}  # by name of the axis

    def continues(self, contribution: Contribution) -> bool:
        """Return whether a call belongs to the open row, if there is one."""
        return contribution.is_value or (contribution.step, contribution.x) == self.place

    def take(self, contribution: Contribution) -> dict[str, Any]:
        """Return the x axes of the row that a call continues, so far: else W&B fills in the last ones."""
        place, metrics = (contribution.step, contribution.x), contribution.metrics
        if not self.continues(contribution):
            self.of_row, self.has_values = {}, False
        axes, names = self.of_row, [*filter(None, (*self._rows.definitions().axes, self._rows.writer.step_metric))]
        if not metrics.keys().isdisjoint(names):
            axes = {**axes, **known({name: metrics[name] for name in names if name in metrics})}
        is_end = contribution.step is None if contribution.commit is None else contribution.commit
        self.place, self.of_row = (None, {}) if is_end else (place, axes)
        return axes

    def lacked(
        self, axes: Mapping[str, Any], metrics: Mapping[str, Any], before: int = 0, *, is_open: bool = False
    ) -> dict[str, Any]:
        """Return the x axes that a row lacks which these metrics end, with the last values in calls of this rank."""
        definitions = self._rows.definitions()
        since = definitions.axes
        self._last.update((axis, one) for axis, one in axes.items() if is_number(one) and before >= since.get(axis, 0))
        self._needed.update(map(definitions.axis_of, metrics))
        if is_open:
            return {}
        needed, self._needed = self._needed & self._last.keys() - axes.keys(), set()
        return {axis: self._last[axis] for axis in self._rows.axes() if axis in needed} if needed else {}

    def end(self, outbox: Outbox) -> None:
        """Add what the open row lacks, if its last call still waits."""
        lacked, last = self.lacked(self.of_row, {}), outbox.waiting[-1] if outbox.waiting else None
        if not lacked or last is None or (last.step, last.x) != self.place:
            return
        if last.names:
            outbox.extend((*lacked,), lanes_of([*map(number_of, lacked.values())]))
        elif last.own:
            outbox.extend((), last.lanes, last.own[-1][1]._replace(values=lacked))


class Rows:
    """What turns the contributions of one rank into rows, and with what."""

    def __init__(
        self,
        writer: RowWriter,
        reduce: Mapping[str, Reduction] | None,  # by name pattern; the first match applies
        per_rank: PerRankNames = PerRankNames(),  # noqa: B008  # immutable; what ranks also write under their label
        spread: Sequence[str] = (),  # patterns of names whose spread over ranks is wanted
        definitions: Callable[[], Definitions] = Definitions,  # of metrics, in this rank's run
        # `runs.summary.SummaryWrites`: after each row, keeps what the user has written there since; before each row,
        # does what the user did with the run before its call
        keep_summary: Callable[..., None] = lambda *_, **__: None,
        act: Callable[..., None] = lambda *_: None,
        *,
        counts: bool = True,  # whether rows without a step lie at the number of calls on the x axis
        first: int = 0,  # position of the first of these rows
        rank: int = 0,  # in the job, for messages
        index: int = 0,  # in the unit
    ) -> None:
        self.writer = writer
        self.writes: bool = writer.is_primary  # the rows of its unit
        self.rank = rank
        self.definitions = definitions
        self.keep_summary = keep_summary
        self.act = act
        self.first: int | None = first if counts else None
        self.reductions: Reductions = Reductions(reduce)
        kinds = {Snapshot: FusedMetrics, Gathered: FusedGathers}
        self.attachments: Attachments = Attachments(rank, writer.lost, kinds, merges=self.writes)
        self.spreads: Spreads = Spreads(index, lambda name: matches_any(name, spread))
        self.writing: Writing = Writing(self)
        self._per_rank = per_rank
        self._is_first = not index
        self._is_open = False  # whether the last call has left its row open
        self._parts = 0  # how many calls have left a row open without a step
        self._axes = _Axes(self)

    def write_own(self, contribution: Contribution) -> None:
        """Write a contribution as a row without other ranks; plain names are written by the first rank of a unit."""
        metrics = known(contribution.metrics)
        if any(isinstance(value, ATTACHED) for value in metrics.values()):
            found, by_type = dict[str, Any](), self.attachments.by_type
            for name, value in metrics.items():
                found.update(by_type[type(value)].alone(name, value) if type(value) in by_type else {name: value})
            metrics = found
        row = metrics
        if self.writer.label is not None:
            labelled = self._labelled(metrics)
            axes = self._axes.take(contribution)
            row = {**metrics, **labelled} if self.writes else self._under_label(labelled, axes)
        self.act(contribution.writes_before)
        if row or not metrics:
            self.writer.write(row, contribution.step, commit=contribution.commit)
        if row:  # the end of an open row replaces what was written into the summary meanwhile, as in wandb
            is_open = contribution.commit is False
            self.keep_summary(row, contribution.writes_before, contribution.step, is_open=is_open)

    def post(self, contribution: Contribution, rounds: Rounds, now: float) -> None:
        """Post a contribution whose values are computed; write own values, or keep them."""
        outbox, side = rounds.outbox, rounds.side_data
        side.interleaved = side.interleaved or not contribution.in_order
        metrics, step, commit, weight, x, _, before, is_value = contribution
        own_axes = self.definitions().axes
        if own_axes and not self._axes.continues(contribution):
            self._axes.end(outbox)
        continues, axes = self._is_open, self._axes.take(contribution)
        is_end = step is None if commit is None else commit
        self._is_open = not is_end
        is_part = commit is False and step is None
        after = self._parts if continues and (step is None or commit) else 0  # as in wandb, a step ends the row before
        self._parts += is_part
        outbox.may_grow = self._is_open and (commit is False or not axes.keys() >= {*own_axes})
        lacked = self._axes.lacked(axes, metrics, before, is_open=self._is_open) if own_axes else {}
        names, lanes, others = tuple(metrics), None, dict[str, Any]()
        mine: Mapping[str, Any] = {}
        exact: Mapping[str, int] = {}
        is_plain = not lacked and self.writer.label is None and (weight is None or type(weight) in (int, float))
        if is_plain and {*map(type, metrics.values())} == _FLOATS and "first" not in self.reductions.of_all(names):
            lanes = lanes_of_floats([*metrics.values()], 1.0 if weight is None else float(weight))  # the usual call
        if lanes is None:
            values = known(metrics)
            unit, others, mine = self._sorted(values, lacked, self._weights(weight, values))
            names, lanes = (*unit, *others), lanes_of([*unit.values(), *(NO_NUMBER for _ in others)])
            exact = self._exact(values) if self.writes else {}
        own = Own(mine, is_end, before, exact, is_value, self._parts if is_part else 0, after) if self.writes else None
        if names or own:
            call = _join(outbox, names, lanes, step, x, own) if continues else None
            call = call or outbox.post(names, lanes, step, x, now, own)
            for key in call.cells() if others else ():
                if key.name in others:
                    self.attachments.by_type[type(others[key.name])].keep(key, others[key.name])
        if self.writer.label is not None and not self.writes and (row := self._under_label(mine, {**axes, **lacked})):
            self.act(before)
            self.writing.write_own(row, mine, self.x(x), commit=not self._is_open)
            self.keep_summary(row, before, self.x(x), is_open=self._is_open)

    def end_row(self, outbox: Outbox) -> None:
        self._is_open = False
        self._axes.end(outbox)

    def _under_label(self, labelled: Mapping[str, Any], axes: Mapping[str, Any]) -> dict[str, Any]:
        """Return values with the x axes of their row, or these alone if it has such values already."""
        self._axes.has_values = self._axes.has_values or bool(labelled)
        return {**axes, **labelled} if self._axes.has_values else {}

    def _sorted(
        self, values: Mapping[str, Any], lacked: Mapping[str, Any], weights: Any
    ) -> tuple[dict[str, Number], dict[str, Any], dict[str, Any]]:
        """Split values into numbers to reduce, attachments to combine, and own values, with those under a label."""
        unit: dict[str, Number] = {}
        others: dict[str, Any] = {}
        mine: dict[str, Any] = {}
        by_name = isinstance(weights, dict)
        for name, value in values.items():
            if is_number(value) and (kind := self.reductions.of(name)) != "first":
                weight = weights.get(name, 1.0) if by_name else weights
                unit[name] = number_of(value, weight, ignores_nan=kind in WITHOUT_NANS)
            elif value is None and self.reductions.of(name) != "first":
                unit[name] = NO_NUMBER  # the other ranks need not wait for this one
            elif is_number(value) and self.writer.has_own_run:  # all runs get the number of the unit's first rank
                unit[name] = number_of(value) if self._is_first else NO_NUMBER
            elif isinstance(value, ATTACHED):
                others[self.attachments.by_type[type(value)].series(name, value)] = value
            else:
                if self.writes or not (value is None or is_number(value)):  # of numbers, `reduce` asks for the first
                    self.reductions.unreduced.add(name)
                if self.writes:
                    mine[name] = value
        if unit or others:
            unit.update((axis, number_of(value)) for axis, value in lacked.items())
        elif mine:
            mine.update(lacked)
        return unit, others, {**mine, **self._labelled(values)}

    def _exact(self, values: Mapping[str, Any]) -> dict[str, int]:
        """Return `Own.exact`, without numbers that are summed, and integers beyond all floats."""
        return {
            name: value
            for name, value in values.items()
            if (type(value) is bool or (type(value) is int and LARGEST_EXACT_INTEGER < abs(value) < sys.float_info.max))
            and self.reductions.of(name) not in ("sum", "nansum")
        }

    def _labelled(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values under this rank's label in a shared run: numbers and, except on the primary, all others."""
        label, names, axis = self.writer.label, self._per_rank, self.writer.step_metric
        if label is None or not names.patterns:
            return {}
        labelled, axes = {}, {axis, *self.definitions().axes}
        for name, value in values.items():
            self.reductions.of(name)  # it is a logged name, also if it is not reduced
            if name in axes or value is None or isinstance(value, ATTACHED):
                continue
            number = is_number(value)
            if (number or not self.writes) and names.has(name, is_number=number):
                labelled[f"{label}/{name}"] = value
        return labelled

    def _weights(self, weight: Any, values: Mapping[str, Any]) -> Any:
        if weight is None or isinstance(weight, (int, float)):
            return 1.0 if weight is None else float(weight)
        if isinstance(weight, Later):
            return float(checked_weight("weight", weight.number(), self.rank))
        self.reductions.weighted.update(weight.keys() - values.keys())
        return {name: self._weights(value, values) for name, value in weight.items()}

    def axes(self) -> list[str]:
        """Return the x axes of the user, whose values are those of one call; not those whose reduction was chosen."""
        known = self.definitions().axes
        return [name for name in known if not reduction_of(name, self.reductions.chosen)[0]] if known else []

    def x(self, x: int) -> int | None:
        """Return the position of a row on the x axis of this rank's run; `x` as in `protocol.calls.Call`."""
        if x >= 0:
            return x
        return 0 if self.first is None else self.first - 1 - x


def _join(outbox: Outbox, names: Names, lanes: Lanes, step: int | None, x: int, own: Own | None) -> Call | None:
    """Add values to the last call, if they continue its row and it waits: a row that ranks form together stays whole.

    On the primary, values that it alone has stay with it in any case.
    """
    last = outbox.waiting[-1] if outbox.waiting else None
    if last is None or last.x != x or (names and last.step != step):
        return None
    given = {*(series_of(name).name for name in last.names), *chain(*(before.values for _, before in last.own))}
    if not given.isdisjoint([*(series_of(name).name for name in names), *(own.values if own else ())]):
        return None
    return outbox.extend(names, lanes, own and own._replace(is_value=False))
