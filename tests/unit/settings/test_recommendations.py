"""Jobs that are larger than W&B recommends for their run mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from limits import Limit

from dist_wandb.job.topology import Topology
from dist_wandb.settings import plan
from dist_wandb.settings.plan import plan_run, too_large

Job = Callable[..., list[Any]]


def doubt(nodes: int, ranks_per_node: int, run_mode: str, rank_scope: str = "global") -> str | None:
    topology = Topology(0, 0, 0, nodes * ranks_per_node, ranks_per_node, nodes)
    return too_large(topology, plan_run(topology, run_mode, rank_scope, "exp"), ranks_per_node)


def test_a_shared_run_with_too_many_writers_warns() -> None:
    assert doubt(64, 8, "shared") == (
        'run_mode="shared" opens a run with 512 writers, but W&B has tested at most 300 connections to one. Use '
        'rank_scope="worker", for a run of each node with 8 writers, or run_mode="auto": one writer, with the metrics '
        "of all ranks."
    )


def test_worker_scope_is_not_recommended_if_it_does_not_help() -> None:
    for found in (doubt(1, 301, "shared"), doubt(2, 301, "shared", "worker")):
        assert found is not None
        assert "rank_scope" not in found
        assert 'Use run_mode="auto"' in found
    unknown = Topology(0, None, None, 512, None, None)
    found = too_large(unknown, plan_run(Topology(0, 0, 0, 512, 512, 1), "shared", "global", "exp"), None)
    assert found is not None
    assert 'Use run_mode="auto"' in found


def test_one_rank_warns_before_the_runs_are_opened(job: Job, fake_wandb: Any, limit: Limit) -> None:
    limit(plan, MOST_WRITERS=1)
    topologies = [Topology(rank, rank, 0, 2, 2, 1) for rank in range(2)]
    init, warned = fake_wandb.init, list[int]()

    def noted(**arguments: Any) -> Any:
        warned.append(len(caught))
        return init(**arguments)

    fake_wandb.init = noted
    with pytest.warns(UserWarning, match='run_mode="shared" opens a run with 2 writers') as caught:
        job(topologies, run_mode="shared", rank_scope="global")
    assert warned == [1, 1]
