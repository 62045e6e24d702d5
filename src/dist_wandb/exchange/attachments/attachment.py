"""The interface of all kinds of attachments, and their dispatch by type and kind.

An attachment gets a series in the rounds, and is kept until the rounds have finished its cell. Then all ranks exchange
their contributions to the cell, and the primary writes the merged value to its row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from dist_wandb.exchange.protocol.series import is_attached, series_of
from dist_wandb.notices import Notices
from dist_wandb.payloads.media.gathers import Gathered
from dist_wandb.payloads.torchmetrics.metrics import Snapshot

if TYPE_CHECKING:
    from dist_wandb.exchange.protocol.calls import Key, Outbox
    from dist_wandb.exchange.transport.group import Group

ATTACHED = (Snapshot, Gathered)  # types of values that are attachments


class Attachment(Protocol):
    """One rank's part in merging the values of some kinds."""

    kinds: Collection[str]  # as in the series
    needs_own_part: bool  # whether the primary needs its own contribution to merge those of the others
    is_for_primary: bool  # whether exchanges are useless while the primary is away

    def series(self, name: str, value: Any, known: Iterable[str]) -> str:
        """Return the text of the series of a value.

        Args:
            name: The name that the user logged it under.
            value: The value.
            known: Texts of all series that the ranks have agreed on.
        """

    def alone(self, name: str, value: Any) -> dict[str, Any]:
        """Return the values of this rank alone, by their names in the row."""

    def keep(self, key: Key, value: Any) -> None:
        """Keep this rank's contribution to a cell."""

    def settle(self, outbox: Outbox, known: Collection[str]) -> list[tuple[Key, Key]]:  # noqa: ARG002  # a default
        """Move pending values to other series if they fit, after the ranks have agreed on series.

        Returns:
            The moved cells: each the old key and the new one.
        """
        return []

    def exchange(self, keys: Sequence[Key], group: Group) -> None:
        """Exchange and merge the contributions to some cells. All ranks call it with the same cells.

        Raises:
            BrokenError: The exchange failed.
        """

    def passed(self) -> None:
        """Note the end of a round, which shows that all ranks have completed the exchange before it."""

    def pop_values(self, key: Key) -> tuple[dict[str, Any], int]:
        """Remove and return the merged values by their names in the row, and the number of contributors."""


class Attachments:
    """One rank's part in merging all attachments.

    Args:
        by_type: The attachment that merges the values of each type.
    """

    def __init__(self, by_type: Mapping[type, Attachment]) -> None:
        self._by_type = by_type
        self._by_kind = {kind: attachment for attachment in by_type.values() for kind in attachment.kinds}
        self._notices = Notices()

    def series(self, name: str, value: Any, known: Iterable[str]) -> str:
        """Return the text of the series of a value; see `Attachment`, also for the other methods."""
        return self._by_type[type(value)].series(name, value, known)

    def alone(self, name: str, value: Any) -> dict[str, Any]:
        """Return the values of this rank alone for a value of any type, by their names in the row."""
        attachment = self._by_type.get(type(value))
        return {name: value} if attachment is None else attachment.alone(name, value)

    def keep(self, key: Key, value: Any) -> None:
        """Keep this rank's contribution to a cell."""
        self._by_type[type(value)].keep(key, value)

    def settle(self, outbox: Outbox, known: Collection[str]) -> list[tuple[Key, Key]]:
        """Move pending values to other series if they fit, after the ranks have agreed on series."""
        return [renamed for attachment in self._by_type.values() for renamed in attachment.settle(outbox, known)]

    def needs_primary(self, series: str) -> bool:
        """Return whether the primary needs its own contribution to merge a series."""
        attachment = self._of(series)
        return attachment is not None and attachment.needs_own_part

    def due(self, keys: Iterable[Key], *, has_primary: bool) -> list[tuple[Attachment, list[Key]]]:
        """Return the cells to exchange now, by attachment; equal on all ranks.

        Args:
            keys: Finished cells.
            has_primary: Whether the primary takes part.
        """
        due: dict[int, tuple[Attachment, list[Key]]] = {}
        for key in keys:
            attachment = self._of(key.name)
            if attachment is not None and (has_primary or not attachment.is_for_primary):
                due.setdefault(id(attachment), (attachment, []))[1].append(key)
        return [due[id(attachment)] for attachment in self._by_type.values() if id(attachment) in due]

    def passed(self) -> None:
        """Note the end of a round, which shows that all ranks have completed the exchange before it."""
        for attachment in self._by_type.values():
            attachment.passed()

    def pop_values(self, key: Key, ranks: int, *, corrects: bool) -> tuple[dict[str, Any], int] | None:
        """Remove and return the values of a finished cell by name, and the number of missing contributions.

        Args:
            key: The cell.
            ranks: How many ranks have contributed to it.
            corrects: Whether its row was written before.

        Returns:
            `None` for a late correction that would replace a more complete value, because older contributions are no
            longer kept.
        """
        attachment = self._of(key.name)
        if attachment is None:
            return {}, 0
        values, contributors = attachment.pop_values(key)
        missing = ranks - contributors  # from ranks that were lost meanwhile, or are too late
        if missing > 0 and corrects:
            self._notices.warn(
                f"late {key.name}",
                f"a part of {key.series.name!r} is not written: it came after the parts of the other ranks were "
                "dropped.",
            )
            return None
        return values, max(0, missing) if values else 0

    def _of(self, series: str) -> Attachment | None:
        return self._by_kind.get(series_of(series).kind) if is_attached(series) else None
