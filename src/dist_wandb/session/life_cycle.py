"""The life cycle of a session: whether it accepts rows, and which thread finishes it.

States and transitions::

    OPEN ──────── run finished on the rank that has it ───────▶ DETACHED
      │ finish, release, or the user finished this rank's run      │ finish
      ▼                                                            ▼
    CLOSED                                                      (ended)

- `OPEN`: rows are accepted.
- `CLOSED`: `log` raises. What was accepted before is being written, and the run may still be ending: the thread that
  finishes holds the claim until that is done.
- `DETACHED`: rows are dropped, with one warning. Only ranks without a run reach this state.

Invariants: no transition leads back to `OPEN`; at most one thread finishes a session, and others wait until it is done;
a row that was accepted is with the exchange before the session is `CLOSED`. The only lock is reentrant, so a signal
handler that interrupts the training thread may log and finish.
"""

from __future__ import annotations

import threading
from enum import Enum

_LONGEST_ROW = 2.0  # seconds that a row gets to be passed on: SIGTERM's handler holds up the thread that logs it


class Phase(Enum):
    """Whether a session accepts rows."""

    OPEN = "open"
    CLOSED = "closed"
    DETACHED = "detached"


class LifeCycle:
    """The state of one session. Several threads may log, and finish it."""

    def __init__(self) -> None:
        self.phase: Phase = Phase.OPEN
        self.accepting: threading.RLock = threading.RLock()  # held while a row is checked and passed on
        self._claims: dict[str, tuple[int]] = {}
        self._finished = threading.Event()

    def claim_finish(self, within: float) -> bool:
        """Return whether the caller is to finish the session. Otherwise wait until that is done, for `within` seconds.

        The thread that finishes, interrupted by a signal's handler, does not wait for itself.
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
        """Stop accepting rows, once those that other threads are logging are passed on."""
        has_turn = self.accepting.acquire(timeout=_LONGEST_ROW)
        try:
            if self.phase is Phase.OPEN:
                self.phase = Phase.CLOSED
        finally:
            if has_turn:
                self.accepting.release()

    def detach(self) -> bool:
        """Drop further rows; return whether they were accepted until now."""
        if self.phase is not Phase.OPEN:
            return False
        self.phase = Phase.DETACHED
        return True
