"""The ranks of one unit as state machines in one process, with an exchange in memory and virtual time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dist_wandb.exchange.protocol.calls import Intent, Key
from dist_wandb.exchange.protocol.contributors import NEVER, Contributors, Progress
from dist_wandb.exchange.protocol.lanes import lanes_of, number_of
from dist_wandb.exchange.protocol.memory import Memory, Row
from dist_wandb.exchange.protocol.plan import Plan
from dist_wandb.exchange.protocol.rounds import Outcome, Rounds
from dist_wandb.exchange.protocol.table import Table

SHORT, LONG = 1.0, 8.0  # seconds of patience with new names, and with ranks that usually log a name
MOST_ROUNDS = 1000
EXACTLY = 16  # rounds after which the ranks are compared by their snapshots

Life = tuple[int, int]  # a rank, and how often it was started again
Values = Mapping[str, float]


class Logged(NamedTuple):
    life: Life
    number: int  # of its life's calls
    step: int | None
    x: int
    values: Mapping[Key, float]  # without x axes of the user, if there are others
    axes: Values
    weight: float
    own: str | None

    @property
    def rank(self) -> int:
        return self.life[0]


class Unit:
    """The ranks of a unit; `axes` are x axes that all know, `always` further arguments of all `Rounds`."""

    def __init__(self, size: int, axes: Iterable[str] = (), **always: Any) -> None:
        self._always = always
        self._axes = tuple(axes)
        self.machines = [self._machine(rank, size) for rank in range(size)]
        self.calls: list[Logged] = []  # that the others received, or may still receive
        self.rows: list[Row] = []  # as rank 0 writes them
        self.owns: dict[Life, list[str]] = {}  # what each life kept for rows, in the order in which it got it back
        self.now = 0.0
        self.rounds = 0
        self.closed = False
        self.is_checked = True  # whether the states of the ranks are compared after each round
        self.lives: Counter[int] = Counter()
        self.dead: set[int] = set()  # died, and did not start again
        self.away: set[int] = set()  # take no part, but may return
        self.absent: set[int] = set()  # have not opened a session yet
        self.lost: set[Key] = set()  # whose values came too late
        self.undone: list[Logged] = []  # calls of ranks that died, which the others never received
        self.usual_at_death: dict[Life, set[str]] = {}  # the names that a rank was known to log
        self.times: list[tuple[int, float]] = []  # rounds, and when they were
        self.outcomes: dict[int, Outcome] = {}
        self._count: Counter[Life] = Counter()
        self._occurrences: Counter[tuple[Life, str, int | None]] = Counter()
        self._last_step: dict[Life, int] = {}

    def _machine(self, rank: int, size: int) -> Rounds:
        machine = Rounds(rank, size, **self._always)
        machine.side_data.axes = self._axes
        return machine

    @property
    def size(self) -> int:
        return len(self.machines)

    @property
    def members(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.dead | self.away | self.absent]

    # What ranks do

    def log(
        self, rank: int, values: Values, step: int | None = None, weight: float = 1.0, own: str | None = None
    ) -> Logged:
        life = rank, self.lives[rank]
        if step is not None:
            self._last_step[life] = step
        x = self._last_step.get(life, -1 - self._count[life])
        keys = {}
        for name, value in values.items():
            keys[Key(name, step, self._occurrences[life, name, step])] = value
            self._occurrences[life, name, step] += 1
        axes = {name: value for name, value in values.items() if name in self._axes}
        cells = {key: value for key, value in keys.items() if key.name not in axes} or keys
        call = Logged(life, self._count[life], step, x, cells, axes, weight, own)
        self._count[life] += 1
        if rank in self.dead:
            self.undone.append(call)
        else:
            self.calls.append(call)
            lanes = lanes_of([number_of(value, weight) for value in values.values()])
            self.machines[rank].outbox.post(values, lanes, step, x, self.now, own)
        return call

    def log_on_all(self, values: Values, step: int | None = None) -> None:
        for rank in self.members:
            self.log(rank, values, step)

    def write(self, rank: int, values: Values, step: int | None = None) -> None:
        """Let a rank log, and the others receive it."""
        self.log(rank, values, step)
        self.settle()

    def write_on_all(self, values: Values, step: int | None = None) -> None:
        self.log_on_all(values, step)
        self.settle()

    # Ranks come and go

    def resize(self) -> None:
        members = self.members
        for rank in members:
            self.machines[rank].resize(members, self.dead | self.away)

    def die(self, rank: int) -> None:
        """End a rank: what waits on it is lost."""
        waiting = len(self.machines[rank].outbox.waiting)
        mine = [call for call in self.calls if call.life == (rank, self.lives[rank])]
        gone = mine[len(mine) - waiting :]
        self.calls = [call for call in self.calls if call not in gone]
        usual = self.machines[self.members[0]].table.ranks.usual if self.members else {}
        self.usual_at_death[rank, self.lives[rank]] = {name for name, ranks in usual.items() if rank in ranks}
        self.undone += gone
        self.away.discard(rank)
        self.dead.add(rank)
        self.resize()

    def stall(self, rank: int) -> None:
        """Let the others continue without a rank, which may log, and return."""
        self.away.add(rank)
        self.resize()

    def come(self, rank: int) -> None:
        """Let a rank join the others, or return to them; one that died starts again, without state."""
        if rank in self.dead:
            self.lives[rank] += 1
            self.machines[rank] = self._machine(rank, self.size)
        if self.members:
            state = json.dumps(self.machines[self.members[0]].snapshot())
            self.machines[rank].restore(json.loads(state))
        for those in (self.dead, self.away, self.absent):
            those.discard(rank)
        self.resize()
        self.check_equal()

    # Rounds

    def offers(self) -> dict[bytes, frozenset[int]]:
        found: dict[bytes, frozenset[int]] = {}
        for rank in self.members:
            data = self.machines[rank].offer(self.now)
            found[data] = found.get(data, frozenset()) | {rank}
        return found

    def reduce(self, plans: Iterable[Plan]) -> tuple[list[float], list[float]]:
        packed = [plan.pack() for plan in plans]
        assert len({(len(sums), len(maxima)) for sums, maxima in packed}) == 1
        return reduced(packed)

    def exchange(self, first: Sequence[int] | None = None) -> Outcome:
        """Run one round; if some ranks complete it first, the others catch up with it."""
        members = self.members
        offers = self.offers()
        plans = {rank: self.machines[rank].plan(offers) for rank in members}
        lists = self.reduce(plans.values())
        self.rounds += 1
        outcomes = {rank: self.machines[rank].unpack(plans[rank], *lists) for rank in first or members}
        for rank in members:
            if rank not in outcomes:  # with what the others have kept of the round
                outcomes[rank] = self.machines[rank].unpack(self.machines[rank].plan(offers), *lists)
        for rank in members:
            self.machines[rank].gives_up = NEVER, NEVER
        self.outcomes = outcomes
        for rank, outcome in outcomes.items():
            owns = self.owns.setdefault((rank, self.lives[rank]), [])
            owns += [own for row in outcome.rows for own in row.own]
            self.lost.update(outcome.lost)
        lowest = outcomes[members[0]]
        self.rows += lowest.rows
        self.closed = lowest.closed
        self.check_equal()
        assert all(_common(outcomes[rank]) == _common(lowest) for rank in members)
        return lowest

    def undo(self, holders: Sequence[int]) -> None:
        """Let some ranks complete a round which the others interrupted, and continue from before it, as these do."""
        members = self.members
        others = [rank for rank in members if rank not in holders]
        offers = self.offers()
        plans = {rank: self.machines[rank].plan(offers) for rank in members}
        lists = self.reduce(plans.values())
        for rank in holders:
            self.machines[rank].unpack(plans[rank], *lists)
            self.machines[rank].put_back()
        state = json.dumps(self.machines[others[0]].snapshot())
        for rank in holders:
            self.machines[rank].restore(json.loads(state))
        self.resize()
        self.check_equal()

    def impatient(self) -> None:
        """Let the members give up what has waited too long, as of now."""
        times = [self.now - patience for patience in (SHORT, LONG)]
        new, every = (max((number for number, at in self.times if at <= since), default=NEVER) for since in times)
        for rank in self.members:
            self.machines[rank].gives_up = new, every
        self.times = [(number, at) for number, at in self.times if at > self.now - 2 * LONG]
        self.times.append((self.machines[self.members[0]].table.round, self.now))

    def give_up(self, *, new_only: bool) -> Outcome:
        """Let rank 0 give up waiting for everything that was received so far, and run a round."""
        machine = self.machines[self.members[0]]
        machine.gives_up = (machine.table.round, NEVER) if new_only else (NEVER, machine.table.round)
        return self.exchange()

    def settle(self, seconds: float = 1.0) -> None:
        """Let everything that waits be received; calls become old."""
        self.now += seconds
        for _ in range(MOST_ROUNDS):
            self.exchange()
            if not any(self.machines[rank].outbox.waiting for rank in self.members):
                return
        raise AssertionError("calls are never taken")

    def close(self) -> None:
        for rank in self.members:
            self.machines[rank].intent = Intent.CLOSING
        for _ in range(MOST_ROUNDS):
            if self.closed:
                return
            self.exchange()
        raise AssertionError("the rounds do not end")

    def check_equal(self) -> None:
        """Check that the members have the same state."""
        if not self.is_checked:
            return
        machines = [self.machines[rank] for rank in self.members]
        first, *others = (in_order(machine.table) for machine in machines)
        if self.closed or self.rounds % EXACTLY == 0 or any(other != first for other in others):
            assert len({json.dumps(machine.snapshot()) for machine in machines}) == 1


def in_order(state: Any) -> Any:
    """Return a state as lists. They are compared much faster than snapshots, but 1 is 1.0, and NaN no NaN."""
    if isinstance(state, dict):
        return [(key, in_order(value)) for key, value in state.items()]
    if isinstance(state, (Table, Contributors, Memory, Progress)):
        return in_order(vars(state))
    return state


def reduced(given: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[list[float], list[float]]:
    """Return the sums and maxima of what ranks give."""
    sums = [sum(column) for column in zip(*(sums for sums, _ in given), strict=True)]
    return sums, [max(column) for column in zip(*(maxima for _, maxima in given), strict=True)]


def _common(outcome: Outcome) -> tuple[object, ...]:
    """Return what is the same on all ranks."""
    rows = [row._replace(own=()) for row in outcome.rows if row.names]
    return replace(outcome, rows=()), repr(rows)
