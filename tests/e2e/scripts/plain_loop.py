"""One rank of plain PyTorch without a process group: every mode and scope in turn, each in its own directory."""

import json
import sys
from pathlib import Path
from typing import Any

from stored import COMBINATIONS, PATIENT, ROWS

import dist_wandb


def log_rows(run: dist_wandb.Session) -> None:
    for row in range(ROWS):
        run.log({"loss": 10.0 * run.topology.global_rank + row})


def main(directory: Path) -> None:
    given: dict[str, Any] = {"id": "exp", "name": "nm", "config": {"lr": 0.1}}
    limits = dist_wandb.Limits(heartbeat=PATIENT)
    for mode, scope in COMBINATIONS:
        into = str(directory / f"{mode}-{scope}")
        with dist_wandb.init("tests", run_mode=mode, rank_scope=scope, limits=limits, dir=into, **given) as run:
            assert dist_wandb.get_run() is run
            log_rows(run)
        assert not dist_wandb.get_run()
    with dist_wandb.init("tests", run_mode="new", dir=str(directory / "generated")) as run:
        log_rows(run)
        sys.stdout.write(f"\nSAW {json.dumps({'rank': run.topology.global_rank, 'base_id': run.plan.base_id})}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
