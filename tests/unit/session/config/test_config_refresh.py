"""When a session's thread polls what other ranks have published: each poll is a request to the job's store."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from fakes import TWO

from dist_wandb.session.config import sync
from dist_wandb.session.config.sync import ConfigSync
from dist_wandb.settings.options import Limits, Options


class Rank(ConfigSync):
    """A rank's refreshes and polls, on a simulated clock."""

    def __init__(self, heartbeat: float, patch: pytest.MonkeyPatch) -> None:
        super().__init__(Options(limits=Limits(heartbeat=heartbeat)), TWO[1], None, {})
        self.now = 100.0
        self.refreshes: list[float] = []
        self.polls: list[float] = []
        self.failure: Exception | None = None
        patch.setattr(sync, "time", SimpleNamespace(monotonic=lambda: self.now))

    def update(self, polls: bool) -> None:
        self.refreshes.append(self.now - 100.0)
        if polls:
            self.polls.append(self.now - 100.0)
            if self.failure is not None:
                raise self.failure

    def idle(self, seconds: float, published: float, every: float = 1.0) -> None:
        """Run rounds without messages."""
        for _ in range(round(seconds / every)):
            self.in_background(published)
            self.now += every


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(1.0, monkeypatch)


def test_a_rank_without_reports_of_news_polls_seldom_and_else_at_once(rank: Rank) -> None:
    rank.idle(30, published=0.0)
    assert rank.polls == [0, 10, 20]
    assert rank.refreshes == list(range(30))
    rank.now += 0.25  # not at the time of a heartbeat
    rank.idle(12, published=1.0)
    assert rank.polls[3:] == [30.25, 40.25]


def test_rounds_in_quick_succession_cause_no_further_polls(rank: Rank) -> None:
    rank.idle(3, published=1.0, every=0.125)
    assert (rank.refreshes, rank.polls) == ([0, 1, 2], [0])


def test_a_reader_polls_once_per_heartbeat_whatever_the_thread_does(rank: Rank) -> None:
    rank.idle(16, published=0.0)
    before = len(rank.polls)
    for _ in range(8):
        rank.refresh()
        rank.now += 0.5
    assert rank.polls[before:] == [16, 17, 18, 19]


def test_an_error_of_the_config_does_not_end_the_thread(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    rank.failure = ValueError("broken")
    rank.idle(3, published=1.0)
    rank.failure = None
    rank.idle(2, published=2.0)
    assert rank.refreshes == [0, 1, 2, 3, 4]
    (message,) = caplog.messages
    assert message == "dist_wandb: rank 1 could not bring its config up to date"


def test_a_report_that_comes_while_another_thread_writes_is_not_lost(rank: Rank) -> None:
    """The thread whose rounds other ranks wait for does not wait for it."""
    rank.idle(25, published=0.0)
    has_begun, is_over = threading.Event(), threading.Event()

    def write() -> None:
        with rank.undisturbed():  # which polls before and after it
            has_begun.set()
            is_over.wait(60)

    writing = threading.Thread(target=write)
    writing.start()
    assert has_begun.wait(60)
    before = len(rank.polls)
    rank.idle(1, published=1.0)
    assert len(rank.polls) == before
    is_over.set()
    writing.join()
    rank.idle(1, published=1.0)
    assert rank.polls[before:] == [26, 26]
