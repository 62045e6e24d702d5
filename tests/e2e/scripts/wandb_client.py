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


def touch(path: str | None) -> None:
    if path is not None:
        Path(path).touch()


def log(run: wandb.Run, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        run.log(row)
        sys.stdout.write(f"logged {row}\n")


def main(order: dict[str, Any]) -> None:
    """Open a run, log, log more, finish.

    `opens_after` and `goes_on_after` name files to wait for; `opened` and `logged` name files to create. If it
    `is_measured`, it does not finish before wandb has measured the machine.
    """
    wait_for(order.get("opens_after"))
    run = wandb.init(project="tests", settings=wandb.Settings(**order.get("settings", {})), **order["init"])
    touch(order.get("opened"))
    log(run, order.get("rows", []))
    touch(order.get("logged"))
    wait_for(order.get("goes_on_after"))
    log(run, order.get("more_rows", []))
    if "file" in order:
        run.save(order["file"], base_path=str(Path(order["file"]).parent), policy="now")
        artifact = wandb.Artifact("weights", type="model", metadata={"epoch": 3})
        artifact.add_file(order["file"])
        run.log_artifact(artifact, aliases=["best"])
    if order.get("is_measured"):
        wait_for_measurement(run.dir)
    run.finish(exit_code=order.get("exit_code", 0))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
