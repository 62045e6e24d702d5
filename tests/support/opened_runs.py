"""Runs opened according to plans, with the wandb of the test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dist_wandb.job.topology import Topology
from dist_wandb.runs.opening import RunOpener
from dist_wandb.settings.options import Options
from dist_wandb.settings.plan import RunPlan, plan_run

FIRST, SECOND = Topology(0, 0, 0, 2, 2, 1), Topology(1, 1, 0, 2, 2, 1)
SINGLE = Topology.single()


def opened(topology: Topology, mode: str, arguments: dict[str, Any], *, group: str | None = None) -> Any:
    return opened_by(plan_run(topology, mode, "global", "exp", group=group), topology, arguments)


def opened_by(
    plan: RunPlan,
    topology: Topology,
    arguments: Mapping[str, Any],
    *,
    create_new: bool = False,
    as_given: bool = True,
) -> Any:
    opener = RunOpener(
        Options(), topology, plan, None, arguments, dict, create_new=create_new, is_alone=True, as_given=as_given
    )
    return opener.attach() if plan.attaches else opener.open()
