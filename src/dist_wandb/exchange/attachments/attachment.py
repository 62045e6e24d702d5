"""What all kinds of attachments have in common, and the ones that there are.

A value that is one is given a series in the rounds, and waits until they have finished its cell. Then all ranks
exchange what they keep for it, and the primary takes the whole for its row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from dist_wandb.exchange.protocol.series import is_attached, series_of
from dist_wandb.notices import Notices
from dist_wandb.payloads.media.gathers import Gathered
from dist_wandb.payloads.torchmetrics.metrics import Snapshot

if TYPE_CHECKING:
    from dist_wandb.exchange.protocol.cells import Finished, Key
    from dist_wandb.exchange.protocol.outbox import Outbox
    from dist_wandb.exchange.transport.group import Group

ATTACHED = (Snapshot, Gathered)  # types of values that are attachments


class Attachment(Protocol):
    """One rank's part in bringing the values of some kinds together."""

    @property
    def kinds(self) -> Collection[str]:
        """The kinds, as in the series."""

    @property
    def needs_own_part(self) -> bool:
        """Whether the primary can make nothing of the others' parts without one of its own."""

    @property
    def is_for_primary(self) -> bool:
        """Whether there is nothing to exchange as long as the primary is away."""

    def series(self, name: str, value: Any, known: Iterable[str]) -> str:
        """The text of the series that a value belongs to.

        Args:
            name: As the user gave it.
            value: The value.
            known: The texts of all series that the ranks have agreed on.
        """

    def alone(self, name: str, value: Any) -> dict[str, Any]:
        """What this rank alone writes of a value, by the names it has in the row."""

    def keep(self, key: Key, value: Any) -> None:
        """Remember what this rank contributes to a cell."""

    def settle(self, outbox: Outbox, known: Collection[str]) -> list[tuple[Key, Key]]:
        """After the ranks agreed on series: give what waits another one, where it fits.

        Returns:
            The cells that have another key by this: the one they had, and the one they have now.
        """

    def exchange(self, keys: Sequence[Key], group: Group) -> None:
        """Bring together what belongs to some cells: all ranks call it with the same cells.

        Raises:
            BrokenError: The exchange did not come about.
        """

    def passed(self) -> None:
        """After a round: all ranks have come out of the exchange before it."""

    def take_values(self, key: Key) -> tuple[dict[str, Any], int]:
        """The whole by the names it has in the row, and how many ranks had a part in it."""


class Attachments:
    """One rank's part in bringing together all attachments.

    Args:
        by_type: Who brings together the values of each type.
    """

    def __init__(self, by_type: Mapping[type, Attachment]) -> None:
        self._by_type = by_type
        self._by_kind = {kind: attachment for attachment in by_type.values() for kind in attachment.kinds}
        self._notices = Notices()

    def series(self, name: str, value: Any, known: Iterable[str]) -> str:
        """The text of the series that a value belongs to; see `Attachment`, as for the other methods."""
        return self._by_type[type(value)].series(name, value, known)

    def alone(self, name: str, value: Any) -> dict[str, Any]:
        """What this rank alone writes of any value, by the names it has in the row."""
        attachment = self._by_type.get(type(value))
        return {name: value} if attachment is None else attachment.alone(name, value)

    def keep(self, key: Key, value: Any) -> None:
        """Remember what this rank contributes to a cell."""
        self._by_type[type(value)].keep(key, value)

    def settle(self, outbox: Outbox, known: Collection[str]) -> list[tuple[Key, Key]]:
        """After the ranks agreed on series: give what waits another one, where it fits."""
        return [renamed for attachment in self._by_type.values() for renamed in attachment.settle(outbox, known)]

    def needs_primary(self, series: str) -> bool:
        """Whether only the primary can make anything of a series, and not without its own part."""
        attachment = self._of(series)
        return attachment is not None and attachment.needs_own_part

    def due(self, keys: Iterable[Key], *, has_primary: bool) -> list[tuple[Attachment, list[Key]]]:
        """Which of some cells are to be exchanged now, kind by kind; equal on all ranks.

        Args:
            keys: The cells.
            has_primary: Whether the primary takes part.
        """
        due: dict[int, tuple[Attachment, list[Key]]] = {}
        for key in keys:
            attachment = self._of(key.name)
            if attachment is not None and (has_primary or not attachment.is_for_primary):
                due.setdefault(id(attachment), (attachment, []))[1].append(key)
        return [due[id(attachment)] for attachment in self._by_type.values() if id(attachment) in due]

    def passed(self) -> None:
        """After a round: all ranks have come out of the exchange before it."""
        for attachment in self._by_type.values():
            attachment.passed()

    def take(self, value: Finished) -> tuple[dict[str, Any], int] | None:
        """What of a finished cell goes into its row, by names, and how many ranks' parts are missing in it.

        Returns:
            `None` if it would take the place of a value that is more: parts came late, and older ones are forgotten.
        """
        attachment = self._of(value.key.name)
        if attachment is None:
            return {}, 0
        values, contributors = attachment.take_values(value.key)
        forgotten = value.totals.contributors - contributors  # of ranks that were lost meanwhile, or came too late
        if forgotten > 0 and value.corrects:
            self._notices.warn(
                f"late {value.key.name}",
                f"a part of {value.key.series.name!r} came so long after the others that theirs is forgotten. It is "
                "not written.",
            )
            return None
        return values, max(0, forgotten) if values else 0

    def _of(self, series: str) -> Attachment | None:
        return self._by_kind.get(series_of(series).kind) if is_attached(series) else None
