"""Plain PyTorch under `mp.spawn`: no launcher variables at all, every mode and scope in turn."""

import sys

import plain_loop
import torch.distributed as dist
import torch.multiprocessing as mp


def rank(index: int, directory: str, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=2)
    plain_loop.main(directory, "already")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank, args=tuple(sys.argv[1:]), nprocs=2)  # type: ignore[no-untyped-call]
