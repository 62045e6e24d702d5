"""When a session's thread looks at what other ranks have published: each time is a request to the job's store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dist_wandb.errors import RendezvousError
from dist_wandb.run_config import look as look_module
from dist_wandb.run_config.look import Look


class Looked:
    """A rank's looks, on a clock of its own: when, and whether elsewhere as well.

    Args:
        heartbeat: Of the session, in seconds.
        patch: Sets the clock.
    """

    def __init__(self, heartbeat: float, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.here: list[float] = []
        self.elsewhere: list[float] = []
        self.failure: Exception | None = None
        connection: Any = type("Connection", (), {"is_usable": True, "rank": 1})
        self.look = Look(connection, heartbeat, self._update)
        patch.setattr(look_module, "time", SimpleNamespace(monotonic=lambda: self.now))

    def _update(self, _whole: bool, elsewhere: bool) -> None:
        self.here.append(self.now - 100.0)
        if elsewhere:
            self.elsewhere.append(self.now - 100.0)
            if self.failure is not None:
                raise self.failure

    def idle(self, seconds: float, heard: float, every: float = 1.0) -> None:
        """Go through rounds."""
        for _ in range(round(seconds / every)):
            self.look.in_background(heard)
            self.now += every


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Looked:
    return Looked(1.0, monkeypatch)


def test_a_rank_to_which_nobody_brings_word_looks_elsewhere_less_and_less_often(looked: Looked) -> None:
    looked.idle(60, heard=0.0)
    assert looked.elsewhere == [0, 2, 6, 14, 24, 34, 44, 54]
    assert looked.here == list(range(60))


def test_word_of_something_new_makes_a_rank_look_at_once(looked: Looked) -> None:
    looked.idle(30, heard=0.0)
    before = len(looked.elsewhere)
    looked.now += 0.25  # not at the time of a heartbeat
    looked.idle(6, heard=1.0)
    assert looked.elsewhere[before:] == [30.25, 31.25, 33.25]


def test_rounds_that_follow_each_other_quickly_make_no_further_looks(looked: Looked) -> None:
    looked.idle(3, heard=1.0, every=0.125)
    assert (looked.here, looked.elsewhere) == ([0, 1, 2], [0, 1])


def test_where_many_ranks_look_a_heartbeat_of_theirs_is_not_made_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Looked(30.0, monkeypatch)
    looked.idle(100, heard=0.0)
    assert looked.elsewhere == [0, 30, 60, 90]


def test_a_reader_looks_once_in_a_heartbeat_whatever_the_thread_does(looked: Looked) -> None:
    looked.idle(16, heard=0.0)
    before = len(looked.elsewhere)
    for _ in range(8):
        looked.look()
        looked.now += 0.5
    assert looked.elsewhere[before:] == [16, 17, 18, 19]


def test_a_store_that_does_not_answer_is_asked_again_in_a_heartbeat(looked: Looked) -> None:
    looked.idle(30, heard=0.0)
    looked.failure = RendezvousError("gone")
    before = len(looked.elsewhere)
    looked.idle(2, heard=1.0)
    assert looked.elsewhere[before:] == [30, 31]


def test_word_that_comes_while_another_thread_looks_is_not_lost(looked: Looked) -> None:
    looked.idle(30, heard=0.0)
    before = len(looked.elsewhere)
    looked.look._lock = Held()  # type: ignore[assignment]
    looked.idle(1, heard=1.0)
    assert len(looked.elsewhere) == before
    looked.look._lock = Free()  # type: ignore[assignment]
    looked.idle(1, heard=1.0)
    assert looked.elsewhere[before:] == [31]


class Held:
    """A lock that another thread holds."""

    def acquire(self, timeout: float) -> bool:
        assert timeout == 0.0  # on a thread whose rounds others wait for
        return False


class Free:
    """A lock that nobody holds."""

    def acquire(self, timeout: float) -> bool:
        return timeout == 0.0

    def release(self) -> None:
        """As of a lock."""
