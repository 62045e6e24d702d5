"""Cost of gathering a table or images of all ranks: time on the training thread, and time until the result is written.

Each of two and of four processes logs a table of 1,000 rows and five cells, 16 images of 3 x 64 x 64, and a table of
5 MB, with `dist_wandb.gathered`. The time on the training thread is that of calling `gathered` and `Session.log`. It is
compared with the stock way for this rank's part: creating the `wandb.Table` or the `wandb.Image`s, and passing them to
an offline `wandb.Run.log`. The time until written is from the call on rank 0 until its `wandb.Run.log` with the whole
value has returned; all ranks start together after a barrier. A repeat is a block of such calls, and its number is their
median on rank 0.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks import common

if TYPE_CHECKING:
    from queue import SimpleQueue

    from dist_wandb.session.session import Session

_COLUMNS: list[str | int] = ["label", "id", "score", "text", "right"]
_OURS, _STOCK = "dist_wandb, all ranks", "wandb, this rank alone"
_THREAD = "training thread, median milliseconds"
_WRITTEN = "until the whole is written, median milliseconds"
_THINGS = ("1,000 rows", "16 images", "5 MB of text")


def measure(options: common.Options) -> common.Result:
    """Run a job of two ranks, and one of four ranks."""
    result = common.Result("gather_cost")
    arguments = {"repeats": options.repeats, "calls": options.of(10, 2)}
    thread: dict[str, list[float]] = {}
    written: dict[str, list[float]] = {}
    for ranks in (2, 4):
        found = common.run_ranks(__file__, arguments, processes=ranks)[0]
        thread.update({f"{ranks} ranks, {name}": times for name, times in found["thread"].items()})
        written.update({f"{ranks} ranks, {name}": times for name, times in found["written"].items()})
    result.add(_THREAD, thread, against=_STOCK)
    result.add(_WRITTEN, written)
    for thing in _THINGS[:2]:
        ratio = result.ratio(_THREAD, f"2 ranks, {thing}: {_OURS}", f"2 ranks, {thing}: {_STOCK}")
        result.targets.append(common.Target(f"{thing}, 2 ranks: dist_wandb / wandb on the training thread", 0.5, ratio))
    return result


def job(arguments: dict[str, Any]) -> None:
    """Run one rank: all blocks, alternating."""
    import torch.distributed as dist

    import dist_wandb

    dist.init_process_group("gloo")
    found: dict[str, Any] = {"thread": {}, "written": {}}
    with dist_wandb.init("bench", mode="offline", dir=arguments["directory"]) as session:
        step = 0
        with common.watching(session) as handed:
            for _ in range(arguments["repeats"]):
                for thing, (gathered, stock) in zip(_THINGS, _ways(), strict=True):
                    ours = [_gather(session, handed, gathered, step := step + 1) for _ in range(arguments["calls"])]
                    alone = [_log_alone(session, stock, step := step + 1) for _ in range(arguments["calls"])]
                    session.flush(together=True)  # rows logged alone are also written in the background
                    while session.run and not handed.empty():
                        handed.get()
                    _note(found["thread"], f"{thing}: {_OURS}", [times[0] for times in ours])
                    _note(found["thread"], f"{thing}: {_STOCK}", alone)
                    _note(found["written"], thing, [times[1] for times in ours])
    common.report(arguments["directory"], dist.get_rank(), found)
    dist.destroy_process_group()


def _ways() -> list[tuple[Callable[[], Any], Callable[[], Any]]]:
    """Return for each thing the value to gather, and the value of the stock way."""
    import torch
    import wandb

    import dist_wandb

    rows = [[f"label {number}", number, number / 2, "some text of a prediction", True] for number in range(1000)]
    images = [torch.randint(0, 255, (3, 64, 64), dtype=torch.float32) for _ in range(16)]
    text = [[f"{number:05d}" * 1000] for number in range(1000)]
    return [
        (lambda: dist_wandb.gathered(rows, _COLUMNS), lambda: wandb.Table(_COLUMNS, rows)),
        (lambda: dist_wandb.gathered(images), lambda: [wandb.Image(image) for image in images]),
        (lambda: dist_wandb.gathered(text, ["text"]), lambda: wandb.Table(["text"], text)),
    ]


def _gather(
    session: Session, handed: SimpleQueue[common.Handed], make: Callable[[], Any], step: int
) -> tuple[float, float]:
    """Log once; return the milliseconds on the training thread, and on rank 0 those until the result was written."""
    import torch.distributed as dist

    dist.barrier()
    began = time.time()
    session.log({"whole": make()}, step=step)
    on_thread = time.time() - began
    session.flush(together=True)
    written = handed.get(timeout=60) if session.run else None
    if written is not None and "whole" not in written.row:
        raise RuntimeError(f"the row with the whole was expected, but another one was written: {sorted(written.row)}")
    ended = began if written is None else written.ended
    return 1000 * on_thread, 1000 * (ended - began)


def _log_alone(session: Session, make: Callable[[], Any], step: int) -> float:
    """Log in the stock way, on a rank with a run; return the milliseconds on the training thread."""
    import torch.distributed as dist

    dist.barrier()
    began = time.time()
    if session.run:
        session.run.log({"alone": make(), "global_step": step})
    return 1000 * (time.time() - began)


def _note(times: dict[str, list[float]], name: str, block: list[float]) -> None:
    times.setdefault(name, []).append(statistics.median(block))


if __name__ == "__main__":
    common.main(measure, job, __doc__)
