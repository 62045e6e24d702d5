"""Cost of a row apart from the training thread: CPU of the exchange's threads, collectives under skew, bursts, idling.

Two processes, rows of 20 numbers, offline, without training. Other load affects CPU time less than it affects wall
time.

- paced: a row every 10 ms on both ranks. CPU of the exchange's Python thread, and of the threads of gloo, for each row,
  on the rank with the larger value.
- burst: rows in a tight loop until all are reduced (`flush`); rows per second.
- skew: rank 1 logs each row a number of milliseconds after rank 0; collectives for each row.
- idle: a session without rows; how often the threads of the exchange and of gloo wake up.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import common

if TYPE_CHECKING:
    from dist_wandb.session.session import Session

_NAMES = 20
_PERIOD = 0.01  # seconds
_SKEWS = (1, 10, 100, 1000)  # milliseconds
_CPU = "CPU for each row at 100 rows a second, milliseconds"
_BURST = "rows brought together in a burst, per second"
_COLLECTIVES = "collectives for each row"
_IDLE = "wake-ups a second of an idle session"
_OURS, _GLOO = "exchange", "gloo"


def measure(options: common.Options) -> common.Result:
    """Run one job of two ranks, which measures everything."""
    counts = {"paced": options.of(500, 20), "burst": options.of(10_000, 200), "skewed": options.of(20, 3)}
    arguments = {"repeats": options.repeats, **counts, "idle": 10.0 if not options.quick else 0.5}
    reports = common.run_ranks(__file__, arguments, timeout=1800)
    result = common.Result("row_cost")
    for title in (_CPU, _BURST, _COLLECTIVES, _IDLE):
        least = title == _BURST
        result.add(title, {way: _worse(reports, title, way, least=least) for way in reports[0][title]})
    cpu = [sum(both) for both in zip(*result.series[_CPU].values(), strict=True)]
    result.targets.append(common.Target("CPU of exchange and gloo for each row, ms", 0.5, statistics.median(cpu)))
    burst = statistics.median(result.series[_BURST]["burst"])
    result.targets.append(common.Target("rows a second in a burst", 5000, burst, at_least=True))
    for skew, collectives in result.series[_COLLECTIVES].items():
        limit = 5 if "1000" in skew else 2  # rounds go on while a row waits for a rank
        result.targets.append(common.Target(f"collectives for each row, {skew}", limit, statistics.median(collectives)))
    idle = [sum(both) for both in zip(*result.series[_IDLE].values(), strict=True)]
    result.targets.append(common.Target("wake-ups a second of an idle session", 5, statistics.median(idle)))
    return result


def _worse(reports: list[dict[str, Any]], title: str, way: str, *, least: bool) -> list[float]:
    """Return for each repeat the number of the rank with the worse value."""
    return [(min if least else max)(both) for both in zip(*(report[title][way] for report in reports), strict=True)]


def job(arguments: dict[str, Any]) -> None:
    """Run one rank: all measurements, alternating."""
    import torch.distributed as dist

    import dist_wandb

    dist.init_process_group("gloo")
    found: dict[str, dict[str, list[float]]] = {title: {} for title in (_CPU, _BURST, _COLLECTIVES, _IDLE)}
    with dist_wandb.init("row_cost", dir=arguments["directory"]) as session:
        _log(session, 5, _PERIOD)  # names are exchanged once
        for _ in range(arguments["repeats"]):
            dist.barrier()
            _add(found[_CPU], _per(arguments["paced"], lambda: _log(session, arguments["paced"], _PERIOD)))
            dist.barrier()
            began = time.perf_counter()
            _log(session, arguments["burst"], 0.0)
            _add(found[_BURST], {"burst": arguments["burst"] / (time.perf_counter() - began)})
            for skew in _SKEWS:
                dist.barrier()
                rows = max(3, arguments["skewed"] if skew < 1000 else arguments["skewed"] // 4)
                _add(found[_COLLECTIVES], {f"a skew of {skew} ms": _collectives(session, rows, skew / 1000)})
            dist.barrier()
            time.sleep(2.0)  # remaining work of the last rows
            _add(found[_IDLE], _wake_ups(arguments["idle"]))
        dist.barrier()
    common.report(arguments["directory"], dist.get_rank(), found)
    dist.destroy_process_group()


def _add(series: dict[str, list[float]], numbers: dict[str, float]) -> None:
    for way, number in numbers.items():
        series.setdefault(way, []).append(number)


def _log(session: Session, rows: int, period: float) -> None:
    """Log rows at a steady pace until they are reduced."""
    row = common.numbers(_NAMES)
    following = time.perf_counter()
    for _ in range(rows):
        session.log(row)
        following += period
        time.sleep(max(0.0, following - time.perf_counter()) if period else 0.0)
    if not session.flush():
        raise RuntimeError("the rows were not brought together in time")


def _collectives(session: Session, rows: int, skew: float) -> float:
    """Return the collectives per row if rank 1 logs later. A row starts after both ranks have logged the last one."""
    import torch.distributed as dist

    before = common.collectives_of(session)
    for _ in range(rows):
        dist.barrier()
        time.sleep(skew * dist.get_rank())
        session.log(common.numbers(_NAMES))
    session.flush()
    return (common.collectives_of(session) - before) / rows


# Threads of this process. gloo's threads of the training cannot be told apart, but they are idle meanwhile.


def _threads() -> dict[str, list[Path]]:
    """Return the threads of the exchange and of gloo according to the kernel."""
    ours = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("dist_wandb")}
    found: dict[str, list[Path]] = {_OURS: [], _GLOO: []}
    for path in Path("/proc/self/task").iterdir():
        if int(path.name) in ours:
            found[_OURS].append(path)
        elif "gloo" in (path / "comm").read_text():
            found[_GLOO].append(path)
    return found


def _seconds(path: Path) -> float:
    """Return the CPU time of a thread in seconds."""
    return float((path / "schedstat").read_text().split()[0]) / 1e9


def _switches(path: Path) -> float:
    """Return how often a thread has slept."""
    lines = dict(line.split(":", 1) for line in (path / "status").read_text().splitlines())
    return float(lines["voluntary_ctxt_switches"])


def _growth(look: Callable[[Path], float], act: Callable[[], object]) -> dict[str, float]:
    """Return the growth of a quantity of the threads during some work."""
    before = {kind: {path: look(path) for path in paths} for kind, paths in _threads().items()}
    act()
    after = {kind: {path: look(path) for path in paths} for kind, paths in _threads().items()}
    return {
        kind: sum(number - before[kind].get(path, 0.0) for path, number in paths.items())
        for kind, paths in after.items()
    }


def _per(rows: int, act: Callable[[], object]) -> dict[str, float]:
    return {kind: 1000 * seconds / rows for kind, seconds in _growth(_seconds, act).items()}


def _wake_ups(seconds: float) -> dict[str, float]:
    return {kind: number / seconds for kind, number in _growth(_switches, lambda: time.sleep(seconds)).items()}


if __name__ == "__main__":
    common.main(measure, job, __doc__)
