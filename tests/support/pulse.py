"""Measures how long a busy machine has suspended the whole process, to find how long a call itself has waited."""

from __future__ import annotations

import threading
import time

_BEAT = 0.02  # seconds


class Pulse:
    """A thread that detects when it was not scheduled."""

    def __init__(self) -> None:
        self._gaps: list[tuple[float, float]] = []  # begin and end of each suspension
        self._last = time.monotonic()
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def own(self, begin: float, end: float) -> float:
        """Return the seconds between two times of the monotonic clock in which the process was not suspended."""
        held_up = sum(max(0.0, min(end, to) - max(begin, since)) for since, to in [*self._gaps, (self._last, end)])
        return end - begin - held_up

    def _beat(self) -> None:
        while True:
            time.sleep(_BEAT)
            now = time.monotonic()
            if now - self._last > 5 * _BEAT:
                self._gaps.append((self._last, now))
            self._last = now
