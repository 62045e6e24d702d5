"""The attachments of a rank: where they wait, the interface of their kinds, and their dispatch by type and kind.

An attachment gets a series in the rounds, and is kept until the rounds have finished its cell. Then all ranks exchange
their contributions to the cell, and the primary writes the merged value to its row.

The end of a round shows that all members have completed the exchange before it. Until then the exchange may be
repeated, if it broke on one of them. After that, contributions are kept for late ranks, up to a number of bytes.
Contributions whose cell is not finished, because a rank or the primary is away, are bounded as well. A late part
corrects the value. If the parts of other ranks are no longer kept, the row is marked instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from dist_wandb.errors import ConfigurationError
from dist_wandb.exchange.protocol.calls import Key, Outbox, is_attached, series_of
from dist_wandb.exchange.transport import Group
from dist_wandb.notices import Notices
from dist_wandb.payloads.gathers import Gathered
from dist_wandb.payloads.metrics import Snapshot

ATTACHED = (Snapshot, Gathered)  # types of values that are attachments

_MOST_WAITING = 128 * 2**20  # maximum bytes that wait on a rank for other ranks
MOST_KEPT = 16 * 2**20  # maximum bytes that are kept for late ranks
_OVERHEAD = 1024  # bytes of a contribution besides its data
_MOST_WRITTEN = 32_768  # written cells for which the numbers of contributors are kept

NOT_SENT = "that could not be sent"  # why a value is lost


class Contributions:
    """One rank's contributions to cells, within limits: those that wait for their exchange, then those that were sent.

    `lost` counts values of this rank, by the cause in words.
    """

    def __init__(self, rank: int, lost: Counter[str]) -> None:
        self.rank = rank  # in the job, for messages
        self.lost = lost
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

    def waiting(self, series: str) -> list[Any]:
        return [value for key, (value, _) in self._waiting.items() if key.name == series]

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


class Attachment(ABC):
    """One rank's part in merging the values of some kinds."""

    kinds: Collection[str]  # as in the series
    not_merged: str  # why a value is lost that could not be merged, in words
    needs_own_part: bool = False  # whether the primary needs its own contribution to merge those of the others

    def __init__(self, contributions: Contributions, *, merges: bool) -> None:
        self._merges = merges  # whether this rank writes the merged values
        self._contributions = contributions
        self._lost = contributions.lost
        self._rank = contributions.rank
        self.values: dict[Key, tuple[dict[str, Any], int]] = {}  # merged, and the numbers of contributors
        self._notices = Notices()

    @abstractmethod
    def series(self, name: str, value: Any, known: Iterable[str]) -> str:
        """Return the text of the series of a value, given those that the ranks have agreed on."""

    @abstractmethod
    def alone(self, name: str, value: Any) -> dict[str, Any]:
        """Return the values of this rank alone, by their names in the row."""

    @abstractmethod
    def keep(self, key: Key, value: Any) -> None:
        """Keep this rank's contribution to a cell."""

    def settle(self, outbox: Outbox, known: Collection[str]) -> None:  # noqa: B027  # most kinds have one series
        """Move pending values to series that the ranks have agreed on, if they fit."""

    def exchange(self, keys: Sequence[Key], group: Group) -> None:
        """Exchange and merge the contributions to some cells, the same on all ranks; raise BrokenError on failure."""
        understood = [key for key in keys if self._is_understood(key.name)]
        self._lost[self.not_merged] += len(keys) - len(understood)
        try:
            if understood:
                self._exchange(understood, group)
        except ConfigurationError as error:  # of too many bytes on all ranks, of malformed ones on the primary
            names = ", ".join(repr(key.series.name) for key in understood)
            self._notices.warn(f"much {names}", f"{names}: left out of their rows on rank {self._rank}. {error}")
            self._lost[self.not_merged] += len(understood)
        self._contributions.sent(keys)

    def _is_understood(self, series: str) -> bool:  # noqa: ARG002  # a default
        return True

    @abstractmethod
    def _exchange(self, keys: Sequence[Key], group: Group) -> None:
        pass


class Attachments:
    """One rank's part in merging all attachments; for its methods, see `Attachment`."""

    def __init__(self, contributions: Contributions, by_type: Mapping[type, Attachment], *, merges: bool) -> None:
        self.contributions = contributions
        self._merges = merges  # whether this rank writes the merged values
        self.by_type: Mapping[type, Attachment] = by_type
        self._by_kind = {kind: attachment for attachment in by_type.values() for kind in attachment.kinds}
        self._written: dict[Key, tuple[int, int]] = {}  # how many ranks have contributed to it, and to its value
        self._notices = Notices()

    def alone(self, name: str, value: Any) -> dict[str, Any]:
        """Return the values of this rank alone, by their names in the row; the value may be of any type."""
        attachment = self.by_type.get(type(value))
        return {name: value} if attachment is None else attachment.alone(name, value)

    def settle(self, outbox: Outbox, known: Collection[str]) -> None:
        for attachment in self.by_type.values():
            attachment.settle(outbox, known)

    def needs_primary(self, series: str) -> bool:
        attachment = self._of(series)
        return attachment is not None and attachment.needs_own_part

    def due(self, keys: Sequence[Key], *, has_primary: bool) -> list[tuple[Attachment, list[Key]]]:
        """Return which of the finished cells to exchange now, by attachment; equal on all ranks."""
        if not (has_primary or self._merges):
            return []
        due = [(one, [key for key in keys if self._of(key.name) is one]) for one in self.by_type.values()]
        return [(one, found) for one, found in due if found]

    def pop_values(self, key: Key, ranks: int, *, corrects: bool) -> tuple[dict[str, Any], int]:
        """Remove and return the values of a finished cell by name, and how many of its `ranks` are missing in them.

        No values if its row was written before (`corrects`), and parts of what was written are no longer kept.
        """
        attachment = self._of(key.name)
        if attachment is None:
            return {}, 0
        values, contributors = attachment.values.pop(key, ({}, 0))
        missing = ranks - contributors  # from ranks that were lost meanwhile, or are too late
        if missing > 0 and corrects:
            before, written = self._written.get(key, (0, contributors))
            missing = ranks - written
            if missing > 0 and ranks > before:
                self.contributions.lost["that came too late"] += 1
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
        return self._by_kind.get(series_of(series).kind) if is_attached(series) else None
