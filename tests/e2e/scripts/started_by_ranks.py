"""Two ranks train, and start processes that log: another program, a spawned process, and a forked one."""

import multiprocessing
import subprocess
import sys
import time
from typing import Any

import torch.distributed as dist

import dist_wandb as wandb

LIMITS = {"join_timeout": 30}


def evaluate(name: str) -> None:
    begun = time.monotonic()
    run = wandb.init(project="tests", name=name, limits=LIMITS, settings={"silent": True})
    run.log({"acc": 0.9}, step=10)
    run.finish()
    sys.stdout.write(f"EVALUATED {name} {time.monotonic() - begun:.1f}\n")
    sys.stdout.flush()


def start(kind: str) -> int:
    """Evaluate in another process; return its exit code."""
    if kind == "program":
        return subprocess.run([sys.executable, __file__, kind], check=False).returncode
    context: Any = multiprocessing.get_context(kind)
    process = context.Process(target=evaluate, args=(kind,))
    process.start()
    process.join()
    return process.exitcode or 0


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    wandb.init(project="tests", name="train", limits=LIMITS, settings={"silent": True})
    codes = []
    for step in range(12):
        wandb.log({"loss": 1.0 + rank}, step=step)
        if step == 4:
            codes = [start(kind) for kind in (("program", "fork") if rank == 0 else ("spawn",))]
        dist.barrier()
    wandb.finish()
    sys.stdout.write(f"CODES {rank} {codes}\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        evaluate(sys.argv[1])
    else:
        main()
