"""Run all benchmarks, one after the other: print tables, and write a record of each to benchmarks/results.

At the end all targets are printed together, with the measured values and whether they are met. If a benchmark fails,
the others still run, and the exit code is 1. A missed target is not a failure: it is only printed.
"""

from __future__ import annotations

import sys
import traceback

from benchmarks import (
    accelerate_step,
    common,
    delay,
    gather_cost,
    growth,
    lightning_step,
    log_cost,
    reduction_cost,
    row_cost,
    startup,
)
from rich.console import Console

_BENCHMARKS = (startup, log_cost, lightning_step, reduction_cost, row_cost, accelerate_step, gather_cost, growth, delay)


def main() -> int:
    """Run all benchmarks; return 1 if one of them failed."""
    options = common.given(__doc__)
    results: list[common.Result] = []
    failed: list[str] = []
    for benchmark in _BENCHMARKS:
        name = benchmark.__name__.rpartition(".")[2]
        Console().rule(name)
        try:
            results.append(common.run(benchmark.measure, options))
        except Exception:  # noqa: BLE001  # the others are to run
            traceback.print_exc()
            failed.append(name)
        else:
            common.show(results[-1])
    Console().rule("all")
    common.show_targets(results)
    if failed:
        Console().print(f"[red]failed: {', '.join(failed)}[/red]")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
