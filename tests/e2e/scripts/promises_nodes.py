"""Plain PyTorch on two nodes of two ranks: in worker scope, exchanges are within a node."""

import sys
from pathlib import Path

import torch.distributed as dist
from history import STEPS

import dist_wandb


def main(directory: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    into = Path(directory)
    with dist_wandb.init("tests", id="exp", dir=str(into / "shared"), rank_scope="worker", run_mode="shared") as run:
        for step in range(STEPS):
            run.log({"loss": 10.0 * rank + step}, step=step)
    with dist_wandb.init("tests", id="exp", dir=str(into / "auto"), rank_scope="worker", spread=True) as run:
        assert run.topology.node_rank == rank // 2
        run.log({"loss": 0.0}, step=0)
        assert run.flush(timeout=20)
        dist.barrier()
        if rank < 2:  # the other node logs nothing while this one does
            for step in range(1, STEPS):
                run.log({"loss": 10.0 * rank + step}, step=step)
            assert run.flush(timeout=30), "the other node was waited for"  # because peer_timeout would be 60 s
        dist.barrier()
        if rank >= 2:
            run.log({f"loss_{rank}": 10.0 * rank, "loss": 10.0 * rank}, step=STEPS)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
