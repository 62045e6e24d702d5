"""The console output of wandb, and when it is reduced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import wandb
from opened_runs import FIRST, SECOND, SINGLE, opened_by

from dist_wandb.job.topology import Topology
from dist_wandb.runs import wandb_private, writer
from dist_wandb.settings.plan import plan_run

pytestmark = pytest.mark.usefixtures("bare_environment")


@pytest.mark.parametrize(
    ("mode", "verbosity"),
    [("new", "not set"), *(("shared", verbosity) for verbosity in ("not set", "in settings", "in the environment"))],
)
@pytest.mark.parametrize("topology", [FIRST, SECOND], ids=["primary", "secondary"])
def test_wandb_prints_only_useful_lines_about_runs_of_several_ranks_on_disk(
    fresh_wandb: Path,
    topology: Topology,
    mode: str,
    verbosity: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WANDB_SILENT")
    arguments: dict[str, Any] = {"mode": "offline", "dir": str(fresh_wandb)}
    if verbosity == "in settings":
        arguments["settings"] = wandb.Settings(quiet=False)
    elif verbosity == "in the environment":
        monkeypatch.setenv("WANDB_QUIET", "false")
    plan = plan_run(topology, mode, "global", "exp")
    run = opened_by(plan, topology, arguments)
    run.log({"loss": 0.5})
    opening = capfd.readouterr().err
    with writer.quiet_finish(run, plan, arguments):
        wandb.termwarn("a warning")
        run.finish()
    ending = capfd.readouterr().err
    wandb.termlog("information")
    assert "information" in capfd.readouterr().err
    assert "a warning" in ending
    is_told = verbosity != "not set" or (mode == "new" and topology is FIRST)  # of the runs of all ranks, the first
    assert ("wandb sync" in ending, "Run history" in ending) == (is_told,) * 2
    assert ("offline" in opening) == (verbosity != "not set" or topology is FIRST)
    hint = f"dist_wandb: the run exp is on disk, in several files. Upload it with: dist-wandb sync {fresh_wandb}/wandb"
    assert writer.upload_hint(run, plan, topology) == (hint if mode == "shared" and topology is FIRST else None)


@pytest.mark.parametrize(
    ("value", "silent"), [("true", True), ("1", True), ("YES", True), ("false", False), ("", False)]
)
def test_silence_is_defined_as_by_wandb(monkeypatch: pytest.MonkeyPatch, value: str, silent: bool) -> None:
    assert not wandb_private.is_silent()
    monkeypatch.setenv("WANDB_SILENT", value)
    assert wandb_private.is_silent() is silent


@pytest.mark.usefixtures("fake_wandb")
def test_only_runs_in_several_files_have_an_upload_hint() -> None:
    def line(run_mode: Any, topology: Topology = FIRST, **arguments: Any) -> str | None:
        plan = plan_run(topology, run_mode, "global", "exp")
        return writer.upload_hint(opened_by(plan, topology, arguments), plan, topology)

    assert line("shared") is None  # it is on the server
    assert line("shared", mode="disabled") is None
    assert line("auto", mode="offline") is None  # W&B's own line is correct
    assert line("new", mode="offline") is None
    assert line("shared", SINGLE, mode="offline") is None
