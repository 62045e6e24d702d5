"""How long a process was held up as a whole, by a busy machine: what a call took beyond that, it has waited itself."""

from __future__ import annotations

import threading
import time

_BEAT = 0.02  # seconds


class Pulse:
    """A thread that does nothing but notice when it was not let run."""

    def __init__(self) -> None:
        self._gaps: list[tuple[float, float]] = []  # when one began and when it ended
        self._last = time.monotonic()
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def own(self, begin: float, end: float) -> float:
        """Of the seconds between two times of the monotonic clock, those in which the process was not held up."""
        held_up = sum(max(0.0, min(end, to) - max(begin, since)) for since, to in [*self._gaps, (self._last, end)])
        return end - begin - held_up

    def _beat(self) -> None:
        while True:
            time.sleep(_BEAT)
            now = time.monotonic()
            if now - self._last > 5 * _BEAT:
                self._gaps.append((self._last, now))
            self._last = now
