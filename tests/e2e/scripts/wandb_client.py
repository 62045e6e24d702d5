"""One process that uses wandb itself, without dist_wandb, as its only argument specifies in JSON."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import wandb

_LONGEST = 60.0  # seconds


def wait_for(path: str | None) -> None:
    deadline = time.monotonic() + _LONGEST
    while path is not None and not Path(path).exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)


def wait_for_measurement(directory: str) -> None:
    """Wait until wandb has measured the machine: a run that is over before that has no system metrics.

    Args:
        directory: The directory of the run's files, `run.dir`. It was started with short intervals: see `MEASURED`.
    """
    deadline = time.monotonic() + _LONGEST
    while not any(b"proc.memory" in path.read_bytes() for path in Path(directory).parent.glob("run-*.wandb")):
        assert time.monotonic() < deadline, f"wandb has not measured the machine within {_LONGEST:.0f} s"
        time.sleep(0.05)


def log(run: wandb.Run, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        run.log(row)
        sys.stdout.write(f"logged {row}\n")


def main(order: dict[str, Any]) -> None:
    """Open a run, log, log more once a file exists (`goes_on_after`), finish."""
    run = wandb.init(project="tests", **order["init"])
    log(run, order["rows"])
    wait_for(order.get("goes_on_after"))
    log(run, order.get("more_rows", []))
    run.finish()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
