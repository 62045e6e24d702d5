"""Let W&B be the judge: run random scripts with stock wandb and with this package, and compare the runs.

``python tests/chaos/oracle --seeds 0-199 --ranks 1,2,3 --guards --jobs 2`` compares 200 scripts in five variants.
``--seed 17`` prints the script and all rows side by side.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "src"))  # of this checkout, whichever is installed

from drawing import seeds_of
from oracle.cases import CASES
from oracle.frameworks import FRAMEWORKS
from oracle.frameworks import judge as judge_framework
from oracle.running import Result, Variant, judge
from oracle.scripts import draw
from warm import served

_AT_ONCE = 20  # scripts of one job


def main() -> int:
    """Compare; return 1 if any run differs."""
    options = _options()
    if options.framework:
        return _frameworks(options.framework)
    variants = [Variant(int(ranks)) for ranks in options.ranks.split(",") if ranks]
    if options.guards:
        variants += [Variant(2, "log"), Variant(2, "init")]
    scripts = (
        [draw(seed) for seed in seeds_of(options.seeds or str(options.seed))] if not options.cases else list(CASES)
    )
    begin = time.monotonic()
    results: list[Result] = []
    broken = 0
    with ThreadPoolExecutor(options.jobs) as players:
        batches = [scripts[first : first + _AT_ONCE] for first in range(0, len(scripts), _AT_ONCE)]
        jobs = [players.submit(judge, batch, variants) for batch in batches]
        for job in as_completed(jobs):
            error = job.exception()
            if error is None:
                results += _shown(job.result())
            else:  # the other jobs must run
                broken += 1
                traceback.print_exception(error)
    differing = _sum_up(results, time.monotonic() - begin)
    return 1 if differing or broken else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/chaos/oracle", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seeds", help="a range, such as 0-199, or seeds with commas between them")
    which.add_argument("--seed", type=int, help="one seed")
    which.add_argument("--cases", action="store_true", help="the small scripts of cases.py")
    names = [framework.name for framework in FRAMEWORKS]
    which.add_argument("--framework", choices=[*names, "all"], help="the fixed scripts of a framework instead")
    parser.add_argument("--ranks", default="1,2,3", help="numbers of ranks that all make the same calls (1,2,3)")
    parser.add_argument("--guards", action="store_true", help="also with two ranks of which only rank 0 logs, or opens")
    parser.add_argument("--jobs", type=int, default=2, help="number of jobs that run in parallel (default: 2)")
    return parser.parse_args()


def _frameworks(name: str) -> int:
    """Compare the scripts of frameworks; return 1 if any run differs."""
    results: list[Result] = []
    for framework in FRAMEWORKS:
        if name in ("all", framework.name):
            results += judge_framework(framework)
    sys.stdout.write("\n\n".join(map(str, results)) + "\n")
    return 1 if any(result.differences for result in results) else 0


def _shown(results: Sequence[Result]) -> Sequence[Result]:
    for result in results:
        if result.differences:
            sys.stdout.write(f"{result}\n\n")
    sys.stdout.flush()
    return results


def _sum_up(results: Sequence[Result], seconds: float) -> int:
    of_variant: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        of_variant[result.variant].append(result)
    sys.stdout.write(f"\n{len(results)} runs compared in {seconds:.0f} s\n")
    for variant, its in of_variant.items():
        differing = [result for result in its if result.differences]
        sys.stdout.write(f"{variant}: {len(its) - len(differing)} equal, {len(differing)} differ\n")
        kinds: dict[str, set[str]] = defaultdict(set)
        for result in differing:
            for difference in result.differences:
                kinds[difference.kind].add(result.name)
        for kind, names in sorted(kinds.items()):
            seeds = " ".join(sorted(names, key=lambda name: (len(name), name)))
            sys.stdout.write(f"    {kind}: {len(names)} of {len(its)}: {seeds}\n")
    return sum(bool(result.differences) for result in results)


if __name__ == "__main__":
    with served():
        sys.exit(main())
