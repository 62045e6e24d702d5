"""What a rank does with work that remains when a generation ends: on rank 1 of two, with stand-ins for the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dist_wandb.exchange.interface import Lifecycle
from dist_wandb.exchange.membership.generations import Generation
from dist_wandb.exchange.participation import Participation
from dist_wandb.exchange.protocol.lanes import lanes_of, number_of
from dist_wandb.exchange.protocol.memory import Row
from dist_wandb.exchange.protocol.rounds import Rounds, encoded
from dist_wandb.exchange.reports import Context
from dist_wandb.exchange.rows import Contribution, Rows
from dist_wandb.exchange.turns import Pacer
from dist_wandb.job.topology import Topology
from dist_wandb.runs.null_run import NullRun
from dist_wandb.runs.writer import RunWriter
from dist_wandb.settings.options import Limits
from dist_wandb.settings.plan import plan_run, unit_of


class Second:
    """Rank 1, which is in the first generation."""

    def __init__(self) -> None:
        topology = Topology(1, 1, 0, 2, 2, 1)
        writer = RunWriter(NullRun(), plan_run(topology, "auto", "global", "exp"), "global_step")
        self.rows = Rows(writer, {"*": "mean"}, spread=["loss"], rank=1, index=1)
        context = Context(unit_of(topology, "global"), Limits(), self.rows, Lifecycle())
        self.rounds = Rounds(1, 2)
        self.participation = Participation(context, self.rounds, Pacer(context.limits, 0.0))
        self.presence: Any = SimpleNamespace(
            global_ranks={}, gone={}, are_gone=lambda _: False, absent=lambda _: set(), ended=lambda *_: set()
        )
        self.membership: Any = SimpleNamespace(presence=self.presence)
        self.participation.membership = cast("Any", self.membership)
        self.participation.enter(Generation(0, (0, 1)))


@pytest.mark.parametrize("is_first", [True, False])
def test_all_members_do_the_work_that_remained_on_one_of_them(is_first: bool) -> None:
    """Else the spread of that row, or its tables, would be exchanged by some members only, which then do not agree."""
    rank, reduced = Second(), list[Sequence[float]]()

    def tally(mine: bytes) -> dict[bytes, tuple[int, ...]]:
        row = Row(("loss",), (0,), 0, 0, lanes_of([number_of(1.0)]), {}, (1,))
        other = json.dumps({**json.loads(mine), "due": [encoded(row)]}).encode()
        found: list[tuple[bytes, tuple[int, ...]]] = [(other, (0,)), (mine, (1,))]
        return dict(found if is_first else reversed(found))

    def reduce(sums: Sequence[float], maxima: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
        reduced.append(sums)
        return sums, maxima

    group: Any = SimpleNamespace(tally=tally, reduce=reduce)
    rank.participation.begin(group, Generation(0, (0, 1)))
    assert len(reduced) == 1


def test_what_a_rank_gave_to_a_round_that_the_others_broke_off_without_it_is_given_again() -> None:
    """It has the result of the round, but stalled then; the next generation has begun before that round."""
    rank = Second()
    rounds, state = rank.rounds, {**Rounds(0, 2).snapshot(), "unwritten": encoded([]), "ranks": []}
    rounds.table.names["loss"] = 0
    rank.rows.post(Contribution({"loss": 1.0}, 7, x=7), rounds, 0.0)
    rank.participation.continue_alone()  # a round of which it has the result
    rank.participation.round()
    assert not rounds.outbox.waiting
    rank.membership.generations = SimpleNamespace(latest=lambda found: found, state=lambda _: state)
    rank.membership.join = lambda *_: Generation(2, (0, 1), joined=(1,))
    rank.participation.enter(Generation(1, (0,), last_round=rounds.table.round - 1))
    assert [call.step for call in rounds.outbox.waiting] == [7]
