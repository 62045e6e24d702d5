"""Cost of `log` on the training thread: `Session.log` of two ranks compared with `wandb.Run.log` of the same row.

Both run in the same process in alternating blocks: the session's run, and a second offline run that only
`wandb.Run.log` writes to. A number is the time of one call on the calling thread, on the rank with the larger value. It
does not include later work on other threads, which is part of the step time in `lightning_step`.

- paced: about 5 ms of matrix products and one all_reduce of the training's group between calls, as in a step of ddp.
- hot: calls in a tight loop. Here the session's thread falls behind, and competes for the interpreter.
- timed: an empty section of `Session.timed`, the mean of 1,000.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import common

_ROWS = ("1 float", "20 floats", "200 floats", "20 CPU tensors")
_WAYS = ("wandb", "dist_wandb")
_PACES = ("paced", "hot")
_STEP_SECONDS = 0.005
_PACED = "paced, median microseconds per call"
_TIMED = "timed section, microseconds"
_SECTIONS = 1000
_TITLES = {
    _PACED: ("paced", "median"),
    "paced, mean microseconds per call": ("paced", "mean"),
    "hot loop, median microseconds per call": ("hot", "median"),
    "hot loop, mean microseconds per call": ("hot", "mean"),
}


def measure(options: common.Options) -> common.Result:
    """Run one job of two ranks, which measures all blocks."""
    steps = {"paced": options.of(200, 5), "hot": options.of(500, 20)}
    reports = common.run_ranks(__file__, {"repeats": options.repeats, "steps": steps})
    result = common.Result("log_cost")
    for title, (pace, kind) in _TITLES.items():
        blocks = [(row, way) for row in _ROWS for way in _WAYS]
        result.add(
            title,
            {f"{row}: {way}": _slower(reports, f"{pace}, {row}, {way}", kind) for row, way in blocks},
            against="wandb",
        )
    timed = _slower(reports, "timed", "mean")
    result.add(_TIMED, {"with run.timed(...)": timed})
    result.targets.append(common.Target(_TIMED, 5, statistics.median(timed)))
    ratio = result.ratio(_PACED, "20 floats: dist_wandb", "20 floats: wandb")
    result.targets.append(common.Target("log of 20 floats / bare wandb.Run.log, paced", 0.5, ratio))
    return result


def _slower(reports: list[dict[str, Any]], block: str, kind: str) -> list[float]:
    """Return for each block the number of the rank with the larger value."""
    return [max(of_ranks) for of_ranks in zip(*(report[f"{block}, {kind}"] for report in reports), strict=True)]


def job(arguments: dict[str, Any]) -> None:
    """Run one rank: all blocks, alternating."""
    import torch
    import torch.distributed as dist
    import wandb

    import dist_wandb

    dist.init_process_group("gloo")
    rank, directory = dist.get_rank(), arguments["directory"]
    session = dist_wandb.init(project="log_cost", dir=directory)
    own = f"{directory}/bare-{rank}"
    bare = wandb.init(project="log_cost", dir=own, settings=wandb.Settings(root_dir=own), reinit="create_new")
    logs: dict[str, Callable[[dict[str, Any]], None]] = {"wandb": bare.log, "dist_wandb": session.log}
    rows: dict[str, dict[str, Any]] = {f"{count} floats": common.numbers(count) for count in (20, 200)}
    rows["1 float"] = common.numbers(1)
    rows["20 CPU tensors"] = {name: torch.tensor(number) for name, number in common.numbers(20).items()}
    paces: dict[str, Callable[[], None]] = {"paced": _Step(), "hot": _nothing}
    found: dict[str, list[float]] = {}
    for log in logs.values():
        for row in rows.values():  # names are exchanged once
            log(row)
    for pace in _PACES:
        for row_name in _ROWS:
            for way in common.alternating(_WAYS, arguments["repeats"]):
                session.flush()
                dist.barrier()
                times = _block(logs[way], rows[row_name], arguments["steps"][pace], paces[pace])
                found.setdefault(f"{pace}, {row_name}, {way}, median", []).append(statistics.median(times))
                found.setdefault(f"{pace}, {row_name}, {way}, mean", []).append(statistics.mean(times))
    for _ in range(arguments["repeats"]):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(_SECTIONS):
            with session.timed("section"):
                pass
        found.setdefault("timed, mean", []).append(1e6 * (time.perf_counter() - begin) / _SECTIONS)
    session.finish()
    bare.finish()
    common.report(directory, rank, found)
    dist.destroy_process_group()


def _block(
    log: Callable[[dict[str, Any]], None], row: dict[str, Any], steps: int, between: Callable[[], None]
) -> list[float]:
    """Return the microseconds of each call."""
    times = []
    for _ in range(steps):
        between()
        start = time.perf_counter()
        log(row)
        times.append(1e6 * (time.perf_counter() - start))
    return times


class _Step:
    """Simulates a training step: matrix products for `_STEP_SECONDS`, then one all_reduce."""

    def __init__(self) -> None:
        import torch

        self._matrix = torch.rand(192, 192)
        self._gradient = torch.ones(1000)

    def __call__(self) -> None:
        import torch.distributed as dist

        end = time.perf_counter() + _STEP_SECONDS
        while time.perf_counter() < end:
            self._matrix @ self._matrix
        dist.all_reduce(self._gradient)
        self._gradient.fill_(1.0)


def _nothing() -> None:
    """Do nothing between the calls of a hot loop."""


if __name__ == "__main__":
    common.main(measure, job, __doc__)
