"""The demand on an exchange's thread never decreases, and its end is signalled in every phase."""

from __future__ import annotations

import itertools

import pytest

from dist_wandb.exchange.interface import Demand, Lifecycle, Phase


@pytest.mark.parametrize("order", list(itertools.permutations([Demand.CLOSE, Demand.STOP])))
def test_a_demand_is_never_lowered(order: tuple[Demand, ...]) -> None:
    lifecycle = Lifecycle()
    demands = []
    for demand in order:
        lifecycle.ask(demand)
        demands.append(lifecycle.demand)
    assert demands == sorted(demands)
    assert demands[-1] is Demand.STOP


@pytest.mark.parametrize(
    ("demand", "is_closing", "is_stopped"),
    [(Demand.NONE, False, False), (Demand.CLOSE, True, False), (Demand.STOP, True, True)],
)
def test_each_demand_includes_those_before_it(demand: Demand, is_closing: bool, is_stopped: bool) -> None:
    lifecycle = Lifecycle()
    lifecycle.ask(demand)
    assert (lifecycle.is_closing, lifecycle.is_stopped) == (is_closing, is_stopped)


@pytest.mark.parametrize(
    ("phase", "end"),
    [*((phase, Phase.ENDED) for phase in (Phase.TOGETHER, Phase.ALONE, Phase.LEAVING)), (Phase.BROKEN, Phase.BROKEN)],
)
def test_end_releases_all_waiters(phase: Phase, end: Phase) -> None:
    lifecycle = Lifecycle()
    lifecycle.phase = phase
    lifecycle.end()
    assert lifecycle.phase is end
    assert lifecycle.delivered.is_set()
    assert lifecycle.ended.is_set()
