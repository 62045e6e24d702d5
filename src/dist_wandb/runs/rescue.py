"""Rows with a value that W&B cannot write: the other values are written, and this one as text.

A value over which wandb raises is replaced by its repr (media by nothing), with one warning for each name. A directory
for media that was removed is made again first. Names that cannot be stored are refused by `log` already.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_log = logging.getLogger("dist_wandb")

_WRITABLE = frozenset({float, int, bool, str, type(None)})
_LONGEST = 1000  # characters of a repr
_MOST_WARNED = 10  # names that are warned of, if they change from row to row


class Rescue:
    """Writes rows for which `run.log` has raised.

    Args:
        is_media: Whether a value is one of wandb's own objects, whose repr is useless.
        rank: This rank's index in the job, for messages.
    """

    def __init__(self, is_media: Callable[[object], bool], rank: int) -> None:
        self._is_media = is_media
        self._rank = rank
        self._warned: set[str] = set()

    def write(self, log: Callable[..., None], row: dict[str, Any], error: Exception, **kwargs: Any) -> None:
        """Write a row value by value.

        wandb raises before it accepts anything of a row. Each value that could be the cause is logged individually, as
        a part of the row that is not committed yet; the other values come last and commit the row.

        Args:
            log: The run's method.
            row: Its argument.
            error: What it raised.
            **kwargs: Its other arguments.

        Raises:
            Exception: No value was the cause.
        """
        doubtful = [name for name, value in row.items() if type(value) not in _WRITABLE]
        if not doubtful:
            raise error
        rest = {name: value for name, value in row.items() if name not in doubtful}
        causes = {name: cause for name in doubtful if (cause := _cause(log, name, row[name])) is not None}
        for name in causes:
            rest.update(self._as_text(name, row[name]))
        log(rest, **kwargs)
        for name, why in causes.items():
            self._warn(name, row[name], why, is_text=name in rest)

    def _as_text(self, name: str, value: Any) -> dict[str, str]:
        if not self._is_media(value):
            with suppress(Exception):
                return {name: repr(value)[:_LONGEST].encode(errors="replace").decode()}
        return {}

    def _warn(self, name: str, value: Any, cause: Exception, *, is_text: bool) -> None:
        if name in self._warned or len(self._warned) > _MOST_WARNED:
            return
        self._warned.add(name)
        kind = type(value).__name__
        if len(self._warned) > _MOST_WARNED:
            _log.warning(
                "dist_wandb: W&B cannot write %r (%s) on rank %d either. More names are not told.",
                name,
                kind,
                self._rank,
            )
            return
        _log.warning(
            "dist_wandb: W&B cannot write %r on rank %d, of type %s: %r. %s; the rest of its row is written as ever. "
            "Log numbers, text, lists or W&B's media.",
            name,
            self._rank,
            kind,
            cause,
            "Its repr is written" if is_text else "It is left out",
        )


def _cause(log: Callable[..., None], name: str, value: Any) -> Exception | None:
    """What `log` raises for a value as a part of a row; `None` if it accepts it."""
    try:
        log({name: value}, commit=False)
    except Exception as error:  # noqa: BLE001  # of any kind, as values have code of their own
        return error
    return None
