"""Timeouts for calls that have none."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import wait_until

from dist_wandb.store import timed_caller
from dist_wandb.store.timed_caller import Inquiry, TimedCaller, UnansweredError, briefly, settle

SOON = 20.0  # seconds, on a busy machine


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Provide an event that calls wait for. It is set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def test_what_a_call_returns_and_raises_comes_through() -> None:
    caller = TimedCaller(SOON)
    assert caller.call(lambda: [1]) == [1]
    with pytest.raises(ZeroDivisionError):
        caller.call(lambda: 1 / 0)


def test_a_question_is_asked_less_often_the_longer_there_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [0.0], list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    inquiry: Inquiry[None] = Inquiry(lambda: asked.append(now[0]), 0.05, lambda: 16_384)
    for look in range(10_000):
        now[0] = look / 100
        inquiry.look()
        if inquiry._call is not None:
            inquiry._call.wait(SOON)
    assert len([at for at in asked if at < 1]) > 10
    assert len([at for at in asked if at > 60]) < 10


def test_one_thread_makes_one_call_after_the_other() -> None:
    made_by = {TimedCaller(SOON).call(threading.get_ident) for _ in range(20)}
    assert len(made_by) == 1
    assert made_by != {threading.get_ident()}


def test_a_thread_ends_when_it_has_had_no_call_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_caller, "_KEPT", 0.05)
    monkeypatch.setattr(timed_caller, "_idle", [])
    thread = TimedCaller(10).call(threading.current_thread)
    thread.join(10)
    assert not thread.is_alive()
    assert timed_caller._idle == []
    assert TimedCaller(10).call(threading.current_thread) is not thread


def test_calls_at_the_same_time_do_not_wait_for_each_other() -> None:
    caller, meeting = TimedCaller(SOON), threading.Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        made = [pool.submit(caller.call, meeting.wait) for _ in range(3)]
        assert sorted(each.result() for each in made) == [0, 1, 2]


def test_after_a_call_that_was_given_up_another_thread_makes_the_next(over: threading.Event) -> None:
    before = TimedCaller(SOON).call(threading.get_ident)
    with pytest.raises(UnansweredError):
        TimedCaller(0.1).call(over.wait)
    assert TimedCaller(SOON).call(threading.get_ident) != before


def test_a_fork_makes_threads_of_its_own() -> None:
    assert TimedCaller(SOON).call(lambda: 1) == 1
    child = os.fork()
    if not child:
        os._exit(TimedCaller(SOON).call(lambda: 7))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_call_within_a_call_uses_the_same_thread_if_its_limit_is_not_shorter(over: threading.Event) -> None:
    def call_again() -> tuple[int, int]:
        return threading.get_ident(), TimedCaller(2 * SOON).call(threading.get_ident)

    outer, inner = TimedCaller(SOON).call(call_again)
    assert outer == inner
    with pytest.raises(UnansweredError):
        TimedCaller(SOON).call(lambda: TimedCaller(0.1).call(over.wait))


def test_a_call_that_takes_too_long_is_given_up_and_none_waits_behind_it(over: threading.Event) -> None:
    caller = TimedCaller(0.2)
    with pytest.raises(UnansweredError, match=r"not answered for \d+\.\d s"):
        caller.call(over.wait)
    caller._limit = 2 * SOON
    asked: list[int] = []
    began = time.monotonic()
    with pytest.raises(UnansweredError, match="stopped answering"):
        caller.call(lambda: asked.append(1))
    assert (asked, time.monotonic() - began < SOON) == ([], True)


def test_once_the_call_that_was_given_up_has_come_back_others_are_made_again(over: threading.Event) -> None:
    caller = TimedCaller(0.1)
    with pytest.raises(UnansweredError):
        caller.call(over.wait)
    over.set()
    settle(SOON)
    assert caller.call(lambda: 7) == 7


def test_when_waiting_is_to_end_a_call_gets_half_a_second(over: threading.Event) -> None:
    is_over = threading.Event()
    caller = TimedCaller(60, is_over.is_set)
    is_over.set()
    assert caller.call(lambda: 7) == 7  # last messages are still sent
    began = time.monotonic()
    with pytest.raises(UnansweredError):
        caller.call(over.wait)
    assert 0.4 < time.monotonic() - began < SOON


def test_at_the_end_of_a_process_calls_that_were_given_up_are_waited_for_a_little(over: threading.Event) -> None:
    with pytest.raises(UnansweredError):
        TimedCaller(0.1).call(over.wait)
    began = time.monotonic()
    settle(0.3)
    assert 0.25 < time.monotonic() - began < SOON
    over.set()
    settle(60)
    assert time.monotonic() - began < SOON


def test_at_the_end_of_a_process_calls_that_return_by_themselves_are_waited_for_until_they_do(
    over: threading.Event,
) -> None:
    """Forming a gloo group times out. If that happened while the interpreter shut down, the process was aborted."""
    ended: list[bool] = []
    with pytest.raises(UnansweredError):
        TimedCaller(SOON, lambda: True, returns=True).call(lambda: ended.append(over.wait()))
    threading.Timer(0.3, over.set).start()
    settle(0.0)
    assert ended == [True]


def test_where_no_thread_can_be_started_the_call_is_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(timed_caller, "_idle", [])
    assert TimedCaller(SOON).call(threading.get_ident) == threading.get_ident()


def test_an_inquiry_is_asked_again_until_it_is_answered_and_nobody_waits(over: threading.Event) -> None:
    asked: list[int] = []

    def ask() -> str | None:
        asked.append(1)
        if len(asked) == 1:
            raise ZeroDivisionError
        over.wait()
        return "yes" if len(asked) > 2 else None

    inquiry = Inquiry(ask, 0.01)
    wait_until(lambda: inquiry.look() is None and len(asked) == 2, within=SOON)
    began = time.monotonic()
    assert [inquiry.look(0.1) for _ in range(300)] == [None] * 300  # only one look waits
    assert time.monotonic() - began < SOON
    assert len(asked) == 2
    over.set()
    wait_until(lambda: inquiry.look() == "yes", within=SOON)
    inquiry.forget()
    wait_until(lambda: inquiry.look() == "yes", within=SOON)
    assert len(asked) == 4


@pytest.mark.parametrize(("limit", "is_same"), [(SOON, True), (SOON / 4, False)])
def test_a_call_made_by_one_that_is_given_up_earlier_needs_no_thread_of_its_own(limit: float, is_same: bool) -> None:
    inner = TimedCaller(limit)
    threads = briefly(lambda: (threading.get_ident(), inner.call(threading.get_ident)), None, SOON / 2)
    assert threads is not None
    assert (threads[0] == threads[1]) is is_same


def test_an_error_on_the_way_to_the_store_is_logged_and_fails_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert briefly(lambda: 1 // 0, 7) == 7
    assert "the job's store could not be used" in caplog.text
