"""Exchange of the states of torchmetrics' metrics: which states belong together, and their fused reduction.

The rounds show which ranks have logged a metric, and when all have. Then its states are exchanged once, together with
those of all other due metrics. First, ranks tell each other the forms of their states. Of a metric whose states have
one form on all ranks with data, they are fused into one sum, one maximum and, if there are lists of tensors or custom
reductions, bytes that only the primary collects; ranks without data take part in the form of the others. If the forms
differ (some classes have different states before their first update, and collections find their compute groups then),
or a rank that computes has no data, ranks send their states in full, and attributes that `update` sets.

The primary computes on a private copy. The other ranks send their lists in pieces, and need no memory for them besides
the copy that was made when the metric was logged. A metric that raises an error is left out of its row, with a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from dist_wandb.errors import ConfigurationError
from dist_wandb.exchange.attachments import NOT_SENT, Attachment, Attachments
from dist_wandb.exchange.protocol.calls import Key, Series
from dist_wandb.exchange.protocol.lanes import NOTHING
from dist_wandb.exchange.transport import Group
from dist_wandb.payloads.framing import frame, unframed
from dist_wandb.payloads.metric_merging import Form, Packed, Reduced, neutral
from dist_wandb.payloads.metrics import Snapshot

_METRIC = "metric"
_NOT_LOGGED = "of metrics that it had not logged"  # why a value is lost, on the rank that computes them
_MOST_NUMBERS = 2**28  # maximum numbers of a logged value: 2 GiB, which all ranks exchange
_MOST_NOT_LOGGED = 10_000  # cells of which it is kept that their loss was counted


class FusedMetrics(Attachment):
    """One rank's part in the exchange of metric states."""

    kinds: tuple[str, ...] = (_METRIC,)
    not_merged = "that could not be computed"
    needs_own_part = True  # the merged value is computed on it

    def __init__(self, own: Attachments, *, merges: bool) -> None:
        super().__init__(own, merges=merges)
        self._newest: dict[str, Snapshot] = {}  # by series, without states, to compute with
        self._not_logged: dict[Key, None] = {}

    def series(self, name: str, value: Snapshot) -> str:
        if value.fallback is not None:
            self._notices.warn(name, f"{name!r} on rank {self._rank}: {value.fallback}")
        return Series(name, _METRIC).text

    def alone(self, name: str, value: Snapshot) -> dict[str, Any]:
        """Return the values of this rank alone, by their names in the row. Waits for the metric's device."""
        try:
            sent = b"".join(value.in_full(self._rank))
            values = value.compute([sent] if sent else [])
        except Exception as error:  # noqa: BLE001  # an error of a metric must not cost the rest of the row
            self._warn_of_left_out(name, value, "its states", error)
            return {}
        return {name + suffix: number for suffix, number in values.items()}

    def keep(self, key: Key, value: Snapshot) -> None:
        try:
            self._own.add(key, value, value.size)
            if self._merges:
                self._newest[key.name] = value.without_states()
        except Exception as error:  # noqa: BLE001  # an error of a metric must not end the exchange
            self._warn_of_no_part("keep", key, error)

    def _exchange(self, keys: Sequence[Key], group: Group) -> None:
        import torch

        mine = [self._packed(key) for key in keys]
        heads = [_head(one, merges=self._merges) for one in mine]
        told = group.reduce(list(chain(*(head[0] for head in heads))), list(chain(*(head[1] for head in heads))))
        lanes = (zip(*[iter(numbers)] * size, strict=True) for numbers, size in zip(told, (3, 5), strict=True))
        cells = [_agreed(*sums, *maxima) for sums, maxima in zip(*lanes, strict=True)]
        parts = list(map(self._part, keys, mine, cells))
        lanes_of_parts = [part.sums for part in parts] + [part.maxima for part in parts]
        numbers, sizes = torch.cat(lanes_of_parts), [*map(len, lanes_of_parts)]
        group.reduce_in_place(numbers.numpy(), sum(sizes[: len(parts)]))
        collects = any(cell.has_blob for cell in cells)
        blobs = group.collect(*frame(*(part.blob for part in parts))) if collects else []
        if not self._merges:
            return
        is_first, columns = bool(blobs), _columns(blobs, len(keys))  # it alone collects
        reduced_lanes = numbers.split_with_sizes(sizes)
        of_sums, of_maxima = reduced_lanes[: len(keys)], reduced_lanes[len(keys) :]
        for key, cell, column, own_sums, own_maxima in zip(keys, cells, columns, of_sums, of_maxima, strict=True):
            if cell.contributors:  # otherwise their ranks were lost meanwhile: a metric without data may be NaN
                reduced = None if cell.form is None else Reduced(own_sums, own_maxima, cell.holders)
                is_here = is_first or not cell.has_blob
                self.values[key] = self._computed(key, column, reduced) if is_here else {}, cell.contributors

    def _packed(self, key: Key) -> Packed | None:
        snapshot = self._own.get(key)
        try:
            packed: Packed | None = None if snapshot is None else snapshot.packed(self._rank)
        except Exception as error:  # noqa: BLE001  # an error of a metric must not end the exchange
            self._warn_of_no_part("pack", key, error)
            return None
        return packed

    def _part(self, key: Key, own: Packed | None, cell: _AttachedCell) -> Packed:
        """Return what this rank sends of a cell."""
        if own is None or (cell.form is not None and own.form != cell.form):
            return neutral(cell.form)
        if own.form == cell.form:
            return own
        try:
            return neutral(None)._replace(blob=self._own.get(key).in_full(self._rank))
        except Exception as error:  # noqa: BLE001  # an error of a metric must not end the exchange
            self._warn_of_no_part("in full", key, error)
            return neutral(None)

    def _warn_of_no_part(self, why: str, key: Key, error: Exception) -> None:
        self._lost[NOT_SENT] += 1
        self._notices.warn(
            f"{why} {key.name}", f"{key.series.name!r} on rank {self._rank} has no part in its row: {error!r}"
        )

    def _computed(self, key: Key, blobs: list[bytes], reduced: Reduced | None) -> dict[str, Any]:
        snapshot = self._own.get(key) or self._newest.get(key.name)
        name = key.series.name
        if snapshot is None:
            self._notices.warn(
                name,
                f"{name!r} was logged as a metric by other ranks, but not yet by rank {self._rank}, which computes it. "
                "It is written once that rank logs it too. Log it on all ranks.",
            )
            self._lost[_NOT_LOGGED] += key not in self._not_logged
            self._not_logged[key] = None
            if len(self._not_logged) > _MOST_NOT_LOGGED:
                del self._not_logged[next(iter(self._not_logged))]
            return {}
        if key in self._not_logged:  # that rank was late
            self._lost[_NOT_LOGGED] -= 1
            del self._not_logged[key]
        try:
            values = snapshot.compute(blobs, reduced)
        except Exception as error:  # noqa: BLE001  # an error of a metric must not end the exchange
            self._warn_of_left_out(name, snapshot, "the states of all ranks", error)
            return {}
        return {name + suffix: value for suffix, value in values.items()}

    def _warn_of_left_out(self, name: str, snapshot: Snapshot, states: str, error: Exception) -> None:
        self._lost[self.not_merged] += 1
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        self._notices.warn(
            f"compute {name}",
            f"{name!r} ({snapshot.metric}) is left out of its row: rank {self._rank} could not compute it from "
            f"{states}, {reason}. Log it once some rank has data; otherwise log the result of its compute().",
        )


class _AttachedCell(NamedTuple):
    contributors: int  # number of ranks that have contributed
    holders: int  # those that have data
    form: Form | None  # in which their states are reduced; `None`: they are sent in full

    @property
    def has_blob(self) -> bool:
        return self.form is None or self.form.has_blob


def _head(own: Packed | None, *, merges: bool) -> tuple[list[float], list[float]]:
    """Return what a rank tells the others of a cell: numbers to sum, and numbers whose maximum is taken."""
    form = None if own is None else own.form
    sums = [float(own is not None), float(form is not None), float(merges and form is None)]
    if form is None:
        return sums, [NOTHING] * 5
    return sums, [form.digest, -form.digest, form.sums, form.maxima, form.has_blob]


def _agreed(
    contributors: float, holders: float, lacking: float, digest: float, minus: float, *sizes: float
) -> _AttachedCell:
    """Return what follows from the reduced heads: states are sent in full if a rank that computes has none."""
    is_one = holders and not lacking and digest == -minus and min(sizes) >= 0 and sum(sizes) <= _MOST_NUMBERS
    form = Form(digest, int(sizes[0]), int(sizes[1]), bool(sizes[2])) if is_one else None
    return _AttachedCell(int(contributors), int(holders), form)


def _columns(received: list[bytes], number: int) -> list[list[bytes]]:
    """Return for each cell the bytes of all ranks, in their order. Releases the received bytes."""
    columns: list[list[bytes]] = [[] for _ in range(number)]
    while received:
        parts = unframed(received.pop(0), "states of metrics")
        if len(parts) != number:
            raise ConfigurationError(
                f"A rank did not send the states of {number} metrics. Install the same version of dist_wandb on all "
                "ranks."
            )
        for column, part in zip(columns, parts, strict=True):
            if part:  # it has data
                column.append(part)
    return columns
