"""Fuzz parsers for some minutes, with other inputs each time: ``python tests/fuzz/run_fuzz.py --minutes 10``.

Findings are stored below ``tests/fuzz/findings``, where CI tries them again. Fix the parser, and commit both.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "support")]

import fuzz_of_files
import fuzz_of_peers
import fuzz_of_reports
import fuzz_of_starts
from fuzzing import FindingError, Target, fuzz, keep, read_all

_BATCH = 500  # inputs of one target before the next target
TARGETS: tuple[Target, ...] = (
    *fuzz_of_peers.TARGETS,
    *fuzz_of_files.TARGETS,
    *fuzz_of_reports.TARGETS,
    *fuzz_of_starts.TARGETS,
)


def named(name: str) -> Target:
    return next(target for target in TARGETS if target.name == name)


def main() -> int:
    """Fuzz until the time is over. Return 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(target.name for target in TARGETS))
    parser.add_argument("--read", type=Path, metavar="DIR", help=argparse.SUPPRESS)  # see `fuzzing.check`
    arguments = parser.parse_args()
    targets = [named(name) for name in arguments.targets] or list(TARGETS)
    if arguments.read is not None:
        read_all(targets[0], arguments.read)
        return 0
    counts, found = dict.fromkeys((target.name for target in targets), 0), 0
    deadline = time.monotonic() + 60 * arguments.minutes
    while time.monotonic() < deadline:
        for target in targets:
            number = secrets.randbits(32)
            try:
                fuzz(target, _BATCH, number=number)
                counts[target.name] += _BATCH
            except FindingError as error:
                found += 1
                sys.stdout.write(f"{error} ({keep(error, target)}, seed {number})\n")
            if time.monotonic() >= deadline:
                break
    sys.stdout.write("".join(f"{name:12} {count:9,} inputs\n" for name, count in counts.items()))
    sys.stdout.write(f"{found} findings\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
