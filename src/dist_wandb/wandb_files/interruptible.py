"""Let Ctrl-C end what other threads do, at whatever moment it comes.

In the main thread, an interrupt inside `threading` or `concurrent.futures` may leave one of their locks held for good
(CPython's bpo-29988), and one that comes just before a wait without a time limit does not end it. A pool of threads
that is interrupted so hangs: with interrupts at random moments of its start, within some hundred of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")

_LOOK = 0.2  # seconds between two looks whether the main thread was interrupted
_TIME_TO_STOP = 5.0  # seconds


def call_interruptibly(function: Callable[[], T], stop: Callable[[], None]) -> T:
    """Call a function on a thread of its own and wait for it, so that an interrupt never meets its locks.

    Args:
        function: What to call.
        stop: Makes the function return soon; called after an interrupt, which then waits 5 s at most for that.

    Returns:
        What the function returned.

    Raises:
        BaseException: What the function raised, or what interrupted this thread.
    """
    outcomes: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()  # in C, with no lock to leave held

    def call() -> None:
        try:
            outcomes.put((function(), None))
        except BaseException as error:  # noqa: BLE001  # raised again where it is waited for
            outcomes.put((None, error))

    try:
        threading.Thread(target=call, name="dist_wandb-call", daemon=True).start()
        result, error = _awaited(outcomes)
    except BaseException:
        stop()
        with suppress(Empty):
            outcomes.get(timeout=_TIME_TO_STOP)
        raise
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # there was no error


def _awaited(outcomes: SimpleQueue[tuple[T | None, BaseException | None]]) -> tuple[T | None, BaseException | None]:
    while True:
        with suppress(Empty):
            return outcomes.get(timeout=_LOOK)
