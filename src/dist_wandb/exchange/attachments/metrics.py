"""Exchange of the states of torchmetrics' metrics: which states belong together, and their fused reduction.

In the rounds a metric is a series without numbers, with the layout of its states. The rounds show which ranks have
logged it, and when all have. Then its states are exchanged once, together with those of all other due metrics: one sum,
one maximum, and one gather if there are lists of tensors or custom reductions. The primary computes on a private copy.

Ranks whose collections have found different compute groups, and ranks without data, adopt the layout that was agreed
on. A layout that was made without data is used only if there is no other. If a rank's states do not fit into the layout
(some classes have different states before their first update), or the primary has no data, a second gather sends
complete states, and attributes that `update` sets.

A snapshot is kept until a later exchange has shown that all ranks have its result. Eight more are kept for late ranks.
A correction that would lack older snapshots is not written. A metric that raises an error is left out of its row, with
a warning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from dist_wandb.errors import ConfigurationError
from dist_wandb.exchange.attachments.attachment import Attachment
from dist_wandb.exchange.protocol.calls import Key, Outbox
from dist_wandb.exchange.protocol.series import Series, series_of
from dist_wandb.notices import Notices
from dist_wandb.payloads.framing import framed, unframed
from dist_wandb.payloads.torchmetrics.merging import Layout, Packed
from dist_wandb.payloads.torchmetrics.metrics import Snapshot

if TYPE_CHECKING:
    import torch

    from dist_wandb.exchange.transport.group import Group

_METRIC = "metric"
_REMEMBERED = 8  # snapshots that are kept for late ranks, in addition to pending ones


@lru_cache(maxsize=1024)
def _layout(series: str) -> Layout:
    return Layout.parse(series_of(series).layout)


class _LeftOutError(Exception):
    """The data of the ranks cannot be used. All ranks raise it."""


class FusedMetrics(Attachment):
    """One rank's part in the exchange of metric states.

    Args:
        rank: Index of this rank in the job, for messages.
        computes: Whether this rank computes the merged values.
    """

    kinds: tuple[str, ...] = (_METRIC,)
    needs_own_part = True  # the merged value is computed on it
    is_for_primary = False

    def __init__(self, rank: int, *, computes: bool) -> None:
        self._rank = rank
        self._computes = computes
        self._snapshots: OrderedDict[Key, Snapshot] = OrderedDict()
        self._newest: dict[str, Snapshot] = {}  # by series, to compute with
        self._values: dict[Key, tuple[dict[str, Any], int]] = {}
        self._last: set[Key] = set()  # cells of the last exchange, which is repeated if it broke on another rank
        self._before: set[Key] = set()  # cells of earlier exchanges, in which all ranks have succeeded
        self._notices = Notices()

    def series(self, name: str, value: Snapshot, known: Iterable[str]) -> str:
        """Return the series of a metric: a known one if the states fit its layout, otherwise a new one.

        All ranks try known layouts in the same order. Layouts that were made without data come last.
        """
        snapshot, prefix = value, Series(name, _METRIC).text
        others = [other for other in known if other.startswith(prefix) and self._is_understood(other)]
        if len(others) > 1:
            others.sort(key=lambda other: _layout(other).is_tentative)
        for other in others:
            if self._adopts(snapshot, other):
                return other
        if snapshot.fallback is not None:
            self._notices.warn(name, f"{name!r} on rank {self._rank}: {snapshot.fallback}")
        return Series(name, _METRIC, snapshot.signature).text

    def alone(self, name: str, value: Snapshot) -> dict[str, Any]:
        """Return the values of a metric on this rank alone, by their names in the row. Waits for its device."""
        try:
            packed = value.packed()
            values = value.compute(packed.sums, packed.maxima, [packed.blob])
        except Exception as error:  # noqa: BLE001  # an error of a metric must not cost the rest of the row
            self._warn_of_left_out(name, value, "its states", error)
            return {}
        return {name + suffix: number for suffix, number in values.items()}

    def _adopts(self, snapshot: Snapshot, series: str) -> bool:
        try:
            return snapshot.adopt(series_of(series).layout)
        except Exception as error:  # noqa: BLE001  # an error of a metric must not end the exchange
            self._notices.warn(
                f"adopt {series}",
                f"the states of {series_of(series).name!r} on rank {self._rank} cannot be sent: {error!r}",
            )
            return False

    def _is_understood(self, series: str) -> bool:
        """Return whether a series has a valid layout. The result is the same on all ranks, because its text is."""
        try:
            return series_of(series).kind == _METRIC and bool(_layout(series))
        except ConfigurationError as error:
            self._notices.warn(
                f"layout {series}",
                f"{series_of(series).name!r} is left out of its rows on rank {self._rank}: {error}",
            )
            return False

    def keep(self, key: Key, value: Snapshot) -> None:
        """Keep this rank's contribution to a cell."""
        self._snapshots[key] = self._newest[key.name] = value

    def settle(self, outbox: Outbox, known: Collection[str]) -> list[tuple[Key, Key]]:
        """Adopt layouts of other ranks if this rank's states fit into them, after the ranks have agreed on series."""
        renamed = []
        for series in [series for series in outbox.names() if series_of(series).kind == _METRIC]:
            waiting = [key for key in self._snapshots if key.name == series]
            adopted = {self.series(series_of(series).name, self._snapshots[key], known) for key in waiting}
            if len(adopted) == 1 and adopted != {series}:
                for old, new in outbox.rename(series, adopted.pop()):
                    self.keep(new, self._snapshots.pop(old))
                    renamed.append((old, new))
        return renamed

    def exchange(self, keys: Sequence[Key], group: Group) -> None:
        """Exchange and merge the metric states of some cells. All ranks call it with the same cells.

        Raises:
            BrokenError: The exchange failed.
        """
        understood = [key for key in keys if self._is_understood(key.name)]
        try:
            if understood:
                self._exchange(understood, group)
        except _LeftOutError as error:  # raised on all ranks, after the same collectives
            names = ", ".join(repr(key.series.name) for key in understood)
            self._notices.warn(f"much {names}", f"{names}: left out of their rows on rank {self._rank}. {error}")
        self._before |= (self._last - set(keys)) & self._snapshots.keys()
        self._last = set(keys)
        while len(self._snapshots) > _REMEMBERED and next(iter(self._snapshots)) in self._before:
            self._before.discard(self._snapshots.popitem(last=False)[0])  # only a late rank could need it

    def _exchange(self, keys: Sequence[Key], group: Group) -> None:
        import torch

        layouts = [_layout(key.name) for key in keys]
        packed = [self._packed(key, layout) for key, layout in zip(keys, layouts, strict=True)]
        heads: list[float] = []
        for key, layout in zip(keys, layouts, strict=True):
            heads += _head(self._snapshots.get(key), layout, computes=self._computes)
        sums = torch.cat([torch.tensor(heads, dtype=torch.float64), *(own.sums for own in packed)])
        sums, maxima = group.reduce_tensors(sums, torch.cat([own.maxima for own in packed]))
        blobs = in_full = [[b""] for _ in keys]
        if any(layout.has_blob for layout in layouts):
            blobs = _gathered(group, [own.blob for own in packed])
        reduced = list(_reduced(layouts, sums, maxima))
        if any(one.needs_more for one in reduced):
            own = [self._in_full(key) if one.needs_more else b"" for key, one in zip(keys, reduced, strict=True)]
            in_full = _gathered(group, own)
        if self._computes:
            for key, one, gathered, more in zip(keys, reduced, blobs, in_full, strict=True):
                self._values[key] = self._computed(key, one, gathered, more), one.contributors

    def _in_full(self, key: Key) -> bytes:
        snapshot = self._snapshots.get(key)
        try:
            return snapshot.in_full(self._rank) if snapshot else b""
        except Exception as error:  # noqa: BLE001  # an error of a metric must not end the exchange
            self._notices.warn(
                f"in full {key.name}", f"{key.series.name!r} on rank {self._rank} has no part in its row: {error!r}"
            )
            return b""

    def passed(self) -> None:
        """Do nothing: later exchanges drop snapshots."""

    def pop_values(self, key: Key) -> tuple[dict[str, Any], int]:
        """Remove and return the merged values of a cell by their names in the row, and the number of contributors."""
        return self._values.pop(key, ({}, 0))

    def _packed(self, key: Key, layout: Layout) -> Packed:
        if key not in self._snapshots:
            return layout.neutral()
        try:
            packed = self._snapshots[key].packed()
        except Exception as error:  # noqa: BLE001  # an error of a metric must not end the exchange
            self._notices.warn(
                f"pack {key.name}", f"{key.series.name!r} on rank {self._rank} has no part in its row: {error!r}"
            )
            del self._snapshots[key]
            return layout.neutral()
        if (packed.sums.numel(), packed.maxima.numel()) == (layout.sums, layout.maxima):
            return packed
        self._notices.warn(
            f"layout {key.name}",
            f"the states of {key.series.name!r} on rank {self._rank} do not fit their layout, so this rank has no part "
            "in its row",
        )
        del self._snapshots[key]  # gloo aborts the process if ranks reduce lists of different lengths
        return layout.neutral()

    def _computed(self, key: Key, one: _Reduced, blobs: list[bytes], in_full: list[bytes]) -> dict[str, Any]:
        snapshot = self._snapshots.get(key) or self._newest.get(key.name)
        name = key.series.name
        if snapshot is None:
            self._notices.warn(
                name,
                f"{name!r} was logged as a metric by other ranks, but not yet by rank {self._rank}, which computes it. "
                "It is written once that rank logs it too. Log it on all ranks.",
            )
            return {}
        try:
            values = snapshot.compute(one.sums, one.maxima, blobs, in_full)
        except Exception as error:  # noqa: BLE001  # an error of a metric must not end the exchange
            self._warn_of_left_out(name, snapshot, "the states of all ranks", error)
            return {}
        return {name + suffix: value for suffix, value in values.items()}

    def _warn_of_left_out(self, name: str, snapshot: Snapshot, states: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        self._notices.warn(
            f"compute {name}",
            f"{name!r} ({snapshot.metric}) is left out of its row: rank {self._rank} could not compute it from "
            f"{states}, {reason}. Log it once some rank has data; otherwise log the result of its compute().",
        )


class _Reduced(NamedTuple):
    """The reduced numbers of a cell."""

    contributors: int  # number of ranks that have contributed
    needs_more: bool  # whether ranks send complete states: some state does not fit, or the computing rank has no data
    sums: torch.Tensor  # the sums over ranks, one-dimensional
    maxima: torch.Tensor  # the maxima over ranks, one-dimensional


def _head(snapshot: Snapshot | None, layout: Layout, *, computes: bool) -> list[float]:
    """Return the head of a cell, which precedes the sums of all cells: see `_reduced`."""
    held = snapshot.held if snapshot else [False] * len(layout.nodes)
    lacks = [float(computes and not here) for here in held]
    return [float(snapshot is not None), float(snapshot is not None and snapshot.is_loose), *lacks]


def _reduced(layouts: Sequence[Layout], sums: torch.Tensor, maxima: torch.Tensor) -> Iterator[_Reduced]:
    """Yield the reduced numbers of each cell.

    The sums of all cells are preceded by a head for each cell: the number of contributors, the number of ranks on which
    some state does not fit, and for each node whether the computing rank has no data.
    """
    ends = list(accumulate(2 + len(layout.nodes) for layout in layouts))
    heads = sums[: ends[-1]].tolist()
    of_cells = sums[ends[-1] :].split_with_sizes([layout.sums for layout in layouts])
    largest_of_cells = maxima.split_with_sizes([layout.maxima for layout in layouts])
    for layout, end, own, largest in zip(layouts, ends, of_cells, largest_of_cells, strict=True):
        contributors, misfits, *lacks = heads[end - 2 - len(layout.nodes) : end]
        lacking = any(lacks) and any(lack and held for lack, held in zip(lacks, layout.holders(own), strict=True))
        yield _Reduced(int(contributors), bool(misfits or lacking), own, largest)


def _gathered(group: Group, parts: Sequence[bytes]) -> list[list[bytes]]:
    """Return for each part the bytes of all ranks, in their order."""
    try:
        received = [unframed(data, "states of metrics") for data in group.gather(framed(*parts))]
    except ConfigurationError as error:
        raise _LeftOutError(str(error)) from error
    if any(len(of_rank) != len(parts) for of_rank in received):
        raise _LeftOutError(
            f"A rank did not send the states of {len(parts)} metrics. Install the same version of dist_wandb on all "
            "ranks."
        )
    return [list(column) for column in zip(*received, strict=True)]
