"""The attachments of a rank: where they wait, the interface of their kinds, and their dispatch by type and kind.

An attachment gets a series in the rounds, and is kept until the rounds have finished its cell. Then all ranks exchange
their contributions to the cell, and the primary writes the merged value to its row.

The end of a round shows that all members have completed the exchange before it. Until then the exchange may be
repeated, if it broke on one of them. After that, contributions are kept for late ranks, up to a number of bytes.
Contributions whose cell is not finished, because a rank or the primary is away, are bounded as well. A late part
corrects the value. If the parts of other ranks are no longer kept, the row is marked instead.

Of tables and images, ranks exchange their numbers of items and bytes, and compute the same shares of the limits
(`payloads.gathers.fair`). Each rank sends the first items of its share to the primary, which alone needs memory for
them, in pieces of 1 MiB. Each piece may take `peer_timeout`, so a slow network is not mistaken for a dead rank. Numbers
wait meanwhile. If a rank dies or is late, the row is marked, as with numbers.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, cast

from dist_wandb.errors import ConfigurationError
from dist_wandb.exchange.protocol.calls import Key, Series, series_of
from dist_wandb.exchange.transport import Group
from dist_wandb.job.ranges import named
from dist_wandb.notices import Notices
from dist_wandb.payloads.cells import Part
from dist_wandb.payloads.framing import framed, unframed
from dist_wandb.payloads.gathers import Gathered, Kind, decoded, differ, fair, whole
from dist_wandb.payloads.metrics import Snapshot
from dist_wandb.settings.reduction import LARGEST_EXACT_INTEGER

ATTACHED = (Snapshot, Gathered)  # types of values that are attachments

_MOST_WAITING = 128 * 2**20  # maximum bytes that wait on a rank for other ranks
MOST_KEPT = 16 * 2**20  # maximum bytes that are kept for late ranks
_OVERHEAD = 1024  # bytes of a contribution besides its data
_MOST_SHARES = 10  # maximum number of shares in a message
_MOST_BYTES = 64 * 2**20  # maximum bytes of tables and images that all ranks together send in an exchange
_MOST_WRITTEN = 32_768  # written cells for which the numbers of contributors are kept

NOT_SENT = "that could not be sent"  # why a value is lost


class Attachments:
    """One rank's contributions to cells, within limits: those that wait for their exchange, then those that were sent.

    `lost` counts values of this rank, by the cause in words; `kinds` says what merges values of which type.
    """

    def __init__(
        self,
        rank: int,  # in the job, for messages
        lost: Counter[str],
        kinds: Mapping[type, type[Attachment]] = MappingProxyType({}),
        *,
        merges: bool = False,  # whether this rank writes the merged values
    ) -> None:
        self.rank = rank
        self.lost = lost
        self.by_type: dict[type, Attachment] = {one: kind(self, merges=merges) for one, kind in kinds.items()}
        self._written: dict[Key, tuple[int, int]] = {}  # how many ranks have contributed to it, and to its value
        self._waiting: dict[Key, tuple[Any, int]] = {}  # with their sizes, in the order of logging
        self._sent: dict[Key, tuple[Any, int]] = {}  # for an exchange that broke on another rank, and for late ranks
        self.bytes_waiting: int = 0
        self.bytes_sent: int = 0
        self._notices = Notices()

    def add(self, key: Key, value: Any, size: int) -> None:
        """Keep a contribution of `size` bytes; the newest one of a series is kept in any case."""
        self._waiting[key] = value, size + _OVERHEAD
        self.bytes_waiting += size + _OVERHEAD
        newest = {one.name: one for one in self._waiting} if self.bytes_waiting > _MOST_WAITING else {}
        for old in [one for one in self._waiting if newest.get(one.name) != one] if newest else ():
            if self.bytes_waiting <= _MOST_WAITING:
                break
            self.pop(old)
            self.lost["that waited too long for other ranks"] += 1
            self._notices.warn(
                f"waiting {old.name}",
                f"more than {_MOST_WAITING // 2**20} MiB of metric states, tables and images wait on rank {self.rank} "
                f"for other ranks. The oldest are dropped, first {old.series.name!r}: their rows lack this rank, and "
                "are marked. Log less often, or less at once.",
            )

    def get(self, key: Key) -> Any:
        found = self._waiting.get(key) or self._sent.get(key)
        return None if found is None else found[0]

    def pop(self, key: Key) -> Any:
        value, size = self._waiting.pop(key, (None, 0))
        self.bytes_waiting -= size
        return value

    def cells(self) -> list[Key]:
        return [*self._waiting, *self._sent]

    def sent(self, keys: Iterable[Key]) -> None:
        for key in keys:
            if key in self._waiting:
                self._sent[key] = self._waiting[key]
                self.bytes_sent += self._sent[key][1]
                self.pop(key)

    def passed(self) -> None:
        # the end of a round shows that all ranks have completed the exchange before it
        while self.bytes_sent > MOST_KEPT:
            _, size = self._sent.pop(next(iter(self._sent)))
            self.bytes_sent -= size

    def needs_primary(self, series: str) -> bool:
        return bool((attachment := self._of(series)) and attachment.needs_own_part)

    def due(self, keys: Sequence[Key], *, is_alone: bool = False) -> list[tuple[Attachment, list[Key]]]:
        """Return the finished cells that have attachments, by these; equal on all ranks.

        A rank that `is_alone` gets only cells without values: an exchange with other ranks that broke may have some.
        """
        cells = [(one, [key for key in keys if self._of(key.name) is one]) for one in self.by_type.values()]
        if is_alone:
            cells = [(one, [key for key in found if key not in one.values]) for one, found in cells]
        return [(one, found) for one, found in cells if found]

    def pop_values(self, key: Key, ranks: int, *, corrects: bool) -> tuple[dict[str, Any], int]:
        """Remove and return the values of a finished cell by name, and how many of its `ranks` are missing in them.

        No values if its row is written again (`corrects`), had some before, and parts of them are no longer kept.
        """
        attachment = self._of(key.name)
        if attachment is None:
            return {}, 0
        values, contributors = attachment.values.pop(key, ({}, 0))
        missing = ranks - contributors  # from ranks that were lost meanwhile, or are too late
        if missing > 0 and corrects and key in self._written:
            before, written = self._written[key]
            missing = ranks - written
            if missing > 0 and ranks > before:
                self.lost["that came too late"] += 1
                self._notices.warn(
                    "late",
                    f"a part of {key.series.name!r} is not written: it came after the parts of other ranks were "
                    f"dropped. A rank keeps the last {MOST_KEPT // 2**20} MiB until it ends. The row is written "
                    "again with dist_wandb/degraded, and so are others of this kind.",
                )
            return {}, missing
        if values:
            self._written[key] = ranks, contributors
            if len(self._written) > _MOST_WRITTEN:
                del self._written[next(iter(self._written))]
        return values, max(0, missing) if values else 0

    def _of(self, series: str) -> Attachment | None:
        kind = series_of(series).kind
        return next((one for one in self.by_type.values() if kind in one.kinds), None)


class Attachment(ABC):
    """One rank's part in merging the values of some kinds."""

    kinds: Collection[str]  # as in the series
    not_merged: str  # why a value is lost that could not be merged, in words
    needs_own_part: bool = False  # whether the primary needs its own contribution to merge those of the others

    def __init__(self, own: Attachments, *, merges: bool) -> None:
        self._merges = merges
        self._own = own
        self._lost = own.lost
        self._rank = own.rank
        self.values: dict[Key, tuple[dict[str, Any], int]] = {}  # merged, and the numbers of contributors
        self._notices = Notices()

    @abstractmethod
    def series(self, name: str, value: Any) -> str:
        """Return the text of the series of a value."""

    @abstractmethod
    def alone(self, name: str, value: Any) -> dict[str, Any]:
        """Return the values of this rank alone, by their names in the row."""

    @abstractmethod
    def keep(self, key: Key, value: Any) -> None:
        """Keep this rank's contribution to a cell."""

    def exchange(self, keys: Sequence[Key], group: Group) -> None:
        """Exchange and merge the contributions to some cells, the same on all ranks; raise BrokenError on failure."""
        try:
            self._exchange(keys, group)
        except ConfigurationError as error:  # of too many bytes on all ranks, of malformed ones on the primary
            names = ", ".join(repr(key.series.name) for key in keys)
            self._notices.warn(f"much {names}", f"{names}: left out of their rows on rank {self._rank}. {error}")
            self._lost[self.not_merged] += len(keys)
        self._own.sent(keys)

    @abstractmethod
    def _exchange(self, keys: Sequence[Key], group: Group) -> None:
        pass


class FusedGathers(Attachment):
    """One rank's part in merging tables and images. All tables fit together, and all images."""

    kinds: tuple[Kind, ...] = ("table", "images")
    not_merged = "that could not be put together"

    def series(self, name: str, value: Gathered) -> str:
        self._warn_of_replaced(name, value)
        return Series(name, value.kind).text

    def _warn_of_replaced(self, name: str, value: Gathered) -> None:
        if value.replaced:
            self._notices.warn(
                f"replaced {name}",
                f"{name!r} on rank {self._rank} has values that are not sent to the primary "
                f"({', '.join(value.replaced)}). Cells have their repr instead; boxes and masks of a wandb.Image are "
                "left out.",
            )

    def alone(self, name: str, value: Gathered) -> dict[str, Any]:
        self._warn_of_replaced(name, value)
        parts = [value.part(self._rank)]
        self._warn_of_cuts(name, value.kind, parts)
        found = whole(value.kind, parts)
        return {} if found is None else {name: found}

    def keep(self, key: Key, value: Gathered) -> None:
        try:
            encoded = value.encoded().within(_MOST_BYTES)  # more is never sent
            self._own.add(key, encoded, encoded.size)
        except Exception as error:  # noqa: BLE001  # an error of a value must not end the exchange
            self._lost[NOT_SENT] += 1
            self._notices.warn(
                f"encode {key.name}", f"{key.series.name!r} on rank {self._rank} cannot be sent: {error!r}"
            )

    def _exchange(self, keys: Sequence[Key], group: Group) -> None:
        mine = [self._own.get(key) for key in keys]
        # numbers of items for each cell, their bytes, and the limits for the items of all ranks
        own_amounts = [(0, 0, 0) if own is None else (len(own.items), own.size, own.limit) for own in mine]
        told = group.tally(json.dumps(own_amounts).encode())
        by_rank = {rank: self._amounts(text, len(keys)) for text, ranks in told.items() for rank in ranks}
        amounts = [by_rank[rank] for rank in sorted(by_rank)]
        shares = [
            fair([count for count, _, _ in column], max(limit for *_, limit in column))
            for column in zip(*amounts, strict=True)
        ]
        room = fair([size for rank in amounts for _, size, _ in rank], _MOST_BYTES)[group.rank * len(keys) :]
        sent = [
            b"" if own is None else own.within(size, share[group.rank]).as_bytes(self._rank)
            for own, share, size in zip(mine, shares, room, strict=False)
        ]
        received = [self._apart(bytes(data), len(keys)) for data in group.collect(framed(*sent))]
        if self._merges and received:
            for key, *blobs in zip(keys, *received, strict=True):
                self.values[key] = self._whole(key, [blob for blob in blobs if blob])
        elif self._merges:  # into a run of its own: the first rank's has the value
            for key, column in zip(keys, zip(*amounts, strict=True), strict=True):
                self.values[key] = {}, sum(map(any, column))

    def _amounts(self, text: bytes, number: int) -> list[list[int]]:
        """Return a rank's amounts for each cell; zeros if they are malformed, with the same result on all ranks."""
        try:
            amounts = json.loads(text)
            are_known = all(type(part) is int and 0 <= part < LARGEST_EXACT_INTEGER for part in chain(*amounts))
            if are_known and [*map(len, amounts)] == [3] * number:
                return list(amounts)
        except (ValueError, TypeError, RecursionError):
            pass
        self._notices.warn(
            "amounts",
            f"a rank sent {len(text)} bytes that are not amounts of tables and images. Its tables and images are left "
            "out. Install the same version of dist_wandb on all ranks.",
        )
        return [[0, 0, 0]] * number

    def _apart(self, data: bytes, number: int) -> list[bytes]:
        try:
            parts = unframed(data)
        except ConfigurationError as error:  # malformed
            self._notices.warn("apart", str(error))
            parts = []
        return parts if len(parts) == number else [b""] * number

    def _whole(self, key: Key, blobs: Sequence[bytes]) -> tuple[dict[str, Any], int]:
        name, kind = key.series.name, cast("Kind", key.series.kind)
        try:
            parts = sorted((decoded(kind, blob) for blob in blobs), key=lambda part: part.rank)
            self._warn_of_cuts(name, kind, parts)
            value = whole(kind, parts)
        except Exception as error:  # noqa: BLE001  # an error of received bytes must not end the exchange
            self._lost[self.not_merged] += 1
            self._notices.warn(
                f"whole {name}", f"{name!r} could not be put together from the parts of the ranks: {error!r}"
            )
            return {}, len(blobs)
        return {} if value is None else {name: value}, len(blobs)

    def _warn_of_cuts(self, name: str, kind: Kind, parts: Sequence[Part]) -> None:
        what = "rows" if kind == "table" else "images"
        if differ(parts):
            self._notices.warn(
                f"columns {name}",
                f"ranks logged {name!r} with different columns. They are matched by name, and filled with None.",
            )
        kept, total = sum(len(part.items) for part in parts), sum(part.total for part in parts)
        if kept < total:
            self._notices.warn(
                f"cut {name}",
                f"{name!r} has {kept:,} of {total:,} {what} ({_shares(parts)}): that is the limit for all ranks "
                f"together, or {_MOST_BYTES // 2**20} MiB. See the argument limit. Further cuts are not reported.",
            )


def _shares(parts: Sequence[Part]) -> str:
    alike: dict[tuple[int, int], list[int]] = {}
    for part in parts:
        alike.setdefault((len(part.items), part.total), []).append(part.rank)
    shares = [
        f"{kept} of {total} of {'each of ' if len(ranks) > 1 else ''}{named(ranks)}"
        for (kept, total), ranks in alike.items()
    ]
    return ", ".join([*shares[:_MOST_SHARES], *(["..."] if len(shares) > _MOST_SHARES else [])])
