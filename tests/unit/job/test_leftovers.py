"""Keys that ended sessions have left in the job's store, with stores in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from new_process import begin_new_process

from dist_wandb.job import leftovers
from dist_wandb.job.job_store import JobStore, RankValues, SharedList
from dist_wandb.job.topology import Topology

Sessions = Callable[[int, int], JobStore]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    begin_new_process(monkeypatch)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def session(host: dist.TCPStore) -> Sessions:
    return lambda rank, number: job_store_of(host, rank, number)


def job_store_of(store: dist.Store, rank: int, number: int) -> JobStore:
    return JobStore(store, f"integration/{number}", Topology(rank, rank, 0, 2, 2, 1), 30.0)


class Rank:
    """One rank in its own process, which opens and ends sessions."""

    def __init__(self, rank: int, session: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rank, self._session, self._monkeypatch = rank, session, monkeypatch
        self._leftovers: list[object] = []

    def open_and_end(self, *numbers: int) -> None:
        self._monkeypatch.setattr(leftovers, "_leftovers", self._leftovers)
        for number in numbers:
            job_store = self._session(self._rank, number)
            leftovers.delete_stale_keys(job_store, 2)
            RankValues(job_store, "node").publish("host")
            SharedList(job_store.below("unit/"), "here").append(self._rank)
            job_store.below("config_sync").claim("given", 1)
            leftovers.leave(job_store, lambda: True)


@pytest.fixture
def ranks(session: Sessions, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rank]]:
    return [Rank(rank, session, monkeypatch) for rank in range(2)]  # type: ignore[return-value]


def test_successive_sessions_leave_only_the_keys_of_the_last_ones(host: dist.TCPStore, ranks: list[Rank]) -> None:
    numbers = []
    for number in range(1, 41):
        for rank in ranks:
            rank.open_and_end(number)
        numbers.append(host.num_keys())
    assert max(numbers) == max(numbers[:4]) <= 20


def test_keys_of_sessions_that_a_rank_has_yet_to_open_are_kept(
    host: dist.TCPStore, session: Sessions, ranks: list[Rank]
) -> None:
    ranks[0].open_and_end(*range(1, 11))
    assert all(session(1, number).try_get("node/1") == [0, "host"] for number in range(1, 11))
    ranks[1].open_and_end(*range(1, 11))
    ranks[0].open_and_end(11)
    ranks[1].open_and_end(11)
    ranks[0].open_and_end(12)
    assert host.num_keys() <= 20


def test_skipped_sessions_are_cleared_with_a_later_one(session: Sessions, ranks: list[Rank]) -> None:
    ranks[0].open_and_end(1, 2)
    ranks[1].open_and_end(2, 3, 4)
    ranks[0].open_and_end(3, 4)
    assert session(0, 1).try_get("node/1") is None
    assert session(0, 4).try_get("node/1") is not None


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_keys_of_a_session_whose_thread_runs_and_those_in_another_store_are_not_cleared(
    session: Sessions, is_elsewhere: bool
) -> None:
    ended = job_store_of(dist.HashStore(), 0, 1) if is_elsewhere else session(0, 1)
    ended.publish("word", 1)
    leftovers.leave(ended, lambda: is_elsewhere)
    for number in (2, 3, 4):
        leftovers.delete_stale_keys(session(0, number), 1)
    assert ended.try_get("word") == 1
    assert not is_elsewhere or session(0, 1).try_get("left") is None


def test_finished_sessions_are_recorded_in_one_key(host: dist.TCPStore, session: Sessions) -> None:
    assert not leftovers.is_over(session(1, 1))
    for number in (1, 2, 4, 3, 7):
        leftovers.publish_over(session(0, number))
    assert [number for number in range(1, 10) if leftovers.is_over(session(1, number))] == [1, 2, 3, 4, 7]
    assert leftovers.place_of(session(1, 1))[0].try_get("over") == [[1, 4], [7, 7]]
    assert host.num_keys() == 1


@pytest.mark.parametrize("kind", ["tcp", "hash", "file"])
def test_keys_and_lists_work_with_each_kind_of_store(host: dist.TCPStore, tmp_path: Path, kind: str) -> None:
    """Reading a key neither sets it nor waits for it."""
    stores = {"tcp": lambda: host, "hash": dist.HashStore, "file": lambda: dist.FileStore(str(tmp_path / "store"), 1)}
    job_store = job_store_of(stores[kind](), 0, 1)  # type: ignore[no-untyped-call]
    assert job_store.try_get("key") is None
    assert not job_store.has(["key"])
    job_store.publish("key", {"a": 1})
    assert job_store.try_get("key") == {"a": 1}
    job_store.delete(["key"])
    assert job_store.try_get("key") is None
    appending, reading = SharedList(job_store, "list"), SharedList(job_store, "list")
    assert [appending.append([value]) for value in range(9)] == list(range(1, 10))
    assert (reading.count(), reading.read_new(), reading.read_new()) == (9, [[value] for value in range(9)], [])
