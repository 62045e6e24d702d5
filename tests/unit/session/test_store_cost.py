"""The number of store requests of sessions from opening to end, in each mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from counting import CountedStore, Counts, groups_in_memory
from fakes import Meeting

from dist_wandb.job.model import Topology
from dist_wandb.session.session import Session

pytestmark = pytest.mark.slow

OnRanks = Callable[[int, Callable[[int], Any]], list[Any]]

SIZE = 32
PER_NODE = 4
PATIENT = {"heartbeat": 1.0, "join_timeout": 200.0, "finish_timeout": 200.0}


def of_nodes(rank: int, size: int) -> Topology:
    return Topology(rank, rank % PER_NODE, rank // PER_NODE, size, PER_NODE, size // PER_NODE)


def of_unknown_nodes(rank: int, size: int) -> Topology:
    return Topology(rank, None, None, size, None, None)


@pytest.mark.parametrize(
    ("mode", "scope", "place", "most"),  # keys of a rank, on average; one more for each other rank is too many
    [
        ("auto", "global", of_nodes, 75),
        ("auto", "worker", of_nodes, 75),
        ("shared", "global", of_unknown_nodes, 100),
        ("new", "global", of_nodes, 40),
    ],
)
def test_store_requests_per_rank_are_independent_of_the_number_of_ranks(
    meeting: Meeting,
    job: Callable[..., list[Session]],
    on_ranks: OnRanks,
    mode: str,
    scope: str,
    place: Callable[[int, int], Topology],
    most: int,
) -> None:
    counts = Counts()

    def use(session: Session) -> None:
        for step in range(10):
            session.log({"loss": 1.0}, step=step)
        session.flush()
        session.finish()

    meeting.store_of = lambda rank: CountedStore(meeting.store, rank, counts)
    with groups_in_memory():
        sessions = job([place(rank, SIZE) for rank in range(SIZE)], run_mode=mode, rank_scope=scope, limits=PATIENT)
        on_ranks(SIZE, lambda rank: use(sessions[rank]))
    families = ", ".join(f"{family} {number / SIZE:.1f}" for family, number in counts.by_family().most_common())
    assert counts.per_rank(SIZE) <= most, families
