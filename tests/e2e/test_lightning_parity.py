"""Lightning with the real wandb: the results of the stock logger, on all ranks, without its outdated warnings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from processes import Finished, python, run_job
from wandb_server import WandbServer

SCRIPTS = Path(__file__).parent / "scripts"
STALE = ("anonymous", "require(")  # wandb warns about these at every start of the stock logger


def seen(finished: Finished) -> dict[str, list[Any]]:
    """Return the reports of the ranks, in rank order."""
    reports = [json.loads(line.removeprefix("SAW ")) for line in finished.lines("SAW ")]
    reports.sort(key=lambda one: (one[0], one[1]))
    return {what: [value for name, _, value in reports if name == what] for what, *_ in reports}


def test_both_ranks_know_the_run_and_its_checkpoint_is_downloaded(wandb_server: WandbServer, tmp_path: Path) -> None:
    job = python(SCRIPTS / "lightning_parity.py", tmp_path)
    finished = run_job(*job, cwd=tmp_path, environment=wandb_server.environment(tmp_path)).check()
    assert not [line for line in finished.output.splitlines() if line.startswith("wandb: WARNING")]
    assert not [word for word in STALE if word in finished.output]
    reports = seen(finished)
    place = f"{wandb_server.url}/tester/tests"
    first, second = reports["facts"]
    assert first == second
    described = {"group": "g", "job_type": "train", "tags": ["a", "b"], "notes": "n", "offline": False}
    named = {"id": "exp", "name": "night", "url": f"{place}/runs/exp", "project_url": place, "path": "tester/tests/exp"}
    owned = {"entity": "tester", "project": "tests", "disabled": False, "resumed": False, "sweep_id": None}
    assert {**described, **named, **owned}.items() <= first.items()
    assert Path(first["dir"]).is_relative_to(tmp_path / "wandb")
    expected: dict[str, list[Any]] = {
        "config": [0.1, 0.1],
        "version before": ["exp", "exp"],
        "logger": [["tests", "exp", str(tmp_path)]] * 2,
        "log_dir": [str(tmp_path)] * 2,
        "log_dir later": [str(tmp_path)] * 2,
        "checkpoints": [str(tmp_path / "tests" / "exp" / "checkpoints")] * 2,
        "name later": ["renamed", "renamed"],
        "used": [["v0", ["best", "latest"], "epoch=1-step=4.ckpt"], False],
        "downloaded": ["exp", None],
        "downloaded without a run": [["model.ckpt"], None],
        "changed": [["WANDB_SERVICE"], []],  # set by wandb on the rank that used it
    }
    assert {what: reports[what] for what in expected} == expected
    (artifact,) = wandb_server.artifacts
    assert (artifact.kind, artifact.used_by) == ("model", ["tester/tests/second"] * 2)
    for way in ("by-use", "by-name", "by-api"):
        assert (tmp_path / way / "model.ckpt").read_bytes() == artifact.files["model.ckpt"]
