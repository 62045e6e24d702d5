"""The finished rows on their way into the run: written here, or kept for a primary that is away.

While the primary is away (it stalled, and may return), the others continue, keep finished rows up to a limit, and
hand them over with the shared state when it joins. A rank that finishes meanwhile waits for it within `finish_timeout`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from dist_wandb.exchange.context import Context
from dist_wandb.exchange.protocol.table import Row

_log = logging.getLogger("dist_wandb")

_MOST_KEPT = 20_000  # rows kept for a primary that is away


class Output:
    """Writes finished rows if this rank is the primary; otherwise keeps them while the primary is away."""

    def __init__(self, context: Context) -> None:
        self.has_primary: bool = False  # the primary participates
        self.kept_after: str = ""  # the position after which rows are kept for the primary
        self._context = context
        self._kept: deque[Row] = deque(maxlen=_MOST_KEPT)

    @property
    def keeps_rows(self) -> bool:
        """Whether there are rows kept for a primary that is away."""
        return bool(self._kept) and not self.has_primary

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows in their order, or keep them for the primary."""
        if not rows:
            return
        own = self._context.rows
        if not own.writes and not self.has_primary:
            if len(self._kept) + len(rows) > _MOST_KEPT:
                where = own.writing.last_position
                self._context.warn("unwritten", f"rows up to {where} are lost: the rank that writes them is away.")
                dropped = [*self._kept, *rows][:-_MOST_KEPT]
                own.lost["that could not be kept for the rank that writes them"] += sum(
                    len(row.names) for row in dropped
                )
            self.kept_after = self.kept_after if self._kept else own.writing.last_position
            self._kept.extend(row._replace(own=()) for row in rows)
        try:
            own.writing.write(rows)
        except Exception:  # noqa: BLE001  # rows that cannot be written must not stop the later ones
            _log.exception("dist_wandb: rank %d could not write rows; they are lost", self._context.rank)

    def meet_primary(self, *, has_primary: bool) -> None:
        """Record whether the primary participates from now on; it received the kept rows when it joined."""
        self.has_primary = has_primary
        if has_primary:
            self.forget()

    def forget(self) -> None:
        """Discard the rows kept for the primary."""
        self._kept.clear()

    def snapshot(self) -> list[Any]:
        """Return the kept rows as JSON values."""
        return [row.as_list() for row in self._kept]

    def restore(self, snapshot: Iterable[Sequence[Any]]) -> tuple[Row, ...]:
        """Take over the rows that the others keep; return those that this rank has to write."""
        rows = tuple(map(Row.from_list, snapshot))
        if self._context.rows.writes:
            return rows
        self._kept.extend(rows)
        return ()
