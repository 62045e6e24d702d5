"""Collectives over gloo, in one group or in a tree of groups. The members are threads, over a store in memory."""

from __future__ import annotations

import itertools
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fakes import on_ranks
from limits import Limit
from units import eventually, threads_of_gloo

from dist_wandb.errors import ConfigurationError
from dist_wandb.exchange import transport
from dist_wandb.exchange.transport import BrokenError, destroy_closed, gloo, members_of, tree, tree_of, undestroyed
from dist_wandb.exchange.transport.gloo import GlooGroup
from dist_wandb.exchange.transport.tree import TreeGroup

Form = Callable[..., list[Any]]

SOON = 20.0  # seconds, on a busy machine
MANY = 100  # the most members of one group
GROUPS = [(2, MANY), (3, MANY)]  # members, and the most of a group
TREES = [(5, 2), (7, 3), (12, 3)]  # two or three levels
in_all = pytest.mark.parametrize(("size", "fan_out"), [*GROUPS, *TREES])
in_one_and_a_tree = pytest.mark.parametrize(("size", "fan_out"), [(3, MANY), (5, 2)])


def nodes_of(size: int) -> list[int]:
    return [rank // 3 for rank in range(size)]


@pytest.fixture
def form() -> Iterator[Form]:
    """Form a group or a tree of threads, which is closed after the test."""
    formed: list[GlooGroup] = []

    def form_all(
        size: int, fan_out: int = MANY, timeout: float = 30.0, is_over: Any = bool, *, parts: bool = False
    ) -> list[Any]:
        store = dist.HashStore()

        def form_one(rank: int) -> Any:
            path, _ = tree_of(range(size), nodes_of(size), rank, fan_out)
            groups = [
                GlooGroup(dist.PrefixStore(group.name, store), group.group_rank, len(group.members), timeout, is_over)
                for group in path
            ]
            formed.extend(groups)
            whole = groups[0] if size <= fan_out else TreeGroup(groups, path, rank, size, timeout)
            return (whole, groups) if parts else whole

        groups: list[Any] = on_ranks(size, form_one)
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


@in_all
def test_all_members_have_the_same_sums_and_maxima(form: Form, size: int, fan_out: int) -> None:
    groups = form(size, fan_out)
    inf = math.inf

    def use(rank: int) -> Any:
        numbers = groups[rank].reduce([1.0, rank, 2.0**53, 0.1 * rank, inf if rank else 0.0], [-rank, 2.0**53, -inf])
        return numbers, groups[rank].reduce([math.nan if rank == 1 else 0.0], [])[0][0]

    ((sums, maxima), nan), *others = on_ranks(size, use)
    assert sums == [size, sum(range(size)), size * 2.0**53, pytest.approx(0.1 * sum(range(size))), inf]
    assert maxima == [0.0, 2.0**53, -inf]
    assert math.isnan(nan)
    assert [other for other, _ in others] == [(sums, maxima)] * (size - 1)
    paths = [tree_of(range(size), nodes_of(size), rank, fan_out)[0] for rank in range(size)]
    assert [group.collectives for group in groups] == [2 * sum(2 - one.is_top for one in path) for path in paths]
    assert fan_out < MANY or [group.bytes_given for group in groups] == [9 * 8] * size


@pytest.mark.parametrize(("size", "fan_out"), [(2, MANY), (3, MANY), (7, 3)])
def test_many_numbers_are_reduced_in_pieces(form: Form, limit: Limit, size: int, fan_out: int) -> None:
    groups, total = form(size, fan_out), sum(range(size))
    for (piece, most), summed in itertools.product(((6, 200), (1000, 2000)), (0, 5, 7, 20)):
        limit(gloo, PIECE=piece * 8)

        def reduce(rank: int, summed: int = summed) -> tuple[list[float], list[float]]:
            numbers = np.arange(20.0) + rank
            groups[rank].reduce_in_place(numbers, summed)
            return numbers[:summed].tolist(), numbers[summed:].tolist()

        expected = [size * n + total for n in range(summed)], [n + size - 1 for n in range(summed, 20)]
        assert on_ranks(size, reduce) == [expected] * size
        for many in (20, most):
            found = on_ranks(size, lambda rank: groups[rank].reduce([rank] * summed, [rank] * many))  # noqa: B023
            assert found == [([total] * summed, [size - 1] * many)] * size


@pytest.mark.parametrize("piece", [24, 2**20])
@in_all
def test_bytes_of_any_length_are_collected_in_member_order(
    form: Form, limit: Limit, size: int, fan_out: int, piece: int
) -> None:
    limit(gloo, PIECE=piece)
    limit(tree, _MOST_HELD=2 * piece * size)
    groups = form(size, fan_out)
    sent = [bytes([rank]) * (rank % 3 * 40) for rank in range(size)]

    def give(rank: int) -> list[Any]:
        group, own = groups[rank], sent[rank]
        return [group.collect(own[:9], b"", own[9:]), group.collect(b"")]

    first, *others = on_ranks(size, give)
    assert first == [sent, [b""] * size]
    assert others == [[[], []]] * (size - 1)


@pytest.mark.parametrize("piece", [24, 2**20])
@in_all
def test_a_tally_has_equal_contents_once_with_their_members(
    form: Form, limit: Limit, size: int, fan_out: int, piece: int
) -> None:
    limit(gloo, PIECE=piece)
    groups = form(size, fan_out)
    for given in (
        [bytes([rank]) * (rank * 40) for rank in range(size)],
        [bytes([rank % 3]) * (rank % 3 * 40) for rank in range(size)],
        [[b"\0", b"a\0\0", b"\0b"][rank % 3] for rank in range(size)],
        [b""] * size,
    ):
        tallies = on_ranks(size, lambda rank: list(groups[rank].tally(given[rank]).items()))  # noqa: B023
        assert tallies == [tallies[0]] * size
        assert dict(tallies[0]) == members_of(given)
    before = [group.bytes_given for group in groups]
    on_ranks(size, lambda rank: groups[rank].tally(b"x" * 1000))
    assert max(group.bytes_given - one for group, one in zip(groups, before, strict=True)) < 1000 * 8


# --- what is refused --------------------------------------------------------------------------------------------------


@in_one_and_a_tree
@pytest.mark.parametrize("how", ["tally", "collect"])
def test_oversized_messages_are_refused_and_the_group_stays_usable(
    form: Form, limit: Limit, how: str, size: int, fan_out: int
) -> None:
    groups = form(size, fan_out)
    limit(gloo, MOST_GATHERED=100, MOST_COLLECTED=100)

    def give(rank: int, length: int) -> Any:
        try:
            return getattr(groups[rank], how)(b"x" * length if rank in (1, 3) else b"y")
        except ConfigurationError as error:
            return str(error)

    for refusal in on_ranks(size, lambda rank: give(rank, 101)):
        assert refusal.startswith("Member 1 of the group announced 101 bytes, but the limit is 100.")
    given = [b"y", b"x" * 100, b"y", b"x" * 100, b"y"][:size]
    assert on_ranks(size, lambda rank: give(rank, 100))[0] == (members_of(given) if how == "tally" else given)
    if how == "tally" and fan_out < size:
        together = 101 + 2 * 12 + 5 * 8
        limit(tree, _MOST_TOGETHER=together - 1)
        for refusal in on_ranks(size, lambda rank: give(rank, 100)):
            assert refusal.startswith(f"All members of the group together announced {together} bytes, but")
    assert on_ranks(size, lambda rank: groups[rank].reduce([1.0], [])) == [([size], [])] * size


@pytest.mark.parametrize("length", [-1, 2**62])
def test_an_absurd_announced_length_raises_no_memory_error(length: int) -> None:
    store = dist.HashStore()

    def give(rank: int) -> None:
        if rank == 0:
            other: Any = dist.ProcessGroupGloo(store, 0, 2, timedelta(seconds=SOON))
            other.alltoall_base(torch.zeros(2, dtype=torch.int64), torch.tensor([length] * 2), [], []).wait()
            return
        group = GlooGroup(store, 1, 2, SOON, bool)
        with pytest.raises(ConfigurationError, match=f"Member 0 of the group announced {length:,} bytes"):
            group.collect(b"")

    on_ranks(2, give)


def test_data_of_another_version_is_refused(form: Form) -> None:
    groups = form(5, 2)

    def announce(rank: int) -> None:
        if rank == 3:
            groups[rank].reduce([math.nan], [math.inf])
            return
        with pytest.raises(ConfigurationError, match="A member of the group announced an impossible number of bytes"):
            groups[rank].tally(b"y")

    def collect(rank: int) -> None:
        with pytest.raises(ConfigurationError if rank == 0 else BrokenError, match="malformed" if rank == 0 else None):
            groups[rank].collect(b"x")
        groups[rank].close()

    on_ranks(5, announce)
    groups[3].rank = 4  # so that a member's part is missing
    on_ranks(5, collect)


ITS_CONTENT = struct.pack("<IQII", 1, 2, 2, 2) + b"ab"  # two bytes of the members from 2 to 2


@pytest.mark.parametrize(
    ("sent", "is_refused"),
    [
        (ITS_CONTENT, False),
        (ITS_CONTENT[:-1], True),
        (ITS_CONTENT + b"d", True),
        (ITS_CONTENT[:5], True),
        (ITS_CONTENT + struct.pack("<IQ", 1, 0), True),
    ],
    ids=["sound", "cut off", "longer", "without a length", "without members"],
)
def test_malformed_tallies_are_refused(form: Form, sent: bytes, is_refused: bool) -> None:
    """Member 2 sends what another version might; member 1 is the first of its group."""
    groups = form(3, 2, timeout=SOON, parts=True)

    def send(whole: TreeGroup, part: GlooGroup) -> None:
        whole.reduce([float(len(sent))], [float(len(sent) * 3)])  # as `tally` announces them
        part.collect(sent, deadline=time.monotonic() + SOON)
        part.receive_from_first(length := torch.zeros(1, dtype=torch.float64))
        part.receive_from_first(torch.zeros(int(length), dtype=torch.uint8))

    def tally(rank: int) -> Any:
        whole, (part, *_) = groups[rank]
        try:
            return send(whole, part) if rank == 2 else whole.tally(b"y")
        except (BrokenError, ConfigurationError) as error:
            whole.close()
            return error

    upper, lower, _ = on_ranks(3, tally)
    if is_refused:
        assert isinstance(upper, BrokenError)
        assert "that the members of the group sent is malformed" in str(lower)
    else:
        assert upper == lower == {b"y": {0, 1}, b"ab": {2}}


# --- interruptions ----------------------------------------------------------------------------------------------------


def test_a_group_whose_members_do_not_connect_in_time_is_broken() -> None:
    with taking(0.2, SOON), pytest.raises(BrokenError):
        GlooGroup(dist.HashStore(), 0, 2, 0.3, lambda: False)


@pytest.mark.parametrize(("size", "fan_out", "late"), [(2, MANY, 1), (9, 3, 0), (9, 3, 1), (9, 3, 8)])
def test_waiting_for_a_stalled_member_ends_at_the_limit(form: Form, size: int, fan_out: int, late: int) -> None:
    groups = form(size, fan_out)
    for group in groups:
        group.timeout = 0.5  # not while they connect, which may take longer

    def use(rank: int) -> float:
        began = time.monotonic()
        with pytest.raises(BrokenError):
            groups[rank].reduce([1.0], [1.0])
        groups[rank].close()
        return time.monotonic() - began

    with ThreadPoolExecutor(size) as pool:
        took = list(pool.map(use, [rank for rank in range(size) if rank != late]))
    assert 0.4 < max(took) < SOON


@pytest.mark.parametrize("after", [0.0, 0.2])
def test_waiting_ends_soon_after_is_over_returns_true(form: Form, after: float) -> None:
    over = threading.Event()
    first, _ = form(2, timeout=60.0, is_over=over.is_set)
    with taking(0.75 * after, SOON):
        threading.Timer(after, over.set).start()
        with pytest.raises(BrokenError):
            first.tally(b"x")


def test_a_group_with_a_pending_collective_is_closed_without_waiting(form: Form) -> None:
    first, second = form(2, timeout=60.0, is_over=lambda: True)
    with pytest.raises(BrokenError):
        reduce_alone(first)
    before = len(undestroyed)
    with taking(0, SOON):
        first.close()
    assert len(undestroyed) == before + 1, "its collective has not ended"
    with pytest.raises(BrokenError, match="the group is closed"):
        reduce_alone(first)
    with taking(0, SOON):
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


def test_a_collective_that_completes_right_after_a_wait_slice_succeeds() -> None:
    works = [LateWork(), LateWork(RuntimeError("gone"))]
    native = mock.Mock(alltoall_base=mock.Mock(side_effect=works))
    with mock.patch.object(dist, "ProcessGroupGloo", return_value=native):
        group = GlooGroup(dist.HashStore(), 0, 1, 5.0, lambda: False)
    assert group.reduce([1.0], []) == ([0.0], [])  # what such a collective has received
    assert works[0].slices == 1
    with pytest.raises(BrokenError, match="gone"):
        group.reduce([1.0], [])


def test_a_closed_group_is_destroyed_after_its_collectives_end() -> None:
    """One of three members dies: gloo's thread then spins on a message of another member to the failed collective."""
    store, is_over = dist.HashStore(), threading.Event()
    with ThreadPoolExecutor(3) as pool:
        groups = list(pool.map(lambda rank: GlooGroup(store, rank, 3, 5.0, is_over.is_set), range(3)))
    threads, earlier = threads_of_gloo(), len(undestroyed)
    is_over.set()
    dying, *others = groups
    for group in others:
        with pytest.raises(BrokenError):
            group.reduce([1.0], [1.0])  # waits, in part, for a member that is soon gone
        group.close()
    kept = [*undestroyed][earlier:]
    assert len(kept) == 2, "their collectives have not ended"
    dying.close()
    del groups, dying, others, group
    eventually(lambda: destroy_closed() or not any(kept))  # type: ignore[func-returns-value]  # with their time limit
    eventually(lambda: threads_of_gloo() <= threads - 3)  # the kernel lists a thread for a moment after its end


def test_a_fork_has_no_groups_to_destroy() -> None:
    """Their threads do not exist in the child: a destructor would wait for them forever."""
    undestroyed.append([])
    child = os.fork()
    if child == 0:
        os._exit(len(undestroyed))
    undestroyed.pop()
    assert os.waitpid(child, 0)[1] == 0


# --- which groups a tree has ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "per_node", "sizes"),
    [
        (16, 8, [16]),
        (1024, 8, [8, 11, 11]),
        (16384, 8, [8, 12, 12, 13]),
    ],
)
def test_member_0_has_groups_of_the_expected_sizes(ranks: int, per_node: int, sizes: list[int]) -> None:
    path, levels = tree_of(range(ranks), [rank // per_node for rank in range(ranks)], 0, transport.FAN_OUT)
    assert [len(group.members) for group in path] == sizes
    assert levels == len(sizes)


def test_groups_are_formed_within_nodes_and_then_between_their_first_ranks() -> None:
    nodes = [rank // 4 for rank in range(20)]
    path, _ = tree_of(range(20), nodes, 8, 5)
    assert [group.members for group in path] == [(8, 9, 10, 11), (0, 4, 8, 12, 16)]
    in_turns = [rank % 5 for rank in range(20)]
    path, _ = tree_of(range(20), in_turns, 2, 5)
    assert [group.members for group in path] == [(2, 7, 12, 17), (0, 1, 2, 3, 4)]
