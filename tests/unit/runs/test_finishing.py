"""The upload hint at the end of a run."""

from __future__ import annotations

from typing import Any

import pytest
from opened_runs import FIRST, SECOND, SINGLE

from dist_wandb.runs import record
from dist_wandb.runs.wandb_init import open_run
from dist_wandb.settings.plan import plan_run
from dist_wandb.topology.model import Topology

pytestmark = pytest.mark.usefixtures("bare_environment")


@pytest.mark.usefixtures("fake_wandb")
def test_only_runs_in_several_files_have_an_upload_hint() -> None:
    def line(run_mode: Any, topology: Topology = FIRST, **arguments: Any) -> str | None:
        plan = plan_run(topology, run_mode, "global", "exp")
        return record.upload_hint(open_run(plan, topology, arguments), plan, topology)

    assert line("shared", mode="offline") is not None
    assert line("shared") is None  # it is on the server
    assert line("shared", mode="disabled") is None
    assert line("auto", mode="offline") is None  # W&B's own line is correct
    assert line("new", mode="offline") is None
    assert line("shared", SINGLE, mode="offline") is None
    assert line("shared", SECOND, mode="offline") is None  # its primary prints the hint
