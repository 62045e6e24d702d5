"""The life cycle of a session: which thread finishes it, and whether it accepts rows."""

from __future__ import annotations

import threading
import time

from dist_wandb.session.shutdown import LifeCycle, Phase


def test_one_thread_finishes_and_others_wait_for_it() -> None:
    life = LifeCycle()
    assert life.claim_finish(60.0)
    results: list[bool] = []
    other = threading.Thread(target=lambda: results.append(life.claim_finish(60.0)))
    other.start()
    assert other.is_alive()
    life.finished()
    other.join(60.0)
    assert results == [False]


def test_the_thread_that_finishes_does_not_wait_for_itself() -> None:
    life = LifeCycle()
    assert life.claim_finish(60.0)
    began = time.monotonic()
    assert not life.claim_finish(60.0)  # as in a signal handler that interrupts it
    assert time.monotonic() - began < 30.0


def test_others_wait_no_longer_than_their_limit() -> None:
    life = LifeCycle()
    thread = threading.Thread(target=lambda: life.claim_finish(60.0))
    thread.start()
    thread.join()
    assert not life.claim_finish(0.0)


def test_a_closed_session_cannot_be_detached() -> None:
    life = LifeCycle()
    life.close()
    assert not life.detach()
    assert life.phase is Phase.CLOSED


def test_a_session_can_be_detached_once() -> None:
    life = LifeCycle()
    assert life.detach()
    assert not life.detach()
    life.close()
    assert life.phase is Phase.DETACHED
