"""Work on other threads ends on Ctrl-C at any moment."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import pytest

from dist_wandb.wandb_files.interruptible import call_interruptibly

ROUNDS = 40


def test_the_result_or_exception_of_a_function_is_passed_on() -> None:
    assert call_interruptibly(lambda: [1, 2], lambda: None) == [1, 2]
    with pytest.raises(ZeroDivisionError):
        call_interruptibly(lambda: 1 // 0, lambda: None)


def test_an_interrupt_that_wakes_another_thread_is_detected() -> None:
    stopped, ended = threading.Event(), threading.Event()

    def wait_to_be_stopped() -> None:
        time.sleep(0.1)  # until the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        assert stopped.wait(20)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        call_interruptibly(wait_to_be_stopped, stopped.set)
    assert ended.is_set()


def test_an_interrupt_at_any_moment_of_the_start_of_a_pool_ends_it() -> None:
    """With the pool in the main thread, about one in some hundred attempts hangs."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(ROUNDS):
            stopped = threading.Event()

            def read_all(stopped: threading.Event = stopped) -> None:
                with ThreadPoolExecutor(4) as pool:
                    list(pool.map(lambda _: stopped.wait(20), range(6)))

            begin = time.monotonic()
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # the timer may go off before the call
                signal.setitimer(signal.ITIMER_REAL, (number + 1) * 5e-5)
                call_interruptibly(read_all, stopped.set)
            assert time.monotonic() - begin < 15
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_the_wait_for_a_function_that_does_not_stop_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dist_wandb.wandb_files.interruptible._STOP_TIMEOUT", 0.2)
    stopped = threading.Event()

    def ignore_it() -> None:
        time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        stopped.wait(20)

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        call_interruptibly(ignore_it, lambda: None)
    assert time.monotonic() - begin < 10
    stopped.set()
