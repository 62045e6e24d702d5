"""Keep the user's writes into the summary of a run in order with the rows of `log`.

A row of several ranks is written after its call of `log`. If the user has written into the summary meanwhile, W&B would
replace that by the row's value. So it is written again, after a row that ended before it in the user's script.

A row ends where it does in wandb: at its call, or if that leaves it open, at the next call for another row.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from dist_wandb.runs import interception, wandb_private

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun

_log = logging.getLogger("dist_wandb")


class _Write(NamedTuple):
    """A write, or a deletion, of one value: its number, the path of names to the value, and wandb's record of it."""

    number: int
    path: tuple[str, ...]
    record: Any


class SummaryWrites:
    """The user's last writes into the summary, of each name.

    The user's threads add them, and one other thread writes them again. Neither waits for the other.

    Attributes:
        count: The number of writes so far. A call of `log` with this number follows all of them.
    """

    def __init__(self) -> None:
        self.count: int = 0
        self._numbers = itertools.count(1)
        self._writes: dict[
            str, tuple[_Write, ...]
        ] = {}  # by the first name of their paths; only the user's threads change it
        self._replaced: dict[str, int] = {}  # by name: the number of the last write that a later row has replaced
        self._open: Collection[str] = ()  # the names of the row that has not ended
        self._x: int | None = None  # its position
        self._write: Callable[[Any], None] | None = None
        self._is_other_run = False  # it has the rows of the lost run, but not these writes

    def follow(self, run: AnyRun) -> Callable[[], None]:
        """Note each write into the summary of a run from now on; return a function that ends this."""
        summary = wandb_private.summary_of(run)
        if summary is None:
            return lambda: None
        _, remove = interception.intercept(summary, wandb_private.SUMMARY_WRITTEN, self._note)
        self._is_other_run = self._write is not None
        self._write = interception.original(summary, wandb_private.SUMMARY_WRITTEN)
        return remove

    def _note(self, write: Callable[[Any], None], record: Any) -> None:
        number = next(self._numbers)
        for kind in ("update", "remove"):
            for item in getattr(record, kind):
                name, path = item.key[0], tuple(item.key)
                one = copy(record)
                one.update, one.remove = ([item], []) if kind == "update" else ([], [item])
                others = [other for other in self._writes.get(name, ()) if other.path[: len(path)] != path]
                self._writes[name] = (*others, _Write(number, path, one))
        self.count = number
        write(record)  # last: a row that is written before this has no effect, and one that is written later finds it

    def keep(
        self, names: Iterable[str], follows: int | None, x: int | None, *, is_open: bool, corrects: bool = False
    ) -> None:
        """Write again what a row has replaced that was just written, but ended before these writes.

        Args:
            names: The names of the row.
            follows: The number of writes that its call of `log` follows; `None` for a row of other ranks, which has no
                place in the user's script: it replaces all of them.
            x: Its position.
            is_open: Whether the row does not end with this call.
            corrects: Whether it was written before: it keeps the place that it had then.
        """
        if corrects:
            self._write_again(names, 0)
        elif follows is None:
            self._replaced.update((name, self.count) for name in names if name in self._writes)
        else:
            before, row = self._open, dict.fromkeys((*self._open, *names))
            continues, self._x = x == self._x, x
            self._open = () if not is_open else row if continues else (*names,)
            ended = row if not is_open else () if continues else before
            self._write_again(ended, follows)

    def _write_again(self, names: Iterable[str], follows: int) -> None:
        if self._is_other_run:
            self._is_other_run = False
            self._write_again(self._writes.copy(), 0)
        for name in names if self._writes else ():
            if name in self._writes:
                done = self._replaced[name] = max(follows, self._replaced.get(name, 0))
                while later := [write for write in self._writes[name] if write.number > done]:
                    for write in later:
                        self._publish(write.record)
                    done = later[-1].number  # the user may have written again meanwhile, before this

    def _publish(self, record: Any) -> None:
        try:
            if self._write is not None:
                self._write(record)
        except Exception:  # noqa: BLE001  # the run has ended, or wandb's process has; rows must still be written
            _log.debug("dist_wandb: a value of the summary could not be written again", exc_info=True)
