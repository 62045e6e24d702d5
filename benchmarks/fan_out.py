"""Cost of a row in trees of groups with at most 8, 16 or 32 members, and of forming the groups.

    python -m benchmarks.fan_out --ranks 64 128 --per-node 8 128 --repeat 5

Ranks are processes that are forked after the imports, with real gloo groups over a real TCPStore in a separate process;
only the sessions are left out. All ranks reduce one row after the other. The output is JSON for each number of ranks,
ranks per node and fan-out, with times in milliseconds:

- levels: levels of the tree.
- connections: connections of a rank to others in its groups; the mean and the maximum over ranks.
- row: median over rows of the time until rank 0 has all numbers; smallest, median and largest of the repetitions.
- cpu: processor time of all ranks for a row, of the repetitions as above.
- formed: from the start of the first rank until the last rank has formed its groups, of the repetitions as above.

Repetitions alternate because the machine may be busy. All processes share its processors, so a row takes about as long
as their work. A tree with fewer levels hardly makes it faster, as it would between hosts.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import resource
import signal
import statistics
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from dist_wandb.exchange import transport as groups
from dist_wandb.exchange.transport import tree
from dist_wandb.exchange.transport.gloo import GlooGroup

_LIMIT = 120.0  # timeout in seconds
_NAMES = 20  # numbers in a row
_LANES = 8  # approximate number of reduced values for each of them


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64])
    parser.add_argument("--per-node", type=int, nargs="+", default=[8])
    parser.add_argument("--fan-out", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.collect()
    gc.freeze()
    cases = list(itertools.product(given.ranks, given.per_node, given.fan_out))
    found: dict[tuple[int, int, int], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(given.repeat):
        for case in cases:
            found[case].append(_measured(*case, given.rows))
    print(json.dumps([{**_shape(*case), **_spread(runs)} for case, runs in found.items()], indent=2))


def _spread(runs: list[dict[str, float]]) -> dict[str, list[float]]:
    numbers = {what: [run[what] for run in runs] for what in runs[0]}
    return {what: [round(of(each), 2) for of in (min, statistics.median, max)] for what, each in numbers.items()}


def _trees(ranks: int, per_node: int, fan_out: int) -> list[groups.Tree]:
    nodes = [rank // per_node for rank in range(ranks)]
    return [groups.tree_of(range(ranks), nodes, rank, fan_out) for rank in range(ranks)]


def _shape(ranks: int, per_node: int, fan_out: int) -> dict[str, Any]:
    trees = _trees(ranks, per_node, fan_out)
    connections = [sum(len(group.members) - 1 for group in path) for path, _ in trees]
    shape = {"ranks": ranks, "per_node": per_node, "fan_out": fan_out, "levels": trees[0][1]}
    return {**shape, "connections": [round(statistics.mean(connections), 1), max(connections)]}


def _measured(ranks: int, per_node: int, fan_out: int, rows: int) -> dict[str, float]:
    """Measure one job."""
    reading, writing = os.pipe()
    store = os.fork()
    if not store:
        kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, f"{kept.port}\n".encode())
        while True:
            signal.pause()
    port = int(os.read(reading, 100))
    with tempfile.TemporaryDirectory() as directory:
        pids = []
        for rank in range(ranks):
            pid = os.fork()
            if not pid:
                _as_rank(rank, _trees(ranks, per_node, fan_out)[rank], ranks, rows, port, Path(directory))
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)
        os.close(reading)
        os.close(writing)
        reports = [json.loads(Path(directory, str(rank)).read_text()) for rank in range(ranks)]
    return {
        "row": 1e3 * reports[0]["row"],
        "cpu": 1e3 * sum(report["cpu"] for report in reports) / rows,
        "formed": 1e3 * (max(report["formed"] for report in reports) - min(report["began"] for report in reports)),
    }


def _as_rank(rank: int, own: groups.Tree, ranks: int, rows: int, port: int, directory: Path) -> NoReturn:
    """Form the groups of a rank, reduce rows, and write the results."""
    try:
        store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=_LIMIT))
        if store.add("come", 1) == ranks:
            store.set("begin", "")
        store.wait(["begin"])
        began = time.time()
        groups = [
            GlooGroup(dist.PrefixStore(at.name, store), at.group_rank, len(at.members), _LIMIT, bool, forming=_LIMIT)
            for at in own[0]
        ]
        tree.hand_down(groups, formed=True, deadline=time.monotonic() + _LIMIT)
        formed = time.time()
        group = groups[0] if own[1] == 1 else tree.TreeGroup(groups, own[0], rank, ranks, _LIMIT)
        sums, maxima = [float(rank)] * _NAMES * _LANES, [float(rank)] * 8
        took, before = [], _cpu()
        for _ in range(rows):
            begun = time.perf_counter()
            reduced, _maxima = group.reduce(sums, maxima)
            took.append(time.perf_counter() - begun)
        if reduced[0] != ranks * (ranks - 1) / 2:
            raise RuntimeError(f"the sum of {ranks} ranks is {reduced[0]}")  # noqa: TRY301  # shown below
        cpu = _cpu() - before
        found = {"began": began, "formed": formed, "row": statistics.median(took), "cpu": cpu}
        Path(directory, str(rank)).write_text(json.dumps(found))
        if store.add("done", 1) == ranks:
            store.set("end", "")
        store.wait(["end"])  # closing a connection would interrupt the last row of other ranks
    except BaseException:  # noqa: BLE001  # it is shown, and the report is missing
        traceback.print_exc()
    os._exit(0)


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
