"""Some of the random jobs, for CI. ``python tests/chaos --seeds 0-299 --jobs 4`` runs others."""

from __future__ import annotations

import pytest
from drawing import draw
from driving import play
from judging import judge

LIMIT = 150.0  # seconds, on a busy machine
SEEDS = (1, 4, 6, 8, 9, 12, 13, 21, 22, 26)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_job_keeps_all_promises(seed: int) -> None:
    spec = draw(seed)
    evidence = play(spec, LIMIT)
    assert judge(evidence).violations == [], f"{spec.describe()}\n{evidence.output[-5000:]}"
