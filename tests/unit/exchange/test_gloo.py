"""Exchanges over gloo groups whose members are threads of this process, with a store in memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from dist_wandb.errors import ConfigurationError
from dist_wandb.exchange.transport import gloo
from dist_wandb.exchange.transport.gloo import GlooGroup
from dist_wandb.exchange.transport.group import BrokenError, Group, destroy_closed, members_of, undestroyed

if TYPE_CHECKING:
    from tests.conftest import OnRanks

Form = Callable[..., list[GlooGroup]]

SOON = 20.0  # seconds, on a busy machine


@pytest.fixture
def form(on_ranks: OnRanks) -> Iterator[Form]:
    """Form a group of threads, which is closed after the test."""
    formed: list[GlooGroup] = []

    def form_all(size: int, timeout: float = 30.0, is_over: Callable[[], bool] = lambda: False) -> list[GlooGroup]:
        store = dist.HashStore()
        groups: list[GlooGroup] = on_ranks(size, lambda rank: GlooGroup(store, rank, size, timeout, is_over))
        formed.extend(groups)
        return groups

    yield form_all
    for group in formed:
        group.close()


@contextmanager
def taking(least: float, most: float) -> Iterator[None]:
    """Check the duration of a block, in seconds."""
    start = time.monotonic()
    yield
    assert least <= time.monotonic() - start <= most


def reduce_alone(group: GlooGroup) -> tuple[list[float], list[float]]:
    return group.reduce([1.0], [1.0])


# --- collectives of all members ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_reduce_computes_sums_and_maxima(form: Form, on_ranks: OnRanks, size: int) -> None:
    groups = form(size)
    results = on_ranks(size, lambda rank: groups[rank].reduce([1.0, rank, 2.0**53], [-rank, float(rank)]))
    assert results == [([size, sum(range(size)), size * 2.0**53], [0.0, size - 1.0])] * size
    assert [group.collectives for group in groups] == [1] * size
    assert [group.bytes_given for group in groups] == [5 * 8] * size


@pytest.mark.parametrize("size", [2, 3])
def test_reduce_keeps_float64_precision_and_infinities(form: Form, on_ranks: OnRanks, size: int) -> None:
    groups = form(size)
    nothing = ([0.0, 0.0], [float("-inf"), 0.0])
    given = [([0.1, float("inf")], [float("-inf"), 2.0**53 - 1]), ([0.2, 1.0], [float("-inf"), 2.0**53]), nothing]
    results = on_ranks(size, lambda rank: groups[rank].reduce(*given[rank]))
    assert results == [([0.1 + 0.2, float("inf")], [float("-inf"), 2.0**53])] * size


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("sums", "maxima", "collectives"), [([], [1.0], 1), ([1.0], [], 1), ([], [], 0)])
def test_empty_lists_need_no_collective(
    form: Form, on_ranks: OnRanks, sums: list[float], maxima: list[float], collectives: int, size: int
) -> None:
    groups = form(size)
    results = on_ranks(size, lambda rank: groups[rank].reduce(sums, maxima))
    assert results == [([size * x for x in sums], maxima)] * size
    assert [group.collectives for group in groups] == [collectives] * size


@pytest.mark.parametrize("size", [2, 3])
def test_tensors_are_reduced_in_place(form: Form, on_ranks: OnRanks, size: int) -> None:
    groups = form(size)
    given = [tuple(torch.full((3,), rank + 1.0, dtype=torch.float64) for _ in range(2)) for rank in range(size)]
    on_ranks(size, lambda rank: groups[rank].reduce_tensors(*given[rank]))
    expected = [[sum(range(1, size + 1))] * 3, [size] * 3]
    assert [[tensor.tolist() for tensor in pair] for pair in given] == [expected] * size


@pytest.mark.parametrize(
    "sent",
    [
        [b"zero", b"one", b"two longer"],
        [b"", b"a", b""],
        [b"", b"", b""],
        [b"\0", b"a\0\0", b"\0b"],
        [bytes(range(256)) * 100, b"x", b""],
    ],
    ids=["lengths", "some empty", "all empty", "zeros", "long"],
)
def test_a_tally_has_bytes_of_any_length_with_their_members(form: Form, on_ranks: OnRanks, sent: list[bytes]) -> None:
    groups = form(3)
    tallies = on_ranks(3, lambda rank: [*groups[rank].tally(sent[rank]).items()])
    assert tallies == [[*members_of(sent).items()]] * 3


@pytest.mark.parametrize("how", ["tally", "collect"])
def test_oversized_messages_are_refused_and_the_group_stays_usable(
    form: Form, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    groups = form(3)
    monkeypatch.setattr(gloo, "MOST_GATHERED", 100)
    monkeypatch.setattr(gloo, "MOST_COLLECTED", 100)

    def give(rank: int, size: int) -> Any:
        return getattr(groups[rank], how)(b"x" * size if rank == 1 else b"y")

    with pytest.raises(ConfigurationError, match="Member 1 of the group announced 101 bytes, but the limit is 100"):
        on_ranks(3, lambda rank: give(rank, 101))
    given = [b"y", b"x" * 100, b"y"]
    assert on_ranks(3, lambda rank: give(rank, 100))[0] == (members_of(given) if how == "tally" else given)


@pytest.mark.parametrize("length", [-1, 2**62])
def test_an_absurd_announced_length_raises_no_memory_error(form: Form, on_ranks: OnRanks, length: int) -> None:
    groups = form(2)

    def give(rank: int) -> None:
        if rank == 0:
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
            groups[0]._group.allgather([lengths], [torch.tensor([length])], groups[0]._options.gather).wait()
            return
        with pytest.raises(ConfigurationError, match=f"Member 0 of the group announced {length:,} bytes"):
            groups[1].collect(b"")

    on_ranks(2, give)


def test_a_group_can_be_used_repeatedly(form: Form, on_ranks: OnRanks) -> None:
    groups = form(2)

    def use(rank: int) -> list[Any]:
        return [(groups[rank].reduce([n], [rank * n]), groups[rank].tally(str(n + rank).encode())) for n in range(20)]

    expected = [(([2.0 * n], [float(n)]), members_of([str(n).encode(), str(n + 1).encode()])) for n in range(20)]
    assert on_ranks(2, use) == [expected] * 2
    assert groups[0].collectives == 20 * 2
    assert groups[0].bytes_given >= 20 * 2 * 8


def test_a_group_of_one_returns_its_own_values() -> None:
    alone = Group()
    assert alone.reduce([1.0], [2.0, 3.0]) == ([1.0], [2.0, 3.0])
    assert alone.tally(b"me") == {b"me": frozenset({0})}
    alone.close()
    assert alone.reduce([], []) == ([], [])


# --- interruptions ----------------------------------------------------------------------------------------------------


def test_a_group_whose_members_do_not_connect_in_time_is_broken() -> None:
    with taking(0.2, SOON), pytest.raises(BrokenError):
        GlooGroup(dist.HashStore(), 0, 2, 0.3, lambda: False)


@pytest.mark.parametrize("use", [reduce_alone, lambda group: group.tally(b"x")], ids=["reduce", "tally"])
def test_a_missing_member_breaks_the_group_after_the_timeout(form: Form, use: Callable[[GlooGroup], Any]) -> None:
    first, _ = form(2)
    first._timeout = 0.4  # not while they connect, which may take longer
    with taking(0.3, SOON), pytest.raises(BrokenError):
        use(first)


def test_a_late_member_within_the_timeout_is_waited_for(form: Form, on_ranks: OnRanks) -> None:
    groups = form(2)
    second_may_go = threading.Event()
    looked: list[float] = []

    def is_over() -> bool:
        looked.append(time.monotonic())
        if len(looked) == 3:  # expired slices of waiting did no harm
            second_may_go.set()
        return False

    groups[0]._is_over = is_over

    def use(rank: int) -> Any:
        if rank == 1:
            assert second_may_go.wait(SOON)
        return groups[rank].reduce([1.0], [rank])

    assert on_ranks(2, use) == [([2.0], [1.0])] * 2
    assert len(looked) >= 3


def test_waiting_ends_soon_after_is_over_returns_true(form: Form) -> None:
    over = threading.Event()
    first, _ = form(2, timeout=60.0, is_over=over.is_set)
    with taking(0.15, SOON):
        threading.Timer(0.2, over.set).start()
        with pytest.raises(BrokenError):
            reduce_alone(first)


def test_waiting_is_short_if_is_over_is_true_from_the_start(form: Form) -> None:
    first, _ = form(2, timeout=60.0, is_over=lambda: True)
    with taking(0, SOON), pytest.raises(BrokenError):
        first.tally(b"x")


def test_a_closed_member_breaks_a_later_collective_at_once(form: Form) -> None:
    first, second = form(2, timeout=60.0)
    second.close()
    del second
    with taking(0, SOON), pytest.raises(BrokenError):
        reduce_alone(first)


def test_closing_a_member_breaks_a_waiting_collective(form: Form) -> None:
    first, second = form(2, timeout=60.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reduce_alone, first)
        while not first._pending:
            time.sleep(0.005)
        with taking(0, SOON):
            second.close()
            with pytest.raises(BrokenError):
                waiting.result()


def test_a_group_with_a_pending_collective_is_closed_without_waiting(form: Form) -> None:
    first, second = form(2, timeout=60.0, is_over=lambda: True)
    with pytest.raises(BrokenError):
        reduce_alone(first)
    assert not all(work.is_completed() for work in first._pending)
    with taking(0, SOON):
        first.close()
    with pytest.raises(BrokenError, match="the group is closed"):
        reduce_alone(first)
    with taking(0, SOON):
        first.close()
        second.close()


class LateWork:
    """A collective that ends just after the slice of waiting for it."""

    def __init__(self, failure: RuntimeError | None = None) -> None:
        self.slices = 0
        self._failure = failure

    def wait(self, limit: timedelta | None = None) -> None:
        self.slices += limit is not None
        if limit is not None:
            raise RuntimeError("Operation timed out!")
        if self._failure is not None:
            raise self._failure

    def is_completed(self) -> bool:
        return self.slices > 0


def threads_of_gloo() -> int:
    """Return the number of threads of this process that wait for messages of other members."""
    number = 0
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # a thread that ends meanwhile
            number += path.read_text() == "gloo_tcp_loop\n"
    return number


def test_a_closed_group_is_destroyed_after_its_collectives_end() -> None:
    """One of three members dies: gloo's thread then spins on a message of another member to the failed collective."""
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        groups = list(pool.map(lambda rank: GlooGroup(store, rank, 3, 2.0, lambda: False), range(3)))
    before = threads_of_gloo()
    first, *others = groups
    collectives = [group._group for group in others]
    first.close()
    for group, native in zip(others, collectives, strict=True):
        group._pending = [native.barrier()]  # waits, in part, for a member that is gone
        group.close()
    del groups, first, others, group, native
    collectives.clear()
    assert undestroyed
    deadline = time.monotonic() + SOON
    while undestroyed:
        assert time.monotonic() < deadline, "a collective does not end with its time limit"
        destroy_closed()
        time.sleep(0.02)
    assert threads_of_gloo() <= before - 3


def test_a_collective_that_completes_right_after_a_wait_slice_succeeds() -> None:
    group = GlooGroup(dist.HashStore(), 0, 1, 5.0, lambda: False)
    work = LateWork()
    group._wait(lambda _: [work], 0)
    assert work.slices == 1
    with pytest.raises(BrokenError, match="gone"):
        group._wait(lambda _: [LateWork(RuntimeError("gone"))], 0)


def test_a_fork_has_no_groups_to_destroy() -> None:
    """Their threads do not exist in the child: a destructor would wait for them forever."""
    undestroyed.append(lambda: False)
    child = os.fork()
    if child == 0:
        os._exit(len(undestroyed))
    undestroyed.pop()
    assert os.waitpid(child, 0)[1] == 0
