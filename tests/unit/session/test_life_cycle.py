"""The life cycle of a session: which thread finishes it, and whether it accepts rows."""

from __future__ import annotations

import threading

from dist_wandb.session.shutdown import LifeCycle, Phase


def test_one_thread_finishes_and_others_wait_for_it() -> None:
    life, results = LifeCycle(), list[bool]()
    assert life.claim_finish(60.0)
    other = threading.Thread(target=lambda: results.append(life.claim_finish(60.0)))
    other.start()
    other.join(0.2)
    assert other.is_alive()
    life.finished()
    other.join(60.0)
    assert results == [False]


def test_a_closed_session_cannot_be_detached() -> None:
    life = LifeCycle()
    life.close()
    assert not life.detach()
    assert life.phase is Phase.CLOSED
