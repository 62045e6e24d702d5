"""Delay of rows and growth of memory: two processes, rows of 20 names.

Delay: both ranks log every 20 or 200 ms, each at a random moment in the first half of that time. The delay of a row is
the time from the call of `log` on the last rank to rank 0's call of `wandb.Run.log` with the reduced row; both ranks
read the clock of the same machine. A repeat is a block of rows, and its numbers are median and 95th percentile.

Memory: the resident set of both ranks, every 5,000 of 100,000 rows that are logged at a steady pace; pending rows are
written before each sample. The same is measured for a process that passes these rows to an offline `wandb.Run.log`. The
result is the growth from the mean of the second fifth of the samples to that of the last fifth. The same is reported
for the memory blocks of Python after a garbage collection, because the resident set also contains free memory of
allocators.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import common
from rich.table import Table

_NAMES = 20
_PERIODS = {"a row every 20 ms": 0.02, "a row every 200 ms": 0.2}
_MEDIAN, _TAIL = "delay, median milliseconds", "delay, 95th percentile, milliseconds"
_GROWTH = "growth of the resident set, MiB"
_SAMPLES = 20  # of memory, in 100,000 rows
_PACE = 0.0015  # shortest time in seconds per row for memory measurements
_FLAT = 8.0  # MiB: largest growth of a process that counts as constant


def measure(options: common.Options) -> common.Result:
    """Measure delays in one job, memory in two others."""
    result = common.Result("delay")
    _measure_delay(result, options)
    _measure_memory(result, options.memory_rows)
    return result


def _measure_delay(result: common.Result, options: common.Options) -> None:
    rows = dict(zip(_PERIODS, (options.of(200, 20), options.of(40, 5)), strict=True))
    arguments = {"what": "delay", "repeats": options.repeats, "rows": rows}
    primary, *others = common.run_ranks(__file__, arguments)
    medians: dict[str, list[float]] = {}
    tails: dict[str, list[float]] = {}
    for block, period in enumerate(primary["periods"]):
        said = [report["logged"][block] for report in (primary, *others)]
        handed = primary["handed"][block]
        delays = [1000 * (began - max(rank[row] for rank in said)) for row, began in handed]
        medians.setdefault(period, []).append(statistics.median(delays))
        tails.setdefault(period, []).append(statistics.quantiles(delays, n=20)[-1])
        if len(delays) != rows[period]:
            result.notes.append(f"{period}: for {rows[period]} rows that were logged, wandb got {len(delays)}")
    result.add(_MEDIAN, medians)
    result.add(_TAIL, tails)
    for period, of_blocks in medians.items():
        result.targets.append(common.Target(f"{period}: median delay in ms", 350.0, statistics.median(of_blocks)))


def _measure_memory(result: common.Result, rows: int) -> None:
    ranks = common.run_ranks(__file__, {"what": "memory", "rows": rows}, timeout=1800)
    bare = common.run_ranks(__file__, {"what": "bare memory", "rows": rows}, processes=1, timeout=1800)
    reports = {**{f"rank {rank}": report for rank, report in enumerate(ranks)}, "bare wandb": bare[0]}
    samples = {process: report["samples"] for process, report in reports.items()}
    blocks = {process: report["blocks"] for process, report in reports.items()}
    result.series[f"resident set in MiB, over {rows:,} rows"] = samples
    result.series[f"memory blocks of Python, over {rows:,} rows"] = blocks
    result.tables.append(_memory_table(f"resident set in MiB, {rows:,} rows of {_NAMES} names", samples))
    result.tables.append(_memory_table(f"memory blocks of Python, {rows:,} rows of {_NAMES} names", blocks))
    grown = {process: _growth(of_process) for process, of_process in samples.items()}
    result.series[_GROWTH] = {process: [growth] for process, growth in grown.items()}
    for rank in range(len(ranks)):
        result.targets.append(
            common.Target(f"rank {rank}: growth over {rows:,} rows in MiB", _FLAT, grown[f"rank {rank}"])
        )


def _growth(samples: list[float]) -> float:
    fifth = max(1, len(samples) // 5)
    return statistics.mean(samples[-fifth:]) - statistics.mean(samples[fifth : 2 * fifth])


def _memory_table(title: str, samples: dict[str, list[float]]) -> Table:
    table = Table("", "first", "largest", "last", "growth", title=title, **common.STYLE)
    for process, of_process in samples.items():
        shown = (of_process[0], max(of_process), of_process[-1], _growth(of_process))
        table.add_row(process, *(f"{number:.1f}" for number in shown))
    return table


def job(arguments: dict[str, Any]) -> None:
    """Run one rank of one of the three jobs."""
    {"delay": _delay, "memory": _memory, "bare memory": _bare_memory}[arguments["what"]](arguments)


def _delay(arguments: dict[str, Any]) -> None:
    """Measure blocks of rows with alternating periods."""
    import torch.distributed as dist

    import dist_wandb

    dist.init_process_group("gloo")
    rank, directory = dist.get_rank(), arguments["directory"]
    session = dist_wandb.init(project="delay", dir=directory)
    session.log(common.numbers(_NAMES), step=0)  # names are exchanged once
    session.flush()
    chance = random.Random(rank)  # noqa: S311  # moments, not secrets
    found: dict[str, list[Any]] = {"periods": [], "logged": [], "handed": []}
    for period in common.alternating(list(_PERIODS), arguments["repeats"]):
        dist.barrier()
        with common.watching(session) as handed:
            first = 1 + sum(len(block) for block in found["logged"])
            logged = _paced_block(session, first, arguments["rows"][period], _PERIODS[period], chance)
            session.flush()
            rows = [handed.get() for _ in range(handed.qsize())]
        found["periods"].append(period)
        found["logged"].append(logged)
        found["handed"].append([(row.row["global_step"] - first, row.began) for row in rows])
    session.finish()
    common.report(directory, rank, found)
    dist.destroy_process_group()


def _paced_block(session: Any, first: int, rows: int, period: float, chance: random.Random) -> list[float]:
    """Log rows; return the time of each call."""
    begin, times = time.time(), []
    for row in range(rows):
        moment = begin + period * (row + chance.random() / 2)
        time.sleep(max(0.0, moment - time.time()))
        times.append(time.time())
        session.log(common.numbers(_NAMES, row), step=first + row)
    return times


def _memory(arguments: dict[str, Any]) -> None:
    """Log many rows through the exchange."""
    import torch.distributed as dist

    import dist_wandb

    dist.init_process_group("gloo")
    rank, directory = dist.get_rank(), arguments["directory"]
    session = dist_wandb.init(project="memory", dir=directory)
    told = _many(session.log, session.flush, arguments["rows"], _PACE)
    session.finish()
    common.report(directory, rank, told)
    dist.destroy_process_group()


def _bare_memory(arguments: dict[str, Any]) -> None:
    """Log many rows without an exchange."""
    import wandb

    run = wandb.init(project="memory", dir=arguments["directory"])
    told = _many(lambda row, step: run.log({**row, "global_step": step}), lambda: True, arguments["rows"])
    run.finish()
    common.report(arguments["directory"], 0, told)


def _many(
    log: Callable[[dict[str, float], int], object], flush: Callable[[], bool], rows: int, pace: float = 0.0
) -> dict[str, list[float]]:
    """Log rows at a steady pace; sample the resident set in MiB and Python's blocks after all rows are written."""
    samples: list[float] = []
    blocks: list[float] = []
    every, begin = max(1, rows // _SAMPLES), time.perf_counter()
    for step in range(rows):
        time.sleep(max(0.0, begin + pace * step - time.perf_counter()))
        log(common.numbers(_NAMES, step), step)
        if (step + 1) % every == 0:
            if not flush():
                raise TimeoutError(f"what was logged until step {step} was not written in time")
            gc.collect()
            samples.append(_resident_mebibytes())
            blocks.append(sys.getallocatedblocks())
            begin = time.perf_counter() - pace * (step + 1)  # the time of the flush is not made up for
    return {"samples": samples, "blocks": blocks}


def _resident_mebibytes() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    common.main(measure, job, __doc__)
