"""Trees of gloo groups whose members are threads of this process, with a store in memory."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from dist_wandb.errors import ConfigurationError
from dist_wandb.exchange.transport import gloo, tree
from dist_wandb.exchange.transport.gloo import GlooGroup
from dist_wandb.exchange.transport.group import BrokenError, members_of, tree_of
from dist_wandb.exchange.transport.tree import TreeGroup

if TYPE_CHECKING:
    from tests.conftest import OnRanks

Form = Callable[..., list[TreeGroup]]

SOON = 20.0  # seconds, on a busy machine
SHAPES = [(5, 2), (7, 3), (9, 3), (12, 3)]  # members and fan-out: two or three levels


@pytest.fixture
def form(on_ranks: OnRanks) -> Iterator[Form]:
    """Form a tree of threads, which is closed after the test."""
    formed: list[TreeGroup] = []

    def form_all(size: int, fan_out: int, timeout: float = 30.0, per_node: int = 2) -> list[TreeGroup]:
        store, nodes = dist.HashStore(), [rank // per_node for rank in range(size)]

        def form_one(rank: int) -> TreeGroup:
            groups = [
                GlooGroup(dist.PrefixStore(group.name, store), group.group_rank, len(group.members), timeout, bool)
                for group in tree_of(range(size), nodes, rank, fan_out).path
            ]
            return TreeGroup(groups, rank, size, timeout)

        groups: list[TreeGroup] = on_ranks(size, form_one)
        formed.extend(groups)
        return groups

    yield form_all
    for group in formed:
        group.close()


@pytest.mark.parametrize(("size", "fan_out"), SHAPES)
def test_all_members_have_the_same_sums_and_maxima(form: Form, on_ranks: OnRanks, size: int, fan_out: int) -> None:
    groups = form(size, fan_out)
    results = on_ranks(size, lambda rank: groups[rank].reduce([1.0, rank, 2.0**53, 0.1 * rank], [-rank, float(rank)]))
    (sums, maxima), *others = results
    assert sums[:3] == [size, sum(range(size)), size * 2.0**53]
    assert sums[3] == pytest.approx(0.1 * sum(range(size)))
    assert maxima == [0.0, size - 1.0]
    assert others == [(sums, maxima)] * (size - 1)
    assert [min(group.collectives for group in groups), groups[-1].collectives] == [2, 2]


@pytest.mark.parametrize("given", [([], [1.0]), ([1.0], []), ([], [])])
def test_either_list_may_be_empty(form: Form, on_ranks: OnRanks, given: tuple[list[float], list[float]]) -> None:
    groups = form(5, 2)
    sums, maxima = given
    assert on_ranks(5, lambda rank: groups[rank].reduce(sums, maxima)) == [([5 * x for x in sums], maxima)] * 5


def test_nonfinite_numbers_are_kept(form: Form, on_ranks: OnRanks) -> None:
    groups = form(5, 2)
    inf, nan = float("inf"), float("nan")
    results = on_ranks(5, lambda rank: groups[rank].reduce([inf if rank == 3 else 0.0, [0.0, nan][rank == 2]], [-inf]))
    for sums, maxima in results:
        assert (sums[0], sums[1] != sums[1], maxima) == (inf, True, [-inf])  # NaN is not equal to itself


@pytest.mark.parametrize(("piece", "serial"), [(6, 1000), (6, 5), (1000, 15), (1000, 1)])
@pytest.mark.parametrize("summed", [0, 1, 5, 7, 13, 20])
def test_many_numbers_are_reduced_in_pieces(
    form: Form, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, summed: int, piece: int, serial: int
) -> None:
    monkeypatch.setattr(gloo, "PIECE", piece * 8)
    monkeypatch.setattr(gloo, "SERIAL", serial)
    groups = form(7, 3)

    def reduce(rank: int) -> tuple[list[float], list[float]]:
        numbers = torch.arange(20, dtype=torch.float64) + rank
        sums, maxima = groups[rank].reduce_tensors(numbers[:summed].clone(), numbers[summed:].clone())
        return sums.tolist(), maxima.tolist()

    expected = [7.0 * n + 21 for n in range(summed)], [n + 6.0 for n in range(summed, 20)]
    assert on_ranks(7, reduce) == [expected] * 7
    assert (
        on_ranks(7, lambda rank: groups[rank].reduce([rank] * summed, [rank] * 20))
        == [([21.0] * summed, [6.0] * 20)] * 7
    )


@pytest.mark.parametrize(("size", "fan_out"), SHAPES)
@pytest.mark.parametrize("piece", [24, 2**20])
def test_bytes_of_any_length_are_collected_in_member_order(
    form: Form, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, size: int, fan_out: int, piece: int
) -> None:
    monkeypatch.setattr(gloo, "PIECE", piece)
    monkeypatch.setattr(tree, "_MOST_HELD", 2 * piece * size)
    groups = form(size, fan_out, per_node=3)
    sent = [bytes([rank]) * (rank % 3 * 40) for rank in range(size)]
    nothing = [b""] * size

    def give(rank: int) -> list[Any]:
        group, own = groups[rank], sent[rank]
        return [group.collect(own[:9], b"", own[9:]), group.collect(b"")]

    first, *others = on_ranks(size, give)
    assert first == [sent, nothing]
    assert others == [[[], []]] * (size - 1)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "fan_out"), SHAPES)
@pytest.mark.parametrize("piece", [24, 2**20])
@pytest.mark.parametrize("different", [1, 3, 100])
def test_tally_sends_equal_contents_once_with_their_members(
    form: Form, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, size: int, fan_out: int, piece: int, different: int
) -> None:
    monkeypatch.setattr(gloo, "PIECE", piece)
    groups = form(size, fan_out, per_node=3)
    given = [bytes([rank % different]) * (rank % different * 40) for rank in range(size)]
    before = [group.bytes_given for group in groups]
    tallies = on_ranks(size, lambda rank: list(groups[rank].tally(given[rank]).items()))
    assert tallies == [tallies[0]] * size
    assert dict(tallies[0]) == members_of(given)
    if different == 1:
        assert max(group.bytes_given - one for group, one in zip(groups, before, strict=True)) < 1000
    assert on_ranks(size, lambda rank: groups[rank].tally(b"")) == [{b"": frozenset(range(size))}] * size


def test_impossible_lengths_of_another_version_are_refused(form: Form, on_ranks: OnRanks) -> None:
    groups = form(5, 2)

    def give(rank: int) -> str:
        if rank == 3:
            return str(groups[rank].reduce([math.nan], [math.inf])[1])
        with pytest.raises(ConfigurationError, match="A member of the group announced an impossible number of bytes"):
            groups[rank].tally(b"y")
        return "refused"

    assert on_ranks(5, give) == ["refused"] * 3 + ["[inf]", "refused"]


@pytest.mark.parametrize("how", ["tally", "collect"])
def test_oversized_messages_are_refused_and_the_group_stays_usable(
    form: Form, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    groups = form(5, 2)
    monkeypatch.setattr(gloo, "MOST_GATHERED", 100)
    monkeypatch.setattr(gloo, "MOST_COLLECTED", 100)

    def give(rank: int, size: int) -> Any:
        try:
            return getattr(groups[rank], how)(b"x" * size if rank in (1, 3) else b"y")
        except ConfigurationError as error:
            return str(error)

    for refusal in on_ranks(5, lambda rank: give(rank, 101)):
        assert refusal.startswith("Member 1 of the group announced 101 bytes, but the limit is 100.")
    given = [b"y", b"x" * 100, b"y", b"x" * 100, b"y"]
    assert on_ranks(5, lambda rank: give(rank, 100))[0] == (members_of(given) if how == "tally" else given)
    together = 101 + 2 * 12 + 5 * 8 if how == "tally" else 0
    monkeypatch.setattr(tree, "_MOST_TOGETHER", together - 1)
    if together:
        for refusal in on_ranks(5, lambda rank: give(rank, 100)):
            assert refusal.startswith(f"All members of the group together announced {together} bytes, but")
    assert on_ranks(5, lambda rank: groups[rank].reduce([1.0], [])) == [([5.0], [])] * 5


@pytest.mark.parametrize("lost", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("how", ["reduce", "tally", "collect"])
def test_all_other_members_notice_a_lost_member(form: Form, on_ranks: OnRanks, lost: int, how: str) -> None:
    """As in the exchange, a member that detects it closes its groups."""
    groups = form(9, 3, timeout=60.0)
    calls: dict[str, Callable[[TreeGroup], Any]] = {
        "reduce": lambda group: group.reduce([1.0], [1.0]),
        "tally": lambda group: group.tally(b"x" * 100),
        "collect": lambda group: group.collect(b"x" * 100),
    }

    noticed: dict[int, tuple[float, str]] = {}  # after how many seconds, and how
    began = time.monotonic()

    def use(rank: int) -> str:
        if rank == lost:
            groups[rank].close()
            return "gone"
        try:
            calls[how](groups[rank])
        except BrokenError as error:
            noticed[rank] = (time.monotonic() - began, str(error))
            groups[rank].close()
            return "broken"
        return "done"

    assert on_ranks(9, use) == ["gone" if rank == lost else "broken" for rank in range(9)]
    assert time.monotonic() - began < SOON, noticed


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1, 3, 8])
def test_waiting_for_a_stalled_member_ends_at_the_limit(form: Form, late: int) -> None:
    groups = form(9, 3)
    for group in groups:
        group._timeout = 0.5

    def use(rank: int) -> float:
        began = time.monotonic()
        try:
            groups[rank].reduce([1.0], [1.0])
        except BrokenError:
            groups[rank].close()
            return time.monotonic() - began
        raise AssertionError

    with ThreadPoolExecutor(9) as pool:
        for took in pool.map(use, [rank for rank in range(9) if rank != late]):
            assert took < SOON


def test_a_late_member_within_the_timeout_is_waited_for(form: Form, on_ranks: OnRanks) -> None:
    groups = form(7, 3)
    looked: list[int] = []
    may_go = threading.Event()

    def is_over() -> bool:
        looked.append(1)
        if len(looked) > 20:
            may_go.set()
        return False

    for group in groups:
        for part in group._groups:
            part._is_over = is_over

    def use(rank: int) -> Any:
        if rank == 4:
            assert may_go.wait(SOON)
        return groups[rank].reduce([1.0], [rank])

    assert on_ranks(7, use) == [([7.0], [6.0])] * 7


@pytest.mark.parametrize(("below", "all_formed"), [(True, True), (False, False)])
def test_lower_levels_learn_whether_upper_groups_have_formed(
    form: Form, on_ranks: OnRanks, below: bool, all_formed: bool
) -> None:
    groups = form(9, 3, per_node=3)

    def hand_down(rank: int) -> bool:
        own = groups[rank]._groups
        deadline = time.monotonic() + SOON
        if len(own) > 1 and not below:  # the upper level has not formed
            return tree.hand_down(own[:1], formed=False, deadline=deadline)
        return tree.hand_down(own, formed=True, deadline=deadline)

    assert on_ranks(9, hand_down) == [all_formed] * 9


def test_collected_data_without_a_members_part_is_refused(form: Form, on_ranks: OnRanks) -> None:
    groups = form(5, 2)
    groups[3].rank = 4

    def collect(rank: int) -> None:
        with pytest.raises(ConfigurationError if rank == 0 else BrokenError, match="malformed" if rank == 0 else None):
            groups[rank].collect(b"x")
        groups[rank].close()

    on_ranks(5, collect)


def test_malformed_tallies_are_refused() -> None:
    good = tree._packed({b"ab": frozenset([0, 1, 4]), b"": frozenset([2])})
    assert tree._unpacked(good) == {b"ab": frozenset([0, 1, 4]), b"": frozenset([2])}
    for bad in (good[:-1], good + b"d", good[:5], good + tree._CONTENT.pack(1, 0)):
        with pytest.raises(ConfigurationError, match="is malformed"):
            tree._unpacked(bad)
