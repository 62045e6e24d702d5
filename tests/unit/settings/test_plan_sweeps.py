"""Plans of a job that a sweep's agent has started: one run is the trial and has the agent's id."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dist_wandb.job.model import Topology
from dist_wandb.settings.plan import RANK_SCOPES, RUN_MODES, RunPlan, plan_run, unit_run_id

layouts = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def ranks(layout: list[int], primary: int | None = None) -> list[Topology]:
    """Return all ranks of a job; `layout` has the number of ranks of each node."""
    places = [(node, local_rank) for node, size in enumerate(layout) for local_rank in range(size)]
    return [
        Topology(rank, local_rank, node, len(places), layout[node], len(layout)).led_by(primary)
        for rank, (node, local_rank) in enumerate(places)
    ]


@given(layouts, st.sampled_from(RUN_MODES), st.sampled_from(RANK_SCOPES), st.data())
def test_only_the_run_of_the_jobs_primary_is_the_trial(
    layout: list[int], mode: str, scope: str, data: st.DataObject
) -> None:
    topologies = ranks(layout, data.draw(st.integers(-1, sum(layout) - 1)))
    alone = [plan_run(topology, mode, scope, "t7") for topology in topologies]
    plans = [plan_run(topology, mode, scope, "t7", in_sweep=True) for topology in topologies]
    before, now = (list(map(unit_run_id, of)) for of in (alone, plans))
    renamed = before[topologies[0].coordinator]
    assert now == ["t7" if run_id == renamed else run_id for run_id in before]
    assert [plan.is_trial for plan in plans] == [run_id == renamed for run_id in before]
    assert not any(plan.is_trial for plan in alone)
    assert [_others(plan) for plan in plans] == [_others(plan) for plan in alone]


def _others(plan: RunPlan) -> tuple[object, ...]:
    return plan.opens_run, plan.group, plan.label, plan.primary, plan.name_suffix, plan.shared, plan.own_directory
