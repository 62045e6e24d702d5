"""The warnings of an exchange: one message per event, however many names, steps and rounds it involves.

The rank concerned reports: it was expected and contributed nothing, or contributed after the row was written. A
recurring event is reported less and less often.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dist_wandb.exchange.protocol.calls import Key
from dist_wandb.notices import Notices

_log = logging.getLogger("dist_wandb")

_MOST_NAMES = 3  # listed by name
_MOST_DOUBLINGS = 10


@dataclass(slots=True)
class _Event:
    """An event that lasts for some time."""

    last: float  # when it was detected last
    reported: int = 1  # number of messages about it, or about earlier events of its kind
    unreported: int = 0  # number of values that no message covers


class Reports(Notices):
    """The warnings of one rank's exchange.

    After `quiet` seconds without an occurrence, the next one of its kind is a new event. Each message of the kind
    doubles this time.
    """

    def __init__(self, quiet: float, clock: Callable[[], float]) -> None:
        super().__init__()
        self._quiet = quiet
        self._clock = clock
        self._events: dict[str, _Event] = {}

    def values(self, kind: str, keys: Sequence[Key], message: Callable[[str], str]) -> None:
        """Warn about values, given as cells, unless an earlier message covers them.

        `message` makes the text from the names and position of the values.
        """
        if not keys:
            return
        if self._goes_on(kind):
            self._events[kind].unreported += len(keys)
            return
        event = self._begin(kind)
        before = f" Since the last message of this kind there were {event.unreported} more." if event.unreported else ""
        event.unreported = 0
        _log.warning("dist_wandb: %s%s", message(_named(keys)), before)

    def follows(self, kind: str, cause: str) -> bool:
        """Return whether an occurrence belongs to a reported event of another kind, and need not be reported itself."""
        if cause not in self._events or not self._goes_on(cause):
            return False
        self._events.setdefault(kind, _Event(0.0)).last = self._clock()
        return True

    def expect(self, kind: str) -> None:
        """Do not report the next event of a kind: another message covers it."""
        self._begin(kind)

    def _begin(self, kind: str) -> _Event:
        event = self._events.setdefault(kind, _Event(0.0, 0))
        event.last, event.reported = self._clock(), event.reported + 1
        return event

    def _goes_on(self, kind: str) -> bool:
        event, now = self._events.get(kind), self._clock()
        if event is None:
            return False
        quiet = self._quiet * 2 ** min(event.reported - 1, _MOST_DOUBLINGS)
        if now - event.last > quiet:
            return False
        event.last = now
        return True


def report_lost(rank: int, lost: Mapping[str, int]) -> None:
    """Report how many values of a rank are lost, by the cause in words."""
    causes = ", ".join(f"{number} {cause}" for cause, number in lost.items() if number)
    if causes:
        _log.warning("dist_wandb: rank %d has lost values: %s.", rank, causes)


def position_of(key: Key) -> str:
    """Return the position at which a rank logged a value, in words."""
    return f"its call {key.occurrence + 1} without a step" if key.step is None else f"step {key.step}"


def _named(keys: Sequence[Key]) -> str:
    """Return names and positions in words: the first names and the first position, and the number of others."""
    names = list(dict.fromkeys(key.series.name for key in keys))
    what = ", ".join(map(repr, names[:_MOST_NAMES]))
    if len(names) > _MOST_NAMES:
        what = f"{len(names)} names ({what}, …)"
    positions = list(dict.fromkeys(position_of(key) for key in keys))
    return f"{what} at {positions[0]}" + (f" and in {len(positions) - 1} more rows" if len(positions) > 1 else "")
