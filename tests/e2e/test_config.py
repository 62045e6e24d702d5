"""One config on all ranks: real processes, real frameworks, real wandb, offline."""

from __future__ import annotations

import json
from pathlib import Path

from processes import run_job, torchrun
from stored import ended_runs

SCRIPTS = Path(__file__).parent / "scripts"
REFUSED = "<object object>"
OPENS = '        with dist_wandb.init("tests", run_mode=mode, **arguments, reinit="create_new") as run:'


def test_every_rank_reads_the_config_of_a_sweep_and_later_changes_by_rank_0(tmp_path: Path) -> None:
    finished = run_job(*torchrun(SCRIPTS / "config_everywhere.py", tmp_path), cwd=tmp_path).check()
    config = {"lr": 0.5, "model": REFUSED, "net": {"h": [1]}, "steps": 7}
    for where, runs in (("accelerate", 1), ("auto", 1), ("shared", 2)):
        start = f"SAW {where} "
        seen = [json.loads(line.removeprefix(start)) for line in finished.lines(start)]
        assert seen == [config] * 2
        assert [stored.config for stored in ended_runs(tmp_path / where, runs)] == [config] * runs
    init = 1 + (SCRIPTS / "config_everywhere.py").read_text().splitlines().index(OPENS)
    warned = f"config_everywhere.py:{init}: UserWarning: The ranks were given different configs: 'lr' is 0.2 on rank 1"
    # For "auto" and "shared", and for all sessions. Python may show equal warnings of one line only once.
    shown = (
        finished.output.count(f"{warned}, but 0.1 on rank 0."),
        finished.output.count("UserWarning: W&B cannot hold"),
    )
    assert 1 <= shown[0] <= 2
    assert 2 <= shown[1] <= 4
    assert finished.output.count("W&B accepts one run as a trial") == 1  # by rank 0, which has the sweep's values
    assert finished.output.count("UserWarning") == sum(shown) + 1
    assert finished.lines("SAW new ") == ["SAW new exp-new 0.5", "SAW new exp-new-rank-1 0.5"]
    assert [stored.config["lr"] for stored in ended_runs(tmp_path / "new", 2)] == [0.5] * 2
