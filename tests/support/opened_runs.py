"""Runs opened according to plans, with the wandb of the test."""

from __future__ import annotations

from typing import Any

from dist_wandb.job.model import Topology
from dist_wandb.runs.opening import open_run
from dist_wandb.settings.plan import plan_run

FIRST, SECOND = Topology(0, 0, 0, 2, 2, 1), Topology(1, 1, 0, 2, 2, 1)
SINGLE = Topology.single()


def opened(topology: Topology, mode: str, arguments: dict[str, Any], *, group: str | None = None) -> Any:
    return open_run(plan_run(topology, mode, "global", "exp", group=group), topology, arguments)
