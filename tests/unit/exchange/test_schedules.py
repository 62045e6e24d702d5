"""Arbitrary schedules of ranks in trees of small groups: deaths, also of leaders, and late ranks. See `simulation`.

The ranks exchange a sum in which each rank has its own digit, which shows how often each rank is included.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from limits import set_limits
from simulation import Store, World, simulated
from units import PatientExchange, Ranks

from dist_wandb.exchange import transport
from dist_wandb.exchange.membership.generations import Generation
from dist_wandb.exchange.transport import Group
from dist_wandb.settings.options import Limits
from dist_wandb.settings.reduction import DEGRADED


class Scaled(Limits):
    """Limits of ranks whose clock is simulated."""

    grace: ClassVar[float] = 0.5  # scaled like the other limits


LIMITS = Scaled(join_timeout=4.0, peer_timeout=4.0, finish_timeout=20.0, heartbeat=1.0)
LATE = 4.3  # seconds after which a rank arrives for which the others have not waited
LONGEST = 1000.0  # seconds of the simulated clock within which all ranks have ended
NAMES = ("loss", "lr")


class Job:
    """Ranks that log rows, some of which die; the results that each rank took, and the written rows.

    Args:
        size: Number of ranks.
        per_node: Number of ranks on each node.
        seed: Seed of the delays.
    """

    def __init__(self, size: int, per_node: int, seed: int, open_until: float) -> None:
        self.open_until = open_until
        self.world = World(seed, message=0.001, call=0.0005, is_random=True)
        self.values: dict[str, bytes] = {}
        self.ranks = Ranks(
            size,
            LIMITS,
            PatientExchange,
            reduce="sum",
            per_node=per_node,
            store_of=lambda _: Store(self.values, Counter()),  # type: ignore[arg-type, return-value]
        )
        self.logged: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        self.taken: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        self.closing: list[float] = []
        self.closed: dict[int, bool] = {}
        self.alone: set[int] = set()
        self.late: int | None = None  # a rank that arrives when the others have begun without it
        self.behind = 0  # ranks that took the result of a broken round from another rank's checkpoint

    def use(self, rank: int, rows: Sequence[Row]) -> None:
        """The actions of a rank: one call of `log` per row."""
        self.ranks.open(rank)
        exchange = self.ranks.exchanges[rank]
        rounds, unpack, put_back = exchange.rounds, exchange.rounds.unpack, exchange.rounds.put_back

        def unpacking(plan: Any, sums: list[float], maxima: list[float]) -> Any:
            outcome = unpack(plan, sums, maxima)
            is_last = outcome.paused and not outcome.rows  # the end: a rank with the result may leave
            if not (type(exchange.group) is Group or is_last):
                self.taken[rank][rounds.table.round] = (sums, maxima)
            return outcome

        def putting_back() -> None:
            put_back()
            self.taken[rank].pop(rounds.table.round, None)  # the others continue from before it

        def continuing_alone() -> None:
            self.alone.add(rank)
            go()

        def catching_up(generation: Generation) -> bool:
            before, is_closed = rounds.table.round, catch_up(generation)
            self.behind += rounds.table.round - before
            return is_closed

        participation = exchange.participation
        catch_up, participation.catch_up = participation.catch_up, catching_up  # type: ignore[method-assign]
        go, exchange._continue_alone = exchange._continue_alone, continuing_alone  # type: ignore[method-assign]
        rounds.unpack, rounds.put_back = unpacking, putting_back  # type: ignore[method-assign, assignment]
        for step, names, pause in rows:
            self.world.pause(pause)
            for name in names:
                self.logged[name, step].add(rank)
            self.ranks.log(rank, dict.fromkeys(names, 4.0**rank), step)
        self.world.pause(self.open_until - self.world.now)
        self.closing.append(self.world.now)
        closed = exchange.close(1.0 if 0 in self.world.dead else None)  # then no rank writes its rows
        exchange.leave()
        self.closed[rank] = closed

    @property
    def living(self) -> list[int]:
        return [rank for rank in range(self.ranks.size) if rank not in self.world.dead]

    def has_ended(self) -> bool:
        size, closed, dead = self.ranks.size, self.closed, self.world.dead
        return len(closed) + len(dead) >= size and len(closed.keys() | dead.keys()) == size

    def check(self) -> None:
        assert self.has_ended(), f"not ended after {self.world.now} s: {self.closed}"
        tables: dict[int, Any] = {}
        for rank in self.living:
            assert self.ranks.exchanges[rank].has_ended
            # a lone rank delivers nothing, and nothing can be delivered to a primary that is gone or alone
            is_without = not {0, rank}.isdisjoint(self.alone) or 0 in self.world.dead
            assert self.closed[rank] or is_without, f"rank {rank} did not deliver"
            if 0 in self.world.dead:
                continue  # no rank writes; ranks that have closed may leave with a last round that others repeat
            for number, lists in self.taken[rank].items():
                assert tables.setdefault(number, lists) == lists, f"round {number} of rank {rank}"
        if 0 not in self.world.dead.keys() | self.alone:
            self.check_rows()

    def check_rows(self) -> None:
        flagged = {row["global_step"] for row in self.ranks.run.rows if row.get(DEGRADED)}
        last: dict[tuple[str, int], float] = {}
        for row in self.ranks.run.rows:
            last.update({(name, row["global_step"]): row[name] for name in NAMES if name in row})
        for (name, step), contributors in self.logged.items():
            digits = f"{_in_base_4(int(last.get((name, step), 0.0))):0>{self.ranks.size}}"[::-1]
            assert set(digits) <= {"0", "1"}, f"{name} at {step}: {digits}"
            found = {rank for rank, digit in enumerate(digits) if digit == "1"}
            assert found <= contributors
            lacking = contributors - found
            assert lacking <= self.world.dead.keys() | self.alone, f"{name} at {step} lacks {lacking}"
            # A rank that dies before it contributes to a name is not counted as missing in it once others have left,
            # and a late one, which nobody has waited for, not if it dies before it takes part.
            known = {rank for rank in lacking if self.world.dead.get(rank, LONGEST) <= min(self.closing)}
            known -= {rank for rank in known if rank == self.late and not self.taken[rank]}
            assert not known or not found or step in flagged, f"{name} at {step} lacks {known}, unflagged"


def _in_base_4(number: int) -> str:
    return (_in_base_4(number // 4) if number >= 4 else "") + str(number % 4)


Row = tuple[int, tuple[str, ...], float]  # step, names, and how long the rank waits before it logs it


@dataclass(frozen=True)
class Schedule:
    size: int  # number of ranks
    per_node: int  # number of ranks on each node
    rows: Sequence[Row]  # the rows that all ranks log
    other_rows: Mapping[int, Sequence[Row]] = field(default_factory=dict)  # the rows that some ranks log instead
    # by rank: the number of effects that others can see, store calls and messages, after which it dies. They are
    # counted from the time when all groups have formed
    deaths: Mapping[int, int] = field(default_factory=dict)
    late: int | None = None  # a rank that arrives when the others have begun without it
    seed: int = 0  # seed of the durations of messages and store calls

    def play(self, fan_out: int) -> Job:
        """Run it with groups of at most that many members, and check the result."""
        job = Job(self.size, self.per_node, self.seed, 0.0 if self.late is None else LATE + 1.0)
        job.late, world = self.late, job.world
        early = sorted({*range(self.size)} - {self.late})
        exchanges = job.ranks.exchanges

        def has_formed(rank: int) -> bool:
            return rank in exchanges and exchanges[rank].group is not None

        def have_formed() -> bool:  # called after each step
            return has_formed(early[0]) and has_formed(early[-1]) and all(map(has_formed, early))

        with pytest.MonkeyPatch.context() as patch, simulated(world):
            patch.setattr(logging.getLogger("dist_wandb"), "disabled", True)
            set_limits(patch, transport, FAN_OUT=fan_out)
            for rank in range(self.size):
                after = world.random.uniform(0.0, 0.1) + (LATE if rank == self.late else 0.0)
                world.start(rank, functools.partial(job.use, rank, self.other_rows.get(rank, self.rows)), after)
            world.run(have_formed, LATE)
            world.doomed.update({rank: world.effects[rank] + seen for rank, seen in self.deaths.items()})
            world.run(job.has_ended, LONGEST)
            job.check()
            assert not job.alone or len(self.deaths) > 1 or self.late is not None
        return job


rows = st.lists(
    st.tuples(st.sampled_from([NAMES, NAMES[:1]]), st.sampled_from([0.0, 0.001, 0.05, 0.7])), max_size=4
).map(lambda found: [(step, *row) for step, row in enumerate(found)])


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    per_node = draw(st.sampled_from([1, 2, 4]))
    most = draw(st.sampled_from([8, 8, 8, 20]))
    size = per_node * draw(st.integers(4 // per_node, most // per_node))
    ranks = st.integers(0, size - 1)
    return Schedule(
        size,
        per_node,
        draw(rows),
        draw(st.dictionaries(ranks, rows, max_size=1)),
        draw(st.dictionaries(ranks, st.integers(1, 80), max_size=2)),
        draw(st.one_of(st.none(), st.none(), ranks)),
        draw(st.integers(0, 2**16)),
    )


def test_a_late_primary_receives_the_rows_of_ranks_that_are_closing_although_others_die() -> None:
    """The primary arrives while the other node's leader and a rank of its own die, and the others are closing."""
    deaths = {4: 1, 1: 5}
    job = Schedule(size=8, per_node=4, rows=[(0, NAMES, 0.0)], deaths=deaths, late=0).play(2)
    assert job.alone == set()
    assert job.closed == dict.fromkeys((0, 2, 3, 5, 6, 7), True)


def test_an_orderly_departure_does_not_compensate_for_a_lost_rank() -> None:
    """Rank 5 dies when three of the ranks that logged a row have left; rank 4 was late, so no row was ever whole."""
    rows = [(0, ("loss",), 0.7), (1, NAMES, 0.7), (2, NAMES, 0.7), (3, ("loss",), 0.7)]
    Schedule(6, 1, rows, deaths={5: 4}, late=4, seed=187).play(3)


@pytest.mark.slow
@pytest.mark.parametrize("fan_out", [2, 3])
@pytest.mark.parametrize("half", [1, 2])
def test_any_schedule_of_a_tree_ends_with_equal_tables_and_exact_sums(fan_out: int, half: int) -> None:
    @seed(half)
    @settings(max_examples=100, deadline=None, database=None)
    @given(schedules())
    def play(schedule: Schedule) -> None:
        schedule.play(fan_out)

    play()


@pytest.mark.parametrize("lost", [0, 3, 4])
def test_a_rank_may_die_at_any_moment_of_a_round(lost: int) -> None:
    """Ranks 0 and 3 are the first of their groups: they may have the result, or have passed it to some members.

    A round has some 25 effects.
    """
    log_rows = [(step, NAMES, 0.05) for step in range(4)]
    jobs = [Schedule(9, 3, log_rows, deaths={lost: seen}).play(3) for seen in range(16, 46)]
    assert not any(job.alone for job in jobs)
    assert all(lost in job.world.dead for job in jobs[:8])
    behind = sum(job.behind > 0 for job in jobs)
    assert behind or lost == 4, "the others never diverged"


def test_ranks_wait_for_a_lost_primary_with_one_round_per_heartbeat() -> None:
    """It may return until their finish_timeout expires; meanwhile they have one round per heartbeat."""
    job = Schedule(4, 1, [(0, NAMES, 0.05), (1, NAMES, 0.7)], deaths={0: 5}).play(3)
    assert set(job.world.dead) == {0}
    assert job.world.now > 1.5
    assert max(job.world.effects.values()) < 400
