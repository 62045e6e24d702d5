"""Exchange of the states of torchmetrics' metrics: which states belong together, and their fused reduction.

In the rounds a metric is a series without numbers, with the layout of its states. The rounds show which ranks have
logged it, and when all have. Then its states are exchanged once, together with those of all other due metrics: one sum,
one maximum and, if there are lists of tensors or custom reductions, bytes that only the primary collects. It computes
on a private copy. The other ranks send their lists in pieces, and need no memory for them besides the copy that was
made when the metric was logged.

Ranks whose collections have found different compute groups, and ranks without data, adopt the layout that was agreed
on. A layout that was made without data is used only if there is no other. If a rank's states do not fit into the layout
(some classes have different states before their first update), or the primary has no data, ranks also send complete
states, and attributes that `update` sets. A metric that raises an error is left out of its row, with a warning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from dist_wandb.errors import ConfigurationError
from dist_wandb.exchange.attachments import NOT_SENT, Attachment, Contributions
from dist_wandb.exchange.protocol.calls import Key, Outbox, Series, series_of
from dist_wandb.exchange.transport import Group
from dist_wandb.payloads.framing import frame, unframed
from dist_wandb.payloads.metric_merging import Layout, Packed
from dist_wandb.payloads.metrics import Snapshot

if TYPE_CHECKING:
    import torch

_METRIC = "metric"
_NOT_LOGGED = "of metrics that it had not logged"  # why a value is lost, on the rank that computes them
_MOST_NOT_LOGGED = 10_000  # cells of which it is kept that their loss was counted


@lru_cache(maxsize=1024)
def _layout(series: str) -> Layout:
    return Layout.parse(series_of(series).layout)


class FusedMetrics(Attachment):
    """One rank's part in the exchange of metric states."""

    kinds: tuple[str, ...] = (_METRIC,)
    not_merged = "that could not be computed"
    needs_own_part = True  # the merged value is computed on it

    def __init__(self, contributions: Contributions, *, merges: bool) -> None:
        super().__init__(contributions, merges=merges)
        self._newest: dict[str, Snapshot] = {}  # by series, without states, to compute with
        self._not_logged: dict[Key, None] = {}

    def series(self, name: str, value: Snapshot, known: Iterable[str]) -> str:
        """Return the series of a metric: a known one if the states fit its layout, otherwise a new one."""
        prefix = Series(name, _METRIC).text
        others = [other for other in known if other.startswith(prefix) and self._is_understood(other)]
        if len(others) > 1:  # all ranks try them in the same order, those that were made without data last
            others.sort(key=lambda other: _layout(other).is_tentative)
        for other in others:
            try:
                if value.adopt(series_of(other).layout):
                    return other
            except Exception as error:  # noqa: BLE001, PERF203  # an error of a metric must not end the exchange
                self._notices.warn(
                    f"adopt {other}", f"the states of {name!r} on rank {self._rank} cannot be sent: {error!r}"
                )
        if value.fallback is not None:
            self._notices.warn(name, f"{name!r} on rank {self._rank}: {value.fallback}")
        return Series(name, _METRIC, value.signature).text

    def alone(self, name: str, value: Snapshot) -> dict[str, Any]:
        """Return the values of this rank alone, by their names in the row. Waits for the metric's device."""
        try:
            packed = value.packed()
            values = value.compute(packed.sums, packed.maxima, [b"".join(packed.blob)])
        except Exception as error:  # noqa: BLE001  # an error of a metric must not cost the rest of the row
            self._warn_of_left_out(name, value, "its states", error)
            return {}
        return {name + suffix: number for suffix, number in values.items()}

    def _is_understood(self, series: str) -> bool:
        """Return whether a series has a valid layout; equal on all ranks, because its text is."""
        try:
            return series_of(series).kind == _METRIC and bool(_layout(series))
        except ConfigurationError as error:
            self._notices.warn(
                f"layout {series}", f"{series_of(series).name!r} is left out of its rows on rank {self._rank}: {error}"
            )
            return False

    def keep(self, key: Key, value: Snapshot) -> None:
        try:
            self._contributions.add(key, value, value.size)
            if self._merges:
                self._newest[key.name] = value.without_states()
        except Exception as error:  # noqa: BLE001  # an error of a metric must not end the exchange
            self._warn_of_no_part("keep", key, error)

    def settle(self, outbox: Outbox, known: Collection[str]) -> None:
        for series in [series for series in outbox.names() if series_of(series).kind == _METRIC]:
            waiting = self._contributions.waiting(series)
            adopted = {self.series(series_of(series).name, snapshot, known) for snapshot in waiting}
            if len(adopted) == 1 and adopted != {series}:
                for old, new in outbox.rename(series, adopted.pop()):
                    if (snapshot := self._contributions.pop(old)) is not None:
                        self.keep(new, snapshot)

    def _exchange(self, keys: Sequence[Key], group: Group) -> None:
        import torch

        layouts = [_layout(key.name) for key in keys]
        packed = [self._packed(key, layout) for key, layout in zip(keys, layouts, strict=True)]
        heads: list[float] = []
        for (snapshot, _), layout in zip(packed, layouts, strict=True):  # see `_reduced`
            held = snapshot.held if snapshot else [False] * len(layout.nodes)
            heads += [float(snapshot is not None), float(snapshot is not None and snapshot.is_loose)]
            heads += [float(self._merges and not here) for here in held]
        sums = torch.cat([torch.tensor(heads, dtype=torch.float64), *(own.sums for _, own in packed)])
        sums, maxima = group.reduce_tensors(sums, torch.cat([own.maxima for _, own in packed]))
        blobs: list[bytes] = []
        in_full: list[bytes] = []
        if any(layout.has_blob for layout in layouts):
            blobs = group.collect(*frame(*(own.blob for _, own in packed)))
        reduced = list(_reduced(layouts, sums, maxima))
        if any(one.needs_more for one in reduced):
            more = [self._in_full(key) if one.needs_more else b"" for key, one in zip(keys, reduced, strict=True)]
            in_full = group.collect(*frame(*([part] for part in more)))
        if self._merges:
            has_blobs, has_more = bool(blobs), bool(in_full)  # only the first member does
            columns = (_columns(received, len(keys)) for received in (blobs, in_full))
            for key, layout, one, *parts in zip(keys, layouts, reduced, *columns, strict=True):
                is_here = has_blobs >= layout.has_blob and has_more >= one.needs_more
                if one.contributors:  # otherwise their ranks were lost meanwhile: a metric without data may be NaN
                    self.values[key] = self._computed(key, one, *parts) if is_here else {}, one.contributors

    def _in_full(self, key: Key) -> bytes:
        snapshot = self._contributions.get(key)
        try:
            return snapshot.in_full(self._rank) if snapshot else b""
        except Exception as error:  # noqa: BLE001  # an error of a metric must not end the exchange
            self._warn_of_no_part("in full", key, error)
            return b""

    def _warn_of_no_part(self, why: str, key: Key, error: Exception) -> None:
        self._lost[NOT_SENT] += 1
        self._notices.warn(
            f"{why} {key.name}", f"{key.series.name!r} on rank {self._rank} has no part in its row: {error!r}"
        )

    def _packed(self, key: Key, layout: Layout) -> tuple[Snapshot | None, Packed]:
        snapshot = self._contributions.get(key)
        if snapshot is None:
            return None, layout.neutral()
        try:
            packed = snapshot.packed()
        except Exception as error:  # noqa: BLE001  # an error of a metric must not end the exchange
            self._warn_of_no_part("pack", key, error)
            return None, layout.neutral()
        if (packed.sums.numel(), packed.maxima.numel()) == (layout.sums, layout.maxima):
            return snapshot, packed
        self._lost[NOT_SENT] += 1
        self._notices.warn(
            f"layout {key.name}",
            f"the states of {key.series.name!r} on rank {self._rank} do not fit their layout, so this rank has no part "
            "in its row",
        )
        return None, layout.neutral()  # gloo aborts the process if ranks reduce lists of different lengths

    def _computed(self, key: Key, one: _Reduced, blobs: list[bytes], in_full: list[bytes]) -> dict[str, Any]:
        snapshot = self._contributions.get(key) or self._newest.get(key.name)
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
            values = snapshot.compute(one.sums, one.maxima, (blobs.pop(0) for _ in range(len(blobs))), in_full)
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


class _Reduced(NamedTuple):
    contributors: int  # number of ranks that have contributed
    needs_more: bool  # whether ranks send complete states: some state does not fit, or the computing rank has no data
    sums: torch.Tensor  # the sums over ranks, one-dimensional
    maxima: torch.Tensor  # the maxima over ranks, one-dimensional


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
            column.append(part)
    return columns
