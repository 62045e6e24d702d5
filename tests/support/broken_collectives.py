"""Collectives that fail at random."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

from dist_wandb.exchange.transport import BrokenError
from dist_wandb.exchange.transport.gloo import GlooGroup


class Faults:
    """Makes single collectives fail at random, on one rank before or after it took part; it then loses the result.

    They come after a number of collectives, not with a probability: on a busy machine rows share rounds, and there are
    few collectives.

    Args:
        seed: Seed of the gaps.
        gaps: The least and the largest number of collectives from one fault to the next.
    """

    def __init__(self, seed: int, gaps: tuple[int, int]) -> None:
        self._random = random.Random(seed)
        self._gaps = gaps
        self._left = self._random.randint(*gaps)
        self._lock = threading.Lock()
        self.number = 0

    def wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that fails now and then."""

        def call(group: GlooGroup, *arguments: Any, **named: Any) -> Any:
            with self._lock:
                self._left -= 1
                is_due, is_before = not self._left, self._random.random() < 0.5
                if is_due:
                    self.number, self._left = self.number + 1, self._random.randint(*self._gaps)
            if is_due and is_before:
                raise BrokenError("before")
            result = method(group, *arguments, **named)
            if is_due:
                raise BrokenError("after")
            return result

        return call
