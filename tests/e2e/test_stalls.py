"""Jobs that stand still say which rank stands where; healthy ones say nothing. `scripts/stalled.py` has more cases."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from processes import run_job, started, torchrun, wait_until
from wandb_server import WandbServer

SCRIPT = Path(__file__).parent / "scripts" / "stalled.py"
LINES = SCRIPT.read_text(encoding="utf-8").splitlines()
TRAIN = next(number for number, line in enumerate(LINES, 1) if "model(torch.ones(2, 2))" in line)


def message_of(case: str, tmp_path: Path) -> str:
    """Run a job until one of its ranks says that it stands still; return what all ranks have said."""
    output = tmp_path / "output.txt"
    with started(*torchrun(SCRIPT, case, tmp_path, processes=3), cwd=tmp_path, output=output):
        wait_until(lambda: "All stacks are in" in output.read_text(encoding="utf-8"), 120, "the message")
        time.sleep(1.0)  # no other rank says it, too
        text = output.read_text(encoding="utf-8")
    (message,) = [line for line in text.splitlines() if "All stacks are in" in line]
    return message


@pytest.mark.parametrize(
    ("case", "where", "what"),
    [
        (
            "dataset",
            f"Ranks 0, 2 wait in all_reduce (stalled.py:{TRAIN})",
            r"rank 1 (is calling sleep|stands) at stalled.py:\d+,",
        ),
        ("barrier", "Ranks 0, 2 wait in barrier", "same calls (call 11 of the default group: barrier on ranks 0, 2,"),
        ("stop_rank", "Ranks 0, 2 wait in all_reduce", "rank 1 does not answer: its process is stopped. To see more:"),
    ],
)
def test_the_rank_that_the_others_wait_for_is_named(case: str, where: str, what: str, tmp_path: Path) -> None:
    message = message_of(case, tmp_path)
    assert where in message
    assert what in message or re.search(what, message)
    stacks = re.search(r"All stacks are in (\S+)\. No process is ended; stall_timeout=None turns this off", message)
    assert stacks is not None
    text = Path(stacks[1]).read_text(encoding="utf-8")
    assert "Ranks 0, 2 wait in" in text
    assert f'File "{SCRIPT}", line ' in text
    (file,) = tmp_path.rglob("stall-*.txt")
    assert str(file) == stacks[1]
    assert file.parent.name == "files"  # of rank 0's run, whichever rank has told it


def test_a_stall_is_one_alert_of_an_online_run(wandb_server: WandbServer, tmp_path: Path) -> None:
    def alerts() -> list[Any]:
        sent = [request for request, _ in wandb_server.answered if request.operation == "NotifyScriptableRunAlert"]
        return [request.message["variables"] for request in sent]

    environment, output = wandb_server.environment(tmp_path), tmp_path / "output.txt"
    job = torchrun(SCRIPT, "dataset", tmp_path, processes=2)
    with started(*job, cwd=tmp_path, environment=environment, output=output):
        wandb_server.wait_until(lambda: bool(alerts()), within=120)
        time.sleep(3.0)  # no other rank sends one, too
    (alert,) = alerts()
    (run,) = wandb_server.runs.values()
    assert (alert["runName"], alert["severity"]) == (run.run_id, "WARN")
    (file,) = tmp_path.rglob("stall-*.txt")
    assert file.read_text(encoding="utf-8").splitlines()[1] == alert["text"]


def test_a_long_validation_of_one_rank_is_no_stall(tmp_path: Path) -> None:
    job = run_job(*torchrun(SCRIPT, "validation", tmp_path, processes=2), cwd=tmp_path, timeout=120).check()
    assert "All stacks are in" not in job.output
    assert not list(tmp_path.rglob("stall-*.txt"))
