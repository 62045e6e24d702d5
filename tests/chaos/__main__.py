"""Run random jobs with faults, drawn from seeds, and report violations.

``python tests/chaos --seeds 0-299 --jobs 4`` runs 300 jobs, ``python tests/chaos --seed 17`` repeats one of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1] / "support"))

from drawing import draw, seeds_of
from driving import play
from judging import judge
from row_rules import Violation

_LIMIT = 150.0  # seconds for a job, on a busy machine


def main() -> int:
    """Run the jobs; return 1 if there is any violation."""
    options = _options()
    seeds = [options.seed] if options.seed is not None else seeds_of(options.seeds)
    begin = time.monotonic()
    results = []
    with ThreadPoolExecutor(options.jobs) as players:
        for future in as_completed([players.submit(_result, seed, options) for seed in seeds]):
            results.append(future.result())
            _show(results[-1])
    _sum_up(results, time.monotonic() - begin)
    if options.json:
        options.json.write_text(json.dumps(sorted(results, key=lambda result: int(result["seed"])), indent=1) + "\n")
    return 1 if any(result["violations"] for result in results) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/chaos", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seeds", help="a range, such as 0-299, or seeds with commas between them")
    which.add_argument("--seed", type=int, help="one seed")
    parser.add_argument("--jobs", type=int, default=2, help="number of jobs that run in parallel (default: 2)")
    parser.add_argument("--limit", type=float, default=_LIMIT, help=f"seconds for a job (default: {_LIMIT:g})")
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument("--keep", type=Path, help="a directory for the files of the jobs")
    parser.add_argument("--describe", action="store_true", help="only print the jobs")
    return parser.parse_args()


def _result(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    spec = draw(seed)
    about = {"seed": seed, "job": spec.describe()}
    if options.describe:
        return {**about, "violations": [], "excused": {}, "cells": 0, "seconds": 0.0}
    keep = options.keep / str(seed) if options.keep else None
    try:
        evidence = play(spec, options.limit, keep)
        verdict = judge(evidence)
    except Exception:  # noqa: BLE001  # the other jobs must run
        broken = Violation("driver", traceback.format_exc())
        return {**about, "violations": [asdict(broken)], "excused": {}, "cells": 0, "seconds": 0.0}
    return {
        **about,
        "violations": [asdict(violation) for violation in verdict.violations],
        "excused": dict(verdict.excused),
        "cells": verdict.cells,
        "seconds": round(evidence.seconds, 1),
    }


def _show(result: dict[str, Any]) -> None:
    state = "VIOLATED" if result["violations"] else "held"
    sys.stdout.write(f"{result['seed']:6} {state:8} {result['seconds']:6} s  {result['job']}\n")
    for kind, number in Counter(violation["kind"] for violation in result["violations"]).items():
        text = next(violation["text"] for violation in result["violations"] if violation["kind"] == kind)
        sys.stdout.write(f"{'':16}{number} x {kind}: {text}\n")
    sys.stdout.flush()


def _sum_up(results: list[dict[str, Any]], seconds: float) -> None:
    violated = sorted(result["seed"] for result in results if result["violations"])
    of_kind = Counter(kind for result in results for kind in {each["kind"] for each in result["violations"]})
    excused: Counter[str] = Counter()
    for result in results:
        excused.update(result["excused"])
    sys.stdout.write(
        f"\n{len(results)} jobs in {seconds:.0f} s, {sum(result['cells'] for result in results):,} numbers compared; "
        f"excused: {dict(excused)}\n"
        f"{len(results) - len(violated)} held, {len(violated)} violated: {violated} {dict(of_kind)}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
