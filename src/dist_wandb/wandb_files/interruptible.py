"""Stop the work of other threads on Ctrl-C, at any moment.

In the main thread, an interrupt inside `threading` or `concurrent.futures` may leave one of their locks held forever
(CPython's bpo-29988), and an interrupt just before a wait without a timeout does not end the wait. A pool of threads
that is interrupted in this way hangs: with interrupts at random moments of its start, after some hundred attempts.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

from dist_wandb.errors import ReadError, UnsupportedVersionError, in_words

T = TypeVar("T")

_POLL = 0.2  # seconds between two checks whether the main thread was interrupted
_STOP_TIMEOUT = 5.0  # seconds


def read_each(
    paths: Sequence[Path], read: Callable[[Path, threading.Event], T], readers: int
) -> tuple[list[T], dict[Path, ReadError]]:
    """Read files, `readers` at a time; return the results in order, and the errors. An interrupt waits for none."""
    stopped = threading.Event()  # set to stop `read`
    errors: dict[Path, ReadError] = {}

    def result_of(path: Path) -> list[T]:
        try:
            return [read(path, stopped)]
        except UnsupportedVersionError:  # affects all files
            raise
        except ReadError as error:
            errors[path] = error
        except Exception as error:  # noqa: BLE001  # any failure affects only this file
            errors[path] = ReadError(in_words(error, path))
        return []

    def read_all() -> list[T]:
        with ThreadPoolExecutor(readers) as pool:
            return [result for results in pool.map(result_of, paths) for result in results]

    found = call_interruptibly(read_all, stopped.set)
    return found, {path: errors[path] for path in paths if path in errors}


def call_interruptibly(function: Callable[[], T], stop: Callable[[], None]) -> T:
    """Call a function on a new thread and wait for it, so that an interrupt never affects its locks.

    Returns the result or raises the error of the function. After an interrupt, calls `stop`, which makes the function
    return soon, and waits at most 5 s for it.
    """
    # In C, without a lock that could stay held.
    outcomes: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def call() -> None:
        try:
            outcomes.put((function(), None))
        except BaseException as error:  # noqa: BLE001  # raised again in the waiting thread
            outcomes.put((None, error))

    try:
        _thread.start_new_thread(call, ())  # an interrupted `Thread.start` may raise a RuntimeError
        result, error = _awaited(outcomes)
    except BaseException:
        stop()
        with suppress(Empty):
            outcomes.get(timeout=_STOP_TIMEOUT)
        raise
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # there was no error


def _awaited(outcomes: SimpleQueue[tuple[T | None, BaseException | None]]) -> tuple[T | None, BaseException | None]:
    while True:
        with suppress(Empty):
            return outcomes.get(timeout=_POLL)
