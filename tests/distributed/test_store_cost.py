"""The cost of the exchange at the job's store, by the number of ranks. Ranks are threads, over a store in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist
from counting import CountedStore, Counts, groups_in_memory
from units import QUICK, Ranks, making

PATIENT = replace(QUICK, join_timeout=300, peer_timeout=300, finish_timeout=300, heartbeat=1.0)
MOST = 60  # keys of a rank, on average, from its arrival to its end; polls of a busy machine included
SIZES = [2, 8, 64]


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    """Create units; their threads are ended after the test."""
    with groups_in_memory(), making() as make:
        yield make


def counted(ranks: Callable[..., Ranks], size: int) -> tuple[Ranks, Counts]:
    """A unit whose uses of the store are counted."""
    counts, store = Counts(), dist.HashStore()
    return ranks(size, limits=PATIENT, store=store, store_of=lambda rank: CountedStore(store, rank, counts)), counts


def report(counts: Counts, size: int) -> str:
    families = "\n".join(f"{number / size:8.1f} {family}" for family, number in counts.by_family().most_common())
    return f"{counts.per_rank(size):.1f} keys for each of {size} ranks, of which\n{families}"


@pytest.mark.parametrize("size", SIZES)
def test_store_keys_for_a_lost_rank_do_not_grow_with_the_number_of_ranks(
    ranks: Callable[..., Ranks], size: int
) -> None:
    unit, counts = counted(ranks, size)
    for rank in range(size):
        unit.log(rank, {"loss": float(rank)}, 0)
    unit.flush()
    before = counts.per_rank(size)
    unit.die(size - 1)
    stay = range(size - 1)
    for rank in stay:
        unit.log(rank, {"loss": float(rank)}, 1)
    unit.flush(*stay)
    assert unit.last("loss")[1] == (size - 2) / 2
    assert unit.flagged() == {1: 1}
    assert counts.per_rank(size) - before <= MOST, report(counts, size)
