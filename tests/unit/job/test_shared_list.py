"""A list in the job's store to which all ranks append."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from counting import CountedStore, Counts

from dist_wandb.job.job_store import JobStore, SharedList
from dist_wandb.job.timed_caller import UnansweredError
from dist_wandb.job.topology import Topology

pytestmark = pytest.mark.usefixtures("bare_environment")

MANY = 2500  # more than in one call

ListOf = Callable[[int], SharedList]


@pytest.fixture
def counts() -> Counts:
    return Counts()


@pytest.fixture
def keys_of(counts: Counts) -> Callable[[int], JobStore]:
    store = dist.HashStore()
    return lambda rank: JobStore(CountedStore(store, rank, counts), "test", Topology(rank, rank, 0, 2, 2, 1), 30.0)


@pytest.fixture
def list_of(keys_of: Callable[[int], JobStore]) -> ListOf:
    """Return the list for a rank that has not read it yet."""
    return lambda rank: SharedList(keys_of(rank), "list")


@pytest.mark.parametrize("number", [1, 4, 5, MANY])
def test_appended_values_are_read_once_in_order(list_of: ListOf, number: int) -> None:
    appending, reading = list_of(0), list_of(1)
    assert [appending.append([value, "text"]) for value in range(number)] == list(range(1, number + 1))
    assert reading.read_new() == [[value, "text"] for value in range(number)]
    assert reading.read_new() == []
    assert reading.append("own") == number + 1
    assert (reading.read_new(), len(reading.values)) == (["own"], number + 1)
    assert (list_of(0).count(), list_of(1).read_new(soon=True)[-1]) == (number + 1, "own")


def test_checking_for_news_reads_one_key(list_of: ListOf, counts: Counts) -> None:
    appending, reading = list_of(0), list_of(1)
    for value in range(MANY):
        appending.append(value)
    reading.read_new()
    before = counts.of(1), counts.operations[1]
    for _ in range(10):
        reading.read_new()
    assert (counts.of(1) - before[0], counts.operations[1] - before[1]) == (10, 10)
    assert before[0] == 1 + 2 * MANY, "each key is checked, and read"
    assert before[1] <= 1 + 2 * 3


def test_append_once_counts_a_value_once(list_of: ListOf, counts: Counts) -> None:
    for rank in (0, 1, 0):
        list_of(rank).append_once(rank)
    before = counts.of(1)
    reading = list_of(1)
    assert (reading.count(), counts.of(1) - before) == (2, 1)
    assert reading.read_new() == [0, 1]


def test_a_counted_value_that_is_not_set_yet_is_read_later(list_of: ListOf, keys_of: Callable[[int], JobStore]) -> None:
    reading = list_of(1)
    for value in range(10):
        list_of(0).append(value)
    assert keys_of(0).count("list/count") == 11
    list_of(0).append(12)
    assert reading.read_new() == [*range(10), 12]
    assert reading.read_new() == []
    keys_of(0).publish("list/11", 11)
    assert reading.read_new() == [11]


def test_only_the_rank_that_sets_the_last_value_finds_the_list_complete(
    list_of: ListOf, keys_of: Callable[[int], JobStore]
) -> None:
    held_up = keys_of(0)
    assert held_up.count("list/count") == 1
    assert not list_of(1).append_one_of("b", 3)
    assert not list_of(1).append_one_of("c", 3), "it has the last index, but a value is missing"
    held_up.publish("list/1", "a")
    assert held_up.count("list/there") == 3
    other = SharedList(keys_of(0), "other")
    assert [other.append_one_of(value, 3) for value in "abc"] == [False, False, True]
    assert other.read_new() == ["a", "b", "c"]


def test_news_soon_returns_nothing_if_the_store_does_not_answer(
    list_of: ListOf, keys_of: Callable[[int], JobStore]
) -> None:
    keys: Any = keys_of(1)
    reading = SharedList(keys, "list")
    list_of(0).append(1)
    get_present = keys.get_present

    def stall(_: list[str], *, soon: bool) -> dict[str, int]:
        assert soon
        raise UnansweredError("it has not answered")

    keys.get_present = stall
    assert reading.read_new(soon=True) == []
    keys.get_present = get_present
    assert reading.read_new(soon=True) == [1]
