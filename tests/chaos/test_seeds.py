"""Some of the random jobs, for CI. ``python tests/chaos --seeds 0-299 --jobs 4`` runs others."""

from __future__ import annotations

import pytest
from drawing import draw
from driving import play
from judging import judge

LIMIT = 150.0  # seconds, on a busy machine
SEEDS = (10, 13, 18, 22, 35, 39, 48, 54, 99, 126)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_job_keeps_all_promises(seed: int) -> None:
    spec = draw(seed)
    evidence = play(spec, LIMIT)
    assert judge(evidence).violations == [], f"{spec.describe()}\n{evidence.output[-5000:]}"
