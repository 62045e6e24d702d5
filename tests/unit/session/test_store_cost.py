"""The number of store requests of sessions from opening to end, in each mode, on a simulated clock."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

import pytest
from fakes import Meeting
from simulation import Store, World, simulated

from dist_wandb.job.topology import Topology
from dist_wandb.session import opener
from dist_wandb.settings.options import Limits, Options

SIZE = 32
PER_NODE = 4


def of_nodes(rank: int) -> Topology:
    return Topology(rank, rank % PER_NODE, rank // PER_NODE, SIZE, PER_NODE, SIZE // PER_NODE)


def of_unknown_nodes(rank: int) -> Topology:
    return Topology(rank, None, None, SIZE, None, None)


@pytest.mark.parametrize(
    ("mode", "scope", "place", "most"),  # keys of a rank, on average; a tenth of one for each other rank is too many
    [
        ("auto", "global", of_nodes, 65),
        ("auto", "worker", of_nodes, 60),
        ("shared", "global", of_unknown_nodes, 82),
        ("new", "global", of_nodes, 24),
    ],
)
def test_store_requests_per_rank_are_independent_of_the_number_of_ranks(
    meeting: Meeting, mode: str, scope: str, place: Callable[[int], Topology], most: int
) -> None:
    world, values, counts, ended = World(message=1e-4, call=2e-4), dict[str, bytes](), Counter[str](), list[int]()
    meeting.store_of = lambda _: Store(values, counts)  # type: ignore[assignment, return-value]
    options = Options(run_mode=mode, rank_scope=scope, limits=Limits())  # type: ignore[arg-type]

    def use(rank: int) -> None:
        session = opener.open_session(options, {}, integration="test", topology=place(rank), number=1)
        for step in range(10):
            session.log({"loss": 1.0}, step=step)
        session.flush()
        session.finish()
        ended.append(rank)

    with simulated(world):
        for rank in range(SIZE):
            world.start(rank, functools.partial(use, rank))
        world.run(lambda: len(ended) == SIZE)
    assert counts["keys"] / SIZE <= most
