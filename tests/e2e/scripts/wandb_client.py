"""One process that uses wandb itself, without dist_wandb, as its only argument specifies in JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import wandb
from processes import wait_until

_LONGEST = 60.0  # seconds


def wait_for_measurement(directory: str) -> None:
    """Wait until wandb has measured the machine: a run that is over before that has no system metrics.

    Args:
        directory: The directory of the run's files, `run.dir`. It was started with short intervals: see `MEASURED`.
    """
    files = Path(directory).parent
    wait_until(
        lambda: any(b"proc.memory" in path.read_bytes() for path in files.glob("run-*.wandb")),
        _LONGEST,
        "a measurement of the machine by wandb",
    )


def log(run: wandb.Run, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        run.log(row)
        sys.stdout.write(f"logged {row}\n")


def main(order: dict[str, Any]) -> None:
    """Open a run, log, log more once a file exists (`goes_on_after`), finish."""
    run = wandb.init(project="tests", **order["init"])
    log(run, order["rows"])
    if path := order.get("goes_on_after"):
        wait_until(Path(path).exists, _LONGEST, path)
    log(run, order.get("more_rows", []))
    run.finish()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
