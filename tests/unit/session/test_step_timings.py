"""The parts of a training step that an integration measures, one after the other on one thread."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import nn

from dist_wandb.errors import ConfigurationError
from dist_wandb.session.sections import ForwardHook, Section, Sections, StepTimings, check_timings

S = 1_000_000_000  # nanoseconds


class Measured:
    """A stand-in for a session; each part takes the given time."""

    def __init__(self) -> None:
        self.now = 0
        self.sections = Sections(lambda: self.now, lambda: None)
        self.waiting: set[str] = set()

    def timed(self, name: str, *, waits: bool) -> Section:
        self.waiting |= {name} if waits else set()
        return self.sections.timed(name, 0, waits=waits)

    def steps(self, timings: StepTimings, *parts: tuple[Any, int]) -> dict[str, float]:
        for part, seconds in parts:
            timings.enter(part)
            self.now += seconds * S
        timings.enter(None)
        return self.sections.due_timings({"loss"}, None)


def test_each_part_is_timed_and_waiting_parts_do_not_count_as_busy() -> None:
    measured: Any = Measured()
    parts = [("data", 1), ("forward", 2), ("backward", 4), (None, 8), ("optimizer", 1), ("data", 4)]
    assert measured.steps(StepTimings(lambda: measured), *parts) == {
        "time/data": 5.0,
        "time/forward": 2.0,
        "time/backward": 4.0,
        "time/optimizer": 1.0,
        "time/step": 20.0,
        "time/busy": 0.4,
    }
    assert measured.waiting == {"backward"}


def test_forward_and_optimizer_count_as_waiting_with_sharded_parameters() -> None:
    measured: Any = Measured()
    timings = StepTimings(lambda: measured, is_sharded=True)
    row = measured.steps(timings, ("data", 1), ("forward", 1), ("backward", 1), ("optimizer", 1))
    assert measured.waiting == {"forward", "backward", "optimizer"}
    assert row["time/busy"] == 0.25


def test_timing_starts_when_a_session_is_opened() -> None:
    measured: Any = Measured()
    open_sessions: list[Any] = []
    timings = StepTimings(lambda: open_sessions[0] if open_sessions else None)
    assert measured.steps(timings, ("data", 1)) == {}
    assert timings.part is None
    open_sessions.append(measured)
    timings.enter("data")
    assert timings.part == "data"
    assert measured.steps(timings, ("forward", 1))["time/forward"] == 1.0


def test_another_thread_cannot_change_the_part_before_the_training_ends() -> None:
    measured: Any = Measured()
    timings = StepTimings(lambda: measured)
    timings.enter("forward")
    on_another_thread(timings)
    assert timings.part == "forward"
    timings.end()
    assert timings.part is None
    on_another_thread(timings)
    assert timings.part == "data"


def on_another_thread(timings: StepTimings) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(timings.enter, "data").result(30)


def test_the_hook_has_no_effect_in_copied_or_pickled_modules() -> None:
    called: list[Any] = []
    module = nn.Identity()
    module.register_forward_pre_hook(ForwardHook(called.append))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):  # noqa: S301
        other(1)
    assert called == []
    module(1)
    assert called == [module]


@pytest.mark.parametrize("value", [None, 1, "data"])
def test_timings_other_than_bools_are_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"timings=.* is neither True nor False"):
        check_timings(value)
