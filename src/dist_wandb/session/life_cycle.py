"""The life cycle of a session: whether it accepts rows, and which thread finishes it.

States and transitions::

    OPEN ──────── run finished on the rank that has it ───────▶ DETACHED
      │ finish, release, or the user finished this rank's run      │ finish
      ▼                                                            ▼
    CLOSED                                                      (ended)

- `OPEN`: rows are accepted, also while `finish` passes on what was logged: rows of other threads still count then.
- `CLOSED`: the exchange is closed; `log` raises, or writes into a run that has ended. The run itself may still be
  ending: the thread that finishes holds the claim until that is done.
- `DETACHED`: rows are dropped, with one warning. Only ranks without a run reach this state.

Invariants: no transition leads back to `OPEN`; at most one thread finishes a session, and others wait until it is done;
no lock is taken, so a signal handler that interrupts the training thread may log and finish.
"""

from __future__ import annotations

import threading
from enum import Enum


class Phase(Enum):
    """Whether a session accepts rows."""

    OPEN = "open"
    CLOSED = "closed"
    DETACHED = "detached"


class LifeCycle:
    """The state of one session.

    Attributes:
        phase: Whether rows are accepted.
    """

    def __init__(self) -> None:
        self.phase: Phase = Phase.OPEN
        self._claims: dict[str, tuple[int]] = {}
        self._finished = threading.Event()

    def claim_finish(self, within: float) -> bool:
        """Return whether the caller is to finish the session. Otherwise wait until that is done, for `within` seconds.

        The thread that finishes does not wait for itself.
        """
        mine = (threading.get_ident(),)
        first = self._claims.setdefault("finish", mine)  # atomic, also in signal handlers
        if first is not mine and first != mine:
            self._finished.wait(within)
        return first is mine

    def finished(self) -> None:
        """Release the threads that wait in `claim_finish`."""
        self._finished.set()

    def close(self) -> None:
        """Stop accepting rows."""
        if self.phase is Phase.OPEN:
            self.phase = Phase.CLOSED

    def detach(self) -> bool:
        """Drop further rows. Return whether they were accepted until now."""
        if self.phase is not Phase.OPEN:
            return False
        self.phase = Phase.DETACHED
        return True
