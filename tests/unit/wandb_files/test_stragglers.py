"""Stragglers: a rank that delays the others is detected, and none if all ranks are equally fast."""

from __future__ import annotations

import random
import re
import time
from collections import Counter

import pytest

from dist_wandb.wandb_files.stragglers import EXCESS, RANK, Stragglers, Timing, findings


def named(ranks: int, rows: int, seed: int, noise: float, slow: dict[int, float]) -> list[int | None]:
    """Return the detected rank of each row, for ranks with noisy times that wait for each other; one stalls in 4 %."""
    drawn, stragglers, found = random.Random(seed), Stragglers(), []
    for _ in range(rows):
        busy = [
            slow.get(rank, 1.0) * drawn.lognormvariate(0.0, noise) * (3.0 if drawn.random() < 0.04 / ranks else 1.0)
            for rank in range(ranks)
        ]
        step = max(busy) + 0.2  # time to reduce the gradients
        busiest = max(range(ranks), key=busy.__getitem__)
        shares = [seconds / step for seconds in busy]
        others = (sum(shares) - shares[busiest]) / (ranks - 1)
        stragglers.add(busiest, shares[busiest], others)
        found.append(stragglers.detect(step).get(RANK))
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("ranks", [2, 4, 64])
@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_a_rank_slower_by_30_percent_is_always_named(ranks: int, noise: float) -> None:
    for seed in range(20):
        found = named(ranks, 60, seed, noise, {1: 1.3})
        assert {one for one in found if one is not None} == {1}
        assert found[20:].count(1) >= 20


@pytest.mark.parametrize("ranks", [2, 4, 64])
@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
def test_equal_ranks_are_rarely_named(ranks: int, noise: float) -> None:
    alarms = sum(any(one is not None for one in named(ranks, 60, seed, noise, {})) for seed in range(100))
    assert alarms <= 5


def test_no_straggler_is_named_without_a_row_duration() -> None:
    stragglers = Stragglers()
    assert stragglers.detect(1.0) == {}
    for _ in range(20):
        stragglers.add(0, 1.0, 0.0)
    assert stragglers.detect(None) == {}
    assert stragglers.detect(1.0) == {RANK: 0, EXCESS: 1.0}


def timings_of(ranks: int, *slow: int, marked: bool = False, since: int = 0) -> dict[str, Timing]:
    """Return 80 rows of ranks of which some load their data twice as long, and all wait for them in a backward pass."""
    drawn = random.Random(1)
    found: dict[str, Timing] = {}
    for row in range(80):
        held_up = slow if row >= since else ()
        data = [0.03 * drawn.lognormvariate(0.0, 0.05) * (2 if rank in held_up else 1) for rank in range(ranks)]
        waits = [max(data) - own + 0.001 * drawn.random() for own in data]
        step = [own + wait for own, wait in zip(data, waits, strict=True)]
        busy = [own / whole if marked else 1.0 for own, whole in zip(data, step, strict=True)]
        for name, times in {"data": data, "backward": waits, "step": step, "busy": busy}.items():
            largest = max(range(ranks), key=times.__getitem__)
            found.setdefault(f"time/{name}", Timing()).add(largest, max(times), sum(times) / ranks, min(times))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_without_a_marked_section_the_rows_say_who_is_slow_and_where_ranks_wait(ranks: int) -> None:
    said = findings(timings_of(ranks, 1), ranks)
    seconds = r"0\.0[56]\d* s, the others 0\.0[23]\d* s"
    assert re.fullmatch(rf"rank 1 has the largest time/data in 80 of 80 rows: {seconds}", said[0])
    assert len(said) == (3 if ranks == 2 else 2)
    where = "time/backward or time/data" if ranks == 2 else "time/backward"  # of two, either may be the one that waits
    assert said[-1].startswith(f"the ranks seem to wait for each other in {where}: pass waits=True to timed there, ")


@pytest.mark.parametrize(("ranks", "slow"), [(4, (2, 3)), (8, (4, 5, 6, 7)), (8, (0, 5))])
def test_several_slow_ranks_such_as_those_of_a_node_are_named_together(ranks: int, slow: tuple[int, ...]) -> None:
    """None of them is the busiest one in most rows, so the rows themselves name none."""
    they = "ranks 4-7" if len(slow) == 4 else f"ranks {slow[0]}, {slow[1]}"
    said = findings(timings_of(ranks, *slow), ranks)
    assert said[0].startswith(f"{they} have the largest time/data in 80 of 80 rows: 0.0")
    assert "time/backward" in said[-1].partition("wait for each other in")[2]
    (busiest,) = findings(timings_of(ranks, *slow, marked=True), ranks)
    assert re.fullmatch(rf"{they} have the largest time/busy in 80 of 80 rows: 0\.9\d+, the others 0\.[45]\d*", busiest)


def test_a_slow_rank_is_named_although_it_becomes_slow_in_the_middle_or_a_section_is_around_all_others() -> None:
    said = findings(timings_of(4, 2, since=40), 4)
    assert re.match(r"rank 2 has the largest time/data in [45]\d of 80 rows: ", said[0])
    assert said[-1].startswith("the ranks seem to wait for each other in time/backward: ")
    timings = timings_of(3, 1)
    said = findings({**timings, "time/epoch": timings["time/step"]}, 3)  # measured in addition: it does not wait
    assert said[0].partition(":")[0] == "rank 1 has the largest time/data in 80 of 80 rows"


@pytest.mark.parametrize("ranks", [2, 4, 64])
@pytest.mark.parametrize("marked", [False, True])
def test_nothing_is_said_of_equal_ranks(ranks: int, marked: bool) -> None:
    for of_job in (ranks, 2 * ranks):  # with a run for each of two nodes
        assert findings(timings_of(ranks, marked=marked), of_job) == []


def test_a_file_that_names_very_many_ranks_takes_no_time() -> None:
    timing = Timing(Counter(range(20_000)), 20_000, 2.0, 1.0, 0.5)
    begun = time.thread_time()
    assert findings(dict.fromkeys(("time/data", "time/busy", "time/step"), timing), 20_000) == []
    assert time.thread_time() - begun < 2.0


def test_timings_of_one_rank_alone_are_told_apart_from_equal_ranks() -> None:
    """Its script measures on all ranks, but calls `log` on the first one only."""
    alone = {f"time/{name}": Timing() for name in ("data", "backward", "step", "busy")}
    for timing in alone.values():
        for row in range(20):
            timing.add(0, 0.1 + row, 0.1 + row, 0.1 + row)
    (said,) = findings(alone, 4)
    assert said == "only rank 0 has logged timings, so nothing is known of the others: log on all ranks"


def test_a_marked_section_or_a_named_rank_makes_other_timings_silent() -> None:
    (said,) = findings(timings_of(4, 1, marked=True), 4)
    assert said.startswith("rank 1 has the largest time/busy in 80 of 80 rows: ")
    named = {**timings_of(4, 1), RANK: Timing()}
    named[RANK].counts.update({2: 5, 3: 1})
    assert findings(named, 4) == ["rank 2 held the others up in 5 of 80 rows (time/straggler_rank)"]
    named[RANK].rows, named[RANK].mean = 6, 0.18
    assert findings(named, 4)[0].endswith("(time/straggler_rank), busy 0.03 s longer than the others")
    named[RANK].rows = 101
    assert all("held the others up" not in finding for finding in findings(named, 4))  # in less than a 20th of the rows
