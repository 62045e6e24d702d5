"""Random jobs with faults keep all promises: some in CI, others with ``make chaos SEEDS=0-299``.

``SEEDS=17 KEEP=DIR pytest -rP tests/chaos/test_seeds.py`` repeats one of them, and keeps its runs, ledgers and output.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from drawing import draw, seeds_of
from driving import play
from judging import judge

LIMIT = 150.0  # seconds, on a busy machine
SEEDS = seeds_of(os.environ.get("SEEDS", "10,13,18,22,35,39,48,54,99,126"))
KEEP = os.environ.get("KEEP")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_job_keeps_all_promises(seed: int) -> None:
    spec = draw(seed)
    evidence = play(spec, LIMIT, Path(KEEP, str(seed)) if KEEP else None)
    verdict = judge(evidence)
    sys.stdout.write(f"{spec.describe()}: {verdict.cells} numbers compared, excused: {dict(verdict.excused)}\n")
    assert verdict.violations == [], evidence.output[-30000:]
