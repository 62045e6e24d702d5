"""The life cycle of a session: whether rows are taken, and which thread finishes it.

States and transitions::

    OPEN ──────── run finished on the rank that has it ───────▶ DETACHED
      │ finish, release, or the user finished this rank's run      │ finish
      ▼                                                            ▼
    CLOSED                                                      (ended)

- `OPEN`: rows are taken. Also while `finish` hands over what was logged: rows of other threads still count then.
- `CLOSED`: the exchange is closed; `log` raises, or writes into a run that has ended. The run itself may still be
  ending: the thread that finishes holds the claim until that is done.
- `DETACHED`: rows are dropped, with one warning. Only ranks without a run come here.

Invariants: nothing leads back to `OPEN`; one thread at most finishes a session, and others wait until it is done; no
lock is taken, so a signal handler that interrupts the training thread may log and finish.
"""

from __future__ import annotations

import threading
from enum import Enum


class Phase(Enum):
    """What a session does with rows."""

    OPEN = "open"
    CLOSED = "closed"
    DETACHED = "detached"


class LifeCycle:
    """Where a session is in its life.

    Attributes:
        phase: What is done with rows.
    """

    def __init__(self) -> None:
        self.phase: Phase = Phase.OPEN
        self._claims: dict[str, tuple[int]] = {}
        self._finished = threading.Event()

    def claim_finish(self, within: float) -> bool:
        """Whether the caller is the one to finish. Others return once it is done, or after `within` seconds.

        The thread that finishes is not made to wait for itself.
        """
        mine = (threading.get_ident(),)
        first = self._claims.setdefault("finish", mine)  # in one step, also for signal handlers
        if first is not mine and first != mine:
            self._finished.wait(within)
        return first is mine

    def finished(self) -> None:
        """Let those go on who wait in `claim_finish`."""
        self._finished.set()

    def close(self) -> None:
        """Take no more rows."""
        if self.phase is Phase.OPEN:
            self.phase = Phase.CLOSED

    def detach(self) -> bool:
        """Drop further rows; whether they were taken until now."""
        if self.phase is not Phase.OPEN:
            return False
        self.phase = Phase.DETACHED
        return True
