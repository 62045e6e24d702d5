"""Jobs that stand still, each in one way, and healthy ones that do not. torchrun starts them with the name of a case.

`python tests/e2e/scripts/stalled.py --all [CASE ...]` starts each case with three ranks, and prints what they say and
how long after the limit. Nothing ends such a job, so this kills it when it has spoken, or does not speak.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

LIMIT = 4.0  # seconds
FAR = 600  # seconds: longer than any job of a test
LIMITS = {"heartbeat": 0.5, "peer_timeout": 5, "join_timeout": 30, "finish_timeout": 5}
PATIENCE = 45  # seconds until a job is killed that says nothing
_WITHOUT_AGENT = (  # rank 0 has the store
    "export MASTER_ADDR=127.0.0.1 MASTER_PORT=29517 WORLD_SIZE=3; "
    'for r in 0 1 2; do RANK=$r LOCAL_RANK=$r "$0" "$@" & done; wait'
)


def main(case: str, directory: str) -> None:
    """Train some steps, then do what the case does."""
    import torch
    import torch.distributed as dist

    import dist_wandb

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mode: Literal["online", "offline"] = "online" if "WANDB_BASE_URL" in os.environ else "offline"
    run = dist_wandb.init(mode=mode, dir=directory, stall_timeout=LIMIT, limits=LIMITS)
    net = torch.nn.Linear(2, 2)
    model = torch.nn.parallel.DistributedDataParallel(net)
    for step in range(5):
        train(model)
        if case != "never_logs":
            run.log({"loss": 0.5}, step=step)
    tell(rank, case)
    if case == "forward" and rank == 1:
        vars(net)["forward"] = lambda _: time.sleep(FAR)
    CASES[case](rank, model)
    run.finish()
    dist.destroy_process_group()


def tell(rank: int, case: str) -> None:
    """Print that the case begins."""
    sys.stdout.write(f"rank {rank} is process {os.getpid()} and begins {case} at {time.time():.1f}\n")
    sys.stdout.flush()


def train(model: Any, steps: int = 1) -> None:
    import torch

    for _ in range(steps):
        model(torch.ones(2, 2)).sum().backward()


def call(name: str, *arguments: Any, **given: Any) -> None:
    import torch.distributed as dist

    getattr(dist, name)(*arguments, **given)


class Sleepy:
    """A data set of which an item never comes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        time.sleep(FAR)
        return float(index)


# --- what stands still ------------------------------------------------------------------------------------------------


def dataset(rank: int, model: Any) -> None:
    if rank == 1:
        Sleepy()[0]
    train(model)


def forward(_: int, model: Any) -> None:
    train(model, 2)


def worker(rank: int, model: Any) -> None:
    import torch

    if rank == 1:
        next(iter(torch.utils.data.DataLoader(Sleepy(), num_workers=2)))  # type: ignore[arg-type]
    train(model)


def barrier(rank: int, model: Any) -> None:
    import torch.distributed as dist

    if rank != 1:
        dist.barrier()
    train(model)


def objects(rank: int, model: Any) -> None:
    import torch.distributed as dist

    if rank != 0:
        dist.all_gather_object([None] * dist.get_world_size(), {"rank": rank})
    train(model)


def two_groups(rank: int, _: Any) -> None:
    import torch
    import torch.distributed as dist

    groups = [dist.new_group([*range(dist.get_world_size())]) for _ in range(2)]
    if rank == 0:
        dist.all_reduce(torch.ones(1), group=groups[0])
    else:
        dist.broadcast(torch.ones(1), 0, group=groups[1])


def same_line(rank: int, _: Any) -> None:
    import torch
    import torch.distributed as dist

    of_all = dist.new_group([*range(dist.get_world_size())])
    for turn in range(3):
        for group in (of_all, None):
            if not (turn == 1 and group is of_all and rank == 1):
                dist.all_reduce(torch.ones(1), group=group)


def stop_rank(rank: int, model: Any, which: int = 1) -> None:
    if rank == which:
        os.kill(os.getpid(), signal.SIGSTOP)
    train(model)


def stop_0(rank: int, model: Any) -> None:
    stop_rank(rank, model, 0)


def gil(rank: int, model: Any, which: int = 1) -> None:
    if rank == which:
        ctypes.PyDLL(None).sleep(FAR)
    train(model)


def gil_0(rank: int, model: Any) -> None:
    gil(rank, model, 0)


def busy(rank: int, model: Any) -> None:
    while rank == 1:
        pass
    train(model)


def swallowed(rank: int, model: Any) -> None:
    import torch.distributed as dist

    with contextlib.suppress(ZeroDivisionError):
        _ = 1 / (rank != 1)
        train(model)
    dist.barrier()


def lock(rank: int, model: Any) -> None:
    if rank == 1:
        threading.Event().wait()
    train(model)


def goes_on(rank: int, model: Any) -> None:
    if rank == 1:
        time.sleep(4 * LIMIT)
    train(model)


# --- what does not ----------------------------------------------------------------------------------------------------


def validation(rank: int, model: Any) -> None:
    until = time.monotonic() + 1.6 * LIMIT  # it is told to be slow after three limits
    while rank == 0 and time.monotonic() < until:
        sum(range(10000))
    call("barrier")
    train(model)


def slow_line(rank: int, model: Any) -> None:
    for _ in range(13 if rank == 0 else 0):
        time.sleep(0.5)
    call("barrier")
    train(model)


def never_logs(_: int, model: Any) -> None:
    for _step in range(30):
        train(model)
        time.sleep(0.5)


def healthy(_: int, model: Any) -> None:
    train(model, 20)


# --- frameworks -------------------------------------------------------------------------------------------------------


def lightning(directory: str) -> None:
    """A barrier on rank 0 only, in a hook of Lightning's Trainer."""
    from lightning_trainers import Layer, samples, trainer_of_two

    from dist_wandb import DistWandbLogger

    class Net(Layer):
        def training_step(self, batch: Any, index: int) -> Any:
            if index == 5:
                tell(self.global_rank, "lightning")
                if self.global_rank == 0:
                    self.trainer.strategy.barrier()
            loss = super().training_step(batch, index)
            self.log("loss", loss)
            return loss

    logger = DistWandbLogger(save_dir=directory, offline=True, stall_timeout=LIMIT, limits=LIMITS)
    trainer_of_two(logger, devices=3, max_steps=20).fit(Net(), samples(90))


def accelerate(directory: str) -> None:
    """A barrier on the main process only, with Accelerate."""
    import torch
    from accelerate import Accelerator

    from dist_wandb import DistWandbTracker

    tracker = DistWandbTracker(mode="offline", dir=directory, stall_timeout=LIMIT, limits=LIMITS)
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("stalled")
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    for step in range(20):
        accelerator.backward(model(torch.ones(2, 2)).sum())
        accelerator.log({"loss": 0.5}, step=step)
        if step == 5:
            tell(accelerator.process_index, "accelerate")
            if accelerator.is_main_process:
                accelerator.wait_for_everyone()


def transformers(directory: str) -> None:
    """A rank that sleeps while it collates a batch of the Hugging Face Trainer."""
    import torch
    from transformers import Trainer, TrainingArguments

    from dist_wandb import DistWandbCallback

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, x: Any) -> dict[str, Any]:
            return {"loss": self.layer(x).sum()}

    seen = [0]

    def collate(items: list[Any]) -> dict[str, Any]:
        seen[0] += 1
        if seen[0] == 6:
            tell(int(os.environ["RANK"]), "transformers")
            if os.environ["RANK"] == "1":
                time.sleep(FAR)
        return {"x": torch.stack(items)}

    callback = DistWandbCallback(mode="offline", dir=directory, stall_timeout=LIMIT, limits=LIMITS)
    plain: dict[str, Any] = {"report_to": "none", "use_cpu": True, "save_strategy": "no", "logging_steps": 1}
    arguments = TrainingArguments(directory, max_steps=20, remove_unused_columns=False, disable_tqdm=True, **plain)
    data = [torch.ones(2) for _ in range(900)]
    Trainer(Net(), arguments, collate, data, callbacks=[callback]).train()


# --- by hand ----------------------------------------------------------------------------------------------------------

FRAMEWORKS: dict[str, Callable[[str], None]] = {one.__name__: one for one in (lightning, accelerate, transformers)}
STALLED = (
    *(dataset, forward, worker, barrier, objects, two_groups, same_line, stop_rank, stop_0, gil, gil_0, busy),
    *(swallowed, lock, goes_on),
)
HEALTHY = (validation, slow_line, never_logs, healthy)
CASES: dict[str, Callable[[int, Any], None]] = {one.__name__: one for one in (*STALLED, *HEALTHY)}


def run_all(names: list[str]) -> None:
    """Start each case, and print what its ranks say."""
    for name in names or [*CASES, *FRAMEWORKS]:
        with tempfile.TemporaryDirectory() as directory:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
            if name == "stop_0":
                launcher = ["/bin/sh", "-c", _WITHOUT_AGENT, sys.executable]
            command = [*launcher, __file__, name, directory]
            job = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
            sys.stdout.write(f"--- {name}\n")
            _follow(job, [job.pid], name)
            sys.stdout.write(f"exit code {job.wait()}\n")
            sys.stdout.flush()


def _follow(job: subprocess.Popen[str], pids: list[int], name: str) -> None:
    timer = threading.Timer(2 * PATIENCE, _kill, (pids,))
    timer.start()
    began = 0.0
    for line in job.stdout or ():
        if begins := re.search(r"is process (\d+) and begins \w+ at ([\d.]+)", line):  # the Trainer prints, too
            began, pids[1:] = float(begins[2]), [*pids[1:], int(begins[1])]
            timer.cancel()
            timer = threading.Timer(PATIENCE, _kill, (pids,))
            timer.start()
        if "dist_wandb: " in line and "run_mode" not in line:
            sys.stdout.write(f"{time.time() - began - LIMIT:+.1f} s after the limit: {line.strip()}\n")
        if "All stacks are in" in line and name != "goes_on":
            time.sleep(1.0)  # nothing else may follow
            _kill(pids)
    timer.cancel()


def _kill(pids: list[int]) -> None:
    for pid in reversed(pids):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(os.getpgid(pid), signal.SIGKILL)  # with its workers


if __name__ == "__main__":
    if sys.argv[1] == "--all":
        run_all(sys.argv[2:])
    elif sys.argv[1] in FRAMEWORKS:
        FRAMEWORKS[sys.argv[1]](sys.argv[2])
    else:
        main(*sys.argv[1:])
