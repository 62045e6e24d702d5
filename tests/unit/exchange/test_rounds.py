"""The exchange as a state machine: jobs of all kinds by hypothesis, judged row by row, and single rules."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from limits import Limit
from row_model import Judge
from row_units import Unit

from dist_wandb.exchange.protocol import plan, rounds, table
from dist_wandb.exchange.protocol.calls import Intent, Key
from dist_wandb.exchange.protocol.contributors import NEVER, NOBODY
from dist_wandb.exchange.protocol.lanes import lanes_of, number_at, number_of
from dist_wandb.exchange.protocol.memory import Row
from dist_wandb.exchange.protocol.rounds import Rounds

WITHOUT_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


# --- jobs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_rows_of_ranks_that_make_the_same_calls_are_written_once_and_in_order(seed: int) -> None:
    """However far one of them is behind once all names are known, as long as the others have patience."""
    chance, unit = Random(seed), Unit(1 + seed % 5)
    names = [name for _ in range(8) for name in (*4 * [("loss", "lr")], ("val",))]
    waiting = [list(enumerate(names)) for _ in range(unit.size)]
    while any(waiting):
        unit.now += 0.25
        for rank, calls in enumerate(waiting):
            for step, logged in calls[: 1 if len(calls) > 34 else chance.choice((0, 1, 3))]:
                values = {name: float(chance.getrandbits(36) | 1) for name in logged}
                unit.log(rank, values, step if seed % 2 else None, chance.choice((0.5, 1.0)), f"{rank} {step}")
                calls.pop(0)
        unit.impatient()
        unit.exchange()
    unit.close()
    judge = Judge(unit)
    judge.check_last(is_strict=True)
    judge.check_flags()
    judge.check_owns()
    assert [written.owner.number for written in judge.written] == list(range(len(names)))
    assert all(len(givers) == unit.size for written in judge.written for givers in written.givers.values())
    assert not any(written.row.corrects or written.row.missing for written in judge.written)


# Any schedule.

NAMES = ("loss", "tokens", "lr", "samples")
numbers = st.integers(0, 2**35).map(lambda number: 2 * number + 1)
steps = st.sampled_from([*5 * [None], *range(5)])
orders = st.sampled_from([names for number in range(4) for names in itertools.permutations(NAMES, number)])
Entry = tuple[int | None, dict[str, float], float]  # step, values, weight
entries = st.tuples(steps, orders.flatmap(lambda names: st.fixed_dictionaries(dict.fromkeys(names, numbers))),
                    st.sampled_from([0.5, 1.0, 3.0]))  # fmt: skip
ACTIONS = (
    *("log", "log", "log parts", "exchange", "exchange", "wait", "impatient", "impatient with new names"),
    *("die", "stall", "come", "close", "interrupt", "undo", "interleave"),
)
Event = tuple[str, int, list[Entry]]
schedules = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 59), st.lists(entries, min_size=1, max_size=4)), max_size=30
)


@pytest.mark.slow
@given(st.integers(1, 4), st.integers(0, 3), st.sampled_from([(), ("samples",)]), schedules)
@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=WITHOUT_CHECKS)
def test_any_schedule_ends_with_equal_tables_and_whole_rows(
    size: int, late: int, axes: tuple[str, ...], schedule: Sequence[Event]
) -> None:
    """Ranks log anything at any time, join late, give up waiting, close early, stall, die or start again."""
    unit = Unit(size, axes)
    unit.absent.update(range(max(1, size - late), size))
    unit.resize()
    for event in schedule:
        happen(unit, *event)
    for rank in sorted(unit.away):
        unit.die(rank) if unit.closed else unit.come(rank)
    unit.close()
    judge = Judge(unit)
    if not sum(unit.lives.values()):  # the values of a new life are not those of the first one
        judge.check_last()
        judge.check_flags()
    if {"stall", "come", "undo"}.isdisjoint(action for action, *_ in schedule):
        judge.check_owns()


def happen(unit: Unit, action: str, number: int, logged: Sequence[Entry]) -> None:
    rank = unit.members[number % len(unit.members)]
    machine = unit.machines[rank]
    if action.startswith("log"):
        log(unit, unit.members if number % 2 else [rank, *sorted(unit.away)[:1]], logged, parts=action == "log parts")
    elif action == "wait":
        unit.now += 0.3
    elif action.startswith("impatient"):
        born = number % (machine.table.round + 1)
        machine.gives_up = (NEVER, born) if action == "impatient" else (born, NEVER)
    elif action == "close":
        machine.intent = Intent.CLOSING
    elif action == "interleave":
        machine.side_data.interleaved = True
    elif not unit.closed:
        exchange(unit, action, rank, number)


def log(unit: Unit, ranks: Sequence[int], logged: Sequence[Entry], *, parts: bool) -> None:
    """Log the same on some ranks, or, if `parts`, without the first or the last name, of which one may be the axis."""
    for (step, numbers, weight), rank in itertools.product(logged, ranks):
        if unit.machines[rank].intent is not Intent.CLOSING:
            values = {name: value + 2 * 5**rank for name, value in numbers.items()}
            if parts and values:
                del values[list(values)[rank % 2 - 1]]
            unit.log(rank, values, step, weight, f"{rank} {len(unit.calls)}")


def exchange(unit: Unit, action: str, rank: int, number: int) -> None:
    gone = sorted(unit.dead | unit.away | unit.absent)
    if action == "come" and gone:
        unit.come(gone[number % len(gone)])
    elif action in ("exchange", "interrupt"):
        unit.exchange(unit.members[: 1 + number % len(unit.members)] if action == "interrupt" else None)
    elif len(unit.members) > 1 and action != "come":
        actions: dict[str, Callable[[int], None]] = {
            "die": unit.die,
            "stall": unit.stall,
            "undo": lambda one: unit.undo([one]),
        }
        actions[action](rank)


# --- single rules -----------------------------------------------------------------------------------------------------


def shown(unit: Unit) -> list[tuple[Any, ...]]:
    """Return x, values, missing and whether it corrects another of each row."""
    return [(row.x, values(row), row.missing, row.corrects) for row in unit.rows]


def values(row: Row) -> dict[str, float]:
    return {name: number_at(*row.lanes, at, len(row.names)).reduced("mean") for at, name in enumerate(row.names)}


@pytest.mark.parametrize("first", [0, 1])
def test_what_a_higher_rank_adds_in_calls_that_were_joined_stands_beside_the_name_before_it(first: int) -> None:
    """Another thread of rank 0 logs between its calls, so only rank 1's calls at the same step are one."""
    unit = Unit(2)
    for machine in unit.machines:
        machine.side_data.interleaved = True
    for rank in (first, 1 - first):
        if rank:
            unit.log(1, {"gpu_1": 7.0, "loss": 1.0, "own_1": 5.0, "acc": 0.5, "own_acc_1": 6.0, "own_1b": 8.0}, 0)
        else:
            for values in ({"loss": 3.0, "own_0": 4.0}, {"acc": 0.7}):
                unit.log(0, values, 0)
                unit.log(0, {"thread": 1.0}, 9)
        unit.now += 1.0
        unit.exchange()
    unit.close()
    rows = [set(row.names) for row in unit.rows if "thread" not in row.names]
    assert rows == [{"gpu_1", "loss", "own_0", "own_1"}, {"acc", "own_acc_1", "own_1b"}]


def test_the_axis_belongs_to_the_call() -> None:
    """Its value is the owner's; a row of the axis alone is written only for a call of nothing else."""
    unit = Unit(2, ["samples"])
    for rank in (0, 1):
        unit.log(rank, {"loss": float(rank), "samples": 8.0 + rank})
        unit.log(rank, {"samples": 16.0})
    unit.close()
    assert shown(unit) == [(-1, {"loss": 0.5}, 0, False), (-2, {"samples": 16.0}, 0, False)]
    assert [row.axes for row in unit.rows] == [{"samples": 8}, {"samples": 16}]
    unit = Unit(2, ["samples"])
    unit.log(0, {"loss": 1.0, "samples": 8.0})
    unit.log(1, {"loss": 1.0, "samples": 9.0})
    outcomes = [unit.exchange() for _ in range(2)]
    assert [outcome.differing for outcome in outcomes] == [(), ("samples",)]


def test_rows_do_not_wait_for_a_name_that_has_become_an_axis() -> None:
    """Rank 1 gives its part of a row that waits after `epoch` was defined as an axis: it is no cell of that call."""
    unit = Unit(2)
    unit.write_on_all({"loss": 1.0, "epoch": 0.0})
    unit.log(0, {"loss": 1.0, "epoch": 1.0})
    unit.now += 1.0
    unit.exchange()
    assert len(unit.machines[0].table.open) == 1
    for machine in unit.machines:
        machine.side_data.axes = ("epoch",)
    unit.write(1, {"loss": 3.0, "epoch": 1.0})
    assert shown(unit)[1:] == [(-2, {"loss": 2.0, "epoch": 1.0}, 0, False)]


def test_a_call_waits_for_others_until_it_is_old() -> None:
    unit = Unit(2)
    unit.log_on_all({"loss": 1.0}, 0)
    unit.settle(0.0)
    unit.log(0, {"loss": 1.0}, 1)
    unit.now += 0.4
    assert (unit.exchange().taken, len(unit.machines[0].outbox.waiting)) == (0, 1)
    unit.now += 0.2
    assert (unit.exchange().taken, unit.machines[0].settled) == (1, False)
    unit.log(1, {"loss": 3.0}, 1)
    unit.exchange()
    assert shown(unit)[1:] == [(1, {"loss": 2.0}, 0, False)]


def test_a_call_waits_for_the_part_of_a_rank_that_is_held_up_before_it() -> None:
    """Rank 0 gives its `b` after an `a` that waits for rank 1; meanwhile, the old call of rank 2 is taken."""
    unit = Unit(3)
    for rank, names in enumerate(("abc", "ab", "c")):
        unit.log(rank, dict.fromkeys(names, 1.0), 0)
    unit.settle()
    unit.give_up(new_only=True)
    unit.log(2, {"c": 1.0}, 1)
    unit.now += 1.0
    unit.log(0, {"a": 1.0}, 1)
    for rank in (0, 1):
        unit.log(rank, {"b": 1.0}, 1)
    unit.exchange()
    assert [unit.outcomes[rank].taken for rank in range(3)] == [0, 0, 1]


def test_rows_of_new_names_without_a_rank_that_has_failed_are_flagged_once() -> None:
    """The ranks log the names in different orders, so that all rows are written by one round."""
    unit = Unit(2)
    for step, name in itertools.product(range(3), "abc"):
        unit.log(0, {name: 1.0}, step)
    for name in "cba":
        unit.log(1, {name: 1.0}, 0)
    unit.machines[1].intent, unit.machines[0].intent = Intent.FAILING, Intent.CLOSING
    unit.settle()
    unit.die(1)
    unit.settle()
    rows = [(row.step, row.names, row.missing, row.corrects) for row in unit.rows]
    assert rows == [(step, (name,), min(step, 1), False) for step in range(3) for name in "abc"]


def test_one_request_makes_all_ranks_regroup() -> None:
    unit = Unit(2)
    for machine in unit.machines:
        machine.intent = Intent.CLOSING
    found = []
    for asks in (True, True, False):
        offers = {
            machine.offer(0.0, regroup=asks and not rank): frozenset([rank])
            for rank, machine in enumerate(unit.machines)
        }
        offers = offers if len(offers) > 1 else dict.fromkeys(offers, frozenset([0, 1]))
        outcomes = [machine.unpack(machine.plan(offers), [], []) for machine in unit.machines]
        found.append([(outcome.regroup, outcome.closed) for outcome in outcomes])
    assert found == [[(True, False)] * 2, [(True, False)] * 2, [(False, True)] * 2]


def test_the_next_round_shares_the_number_of_publications_of_all_ranks() -> None:
    unit = Unit(3)
    for machine, published in zip(unit.machines, (3, 2, 2), strict=True):
        machine.side_data.published = published
    unit.exchange()
    assert [machine.side_data.all_published for machine in unit.machines] == [7, 7, 7]


@pytest.mark.parametrize("again", [{}, {"loss": 1.0}])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_value_does_not_wait_for_a_rank_that_has_passed_its_step(is_ahead: bool, again: dict[str, float]) -> None:
    """Rank 0 alone evaluates: its row is written before the next one, not some seconds later."""
    unit = Unit(2)
    unit.write_on_all({"loss": 1.0}, 0)
    if is_ahead:
        unit.write(1, {"loss": 3.0}, 1)
    unit.write(0, {"val": 2.0, **again}, 0)
    assert len(unit.rows) == (2 if is_ahead else 1)
    if not is_ahead:
        unit.log(1, {"loss": 3.0}, 1)
    unit.write(0, {"loss": 1.0}, 1)
    assert shown(unit)[1:] == [(0, {"val": 2.0, **again}, 0, False), (1, {"loss": 2.0}, 0, False)]


@pytest.mark.parametrize("falls", [0, 1])
def test_steps_that_fall_do_not_prove_that_a_rank_has_passed_a_new_name(falls: int) -> None:
    """As with `log({"loss": ...}, step=batch)` and `log({"val": ...}, step=epoch)`."""
    unit = Unit(2)
    unit.write_on_all({"loss": 1.0}, 9)
    unit.write(falls, {"other": 1.0}, 8)
    unit.write(0, {"val": 2.0}, 0)
    unit.write_on_all({"loss": 1.0}, 10)
    assert not [row for row in unit.rows if "val" in row.names]
    unit.write(1, {"val": 4.0}, 0)
    assert shown(unit)[-1] == (0, {"val": 3.0}, 0, False)


def test_a_known_name_has_the_long_patience() -> None:
    unit = Unit(2)
    unit.write_on_all({"loss": 1.0}, 0)
    for step in (1, 2):
        unit.write(0, {"loss": 2.0}, step)
    unit.give_up(new_only=True)
    assert len(unit.rows) == 1
    assert unit.give_up(new_only=False).silent == ()
    assert unit.outcomes[1].silent == (Key("loss", 1, 0),)
    unit.log(0, {"loss": 2.0}, 3)  # rank 1 is silent: nobody waits for it
    unit.exchange()
    assert shown(unit)[1:] == [(step, {"loss": 2.0}, 1, False) for step in (1, 2, 3)]
    unit.write(1, {"loss": 4.0}, 1)
    assert shown(unit)[4:] == [(1, {"loss": 3.0}, 0, True)]
    unit.machines[1].intent = Intent.CLOSING  # it has nothing to give to the others: they are not flagged any more
    unit.exchange()
    assert shown(unit)[5:] == [(step, {"loss": 2.0}, 0, True) for step in (2, 3)]


def test_a_rank_that_has_given_a_name_has_the_long_patience_before_a_row_of_it_is_written() -> None:
    """Rank 0 is far ahead, and a name of its own holds all rows back: they are overdue at once."""
    unit = Unit(2)
    unit.machines[1].side_data.interleaved = True
    for step in range(3):
        unit.log(0, {"loss": 1.0, "lr": 0.1}, step)
    for step in range(2):
        unit.write(1, {"loss": 3.0}, step)
    assert not unit.rows
    unit.give_up(new_only=True)
    assert shown(unit) == [(step, {"loss": 2.0, "lr": 0.1}, 0, False) for step in (0, 1)]
    unit.write(1, {"loss": 3.0}, 2)
    assert shown(unit)[2:] == [(2, {"loss": 2.0, "lr": 0.1}, 0, False)]


def test_a_rank_that_goes_on_with_other_names_does_not_log_this_one_any_more() -> None:
    unit = Unit(2)
    unit.write_on_all({"val": 1.0}, 0)
    unit.write(0, {"val": 1.0}, 1)
    unit.write(1, {"other": 1.0}, 1)
    unit.give_up(new_only=False)
    unit.log(0, {"val": 1.0}, 2)
    unit.exchange()
    assert [(row.step, row.missing) for row in unit.rows if row.names == ("val",)] == [(0, 0), (1, 1), (2, 0)]


def test_nobody_is_given_up_while_a_rank_has_more_to_offer(limit: Limit) -> None:
    limit(rounds, MOST_VALUES=10)
    unit = Unit(2)
    unit.write_on_all({"loss": 1.0}, 0)
    for step in range(1, 100):
        unit.log(0, {"loss": 1.0}, step)
    unit.now += 1
    for _ in range(5):
        assert unit.give_up(new_only=False).more
    assert len(unit.rows) == 1
    for step in range(1, 100):
        unit.write(1, {"loss": 3.0}, step)
    assert shown(unit)[1:] == [(step, {"loss": 2.0}, 0, False) for step in range(1, 100)]


@pytest.mark.parametrize(("present", "number"), [((1, 2), 0), ((0, 1), 1)])
def test_a_new_name_that_needs_the_primary_waits_for_it(present: tuple[int, int], number: int) -> None:
    """The primary may be slow at first; by then the others, and their states, may be gone."""
    unit = Unit(3, needs_primary=lambda name: name == "metric")
    for rank in present:
        unit.log(rank, {"metric": 1.0}, 0)
        unit.write(rank, {"loss": 1.0}, 0)
    unit.give_up(new_only=True)
    assert Counter(name for row in unit.rows for name in row.names) == {"loss": 1, **({"metric": 1} if number else {})}
    unit.log(({0, 1, 2} - {*present}).pop(), {"metric": 4.0}, 0)
    unit.close()
    assert values(unit.rows[-1]) == {"metric": 2.0}


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_an_interleaved_rank_does_not_pass_a_row_by_logging_a_later_one(is_interleaved: bool) -> None:
    """The loss of rank 1 follows values that its data loader workers, which are ahead, log for later steps."""
    unit = Unit(2)
    unit.machines[1].side_data.interleaved = is_interleaved
    for step in (0, 1):
        unit.write(0, {"loss": 1.0}, step)
    unit.write(1, {"loss": 3.0}, 1)
    unit.write_on_all({"other": 1.0}, 2)
    late = Rounds(1, 2)
    late.restore(json.loads(json.dumps(unit.machines[0].snapshot())))
    assert late.table.ranks.interleaved == ({1} if is_interleaved else NOBODY)
    unit.write(1, {"loss": 3.0}, 0)
    last = {row.step: row for row in unit.rows}
    assert (values(last[0]), last[0].corrects) == ({"loss": 2.0}, not is_interleaved)


def test_rows_of_before_it_was_known_that_a_lost_rank_logs_their_names_are_flagged() -> None:
    unit = Unit(2)
    for step in range(3):
        unit.write(0, {"loss": 1.0}, step)
        unit.give_up(new_only=True)
    unit.write(1, {"loss": 1.0}, 0)
    unit.die(1)
    unit.exchange()
    assert [(row.step, row.missing, row.corrects) for row in unit.rows[3:]] == [
        (0, 0, True),
        (1, 1, True),
        (2, 1, True),
    ]


@pytest.mark.parametrize("number", [1, 20])
def test_rows_of_new_names_that_waited_when_a_rank_was_lost_are_flagged(number: int) -> None:
    """It is unknown whether the lost rank logged them as well: nobody has heard of what waited there."""
    unit = Unit(2)
    unit.write_on_all({"loss": 1.0}, 0)
    for step in range(number):
        unit.log_on_all({f"acc {name}": 1.0 for name in range(500)}, step)  # several rounds
    unit.die(1)
    unit.settle()
    for _ in range(2):
        unit.exchange()
    unit.write(0, {"acc 0": 1.0, "later": 1.0}, number)
    assert [(row.step, row.missing) for row in unit.rows[1:]] == [*((step, 1) for step in range(number)), (number, 0)]


def test_a_rank_that_is_lost_before_it_gave_anything_is_missing_in_each_row() -> None:
    unit = Unit(3)
    unit.die(2)
    for step in range(3):
        unit.write_on_all({"loss": 1.0}, step)
    assert [row.missing for row in unit.rows] == [1, 1, 1]


@pytest.mark.parametrize("ranks", [(0, 1), (0,)])
def test_rows_of_very_many_names_take_time_in_proportion(ranks: Sequence[int]) -> None:
    """Such as the norms of all layers: ranks are a second apart, or one rank logs them alone."""

    def seconds(number: int) -> float:
        unit, values = Unit(2), {f"norm of layer {number}": 1.0 for number in range(number)}
        unit.write_on_all({"loss": 1.0})
        begun = time.thread_time()
        for _ in range(2):
            for rank in ranks:
                unit.log(rank, values)
                unit.settle()
            unit.give_up(new_only=True)
        assert [len(row.names) for row in unit.rows] == [1, number, number]
        return time.thread_time() - begun

    assert seconds(2000) < 10 * seconds(500) + 0.5


def test_names_of_one_rank_are_not_flagged_when_another_one_is_lost() -> None:
    unit = Unit(2)
    for step in range(5):
        unit.log(0, {"throughput": 1.0}, step)
        unit.write(1, {"other": 1.0}, step)
        unit.give_up(new_only=False)
    unit.die(1)
    unit.log(0, {"throughput": 1.0}, 5)
    unit.close()
    assert {row.missing for row in unit.rows if row.names == ("throughput",) and row.step} == {0}


def test_at_most_some_rows_wait() -> None:
    unit = Unit(2, most_open=10)
    unit.write_on_all({"loss": 1.0}, 0)
    for step in range(1, 100):
        unit.write(0, {"loss": 1.0}, step)
        assert len(unit.machines[0].table.open) <= 10
    assert [(row.step, row.missing) for row in unit.rows] == [(0, 0), *((step, 1) for step in range(1, 100))]


# --- forgotten rows, memory and cost ----------------------------------------------------------------------------------


def test_late_values_do_not_replace_forgotten_rows() -> None:
    unit = Unit(2, remembered=10)
    unit.write_on_all({"loss": 0.0}, 0)
    unit.stall(1)
    for step in range(1, 50):
        unit.log(0, {"loss": 0.0}, step)
        unit.log(1, {"loss": 1.0}, step, own=f"label {step}")
        unit.settle()
    unit.come(1)
    unit.settle()
    unit.close()
    last = {row.step: row for row in unit.rows}
    assert [values(last[step])["loss"] for step in range(50) if step in last] == [0.0] * 40 + [0.5] * 10
    assert sorted(key.step or 0 for key in unit.lost) == list(range(1, 40))
    assert sorted(unit.owns[1, 0]) == sorted(f"label {step}" for step in range(1, 50))


def sizes(value: object, seen: set[int] | None = None) -> int:
    """Return the number of items of all collections in an object of the protocol."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return 0
    seen.add(id(value))
    inner: list[object] = []
    if isinstance(value, dict):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ in ("deque", "OrderedDict"):
        inner = list(value)  # type: ignore[call-overload]
    elif type(value).__module__.startswith("dist_wandb"):
        inner = list(getattr(value, "__dict__", {}).values())
    return len(inner) + sum(sizes(one, seen) for one in inner)


@pytest.mark.parametrize("is_lost", [False, True])
def test_memory_does_not_grow(is_lost: bool) -> None:
    """Rows to which one rank does not contribute, or that lack a lost rank."""
    unit = Unit(2, remembered=100)
    unit.is_checked = False
    found = []
    for number in range(600):
        if is_lost and number == 50:
            unit.stall(1)
        for rank in unit.members:
            unit.log(rank, {"loss": 1.0, **({} if rank else {"own": 1.0})}, number)
        unit.now += 1.0
        unit.exchange()
        unit.rows.clear()
        if number in (300, 599):
            found.append(sizes(unit.machines[0]))
    assert found[1] <= found[0] * 1.02


def test_the_cost_of_a_round_is_independent_of_open_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Unit(2)
    unit.is_checked = False
    unit.write_on_all({"loss": 1.0, "lr": 1.0}, 0)
    for step in range(1, 300):
        unit.write(0, {"loss": 1.0}, step)
    looked_at = Counter[str]()
    unwritten = table.Table.unwritten_in

    def counted(*arguments: Any) -> Any:
        looked_at["rows"] += 1
        return unwritten(*arguments)

    monkeypatch.setattr(table.Table, "unwritten_in", counted)
    for rank in (0, 1):
        unit.write(rank, {"lr": 0.1}, None)
        assert 0 < looked_at.pop("rows") < 200, "in rounds of two ranks"


def test_many_rows_of_a_rank_ahead_are_written_when_the_other_one_passes_their_steps_with_other_names() -> None:
    unit = Unit(2)
    unit.write_on_all({"loss": 1.0}, 0)
    for step in range(1, 300):
        unit.write(0, {"loss": 1.0}, step)
    unit.write(1, {"val": 1.0}, 300)
    assert [(row.step, row.missing) for row in unit.rows] == [(step, 0) for step in range(300)]


def test_wide_calls_have_narrow_offers() -> None:
    unit = Unit(2)
    names = [f"name {number}" for number in range(10_000)]
    for rank in (0, 1):
        unit.log(rank, dict.fromkeys(names, 1.0), 0)
    unit.exchange()
    unit.exchange()
    assert len(unit.machines[0].offer(0.0)) < 100
    unit.log_on_all({"loss": 1.0}, 1)
    unit.exchange()
    offer = unit.machines[0].offer(0.0)
    assert len(offer) < 100
    unit.exchange()
    assert [len(row.names) for row in unit.rows] == [10_000, 1]


@pytest.mark.parametrize("is_another", [False, True])
def test_ranks_with_equal_calls_are_one(is_another: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 512 ranks; the work is for the different calls, not for the ranks."""
    joined: list[int] = []
    joint = plan._joint

    def counted(group: Any, *arguments: Any) -> Any:
        joined.append(len(group))
        return joint(group, *arguments)

    monkeypatch.setattr(plan, "_joint", counted)
    machine, other = Rounds(0, 512), Rounds(511, 512)
    for one, number in ((machine, 20), (other, 19 if is_another else 20)):
        one.table.names.update({"loss": 0})
        for step in range(number):
            one.outbox.post(["loss"], lanes_of([number_of(1.0)]), step, step, 0.0)
    others = range(511 if is_another else 512)
    offers = {machine.offer(1.0): frozenset(others), **({other.offer(1.0): frozenset([511])} if is_another else {})}
    taken = machine.plan(offers)
    rows = machine.unpack(taken, *taken.pack()).rows
    assert joined == ([2, 1] if is_another else [1])
    assert [row.ranks for row in rows[:19]] == [(512,)] * 19


def test_calls_of_an_interrupted_round_are_put_back_in_their_order() -> None:
    unit = Unit(3)
    unit.write_on_all({"loss": 1.0, "lr": 1.0})
    for number, rank in itertools.product((1.0, 2.0), range(3)):
        unit.log(rank, {"loss": number * rank, "lr": 1.0}, own=f"{rank} {number}")
    unit.undo([0, 2])
    assert [len(machine.outbox.waiting) for machine in unit.machines] == [2, 2, 2]
    unit.exchange()
    unit.close()
    assert shown(unit)[1:] == [(-2, {"loss": 1.0, "lr": 1.0}, 0, False), (-3, {"loss": 2.0, "lr": 1.0}, 0, False)]
    assert [unit.owns[rank, 0] for rank in range(3)] == [[f"{rank} 1.0", f"{rank} 2.0"] for rank in range(3)]
