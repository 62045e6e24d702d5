"""The exchange as a state machine: ranks in one process, reduced by hand, with schedules by hypothesis."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dist_wandb.exchange.protocol import negotiation
from dist_wandb.exchange.protocol.aggregates import SUM_LANES, Totals
from dist_wandb.exchange.protocol.cells import Finished, Key, Outcome, Position
from dist_wandb.exchange.protocol.rounds import Intent, Rounds
from dist_wandb.exchange.protocol.wire import Lists

Cell = tuple[str, int | None, int]  # name, step, occurrence
Life = tuple[int, int]  # a rank, and how often it was restarted
NAMES = ("loss", "tokens", "lr")
MOST_ROUNDS = 2000


def reduced(packed: Sequence[Lists]) -> Lists:
    """Reduce the lists of all ranks, as a group does."""
    sums = [sum(column) for column in zip(*(lists[0] for lists in packed), strict=True)]
    maxima = [max(column) for column in zip(*(lists[1] for lists in packed), strict=True)]
    return sums, maxima


@dataclass
class Unit:
    """The ranks of one unit, connected by an exchange in memory, and the expected values."""

    machines: list[Rounds]
    contributed: dict[Cell, dict[Life, tuple[float, float]]] = field(default_factory=lambda: defaultdict(dict))
    written: dict[Cell, Finished] = field(default_factory=dict)
    writes: Counter[Cell] = field(default_factory=Counter)
    rounds: int = 0
    closed: bool = False
    dead: set[int] = field(default_factory=set)
    stalled: set[int] = field(default_factory=set)
    always_whole: bool = True
    _lives: Counter[int] = field(default_factory=Counter)
    _calls: Counter[Life] = field(default_factory=Counter)
    _logged: Counter[tuple[Life, str, int | None]] = field(default_factory=Counter)

    @classmethod
    def of(cls, size: int, spread: Sequence[str] = ()) -> Unit:
        return cls([Rounds(rank, size, spread=spread) for rank in range(size)])

    @property
    def living(self) -> list[int]:
        return [rank for rank in range(len(self.machines)) if rank not in self.dead | self.stalled]

    def log(self, rank: int, values: dict[str, float], step: int | None, weight: float = 1.0) -> None:
        if rank in self.dead:
            return
        life = rank, self._lives[rank]
        for name, value in values.items():
            occurrence = self._logged[life, name, step]
            self._logged[life, name, step] += 1
            self.contributed[name, step, occurrence][life] = (value, weight)
        contributions = {name: Totals.of(value, weight) for name, value in values.items()}
        self.machines[rank].post(contributions, step, self._calls[life])
        self._calls[life] += 1

    def log_on_all(self, values: dict[str, float], step: int | None) -> None:
        for rank in self.living:
            self.log(rank, values, step)

    def give_up(self, rank: int, *, new_only: bool) -> None:
        """Let a rank give up waiting for cells of earlier rounds."""
        self.machines[rank].give_up(self.machines[rank].ledger.round, new_only=new_only)

    def die(self, rank: int) -> None:
        """Kill a rank: its pending contributions are lost, and the others continue without it."""
        for position, values in self.machines[rank].outbox.waiting.items():
            for name, queue in values.items():
                for contributed in queue:
                    cell = name, None if position.counted else position.step, contributed.key.occurrence
                    del self.contributed[cell][rank, self._lives[rank]]
        self.dead.add(rank)
        self.stalled.discard(rank)
        self._resize()

    def stall(self, rank: int) -> None:
        """Stall a rank: the others continue without it; it may return and contribute what is pending."""
        self.stalled.add(rank)
        self._resize()

    def come_back(self, rank: int) -> None:
        """Let a stalled rank rejoin the others; one that died rejoins as a new process without state."""
        if rank in self.dead:
            self._lives[rank] += 1
            spread = self.machines[rank].ledger.names.spread
            self.machines[rank] = Rounds(rank, len(self.machines), spread=spread)
        state = json.dumps(self.machines[self.living[0]].snapshot())
        self.machines[rank].restore(json.loads(state))
        self.dead.discard(rank)
        self.stalled.discard(rank)
        self._resize()
        self.check_equal([self.machines[rank] for rank in self.living], [])

    def _resize(self) -> None:
        self.always_whole = False
        for rank in self.living:
            self.machines[rank].resize(len(self.living), len(self.dead | self.stalled))

    def exchange(self) -> Outcome:
        machines = [self.machines[rank] for rank in self.living]
        if machines[0].negotiation.many_wait:
            offers = [
                json.loads(json.dumps(machine.negotiation.offer(machine.outbox, machine.ledger.names)))
                for machine in machines
            ]
            for machine in machines:
                machine.negotiation.agree(offers, machine.ledger.names)
        packed = [machine.pack() for machine in machines]
        sums, maxima = reduced(packed)
        outcomes = [machine.unpack(sums, maxima) for machine in machines]
        self.rounds += 1
        if outcomes[0].needs_names:
            unknown = [machine.outbox.unknown(machine.ledger.names) for machine in machines]
            for machine in machines:
                machine.learn(unknown)
        self.check_equal(machines, outcomes)
        for value in outcomes[0].finished:
            position, name, occurrence = value.key
            cell = (name, None if position.counted else position.step, occurrence)
            self.written[cell] = value
            self.writes[cell] += 1
        self.closed = outcomes[0].closed
        return outcomes[0]

    def check_equal(self, machines: list[Rounds], outcomes: list[Outcome]) -> None:
        """Check that all ranks have the same state and reached the same conclusions."""
        assert all(outcome == outcomes[0] for outcome in outcomes[1:])
        known = machines[0].snapshot()
        assert all(machine.snapshot() == known for machine in machines[1:])

    def close(self) -> None:
        """Let all ranks close, and run rounds until nothing remains."""
        for rank in self.living:
            self.machines[rank].intent = Intent.CLOSING
        while not self.closed:
            self.exchange()
            assert self.rounds < MOST_ROUNDS, "the rounds do not end"

    def end(self) -> None:
        """Let stalled ranks return if they still can, and all ranks close."""
        for rank in sorted(self.stalled):
            self.die(rank) if self.closed else self.come_back(rank)
        if not self.closed:
            self.close()

    def check_written(self, spread: Iterable[str] = ()) -> None:
        """Check that the last value of every cell is exact, and every cell has a contributor."""
        assert [self.machines[rank].outbox.overtaking for rank in self.living] == [set()] * len(self.living)
        contributed = {cell: parts for cell, parts in self.contributed.items() if parts}
        assert self.written.keys() == contributed.keys()
        for cell, parts in contributed.items():
            totals = self.written[cell].totals
            values, weights = [value for value, _ in parts.values()], [weight for _, weight in parts.values()]
            assert totals.number == len(values)
            mean = math.fsum(map(math.prod, parts.values())) / math.fsum(weights)
            assert totals.reduced("mean") == pytest.approx(mean, abs=1e-12)
            assert totals.reduced("sum") == pytest.approx(math.fsum(values), abs=1e-12)
            assert (totals.reduced("min"), totals.reduced("max")) == (min(values), max(values))
            if cell[0] in spread:
                self.check_spread(cell, {rank: of_rank for (rank, _), of_rank in parts.items()}, mean)

    def check_spread(self, cell: Cell, parts: dict[int, tuple[float, float]], mean: float) -> None:
        spread = self.written[cell].spread
        assert spread is not None
        assert spread.squares == pytest.approx(math.fsum(w * (x - mean) ** 2 for x, w in parts.values()), abs=1e-9)
        largest = max(x for x, _ in parts.values())
        assert spread.largest_at == min(rank for rank, (x, _) in parts.items() if x == largest)


# --- any schedule -----------------------------------------------------------------------------------------------------

numbers = st.floats(-100, 100, allow_nan=False)
weights = st.sampled_from([0.5, 1.0, 3.0])
steps = st.sampled_from([*5 * [None], *range(5)])
orders = st.sampled_from([names for number in range(1, 4) for names in itertools.permutations(NAMES, number)])
strides = st.sampled_from([-1, 0, 1, 1, 2])

Row = tuple[int | None, dict[str, float], float]  # step, values, weight


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """One call of `log`: any names in any order, steps that repeat and go backwards."""
    return draw(steps), {name: draw(numbers) for name in draw(orders)}, draw(weights)


some_rows = st.lists(rows(), min_size=1, max_size=3)


@st.composite
def bursts(draw: st.DrawFn) -> list[Row]:
    """Many calls of `log` at once, with increasing, decreasing or no steps; perhaps with names of their own."""
    first, stride, counted = draw(st.integers(0, 9)), draw(strides), draw(st.booleans())
    found = draw(some_rows)
    return [
        (None if counted else first + stride * number, *found[number % len(found)][1:])
        for number in range(draw(st.integers(5, 30)))
    ]


# An action, numbers that choose among the ranks and the rounds that there are, and the rows to log. All are drawn at
# once, from strategies that are made once: making one, or drawing from the outside, takes longer than the action.
Event = tuple[str, int, int, Sequence[Row]]
ROWS_OF: dict[str, st.SearchStrategy[Sequence[Row]]] = {
    "log": st.tuples(rows()),
    "a stalled one logs": st.tuples(rows()),
    "burst": bursts(),
}
ACTIONS = (
    *("log", "exchange", "exchange", "impatient", "impatient with new names"),
    *("die", "stall", "a stalled one logs", "come back", "close", "burst"),
)
EVENTS: list[st.SearchStrategy[Event]] = [
    st.tuples(
        st.just(action),
        st.integers(0, 11),  # 12 is a multiple of each number of ranks
        st.integers(0, 59) if action.startswith("impatient") or action == "come back" else st.just(0),
        ROWS_OF.get(action, st.just(())),
    )
    for action in ACTIONS
]
schedules = st.lists(st.one_of(EVENTS), max_size=25)


def come_or_go(unit: Unit, event: Event, rank: int) -> None:
    action, _, number, logged = event
    gone = sorted(unit.dead | unit.stalled)
    if action == "die" and len(unit.living) > 1:
        unit.die(rank)
    elif action == "stall" and len(unit.living) > 1:
        unit.stall(rank)
    elif action == "a stalled one logs" and unit.stalled:  # without knowing the state of the others
        for step, values, weight in logged:
            unit.log(min(unit.stalled), values, step, weight)
    elif action == "come back" and gone:
        unit.come_back(gone[number % len(gone)])


@pytest.mark.slow
@given(
    st.integers(1, 4), st.sampled_from([(), ("*",), ("l*",)]), st.sampled_from([1, 4, 8]), st.integers(1, 20), schedules
)
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_any_schedule_ends_with_equal_tables_and_exact_values(
    size: int, spread: tuple[str, ...], many: int, most: int, schedule: Sequence[Event]
) -> None:
    """Ranks log anything at any time, join late, give up waiting, close early, stall, die or restart.

    Contributions that the others have received count, and all contributions of the ranks that remain at the end. A
    round is for one row or for many.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(negotiation, "MANY", many)
        patch.setattr(negotiation, "_MOST_CELLS", most)
        go_through(Unit.of(size, spread), schedule, spread)


def go_through(unit: Unit, schedule: Sequence[Event], spread: tuple[str, ...]) -> None:
    for event in schedule:
        action, among, number, logged = event
        rank = unit.living[among % len(unit.living)]
        machine = unit.machines[rank]
        if action in ("log", "burst") and machine.intent is not Intent.CLOSING:
            for step, values, weight in logged:
                unit.log(rank, values, step, weight)
        elif action == "exchange" and not unit.closed:
            unit.exchange()
        elif action.startswith("impatient"):
            machine.give_up(number % (machine.ledger.round + 1), new_only=action != "impatient")
        elif action == "close":
            machine.intent = Intent.CLOSING
        elif not unit.closed:
            come_or_go(unit, event, rank)
    unit.end()
    if unit.always_whole:
        unit.check_written(spread=[name for name in NAMES if name.startswith("l") or "*" in spread] if spread else ())
    else:
        unit.check_written()


RANKS_OF = {2: [(0,), (1,), (0, 1), (0, 1)], 3: [(0,), (1, 2), (0, 1, 2), (0, 1, 2)]}


@st.composite
def programs(draw: st.DrawFn) -> tuple[Unit, list[list[tuple[int | None, dict[str, float]]]], list[int]]:
    """Ranks that log the same rows in the same order, though not all names; and whose turn it is to log or, at last,
    to have a round.
    """
    size = draw(st.sampled_from([2, 3]))
    ranks_of = {name: draw(st.sampled_from(RANKS_OF[size])) for name in NAMES}
    logged = st.tuples(st.sampled_from([None, None, 0, 1, 2, 3]), orders)
    program = draw(st.lists(logged, min_size=1, max_size=8))
    of_ranks = [
        [(step, {name: 1.0 for name in names if rank in ranks_of[name]}) for step, names in program]
        for rank in range(size)
    ]
    return Unit.of(size), of_ranks, draw(st.lists(st.integers(0, size), max_size=40))


@given(programs(), st.sampled_from([1, 4, 8, 10**9]), st.sampled_from([1, 4, 1024]))
@settings(max_examples=500, deadline=None)
def test_values_logged_in_the_same_order_on_all_ranks_are_written_once(
    program: tuple[Unit, list[list[tuple[int | None, dict[str, float]]]], list[int]], many: int, most: int
) -> None:
    """However late a rank is, and in whatever order of steps: none is taken for one that does not log a name."""
    unit, of_ranks, turns = program
    left = [iter([row for row in rows if row[1]]) for rows in of_ranks]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(negotiation, "MANY", many)
        patch.setattr(negotiation, "_MOST_CELLS", most)
        for turn in turns:
            if turn == len(of_ranks):
                unit.exchange()
            else:
                for step, values in itertools.islice(left[turn], 1):
                    unit.log(turn, values, step)
        for rank, rows in enumerate(left):
            for step, values in rows:
                unit.log(rank, values, step)
        unit.close()
    unit.check_written()
    assert set(unit.writes.values()) <= {1}


@given(st.integers(1, 5), st.integers(0, 12), st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_row_takes_one_round_in_lockstep(size: int, number: int, with_steps: bool) -> None:
    """That is, two collectives for any number of names and ranks; learning the names takes one more round."""
    unit = Unit.of(size)
    for row in range(number):
        for rank in range(size):
            unit.log(rank, {name: float(rank + row) for name in NAMES}, row if with_steps else None)
        unit.exchange()
        if row == 0:
            unit.exchange()
        assert len(unit.written) == (row + 1) * len(NAMES)
    unit.close()
    assert unit.rounds == number + (number > 0) + 1
    assert set(unit.writes.values()) <= {1}
    unit.check_written()


@pytest.mark.parametrize("step", [None, 0])
def test_pending_rows_share_one_round(step: int | None) -> None:
    unit = Unit.of(3, spread=["lr"])
    unit.log_on_all({"loss": 0.0, "lr": 0.1}, step)
    settle(unit)
    finished = []
    steps = itertools.count(1)
    for number in (1, 4, 4, 2, 1, 4, 51):
        for row in range(number):
            unit.log_on_all({"loss": float(row), "lr": 0.1}, None if step is None else next(steps))
        before = unit.rounds
        while any(machine.outbox.pending for machine in unit.machines):
            unit.exchange()
        finished.append(unit.rounds - before)
    assert finished == [1, 2, 1, 1, 1, 1, 2]
    unit.close()
    assert set(unit.writes.values()) == {1}
    unit.check_written(spread=["lr"])


def test_unused_lanes_are_released_after_some_rounds() -> None:
    unit = Unit.of(2)
    lengths = []
    for rows in (20, *(24 * [1])):
        for _ in range(rows):
            unit.log_on_all({"loss": 0.0}, None)
        settle(unit)
        lengths.append(len(unit.machines[0].pack()[0]))
    assert lengths[0] == 20 * SUM_LANES
    assert lengths[-1] == SUM_LANES


def test_an_extra_row_of_one_rank_takes_no_extra_round() -> None:
    """Two rows of one round then have values of the same cell."""
    unit = Unit.of(2)
    unit.log_on_all({"loss": 1.0, "own": 1.0}, None)
    settle(unit)
    for _ in range(5):
        unit.log_on_all({"loss": 1.0}, None)
    settle(unit)
    before = unit.rounds
    unit.log(1, {"own": 0.0}, None)
    unit.log_on_all({"loss": 2.0}, None)
    settle(unit)
    assert unit.rounds - before == 1
    unit.close()
    assert set(unit.writes.values()) == {1}
    unit.check_written()


@pytest.mark.parametrize("ahead", [1, 3])
def test_ranks_out_of_step_share_a_round_up_to_the_first_difference(ahead: int) -> None:
    unit = Unit.of(2)
    for step in range(5):
        unit.log_on_all({"loss": 1.0}, step)
    settle(unit)
    for step in range(5, 10):
        unit.log(0, {"loss": 1.0}, step)
        unit.log(1, {"loss": 2.0}, step if step < 5 + ahead else step + 100)
    unit.exchange()
    assert [machine.outbox.pending for machine in unit.machines] == [5 - ahead, 5 - ahead]
    unit.close()
    unit.check_written()


def test_the_spread_arrives_with_the_next_row_in_lockstep() -> None:
    unit = Unit.of(3, spread=["loss"])
    for row in range(5):
        for rank in range(3):
            unit.log(rank, {"loss": float(rank * row), "lr": 0.1}, row)
        unit.exchange()
        if row == 0:
            unit.exchange()
        assert len(unit.written) == 2 * row
    unit.close()
    assert unit.rounds == 5 + 1 + 2
    unit.check_written(spread=["loss"])


def test_no_spread_is_written_if_a_contributor_is_lost() -> None:
    """It would describe the deviation of the remaining ranks from a mean that includes the lost rank."""
    unit = Unit.of(3, spread=["loss"])
    for row in range(2):
        for rank in range(3):
            unit.log(rank, {"loss": float(rank)}, row)
    unit.exchange()
    unit.exchange()
    unit.log(0, {"loss": 0.0}, 2)
    unit.log(2, {"loss": 2.0}, 2)
    while unit.machines[2].outbox.pending:
        unit.exchange()
    awaiting = [value.key.position.step for value in unit.machines[0].spreads.awaiting]
    unit.die(2)
    unit.log(1, {"loss": 1.0}, 2)
    unit.close()
    assert {step: unit.written["loss", step, 0].spread for step in (*awaiting, 2)} == dict.fromkeys((*awaiting, 2))
    assert [unit.written["loss", step, 0].totals.reduced("mean") for step in range(3)] == [1.0] * 3


def test_no_spread_is_written_for_values_of_a_lost_rank_only() -> None:
    unit = Unit.of(2, spread=["loss"])
    unit.log(1, {"loss": 1.0}, 0)
    while unit.machines[1].outbox.pending:
        unit.exchange()
    unit.machines[0].resize(1, 1)  # as a rank that is alone at the end, without a recount
    unit.machines[0].intent = Intent.CLOSING
    sums, maxima = unit.machines[0].pack()
    (value,) = unit.machines[0].unpack(sums, maxima).finished
    assert (value.totals.reduced("mean"), value.spread) == (1.0, None)


def test_a_spread_is_dropped_if_a_contributor_has_not_completed_the_round() -> None:
    first, second = Unit.of(2, spread=["loss"]).machines
    for rank, machine in enumerate((first, second)):
        machine.learn([["loss"]])
        machine.post({"loss": Totals.of(float(rank))}, 0)
    packed = [first.pack(), second.pack()]
    sums, maxima = reduced(packed)
    first.unpack(sums, maxima)
    assert [value.spread is None for value in first.spreads.awaiting] == [False]
    first.recount(
        [([], 2)], [(first.spreads.held(), 1), (second.spreads.held(), 1)]
    )  # the second has not completed the round: it has no outcome
    assert [value.spread is None for value in first.spreads.awaiting] == [True]


# --- single rules -----------------------------------------------------------------------------------------------------


def settle(unit: Unit) -> None:
    """Run rounds until no rank has anything to contribute."""
    while any(unit.machines[rank].outbox.pending for rank in unit.living):
        unit.exchange()
        assert unit.rounds < MOST_ROUNDS, "the rounds do not end"


def test_the_next_round_shares_the_highest_publication_count() -> None:
    unit = Unit.of(3)
    unit.log_on_all({"loss": 1.0}, 0)
    settle(unit)
    assert [machine.side_data.most_published for machine in unit.machines] == [0.0, 0.0, 0.0]
    unit.machines[1].side_data.published = 2
    unit.machines[2].side_data.published = 1
    unit.log_on_all({"loss": 1.0}, 1)
    settle(unit)
    assert [machine.side_data.most_published for machine in unit.machines] == [2.0, 2.0, 2.0]


def test_a_rank_that_does_not_log_a_name_does_not_count_as_zero() -> None:
    unit = Unit.of(3)
    unit.log(0, {"loss": 4.0}, 0)
    unit.log(2, {"loss": 2.0}, 0)
    unit.close()
    assert unit.written["loss", 0, 0].totals.reduced("mean") == 3.0


@pytest.mark.parametrize(("present", "number"), [((1, 2), 0), ((0, 1), 1)])
def test_a_new_name_that_needs_the_primary_waits_for_it(present: tuple[int, int], number: int) -> None:
    """The primary may be slow at first; by then the others, and their states, may be gone."""
    unit = Unit([Rounds(rank, 3, needs_primary=lambda name: name == "metric") for rank in range(3)])
    for rank in present:
        unit.log(rank, {"metric": 1.0, "loss": 1.0}, 0)
    settle(unit)
    for rank in range(3):
        unit.machines[rank].give_up(unit.rounds, new_only=True)
    unit.exchange()
    assert Counter(name for name, _, _ in unit.written) == {"loss": 1, **({"metric": 1} if number else {})}
    unit.log(({0, 1, 2} - {*present}).pop(), {"metric": 4.0}, 0)
    unit.close()
    assert unit.written["metric", 0, 0].totals.reduced("mean") == 2.0


def test_an_incomplete_value_waits_until_patience_runs_out() -> None:
    unit = Unit.of(2)
    unit.log(0, {"loss": 4.0}, 0)
    settle(unit)
    unit.exchange()
    assert not unit.written
    unit.give_up(1, new_only=True)
    unit.exchange()
    assert unit.written["loss", 0, 0].missing == 0  # it is not known that rank 1 logs it


def test_a_name_of_one_rank_waits_for_the_others_only_the_first_time() -> None:
    unit = Unit.of(2)
    unit.log(0, {"throughput": 1.0}, 0)
    settle(unit)
    unit.give_up(0, new_only=True)
    unit.exchange()
    for step in (1, 2, 3):
        unit.log(0, {"throughput": float(step)}, step)
        unit.exchange()
        assert unit.written["throughput", step, 0].missing == 0


def test_known_names_have_their_own_patience() -> None:
    unit = Unit.of(2)
    unit.log_on_all({"loss": 1.0}, 0)
    settle(unit)
    unit.log(0, {"loss": 2.0}, 1)
    settle(unit)
    unit.give_up(0, new_only=True)
    unit.exchange()
    assert ("loss", 1, 0) not in unit.written
    unit.give_up(0, new_only=False)
    unit.exchange()
    assert unit.written["loss", 1, 0].missing == 1


def test_rows_are_flagged_from_giving_up_until_a_name_is_complete_again() -> None:
    unit = Unit.of(2)
    unit.log_on_all({"loss": 1.0}, 0)
    settle(unit)
    for step in (1, 2, 3):
        unit.log(0, {"loss": 1.0}, step)
    settle(unit)
    unit.give_up(0, new_only=False)
    unit.exchange()
    unit.log(0, {"loss": 1.0}, 4)
    settle(unit)
    unit.log_on_all({"loss": 1.0}, 5)
    settle(unit)
    unit.log_on_all({"loss": 1.0}, 6)
    unit.close()
    assert [unit.written["loss", step, 0].missing for step in range(7)] == [0, 1, 1, 1, 1, 0, 0]


def test_a_late_contribution_corrects_the_row() -> None:
    unit = Unit.of(2)
    unit.log(0, {"loss": 4.0}, 0)
    settle(unit)
    unit.give_up(0, new_only=True)
    unit.exchange()
    unit.log(1, {"loss": 2.0}, 0)
    settle(unit)
    value = unit.written["loss", 0, 0]
    assert value.corrects
    assert value.totals.reduced("mean") == 3.0
    assert unit.writes["loss", 0, 0] == 2


def test_a_value_is_finished_after_all_ranks_pass_it() -> None:
    """Uneven validation loaders: rank 0 has one batch more, and both continue with the next epoch."""
    unit = Unit.of(2)
    for step in (0, 1):
        unit.log_on_all({"val": 1.0}, step)
    unit.log(0, {"val": 5.0}, 2)
    settle(unit)
    assert ("val", 2, 0) not in unit.written
    unit.log_on_all({"val": 2.0}, 0)
    settle(unit)
    assert unit.written["val", 2, 0].totals.reduced("mean") == 5.0
    assert unit.written["val", 0, 1].totals.reduced("mean") == 2.0


@pytest.mark.parametrize("interleaved", [False, True])
def test_an_interleaved_rank_does_not_pass_a_row_by_logging_a_later_one(
    interleaved: bool,
) -> None:
    """The loss of rank 1 follows values that its data loader workers, which are ahead, log for later steps."""
    unit = Unit.of(2)
    unit.machines[1].side_data.interleaved = interleaved
    unit.log(0, {"loss": 1.0}, 0)
    settle(unit)
    unit.log_on_all({"by_worker": 2.0}, 1)
    settle(unit)
    assert (("loss", 0, 0) in unit.written) is not interleaved
    late = Rounds(2, 3)
    late.restore(json.loads(json.dumps(unit.machines[0].snapshot())))
    assert late.snapshot()["interleaved"] is interleaved
    unit.log(1, {"loss": 3.0}, 0)
    settle(unit)
    assert unit.written["loss", 0, 0].totals.reduced("mean") == 2.0
    assert unit.written["loss", 0, 0].corrects is not interleaved


@pytest.mark.parametrize("interleaved", [False, True])
def test_steps_of_an_interleaved_rank_may_be_out_of_order(interleaved: bool) -> None:
    """Its worker logged at step 2 first, so the loss of rank 0 reaches step 2 before step 1."""
    unit = Unit.of(2)
    unit.machines[0].side_data.interleaved = interleaved
    unit.log_on_all({"loss": 0.0}, 0)
    settle(unit)
    unit.log(0, {"loss": 1.0}, 2)
    settle(unit)
    unit.log_on_all({"loss": 5.0}, 1)
    settle(unit)
    assert (("loss", 2, 0) in unit.written) is not interleaved
    unit.log(1, {"loss": 3.0}, 2)
    settle(unit)
    assert unit.written["loss", 2, 0].totals.reduced("mean") == 2.0
    assert unit.written["loss", 2, 0].corrects is not interleaved


def test_a_step_skipped_by_an_interleaved_rank_is_finished_after_patience() -> None:
    unit = Unit.of(2)
    unit.machines[0].side_data.interleaved = True
    unit.log_on_all({"val": 0.0}, 0)
    settle(unit)
    unit.log(0, {"val": 1.0}, 1)
    settle(unit)
    unit.log_on_all({"val": 2.0}, 2)
    settle(unit)
    assert ("val", 1, 0) not in unit.written
    unit.give_up(0, new_only=True)
    unit.log_on_all({"val": 3.0}, 3)
    settle(unit)
    assert unit.written["val", 1, 0].totals.reduced("mean") == 1.0
    assert unit.written["val", 1, 0].missing == 0


@pytest.mark.parametrize("step", [1, None])
@pytest.mark.parametrize("others", [["turn"], ["turn", "val"]])
@pytest.mark.usefixtures("row_by_row")
def test_a_name_that_joins_an_earlier_pending_row_does_not_pass_later_rows(step: int | None, others: list[str]) -> None:
    """The Trainer logs its epoch at step 1 after the user's rows. Rank 0's row of step 1 still waits at that time."""
    unit = Unit.of(2)
    later = {name: 3.0 + index for index, name in enumerate(others)}
    unit.log(1, {"loss": 1.0}, step)
    for at, (name, value) in enumerate(later.items(), 3):
        unit.log(1, {name: value}, at)
    settle(unit)
    unit.log(0, {"loss": 2.0}, step)
    for at, (name, value) in enumerate(later.items(), 3):
        unit.log(0, {name: value}, at)
    unit.log_on_all({"epoch": 1.0}, step)
    settle(unit)
    assert {value.totals.contributors for value in unit.written.values()} == {2}
    assert set(unit.writes.values()) == {1}
    unit.check_written()


@pytest.mark.usefixtures("row_by_row")
@pytest.mark.parametrize("is_known", [False, True])
def test_a_name_that_joined_an_earlier_pending_row_is_not_passed_by_later_rows(is_known: bool) -> None:
    """Rank 1 contributes the epoch with its row of step 1, rank 0 after the rows of steps 2 and 3."""
    unit = Unit.of(2)
    if is_known:
        unit.log_on_all({"epoch": 0.0, "loss": 0.0}, 0)
        settle(unit)
    for step in (1, 2, 3):
        unit.log(1, {"loss": float(step)}, step)
    unit.log(1, {"epoch": 1.0}, 1)
    unit.log(0, {"loss": 1.0}, 1)
    settle(unit)
    for step in (2, 3):
        unit.log(0, {"loss": float(step)}, step)
        settle(unit)
    assert ("epoch", 1, 0) not in unit.written
    unit.log(0, {"epoch": 1.0}, 1)
    settle(unit)
    assert {value.totals.contributors for value in unit.written.values()} == {2}
    assert set(unit.writes.values()) == {1}
    unit.check_written()


@pytest.mark.usefixtures("row_by_row")
def test_a_displaced_name_of_one_rank_is_finished_after_patience() -> None:
    unit = Unit.of(2)
    for step in (1, 2):
        unit.log(1, {"loss": float(step)}, step)
    unit.log(1, {"own": 1.0}, 1)
    for step in (1, 2):
        unit.log(0, {"loss": float(step)}, step)
    settle(unit)
    assert ("own", 1, 0) not in unit.written
    unit.give_up(0, new_only=True)
    unit.exchange()
    assert (unit.written["own", 1, 0].totals.contributors, unit.written["own", 1, 0].missing) == (1, 0)


@pytest.mark.usefixtures("row_by_row")
def test_a_rank_that_logs_steps_in_another_order_has_not_passed_the_others() -> None:
    """The search for the smallest step makes rank 1 contribute step 1 before step 3, which it logged first."""
    unit = Unit.of(2)
    unit.log(0, {"extra": 1.0}, 3)
    settle(unit)
    unit.log(0, {"loss": 1.0}, 1)
    unit.log(1, {"other": 1.0}, 5)
    unit.log(1, {"extra": 3.0}, 3)
    unit.log(1, {"loss": 3.0}, 1)
    settle(unit)
    assert unit.writes["extra", 3, 0] == 1
    assert unit.written["extra", 3, 0].totals.contributors == 2


def test_names_in_one_call_may_have_different_occurrences() -> None:
    """Lightning adds `epoch` to every row, so at a validation step it was logged at that step in training before."""
    unit = Unit.of(2)
    for rank in (0, 1):
        unit.log(rank, {"loss": 1.0, "epoch": 0}, 0)
        unit.log(rank, {"val": 2.0, "epoch": 0}, 0)
    settle(unit)
    assert {cell for cell in unit.written if cell[0] == "epoch"} == {("epoch", 0, 0), ("epoch", 0, 1)}
    unit.close()
    unit.check_written()


def test_a_rank_ahead_with_a_name_lets_the_others_catch_up() -> None:
    """Rank 0 contributed its first number of step 0 long ago, and has a second one; rank 1 has its first one."""
    unit = Unit.of(2)
    unit.log(0, {"loss": 1.0}, 0)
    settle(unit)
    unit.log(0, {"loss": 5.0}, 0)
    unit.log(1, {"loss": 3.0}, 0)
    settle(unit)
    assert unit.written["loss", 0, 0].totals.reduced("mean") == 2.0
    assert unit.machines[0].ledger.open.keys() == {(unit.written["loss", 0, 0].key.position, "loss", 1)}


def test_a_correction_does_not_finish_other_rows() -> None:
    unit = Unit.of(2)
    for step in (0, 1):
        unit.log(0, {"loss": 1.0}, step)
        settle(unit)
        if step == 0:
            unit.give_up(0, new_only=True)
            unit.exchange()
    for machine in unit.machines:
        machine.ledger.names["loss"].usual = 2
    unit.log(0, {"loss": 1.0}, 2)
    settle(unit)
    unit.log(1, {"loss": 3.0}, 0)
    settle(unit)
    assert unit.written["loss", 0, 0].corrects
    assert ("loss", 2, 0) not in unit.written


def test_rows_are_written_in_the_order_they_were_finished() -> None:
    """Two values of one name await their spread, one round each; a row without a spread follows."""
    unit = Unit.of(2, spread=["loss"])
    unit.log(0, {"loss": 1.0, "lr": 0.1}, 0)
    settle(unit)
    unit.log(0, {"loss": 2.0}, 1)
    settle(unit)
    unit.give_up(0, new_only=True)
    unit.exchange()
    unit.log_on_all({"lr": 0.1}, 2)
    unit.close()
    assert [cell for cell in unit.written if cell[0] == "loss"] == [("loss", 0, 0), ("loss", 1, 0)]
    assert list(unit.written)[-1] == ("lr", 2, 0)


def test_an_extra_row_without_a_step_does_not_shift_the_others() -> None:
    unit = Unit.of(2)
    for row in range(4):
        if row == 1:
            unit.log(0, {"only on rank 0": 7.0}, None)
        for rank in (0, 1):
            unit.log(rank, {"loss": float(10 * row + rank)}, None)
    unit.close()
    assert [unit.written["loss", None, row].totals.reduced("mean") for row in range(4)] == [0.5, 10.5, 20.5, 30.5]


def test_a_row_without_a_step_has_the_call_count_of_the_lowest_rank() -> None:
    unit = Unit.of(3)
    for rank, calls in ((1, 40), (2, 9)):
        unit.machines[rank].post({"loss": Totals.of(1.0)}, None, calls)
        settle(unit)
    unit.close()
    assert unit.written["loss", None, 0].calls == 40


def test_survivors_continue_without_a_dead_rank() -> None:
    unit = Unit.of(3)
    unit.log_on_all({"loss": 1.0}, 0)
    settle(unit)
    unit.log(0, {"loss": 2.0}, 1)
    unit.log(1, {"loss": 4.0}, 1)
    settle(unit)
    unit.die(2)
    unit.exchange()
    assert unit.written["loss", 1, 0].totals.reduced("mean") == 3.0


def test_survivors_do_not_wait_for_the_turn_of_a_dead_rank() -> None:
    """Rank 0 contributed its first number of step 0 and has a second one; it is rank 1's turn, but rank 1 dies."""
    unit = Unit.of(2)
    unit.log(0, {"loss": 1.0}, 0)
    settle(unit)
    unit.log(0, {"loss": 5.0}, 0)
    unit.log(1, {"loss": 3.0}, 0)
    unit.exchange()
    unit.die(1)
    unit.close()
    unit.check_written()


def test_memory_is_bounded() -> None:
    machine = Rounds(0, 1, remembered=50)
    machine.learn([["loss"]])
    for step in range(5000):
        machine.post({"loss": Totals.of(1.0)}, step)
        machine.unpack(*machine.pack())
    sizes = [len(value) for value in vars(machine).values() if isinstance(value, (dict, list))]
    assert max(sizes) <= 2 * 50


def test_a_pending_place_is_counted_until_it_is_sent() -> None:
    unit = Unit.of(2)
    unit.log(0, {"loss": 1.0}, 0)
    assert (unit.machines[0].outbox.pending, unit.machines[0].busy, unit.machines[1].busy) == (1, True, False)
    settle(unit)
    assert (unit.machines[0].outbox.pending, unit.machines[0].busy, unit.machines[1].busy) == (0, True, True)
    unit.close()
    assert not any(machine.busy for machine in unit.machines)


# --- missing, late and pending contributions --------------------------------------------------------------------------


def test_absent_ranks_are_counted_as_missing() -> None:
    unit = Unit.of(3)
    unit.die(2)
    for rank in (0, 1):
        unit.log(rank, {"loss": 1.0}, 0)
    settle(unit)
    assert unit.written["loss", 0, 0].missing == 1
    unit.die(1)
    unit.log(0, {"loss": 1.0}, 1)
    settle(unit)
    assert unit.written["loss", 1, 0].missing == 2


def test_no_rank_is_missing_for_a_name_that_one_rank_logs() -> None:
    unit = Unit.of(3)
    unit.log(0, {"throughput": 1.0}, 0)
    settle(unit)
    unit.give_up(1, new_only=True)
    unit.exchange()
    unit.die(2)
    unit.log(0, {"throughput": 1.0}, 1)
    settle(unit)
    assert [unit.written["throughput", step, 0].missing for step in (0, 1)] == [0, 0]


def test_a_returning_rank_is_no_longer_missing() -> None:
    unit = Unit.of(2)
    changes: list[Callable[[], None]] = [lambda: None, lambda: unit.stall(1), lambda: unit.come_back(1)]
    for step, change in enumerate(changes):
        change()
        for rank in unit.living:
            unit.log(rank, {"loss": 1.0}, step)
        settle(unit)
    assert [unit.written["loss", step, 0].missing for step in range(3)] == [0, 1, 0]
    assert [unit.written["loss", step, 0].totals.number for step in range(3)] == [2, 1, 2]


def test_uneven_row_counts_are_not_flagged_as_missing() -> None:
    unit = Unit.of(2)
    for step in range(4):
        for rank in (0, 1) if step != 2 else (0,):
            unit.log(rank, {"val": 1.0}, step)
    unit.log(0, {"val": 1.0}, 4)
    unit.close()
    assert [unit.written["val", step, 0].totals.number for step in range(5)] == [2, 2, 1, 2, 1]
    assert [unit.written["val", step, 0].missing for step in range(5)] == [0] * 5


def test_given_up_ranks_are_missing_until_they_log_again() -> None:
    unit = Unit.of(3)
    for step in range(4):
        for rank in range(3):
            if rank == 0 or step not in (1, 2):
                unit.log(rank, {"loss": 1.0}, step)
        settle(unit)
        if step == 1:
            unit.give_up(0, new_only=False)
        unit.exchange()
    assert unit.written["loss", 1, 0].missing == 2
    assert (unit.written["loss", 3, 0].missing, unit.written["loss", 3, 0].totals.number) == (0, 3)


def test_only_the_late_rank_is_notified() -> None:
    unit = Unit.of(2)
    unit.log(0, {"loss": 4.0}, 7)
    settle(unit)
    unit.give_up(0, new_only=True)
    assert unit.exchange().late == ()
    unit.log(1, {"loss": 2.0}, 7)
    packed = [machine.pack() for machine in unit.machines]
    sums, maxima = reduced(packed)
    outcomes = [machine.unpack(sums, maxima) for machine in unit.machines]
    assert [outcome.late for outcome in outcomes] == [(), (Key(Position(0, 7), "loss", 0),)]
    assert outcomes[0] == outcomes[1]  # apart from `late`


def test_pending_rows_call_for_another_round_at_once() -> None:
    unit = Unit.of(2)
    for step in range(3):
        unit.log(1, {"loss": 1.0}, step)
    assert unit.exchange().more  # the names have to be learnt
    assert [unit.exchange().more for _ in range(2)] == [True, False]  # the last two go together
    unit.log(0, {"loss": 1.0}, 1)
    unit.log(1, {"loss": 1.0}, 3)
    assert unit.exchange().more  # they have not agreed on a position
    while unit.exchange().more:
        assert unit.rounds < MOST_ROUNDS
    assert not any(machine.outbox.pending for machine in unit.machines)


def test_a_name_logged_twice_at_a_step_calls_for_another_round() -> None:
    unit = Unit.of(1)
    for _ in range(2):
        unit.log(0, {"loss": 1.0}, 0)
    unit.exchange()
    assert [unit.exchange().more for _ in range(2)] == [True, False]


def test_one_request_makes_all_ranks_regroup() -> None:
    unit = Unit.of(3)
    for rank in range(3):
        unit.log(rank, {"loss": 1.0}, 0)
        unit.machines[rank].intent = Intent.CLOSING
    unit.exchange()

    def exchange(asking: int | None) -> list[Outcome]:
        packed = [machine.pack(regroup=rank == asking) for rank, machine in enumerate(unit.machines)]
        sums, maxima = reduced(packed)
        return [machine.unpack(sums, maxima) for machine in unit.machines]

    assert [(outcome.regroup, outcome.closed) for outcome in exchange(1)] == [(True, False)] * 3
    assert [(outcome.regroup, outcome.closed) for outcome in exchange(1)] == [(True, False)] * 3  # nothing is left
    assert [(outcome.regroup, outcome.closed) for outcome in exchange(None)] == [(False, True)] * 3


# --- names that only some ranks log -----------------------------------------------------------------------------------


def finish_together(unit: Unit, number: int) -> list[list[Cell]]:
    """Run some rounds; return the values that each of them finished."""
    return [
        [(name, None if at.counted else at.step, occurrence) for (at, name, occurrence), *_ in outcome.finished]
        for outcome in (unit.exchange() for _ in range(number))
    ]


@pytest.mark.parametrize("with_steps", [True, False])
def test_an_extra_name_of_one_rank_joins_the_row_from_the_second_time_on(with_steps: bool) -> None:
    """Fabric's ThroughputMonitor on rank 0, in one `log_dict` with the loss: the other ranks are not waited for."""
    unit = Unit.of(2)
    found = []
    for row in range(4):
        step = row if with_steps else None
        unit.log(0, {"loss": 1.0, "throughput": 5.0}, step)
        unit.log(1, {"loss": 1.0}, step)
        found += finish_together(unit, 2 if row == 0 else 1)  # the first round exchanges the names
    cells = [
        [(name, row, 0) if with_steps else (name, None, row) for name in ("loss", "throughput")] for row in range(4)
    ]
    assert found == [[], cells[0][:1], [cells[0][1], *cells[1]], cells[2], cells[3]]
    unit.close()
    assert unit.rounds == 6
    assert set(unit.writes.values()) == {1}
    unit.check_written()


def test_other_ranks_may_log_a_new_name_in_their_next_call_at_the_step() -> None:
    unit = Unit.of(2)
    unit.log_on_all({"train": 1.0}, 0)
    settle(unit)
    unit.log(0, {"val": 1.0}, 1)
    settle(unit)
    unit.log_on_all({"train": 1.0}, 1)
    settle(unit)
    unit.exchange()
    assert ("val", 1, 0) not in unit.written
    unit.log(1, {"val": 3.0}, 1)
    settle(unit)
    assert unit.written["val", 1, 0].totals.reduced("mean") == 2.0
    assert not unit.written["val", 1, 0].corrects


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds for one row only."""
    monkeypatch.setattr(negotiation, "MANY", 10**9)
    monkeypatch.setattr(negotiation, "_MOST_CELLS", 1)


def behind(logged: int, contributed: int, size: int = 2, remembered: int = 32_768) -> Unit:
    """The last rank is delayed before its first row; the others' rows were written, and it has contributed some."""
    unit = forgetful(size, remembered)
    for step in range(logged):
        for rank in range(size - 1):
            unit.log(rank, {"loss": 1.0}, step)
        settle(unit)
        unit.give_up(0, new_only=True)
    unit.exchange()
    assert {unit.written["loss", step, 0].missing for step in range(logged)} == {0}
    for step in range(logged):
        unit.log(size - 1, {"loss": 3.0}, step)
    while unit.machines[size - 1].outbox.pending > logged - contributed:
        unit.exchange()
    return unit


@pytest.mark.usefixtures("row_by_row")
@pytest.mark.parametrize("contributed", [1, 3, 19])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("remembered", [32_768, 6])
def test_rows_without_a_lost_rank_that_lagged_behind_are_flagged(contributed: int, size: int, remembered: int) -> None:
    """The others do not expect its rows, as it has contributed nothing yet; then they give up on it, or it dies."""
    unit = behind(20, contributed, size, remembered)
    unit.die(size - 1)
    unit.close()
    for step in range(20):
        value = unit.written["loss", step, 0]
        assert value.missing == 1 or value.totals.number == size, f"step {step}"
    assert {unit.written["loss", step, 0].totals.number for step in range(contributed)} <= {0, size}


@pytest.mark.usefixtures("row_by_row")
def test_assumptions_about_finished_rows_survive_a_takeover() -> None:
    unit = behind(20, 0, size=3)
    unit.die(1)
    unit.come_back(1)
    while unit.machines[2].outbox.pending > 15:
        unit.exchange()
    unit.die(2)
    unit.close()
    assert [unit.written["loss", step, 0].missing for step in range(20)] == [0] * 5 + [1] * 15


def test_names_of_one_rank_are_not_flagged_when_another_rank_is_lost() -> None:
    unit = Unit.of(2)
    for step in range(5):
        unit.log(0, {"throughput": 1.0}, step)
        settle(unit)
        unit.give_up(0, new_only=True)
        unit.exchange()
    unit.log(1, {"other": 1.0}, 3)
    settle(unit)
    unit.die(1)
    unit.close()
    assert {unit.written["throughput", step, 0].missing for step in range(5)} == {0}
    assert {unit.writes["throughput", step, 0] for step in range(5)} == {1}


@pytest.mark.parametrize("going_on", [0, 40])
def test_rows_logged_while_a_lost_rank_was_catching_up_are_flagged(
    going_on: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round for many rows contains some of its first rows, and the others' newest ones."""
    monkeypatch.setattr(negotiation, "_MOST_CELLS", 10)
    unit = behind(100, 0)
    for step in range(100, 100 + going_on):
        unit.log(0, {"loss": 1.0}, step)
    while unit.machines[1].outbox.pending > 70:
        unit.exchange()
    unit.die(1)
    unit.close()
    for step in range(100 + going_on):
        value = unit.written["loss", step, 0]
        assert value.missing == 1 or value.totals.number == 2, f"step {step}"


def test_rows_finished_without_waiting_are_flagged_if_others_may_log_them() -> None:
    """Rank 1 is delayed before its first row, until rank 0 gives up on it; but it has passed `own` once."""
    unit = Unit.of(2)
    unit.log(0, {"loss": 1.0, "own": 1.0}, 0)
    unit.log_on_all({"both": 1.0}, 1)
    settle(unit)
    unit.log(0, {"late": 1.0}, 2)
    settle(unit)
    unit.give_up(0, new_only=True)
    unit.exchange()
    for step in range(3, 6):
        unit.log(0, {"own": 1.0, "late": 1.0, "both": 1.0}, step)
    unit.dead.add(1)
    unit.machines[0].resize(1, 1, doubts=True)
    unit.close()
    flags = {(name, step): value.missing for (name, step, _), value in unit.written.items()}
    assert flags == {
        ("loss", 0): 0,
        ("own", 0): 0,
        ("both", 1): 0,
        ("late", 2): 0,
        **{(name, step): missing for name, missing in (("own", 0), ("late", 1), ("both", 1)) for step in range(3, 6)},
    }


def test_rows_that_all_ranks_have_passed_are_never_flagged() -> None:
    """Rank 1 logs `val` only from step 5 on; it has contributed other names in between."""
    unit = Unit.of(2)
    for step in range(10):
        for rank in (0, 1):
            unit.log(rank, {"loss": 1.0, **({"val": 1.0} if rank == 0 or step >= 5 else {})}, step)
        settle(unit)
    assert unit.machines[0].snapshot()["assumed"] == []
    unit.die(1)
    unit.close()
    assert {unit.written["val", step, 0].missing for step in range(10)} == {0}


# --- a rank that takes over the state of the others -------------------------------------------------------------------


def in_the_midst() -> Unit:
    """Ranks with open, finished and awaited cells, that look for a common position and let names take turns."""
    unit = Unit.of(3, spread=["loss"])
    for rank in range(3):
        unit.log(rank, {"loss": float(rank), "lr": math.inf}, 0)
    settle(unit)
    unit.log(0, {"loss": 1.0}, 1)
    settle(unit)
    unit.log(0, {"loss": 2.0}, 1)
    unit.log(1, {"loss": 3.0}, 1)
    unit.log(2, {"lr": 0.5}, 0)
    unit.log_on_all({"loss": 5.0}, None)
    return unit


@pytest.mark.parametrize("rounds", range(6))
@pytest.mark.parametrize("rank", range(3))
def test_a_new_machine_continues_from_a_snapshot(rounds: int, rank: int) -> None:
    unit = in_the_midst()
    for _ in range(rounds):
        unit.exchange()
    unit.die(rank)
    unit.come_back(rank)
    for step in (0, 1, 2):
        for each in range(3):
            unit.log(each, {"loss": float(each), "new": 1.0}, step)
    unit.close()
    unit.check_written()


@pytest.mark.parametrize("rounds", range(8))
def test_a_snapshot_survives_json_completely(rounds: int) -> None:
    unit = in_the_midst()
    for _ in range(rounds):
        unit.exchange()
    machine = unit.machines[0]
    state = json.dumps(machine.snapshot())
    heir = Rounds(2, 3, spread=["loss"])
    heir.restore(json.loads(state))
    assert json.dumps(heir.snapshot()) == state
    assert (heir.ledger.round, list(heir.ledger.names), heir.ledger.open) == (
        machine.ledger.round,
        list(machine.ledger.names),
        machine.ledger.open,
    )
    assert all(type(key) is Key and type(key.position) is Position for key in (*heir.ledger.open, *heir.ledger.assumed))
    assert list(heir.ledger.open) == list(machine.ledger.open)  # in their order too


def test_the_snapshot_scenario_fills_every_field() -> None:
    unit = in_the_midst()
    seen: set[str] = set()
    for _ in range(12):
        seen.update(name for name, value in unit.machines[0].snapshot().items() if value)
        known = unit.machines[0].ledger.names.values()
        seen.update(part for part in ("usual", "whole", "proven", "most") if any(getattr(name, part) for name in known))
        unit.exchange()
    assert seen == {
        "round",
        "names",
        "cells",
        "done",
        "awaiting",
        "usual",
        "whole",
        "focus",
        "turns",
        "room",
        "needed",
        "opened",
        "proven",
        "most",
    }


def test_pending_rows_are_kept_when_a_rank_restores_a_snapshot() -> None:
    unit = Unit.of(2)
    unit.log_on_all({"loss": 1.0}, 0)
    settle(unit)
    unit.log(1, {"loss": 3.0, "own": 7.0}, 1)
    unit.stall(1)
    unit.log(0, {"loss": 5.0, "else": 1.0}, 1)
    settle(unit)
    assert unit.written["loss", 1, 0].totals.number == 1
    unit.come_back(1)
    assert unit.machines[1].outbox.pending == 1
    assert [*unit.machines[1].ledger.names] == ["loss", "else"]
    unit.close()
    assert unit.written["loss", 1, 0].corrects
    unit.check_written()


def test_pending_values_can_be_renamed() -> None:
    unit = Unit.of(2)
    machine = unit.machines[0]
    machine.post({"old": Totals.of(1.0), "loss": Totals.of(2.0)}, 3)
    machine.post({"old": Totals.of(5.0)}, None)
    machine.post({"old": Totals.of(6.0)}, 3)
    assert machine.outbox.overtaking == {Key(Position(0, 3), "old", 1)}
    assert machine.outbox.rename("old", "new") == [
        (Key(Position(0, 3), "old", 0), Key(Position(0, 3), "new", 0)),
        (Key(Position(0, 3), "old", 1), Key(Position(0, 3), "new", 1)),
        (Key(Position(1, 0), "old", 0), Key(Position(1, 0), "new", 0)),
    ]
    assert machine.outbox.overtaking == {Key(Position(0, 3), "new", 1)}
    assert machine.outbox.rename("never logged", "new") == []
    assert set(machine.outbox.names) == {"loss", "new"}
    unit.close()
    assert {cell: value.totals.plain for cell, value in unit.written.items()} == {
        ("new", 3, 0): 1.0,
        ("new", 3, 1): 6.0,
        ("loss", 3, 0): 2.0,
        ("new", None, 0): 5.0,
    }
    assert not machine.outbox.overtaking


# --- contributions to forgotten cells ---------------------------------------------------------------------------------


def forgetful(size: int, remembered: int) -> Unit:
    return Unit([Rounds(rank, size, remembered=remembered) for rank in range(size)])


def test_late_values_do_not_replace_forgotten_rows() -> None:
    unit = forgetful(2, remembered=10)
    for rank in range(2):
        unit.log(rank, {"loss": float(rank)}, 0)
    settle(unit)
    unit.stall(1)
    for step in range(1, 50):
        unit.log(0, {"loss": 0.0}, step)
        settle(unit)
    for step in range(1, 50):
        unit.log(1, {"loss": 1.0}, step)
    unit.come_back(1)
    lost: list[Key] = []
    while unit.machines[1].outbox.pending:
        packed = [machine.pack() for machine in unit.machines]
        sums, maxima = reduced(packed)
        outcomes = [machine.unpack(sums, maxima) for machine in unit.machines]
        assert outcomes[0].finished == outcomes[1].finished
        assert outcomes[0].lost == ()
        lost += outcomes[1].lost
        unit.written.update(
            {(value.key.name, value.key.position.step, value.key.occurrence): value for value in outcomes[0].finished}
        )
    means = {step: unit.written["loss", step, 0].totals.reduced("mean") for step in range(50)}
    assert means == {step: 0.5 if step in (0, *range(40, 50)) else 0.0 for step in range(50)}
    assert [key.position.step for key in lost] == list(range(1, 40))


def test_steps_before_the_forgotten_ones_are_written() -> None:
    unit = forgetful(2, remembered=10)
    for step in [*range(100, 150), *range(50)]:
        for rank in range(2):
            unit.log(rank, {"loss": float(step + rank)}, step)
        settle(unit)
    unit.close()
    unit.check_written()


def test_occurrences_match_however_many_other_names_a_rank_logs() -> None:
    unit = forgetful(2, remembered=16)
    for epoch in range(4):
        for step in range(40):
            unit.log(0, {"loss": 1.0, **{f"own_{number}": 1.0 for number in range(9)}}, step + 40 * epoch)
            unit.log(1, {"loss": 1.0}, step + 40 * epoch)
        for rank in range(2):
            unit.log(rank, {"accuracy": 10.0 * epoch + rank}, None)
    unit.close()
    assert [unit.written["accuracy", None, epoch].totals.reduced("mean") for epoch in range(4)] == [
        0.5,
        10.5,
        20.5,
        30.5,
    ]


def test_rows_without_a_step_count_as_rows() -> None:
    unit = Unit.of(2)
    for _ in range(5):
        unit.log(0, {"loss": 1.0, "lr": 0.1}, None)
        settle(unit)
    assert unit.machines[0].ledger.open.count_rows() == unit.machines[1].ledger.open.count_rows() == 5


def counting(method: Callable[..., list[Key]], counts: list[int]) -> Callable[..., list[Key]]:
    def counted(*arguments: object) -> list[Key]:
        found = method(*arguments)
        counts.append(len(found))
        return found

    return counted


def test_the_cost_of_a_round_is_independent_of_open_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Unit.of(2)
    unit.log_on_all({"loss": 1.0}, 0)
    settle(unit)
    for step in range(1, 200):
        unit.log(0, {"loss": 1.0}, step)
        settle(unit)
    looked_at: list[int] = []
    for machine in unit.machines:
        monkeypatch.setattr(machine.finishing, "_candidates", counting(machine.finishing._candidates, looked_at))
    unit.log_on_all({"lr": 0.1}, 3000)
    settle(unit)
    assert looked_at == [1, 1]
