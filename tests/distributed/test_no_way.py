"""Ranks that reach the job's store but not each other, and reports of ranks that could not contribute everything."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from units import HASTY, QUICK, SOON, Ranks, Stall, UnitExchange, eventually

from dist_wandb import gathered
from dist_wandb.job.job_store import JobStore


def messages(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.message for record in caplog.records if words in record.message]


def computes_nothing() -> bool:
    """Return whether ranks that are alone, and have nothing to write, leave the processor alone for a second."""
    used = time.process_time()
    time.sleep(1.0)
    return time.process_time() - used < 0.5


@pytest.mark.parametrize("is_too_late", [False, True])
def test_ranks_that_cannot_connect_report_it_and_continue_alone(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_too_late: bool
) -> None:
    """Ports between hosts are closed, or gloo was given the wrong interface: it would keep failing forever.

    Rank 1 may see that rank 0 has failed, before it sees that both had come.
    """
    try_get = JobStore.try_get
    hidden = threading.Semaphore(is_too_late)

    def try_get_late(self: JobStore, key: str, *, soon: bool = False) -> Any:
        value = try_get(self, key, soon=soon)
        is_of_rank_1 = self.topology.global_rank == 1 and key.startswith("met/") and key.endswith("/all")
        if value is None or not is_of_rank_1 or not hidden.acquire(blocking=False):
            return value
        time.sleep(1.0)
        return None

    monkeypatch.setattr(JobStore, "try_get", try_get_late)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    unit = ranks(2)
    for step in range(3):
        unit.log_all(lambda rank: {"loss": float(rank)}, step)
    eventually(lambda: len(unit.run.rows) == 3)
    assert unit.last("loss") == dict.fromkeys(range(3), 0.0)
    assert unit.flagged() == dict.fromkeys(range(3), 1)
    (message,) = messages(caplog, "Rank 0 cannot connect to rank 1 in 3 attempts")
    assert "nosuch0" in message
    assert "GLOO_SOCKET_IFNAME" in message
    eventually(lambda: messages(caplog, "Rank 1 cannot connect to rank 0"))  # both try, and each reports it
    eventually(computes_nothing)  # collectives of earlier tests, which spin, end with their time limit
    assert [unit.exchanges[rank].close() for rank in range(2)] == [True, False]
    assert messages(caplog, "what rank 1 logged after the start may be lost")


def test_rows_lack_a_rank_that_left_before_its_numbers_were_received(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    """Its `finish` timed out: its contributions are lost, so it does not count as a rank that finished."""
    unit = ranks(2)
    unit.write_all(lambda rank: {"loss": float(rank)}, 0)
    stall = Stall()
    unit.log(0, {"loss": stall.number()}, 1)
    assert stall.begun.wait(SOON)
    unit.log(1, {"loss": 8.0}, 1)
    assert unit.exchanges[1].close(0.2) is False
    stall.over.set()
    unit.log(0, {"loss": 2.0}, 2)
    unit.close(0)
    assert unit.last("loss")[2] == 2.0
    assert unit.flagged() == {1: 1, 2: 1}
    assert unit.exchanges[0].lifecycle.lost == frozenset(), "it has not failed, either"
    what = "Rank 1 ended after step 0, before the others had received all that it logged (see finish_timeout)"
    assert messages(caplog, what)
    assert not messages(caplog, "Lost rank"), "it is healthy"
    assert messages(caplog, "what rank 1 logged after step 0 may be lost: these rows (about ")


@pytest.mark.parametrize("has_logged", [True, False])
def test_the_writer_reports_rows_as_flagged_only_if_they_are(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture, has_logged: bool
) -> None:
    """Its last row has not been exchanged in time, because the other rank is behind, or will never log it."""
    unit = ranks(2, **({} if has_logged else {"kind": UnitExchange}))
    unit.log_all(lambda rank: {"loss": float(rank)}, 0, ranks=range(2) if has_logged else [0])
    unit.flush(0)
    unit.log(0, {"loss": 2.0}, 1)
    assert unit.exchanges[0].close(0.2) is False
    assert unit.last("loss")[1] == 2.0
    flagged = unit.flagged()
    assert bool(messages(caplog, "are written with its own numbers, and flagged")) is bool(flagged)
    assert bool(messages(caplog, "rank 0 waited 0.2 s for the other ranks to finish")) is not bool(flagged)
    assert flagged == ({1: 1} if has_logged else {})


def test_a_rank_that_ends_at_once_says_why_there_is_no_run(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    answers = iter([None])  # first rank 0 still opens it
    unit = ranks(2, 1, failure=lambda: next(answers, "denied"))
    unit.log(1, {"loss": 1.0}, 0)
    assert unit.exchanges[1].close(failed=True) is False
    (message,) = messages(caplog, "rank 1")
    assert "what rank 1 logs is lost, because init failed on rank 0, which has the run: denied. Correct" in message


def test_rows_that_another_primary_takes_are_not_reported_as_lost(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    """It opens its run while the session ends, which takes longer than the time for the end."""
    taken: list[Any] = []
    is_opening = threading.Event()

    def move(primary: int) -> None:
        is_opening.set()
        time.sleep(3.0)
        successor: Any = SimpleNamespace(put=lambda row: taken.append((primary, dict(row.metrics))))
        unit.exchanges[1].pass_on(successor)

    unit = ranks(2, 1, limits=replace(QUICK, join_timeout=0.5), move=move)
    unit.log(1, {"loss": 1.0}, 0)
    assert is_opening.wait(30)
    unit.exchanges[1].close(1.0)
    eventually(lambda: taken == [(1, {"loss": 1.0})])
    assert not messages(caplog, "may be lost")


def test_ranks_that_wait_for_a_lost_rank_are_not_reported_as_silent(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    """The exchange waits for a rank that is gone; the remaining ranks have logged meanwhile, without a round."""
    unit = ranks(3, limits=HASTY)
    unit.write_all(lambda rank: {"loss": float(rank)}, 0)
    unit.lose_soon(4.0)
    for exchange in unit.exchanges.values():
        exchange.wait_for_peers(4.0)
    unit.log(0, {"loss": 4.0}, 1)
    eventually(lambda: bool(unit.exchanges[1].rounds.table.open))  # rank 1 knows that rank 0 has contributed this
    stall = Stall()
    unit.log(2, {"loss": stall.number()}, 1)
    assert stall.begun.wait(SOON)
    time.sleep(0.5)  # the others wait for it
    unit.log(1, {"loss": 6.0}, 1)
    eventually(lambda: 1 in unit.last("loss"))
    assert unit.last("loss")[1] == 5.0
    assert sum(row["global_step"] == 1 for row in unit.run.rows) == 1, "written once, not corrected"
    assert messages(caplog, "Lost rank 2 after")
    assert not messages(caplog, "has not logged")
    assert not messages(caplog, "after its row was written")
    stall.over.set()
    eventually(lambda: len(unit.exchanges[0].rounds.table.ranks.members) == 3)
    unit.close()


def test_a_contribution_of_a_lost_rank_does_not_replace_a_missing_one(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    """Two of three have contributed, and one of them dies: two remain, but one of those has not contributed yet."""
    unit = ranks(3)

    def log(rank: int, loss: float, step: int) -> None:
        unit.log(rank, {"loss": loss, "table": gathered([[rank]], ["from"])}, step)

    for rank in range(3):
        log(rank, float(rank), 0)
    unit.flush()
    log(1, 1.0, 1)
    log(2, 2.0, 1)
    eventually(lambda: {len(cell.ranks) for cell in unit.exchanges[0].rounds.table.cells.values()} == {2})
    unit.exchanges[2].die()
    eventually(lambda: len(unit.exchanges[0].rounds.table.ranks.members) == 2)
    eventually(lambda: len(unit.exchanges[1].rounds.table.ranks.members) == 2)
    time.sleep(0.5)
    log(0, 6.0, 1)
    unit.close(0, 1)
    assert unit.last("loss") == {0: 1.0, 1: 3.0}, "contributions of a rank before its death count"
    assert [row[-1] for row in unit.last("table")[1].data] == [0, 1]
    assert len(unit.run.rows) == 2, "written once, not corrected"
    assert not messages(caplog, "after its row was written")


def test_a_rank_that_leaves_while_the_others_regroup_is_not_waited_for(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint is there, so the others expect it; its departure is not announced yet."""
    publish = JobStore.publish

    def publish_slowly(self: JobStore, key: str, value: Any) -> None:
        if key.startswith("gone/") and self.topology.global_rank == 2:
            group: Any = unit.exchanges[2].group
            group.close()
            time.sleep(1.0)
        publish(self, key, value)

    monkeypatch.setattr(JobStore, "publish", publish_slowly)
    unit = ranks(3, limits=replace(QUICK, peer_timeout=60.0, finish_timeout=60.0))
    unit.write_all(lambda rank: {"loss": float(rank)}, 0)
    start = time.monotonic()
    unit.exchanges[2].die()
    unit.log_all(lambda rank: {"loss": float(rank)}, 1, ranks=range(2))
    unit.close(0, 1)
    assert time.monotonic() - start < SOON
    assert unit.last("loss") == {0: 1.0, 1: 0.5}
    assert unit.flagged() == {1: 1}
