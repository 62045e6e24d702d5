"""The life cycle of an exchange: the demands on its thread, the thread's phase, and the state that both sides share.

Demands from the user's threads only increase; the exchange's thread alone advances its phase::

    demand   NONE ──close, detach──▶ CLOSE ──timeout, process exit──▶ STOP

    phase    TOGETHER ──all closed, or stopped──▶ LEAVING ──▶ ENDED
                 ├──another rank becomes the primary──▶ MOVING ──▶ LEAVING
                 └──the others or the store cannot be reached──▶ ALONE ──▶ ENDED, or BROKEN if that fails too

From CLOSE on, nothing more is put. From STOP on, no other rank is waited for. `delivered` is set once the thread was
asked to close and the others have received everything that this rank logged; `ended` is set when it writes nothing
more. A thread in phase BROKEN accepts nothing more, and its remaining rows are lost.

A rank that has failed closes too, but tells the others only that it pauses: they take what it has logged, and a row
that it will never complete waits until the rank has left as failed, and is marked.
"""

from __future__ import annotations

import threading
from enum import Enum, IntEnum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dist_wandb.exchange.interface import Exchange

LAST_WRITES = 5.0  # seconds without a written row after which the remaining ones are given up, at the end


class Demand(IntEnum):
    """A demand on the exchange; each includes those before it."""

    NONE = auto()
    CLOSE = auto()  # nothing more is put
    STOP = auto()  # wait for no other rank


class Phase(Enum):
    """The phase of the exchange's thread."""

    TOGETHER = auto()  # it takes part in rounds, or waits to
    MOVING = auto()  # it opens another exchange, which takes the rows
    ALONE = auto()  # it writes this rank's rows without the others
    LEAVING = auto()  # it announces that it leaves
    ENDED = auto()
    BROKEN = auto()


class Lifecycle:
    """The state that the user's threads share with the thread of an exchange."""

    def __init__(self) -> None:
        self.demand: Demand = Demand.NONE
        self.phase: Phase = Phase.TOGETHER
        self.delivered: threading.Event = threading.Event()
        self.ended: threading.Event = threading.Event()
        self.has_failed = False  # the process has failed, or the user has interrupted the end
        self.is_needed = False  # others will request states, tables or spreads of what was delivered
        self.may_have_lost = False  # rows may be lost, because the rank that writes them cannot be reached
        self.unwritten = 0  # rows that were put, and given up at the end
        self.successor: Exchange | None = None  # continues in place of this exchange, with another primary
        self._lock = threading.RLock()

    def ask(self, demand: Demand) -> None:
        """Raise the demand, unless it is higher already."""
        with self._lock:
            self.demand = max(self.demand, demand)

    @property
    def is_closing(self) -> bool:
        """Whether nothing more is put."""
        return self.demand >= Demand.CLOSE

    @property
    def is_stopped(self) -> bool:
        """Whether no other rank is waited for."""
        return self.demand >= Demand.STOP

    @property
    def is_broken(self) -> bool:
        """Whether nothing more is accepted."""
        return self.phase is Phase.BROKEN

    @property
    def has_kept_all(self) -> bool:
        """Whether no row is known to be lost."""
        return not (self.is_broken or self.may_have_lost or self.unwritten)

    def end(self) -> None:
        """Record that the thread writes nothing more."""
        if not self.is_broken:
            self.phase = Phase.ENDED
        self.delivered.set()
        self.ended.set()
