"""How long the logger takes to open its run in a two-process ddp job: DistWandbLogger against the stock WandbLogger.

Each job reports, per rank, the wall-clock time of the first use of `logger.experiment` in Lightning's setup hook; the
slower rank counts, as a barrier follows. Jobs alternate, so that both loggers see the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

JOB = Path(__file__).with_name("startup_job.py")
RESULTS = Path(__file__).with_name("results")
LOGGERS = ("stock", "dist_wandb")


def opening_time(logger: str) -> float:
    """Seconds until the slower rank of one job had its run."""
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
        output = subprocess.run(
            [sys.executable, str(JOB), logger, directory],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
    times = [float(line.split()[1]) for line in output.splitlines() if line.startswith("OPENED ")]
    if len(times) != 2:
        raise RuntimeError(f"expected two ranks to report, got {times}:\n{output}")
    return max(times)


def table(seconds: dict[str, list[float]]) -> Table:
    shown = Table("logger", "median s", "min s", "max s", "ratio of medians", title="opening a run, 2-process ddp")
    stock = statistics.median(seconds["stock"])
    for logger, times in seconds.items():
        median = statistics.median(times)
        shown.add_row(logger, f"{median:.3f}", f"{min(times):.3f}", f"{max(times):.3f}", f"{median / stock:.2f}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="jobs per logger (default: 7)")
    repeats = parser.parse_args().repeats
    seconds: dict[str, list[float]] = {logger: [] for logger in LOGGERS}
    for repeat in range(repeats):
        for logger in LOGGERS if repeat % 2 == 0 else reversed(LOGGERS):
            seconds[logger].append(opening_time(logger))
    Console().print(table(seconds))
    RESULTS.mkdir(exist_ok=True)
    record = {"seconds": seconds, "python": platform.python_version(), "machine": platform.machine()}
    (RESULTS / "startup.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
