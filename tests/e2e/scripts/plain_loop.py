"""One rank of plain PyTorch: every mode and scope in turn, or some of them, each in its own directory."""

import json
import sys
from pathlib import Path

import torch.distributed as dist
from stored import COMBINATIONS, PATIENT, ROWS

import dist_wandb


def log_rows(run: dist_wandb.Session) -> None:
    for row in range(ROWS):
        run.log({"loss": 10.0 * run.topology.global_rank + row})


def main(directory: str, when: str, *only: str) -> None:
    if when == "after":
        dist.init_process_group("gloo")
    for run_mode, rank_scope in COMBINATIONS:
        if only and f"{run_mode}-{rank_scope}" not in only:
            continue
        into = Path(directory) / f"{run_mode}-{rank_scope}"
        with dist_wandb.init(
            "tests",
            run_mode=run_mode,
            rank_scope=rank_scope,
            limits=dist_wandb.Limits(heartbeat=PATIENT),
            id="exp",
            name="nm",
            dir=str(into),
            config={"lr": 0.1},
        ) as run:
            assert dist_wandb.get_run() is run
            log_rows(run)
        assert not dist_wandb.get_run()
    with dist_wandb.init("tests", run_mode="new", dir=str(Path(directory) / "generated")) as run:
        log_rows(run)
        seen = {"rank": run.topology.global_rank, "base_id": run.plan.base_id, "knows": run.topology.knows_layout}
        sys.stdout.write(f"\nSAW {json.dumps(seen)}\n")
    if when == "after":
        dist.barrier()  # rank 0 may host the store that others need for their last run
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
