"""All parsers that are fuzzed."""

from __future__ import annotations

import fuzz_of_files
import fuzz_of_peers
import fuzz_of_reports
import fuzz_of_starts
from fuzzing import Target

TARGETS: tuple[Target, ...] = (
    *fuzz_of_peers.TARGETS,
    *fuzz_of_files.TARGETS,
    *fuzz_of_reports.TARGETS,
    *fuzz_of_starts.TARGETS,
)


def named(name: str) -> Target:
    return next(target for target in TARGETS if target.name == name)
