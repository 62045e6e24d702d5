"""Jobs that stand still, each in one way. Started by torchrun with the name of a case; by hand, `--all` runs them all.

`python tests/e2e/scripts/stalled.py --all [CASE ...]` starts each case under torchrun, prints what its ranks say, and
how long after the limit. It ends no job itself, so the runner ends each one when it has spoken, or does not speak.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

LIMIT = 4.0  # seconds
FAR = 600.0  # seconds: longer than any job of a test
_WITHOUT_AGENT = (
    "export MASTER_ADDR=127.0.0.1 MASTER_PORT=29517 WORLD_SIZE=3; "
    'for r in 0 1 2; do RANK=$r LOCAL_RANK=$r "$0" "$@" & done; wait'
)
HEALTHY = ("validation", "slow_line", "never_logs", "slow_start", "healthy")


def main(case: str, directory: str) -> None:
    """Train some steps, then stand still."""
    import torch
    import torch.distributed as dist

    import dist_wandb

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    limits = {"heartbeat": 0.5, "peer_timeout": 5, "join_timeout": 30, "finish_timeout": 5}
    run = dist_wandb.init(mode="offline", dir=directory, stall_timeout=LIMIT, limits=limits)
    model = torch.nn.parallel.DistributedDataParallel(Model(case, rank))
    for step in range(5):
        loss = model(torch.ones(2, 2)).sum()
        loss.backward()
        if case != "never_logs":
            run.log({"loss": loss.item()}, step=step)
    print(f"rank {rank} of {size}, process {os.getpid()}, begins {case} at {time.time():.1f}", flush=True)
    CASES[case](rank, model)
    run.finish()
    dist.destroy_process_group()


def Model(case: str, rank: int) -> object:  # noqa: N802  # torch is imported late
    """Return a model; one of its ranks may fall asleep inside of it."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if case == "forward" and rank == 1 and self.calls > 5:
                time.sleep(FAR)
            return self.layer(x)  # type: ignore[no-any-return]

    return Net()


def reduce_numbers() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(2))


def train(model: object, steps: int = 1) -> None:
    import torch

    for _ in range(steps):
        model(torch.ones(2, 2)).sum().backward()  # type: ignore[operator]


class Sleepy:
    """A data set of which an item never comes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        time.sleep(FAR)
        return float(index)


def dataset(rank: int, model: object) -> None:
    if rank == 1:
        Sleepy()[0]
    train(model)


def worker(rank: int, model: object) -> None:
    import torch

    if rank == 1:
        next(iter(torch.utils.data.DataLoader(Sleepy(), num_workers=2)))  # type: ignore[arg-type]
    train(model)


def barrier(rank: int, model: object) -> None:
    import torch.distributed as dist

    if rank != 1:
        dist.barrier()
    train(model)


def objects(rank: int, model: object) -> None:
    import torch.distributed as dist

    if rank != 0:
        dist.all_gather_object([None] * dist.get_world_size(), {"rank": rank})
    train(model)


def two_groups(rank: int, _: object) -> None:
    import torch
    import torch.distributed as dist

    size = dist.get_world_size()
    groups = [dist.new_group([*range(size)]), dist.new_group([*range(size)])]
    if rank < size // 2:
        dist.all_reduce(torch.ones(1), group=groups[0])
    else:
        dist.broadcast(torch.ones(1), 0, group=groups[1])


def same_line(rank: int, _: object) -> None:
    import torch
    import torch.distributed as dist

    of_all = dist.new_group([*range(dist.get_world_size())])
    for turn in range(3):
        for group in (of_all, None):
            if not (turn == 1 and group is of_all and rank == 1):
                dist.all_reduce(torch.ones(1), group=group)


def stop_rank(rank: int, model: object) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    train(model)


def stop_0(rank: int, model: object) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    train(model)


def gil(rank: int, model: object) -> None:
    if rank == 1:
        ctypes.PyDLL(None).sleep(int(FAR))
    train(model)


def gil_0(rank: int, model: object) -> None:
    if rank == 0:
        ctypes.PyDLL(None).sleep(int(FAR))
    train(model)


def busy(rank: int, model: object) -> None:
    while rank == 1:
        pass
    train(model)


def swallowed(rank: int, model: object) -> None:
    try:
        if rank == 1:
            raise ValueError("a bad batch")
        train(model)
    except ValueError:
        pass
    reduce_numbers()


def lock(rank: int, model: object) -> None:
    if rank == 1:
        threading.Lock().acquire() and threading.Event().wait()
    train(model)


def goes_on(rank: int, model: object) -> None:
    if rank == 1:
        time.sleep(14)
    train(model)


def validation(rank: int, model: object) -> None:
    import torch.distributed as dist

    until = time.monotonic() + 2.5 * LIMIT
    while rank == 0 and time.monotonic() < until:
        sum(range(10000))
    dist.barrier()
    train(model)


def slow_line(rank: int, model: object) -> None:
    import torch.distributed as dist

    for _ in range(20 if rank == 0 else 0):
        time.sleep(0.5)
    dist.barrier()
    train(model)


def never_logs(_: int, model: object) -> None:
    for _step in range(30):
        train(model)
        time.sleep(0.5)


def slow_start(_: int, model: object) -> None:
    train(model)


def healthy(_: int, model: object) -> None:
    train(model, 20)


CASES: dict[str, Callable[[int, object], None]] = {
    **{"dataset": dataset, "forward": lambda _, model: train(model, 2), "worker": worker, "barrier": barrier},
    **{"objects": objects, "two_groups": two_groups, "same_line": same_line, "stop_rank": stop_rank, "stop_0": stop_0, "gil": gil},
    **{"gil_0": gil_0, "busy": busy, "swallowed": swallowed, "lock": lock, "goes_on": goes_on},
    **{"validation": validation, "slow_line": slow_line, "never_logs": never_logs, "healthy": healthy},
}


def run_all(names: list[str]) -> None:
    """Start each case, and print what its ranks say."""
    for name in names or list(CASES):
        with tempfile.TemporaryDirectory() as directory:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
            if name == "stop_0":  # rank 0 has the store
                launcher = ["/bin/sh", "-c", _WITHOUT_AGENT, sys.executable]
            command = [*launcher, __file__, name, directory]
            job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
            timer = threading.Timer(60, _kill, ([job.pid],))
            began, pids = 0.0, [job.pid]
            print(f"--- {name}")
            for line in job.stdout or ():
                if " begins " in line:
                    began, pids = float(line.split()[-1]), [*pids, int(line.split()[5].strip(","))]
                    timer.cancel()
                    timer = threading.Timer(45, _kill, (pids,))
                    timer.start()
                if "dist_wandb: " in line and "run_mode" not in line:
                    print(f"{time.time() - began - LIMIT:+.1f} s after the limit: {line.strip()}", flush=True)
                if "All stacks are in" in line and name != "goes_on":
                    time.sleep(1.0)  # nothing else may follow
                    _kill(pids)
            timer.cancel()
            print(f"exit code {job.wait()}", flush=True)


def _kill(pids: list[int]) -> None:
    for pid in reversed(pids):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(os.getpgid(pid), signal.SIGKILL)  # with its workers


if __name__ == "__main__":
    if sys.argv[1] == "--all":
        run_all(sys.argv[2:])
    else:
        main(*sys.argv[1:])
