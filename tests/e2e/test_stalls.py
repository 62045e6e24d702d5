"""Jobs that stand still say which rank stands where; healthy ones say nothing."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from processes import run_job, started, torchrun, wait_until
from wandb_server import WandbServer

SCRIPT = Path(__file__).parent / "scripts" / "stalled.py"
LINES = SCRIPT.read_text(encoding="utf-8").splitlines()
TRAIN = next(number for number, line in enumerate(LINES, 1) if "model(torch.ones(2, 2))" in line)


def test_a_stopped_rank_that_the_others_wait_for_is_named(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    with started(*torchrun(SCRIPT, "stop_rank", tmp_path, processes=3), cwd=tmp_path, output=output):
        wait_until(lambda: "All stacks are in" in output.read_text(encoding="utf-8"), 120, "the message")
        time.sleep(1.0)  # no other rank says it, too
        text = output.read_text(encoding="utf-8")
    (message,) = [line for line in text.splitlines() if "All stacks are in" in line]
    assert "Ranks 0, 2 wait in all_reduce" in message
    assert "rank 1 does not answer: its process is stopped. To see more:" in message
    stacks = re.search(r"All stacks are in (\S+)\. No process is ended; stall_timeout=None turns this off", message)
    (file,) = tmp_path.rglob("stall-*.txt")
    assert stacks is not None
    assert str(file) == stacks[1]
    assert file.parent.name == "files"  # of rank 0's run, whichever rank has told it


def test_a_stall_is_one_alert_of_an_online_run_that_names_the_rank_and_the_line(
    wandb_server: WandbServer, tmp_path: Path
) -> None:
    def alerts() -> list[Any]:
        sent = [request for request, _ in wandb_server.answered if request.operation == "NotifyScriptableRunAlert"]
        return [request.message["variables"] for request in sent]

    environment, output = wandb_server.environment(tmp_path), tmp_path / "output.txt"
    job = torchrun(SCRIPT, "dataset", tmp_path, processes=3)
    with started(*job, cwd=tmp_path, environment=environment, output=output):
        wandb_server.wait_until(lambda: bool(alerts()), within=120)
        time.sleep(2.0)  # no other rank sends one, too
    (alert,) = alerts()
    (run,) = wandb_server.runs.values()
    assert (alert["runName"], alert["severity"]) == (run.run_id, "WARN")
    assert f"Ranks 0, 2 wait in all_reduce (stalled.py:{TRAIN})" in alert["text"]
    assert re.search(r"rank 1 (is calling sleep|stands) at stalled.py:\d+,", alert["text"])
    (file,) = tmp_path.rglob("stall-*.txt")
    text = file.read_text(encoding="utf-8")
    assert text.splitlines()[1] == alert["text"]
    assert f'File "{SCRIPT}", line ' in text


def test_a_long_validation_of_one_rank_is_no_stall(tmp_path: Path) -> None:
    job = run_job(*torchrun(SCRIPT, "validation", tmp_path, processes=2), cwd=tmp_path, timeout=120).check()
    assert "All stacks are in" not in job.output
    assert not list(tmp_path.rglob("stall-*.txt"))
