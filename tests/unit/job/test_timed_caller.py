"""Timeouts for calls that have none, and how often ranks poll the job's store."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from limits import Limit
from processes import wait_until

from dist_wandb.job import timed_caller
from dist_wandb.job.timed_caller import (
    BackgroundPoll,
    Interval,
    TimedCaller,
    UnansweredError,
    call_or_default,
    first_pause,
    next_pause,
    settle,
)

SOON = 20.0  # seconds, on a busy machine


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Provide an event that calls wait for. It is set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def test_results_and_errors_of_a_call_are_passed_on() -> None:
    caller = TimedCaller(SOON)
    assert caller.call(lambda: [1]) == [1]
    with pytest.raises(ZeroDivisionError):
        caller.call(lambda: 1 / 0)


def test_an_unanswered_poll_is_repeated_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    poll: BackgroundPoll[None] = BackgroundPoll(lambda: calls.append(now[0]), 0.05, lambda: 16_384)
    for step in range(10_000):
        now[0] = step / 100
        poll.result(SOON)
    assert len([at for at in calls if at < 1]) > 10
    assert len([at for at in calls if at > 60]) < 10


def test_a_fork_starts_its_own_threads() -> None:
    assert TimedCaller(SOON).call(lambda: 1) == 1
    child = os.fork()
    if not child:
        os._exit(TimedCaller(SOON).call(lambda: 7))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_slow_call_is_given_up_and_later_ones_fail_at_once(over: threading.Event) -> None:
    caller = TimedCaller(0.2)
    with pytest.raises(UnansweredError, match=r"not answered for \d+\.\d s"):
        caller.call(over.wait)
    calls: list[int] = []
    began = time.monotonic()
    with pytest.raises(UnansweredError, match="stopped answering"):
        caller.call(lambda: calls.append(1))
    assert (calls, time.monotonic() - began < SOON) == ([], True)


def test_a_call_gets_half_a_second_after_waiting_is_over(over: threading.Event, limit: Limit) -> None:
    is_over = threading.Event()
    caller = TimedCaller(60, is_over.is_set)
    is_over.set()
    began = time.monotonic()
    with pytest.raises(UnansweredError):
        caller.call(over.wait)
    assert 0.4 < time.monotonic() - began < SOON
    limit(timed_caller, LAST_CALL=SOON)
    assert TimedCaller(60, is_over.is_set).call(lambda: 7) == 7  # last messages are still sent


def test_settle_waits_until_calls_with_their_own_timeout_return(
    over: threading.Event,
) -> None:
    """Forming a gloo group times out. If that happened while the interpreter shut down, the process was aborted."""
    ended: list[bool] = []
    with pytest.raises(UnansweredError):
        TimedCaller(SOON, lambda: True, returns=True).call(lambda: ended.append(over.wait()))
    threading.Timer(0.3, over.set).start()
    settle(0.0)
    assert ended == [True]


def test_a_call_is_made_directly_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert TimedCaller(SOON).call(threading.get_ident) == threading.get_ident()


def test_a_poll_is_repeated_in_the_background_until_it_is_answered(over: threading.Event) -> None:
    calls: list[int] = []

    def ask() -> str | None:
        calls.append(1)
        if len(calls) == 1:
            raise ZeroDivisionError
        over.wait()
        return "yes" if len(calls) > 2 else None

    poll = BackgroundPoll(ask, 0.01)
    wait_until(lambda: poll.result() is None and len(calls) == 2, within=SOON)
    began = time.monotonic()
    assert [poll.result(0.1) for _ in range(300)] == [None] * 300  # only one call waits
    assert time.monotonic() - began < SOON
    assert len(calls) == 2
    over.set()
    wait_until(lambda: poll.result() == "yes", within=SOON)
    assert len(calls) == 3


@pytest.mark.parametrize(("limit", "is_same"), [(SOON, True), (SOON / 4, False)])
def test_a_call_within_a_brief_one_needs_no_thread_unless_its_limit_is_shorter(limit: float, is_same: bool) -> None:
    inner = TimedCaller(limit)
    threads = call_or_default(lambda: (threading.get_ident(), inner.call(threading.get_ident)), None, SOON / 2)
    assert threads is not None
    assert (threads[0] == threads[1]) is is_same


def test_call_or_default_logs_errors_and_returns_the_default(caplog: pytest.LogCaptureFixture) -> None:
    assert call_or_default(lambda: 1 // 0, 7) == 7
    assert "the job's store could not be used" in caplog.text


def looks(seconds: float, longest_pause: float, ranks: int) -> int:
    """Return the number of polls of one rank within a time."""
    number, now, pause = 1, 0.0, first_pause(longest_pause, ranks)
    while now < seconds:
        waited, now, number = now, now + pause, number + 1
        pause = next_pause(pause, waited, longest_pause, ranks)
    return number


@pytest.mark.parametrize("ranks", [2, 64, 512, 1024, 16_384])
def test_polling_slows_down_over_time(ranks: int) -> None:
    assert looks(60.0, 0.05, ranks) <= 160
    assert looks(5.0, 0.05, ranks) <= 45
    assert looks(600.0, 0.05, ranks) - looks(540.0, 0.05, ranks) <= 121


def test_calls_are_possible_again_after_a_given_up_call_returns(over: threading.Event) -> None:
    caller = TimedCaller(0.1)
    with pytest.raises(UnansweredError):
        caller.call(over.wait)
    over.set()
    settle(SOON)

    def is_answered() -> bool:
        with suppress(UnansweredError):  # the thread may not have run in time
            return caller.call(lambda: 7) == 7
        return False

    wait_until(is_answered, within=SOON)


def test_an_interval_starts_when_the_previous_one_is_over() -> None:
    every = Interval(0.5, 2)
    assert [every.is_over(now) for now in (7.0, 7.4, 7.6, 8.0, 8.1)] == [True, False, True, False, True]
