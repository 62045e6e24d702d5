"""Contributions on their way to the rounds: in their order, once devices have computed them."""

from __future__ import annotations

import time

from units import Stall

from dist_wandb.exchange.interface import Flush
from dist_wandb.exchange.rows import Contribution
from dist_wandb.exchange.turns import Inbox


def test_contributions_stay_in_order_behind_one_that_is_still_on_a_device() -> None:
    posted: list[Contribution] = []
    inbox, stall = Inbox(posted.append), Stall()
    contributions = [
        Contribution({"loss": 1.0}, 0),
        Contribution({"loss": stall.number(asked=True)}, 1),
        Contribution({"loss": 2.0}, 2),
    ]
    for contribution in contributions:
        inbox.put(contribution)
    assert (inbox.unread, inbox.computing, inbox.is_empty) == (3, 0, False)
    assert inbox.drain()
    assert posted == contributions[:1]
    assert (inbox.unread, inbox.computing, inbox.is_empty) == (0, 2, False)
    assert not inbox.drain()
    stall.over.set()
    assert inbox.drain()
    assert posted == contributions
    assert inbox.is_empty
    assert not inbox.drain()


def test_flushes_are_answered_once_and_a_wake_takes_effect_at_once() -> None:
    inbox, flushes = Inbox(lambda _: None), [Flush(), Flush(together=True)]
    inbox.wake()
    assert inbox.drain(60.0), "waking the thread takes effect at once"
    for flush in flushes:
        inbox.wake(flush)
    inbox.drain()
    assert inbox.flushes == flushes
    inbox.answer(flushes[:1])
    assert [flush.is_set() for flush in flushes] == [True, False]
    assert inbox.flushes == flushes[1:]


def test_a_flush_ends_lingering() -> None:
    posted: list[Contribution] = []
    inbox = Inbox(posted.append)
    inbox.wake(Flush())
    began = time.monotonic()
    inbox.linger(60.0, is_open=lambda: True)
    inbox.linger(60.0, is_open=lambda: False)
    assert time.monotonic() - began < 30.0
    assert len(inbox.flushes) == 1


def test_many_contributions_end_lingering() -> None:
    posted: list[Contribution] = []
    inbox = Inbox(posted.append)
    for step in range(300):
        inbox.put(Contribution({"loss": 1.0}, step))

    def put_more() -> bool:
        for step in range(300, 600):
            inbox.put(Contribution({"loss": 1.0}, step))
        return True

    began = time.monotonic()
    inbox.linger(60.0, is_open=put_more)
    assert time.monotonic() - began < 30.0
    assert [contribution.step for contribution in posted] == list(range(600))
