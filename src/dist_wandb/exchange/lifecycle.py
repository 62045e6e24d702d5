"""The life of an exchange: what is asked of its thread, where the thread is, and what both share.

The user's threads ask for ever more, and the exchange's thread alone moves its phase on::

    demand   NONE ──close, detach──▶ CLOSE ──time is over, process ends──▶ STOP ──failure──▶ ABORT

    phase    TOGETHER ──all closed, or stopped──▶ LEAVING ──▶ ENDED
                 └──the others or the store cannot be reached──▶ ALONE ──▶ ENDED, or BROKEN if that fails too

From CLOSE on nothing more is put. From STOP on no other rank is waited for. `delivered` is set once the thread was
asked to close and the others know all that this rank has logged; `ended` when it writes nothing more. A thread in phase
BROKEN takes nothing any more, and what it has is lost.
"""

from __future__ import annotations

import threading
from enum import Enum, IntEnum, auto


class Demand(IntEnum):
    """What the user's threads ask of the exchange; each includes those before it."""

    NONE = auto()
    CLOSE = auto()  # nothing more comes
    STOP = auto()  # wait for no other rank
    ABORT = auto()  # the process has failed


class Phase(Enum):
    """Where the thread of the exchange is."""

    TOGETHER = auto()  # it takes part in rounds, or waits to
    ALONE = auto()  # it writes what this rank logs by itself
    LEAVING = auto()  # it publishes that it goes
    ENDED = auto()
    BROKEN = auto()


class Lifecycle:
    """What the user's threads and the thread of an exchange know of each other.

    Attributes:
        demand: What is asked of the thread.
        phase: Where the thread is.
        delivered: Set once the thread was asked to close and the others know all that this rank has logged.
        ended: Set once nothing more is written.
        is_needed: Whether others will ask for more of what was delivered, such as states and tables.
        may_have_lost: Whether rows of this rank may be lost, because the rank that writes them cannot be reached.
    """

    def __init__(self) -> None:
        self.demand: Demand = Demand.NONE
        self.phase: Phase = Phase.TOGETHER
        self.delivered: threading.Event = threading.Event()
        self.ended: threading.Event = threading.Event()
        self.is_needed = False
        self.may_have_lost = False
        self._lock = threading.RLock()

    def ask(self, demand: Demand) -> None:
        """Ask for something, unless more was asked for already."""
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
        """Whether nothing is taken any more."""
        return self.phase is Phase.BROKEN

    @property
    def has_kept_all(self) -> bool:
        """Whether nothing that was put is known to be lost."""
        return not (self.is_broken or self.may_have_lost)

    def end(self) -> None:
        """Note that the thread writes nothing more."""
        if not self.is_broken:
            self.phase = Phase.ENDED
        self.delivered.set()
        self.ended.set()
