"""W&B is the judge: scripts leave the same run whether stock wandb or this package carries them out.

``make oracle SEEDS=0-199``, or ``SEEDS=17 pytest``, compares other scripts in all variants.
"""

from __future__ import annotations

import os

import pytest
from drawing import seeds_of
from oracle.cases import CASES
from oracle.frameworks import FRAMEWORKS, Framework
from oracle.frameworks import judge as judge_framework
from oracle.running import VARIANTS, Stock, Variant, play
from oracle.scripts import draw

# Steps that go backwards, lag without steps, parts of a row, summaries, failures, mostly with an axis.
SEEDS = os.environ.get("SEEDS", "23,114,4,82,9,16")
IS_CI = "SEEDS" not in os.environ
FEWER = 3  # with a guard around `init`, whose sessions take two seconds each
ALONE = ("without-values", "not-numbers")  # with several ranks, there is no row of nothing, and no None
SCRIPTS = [*(CASES if IS_CI else ()), *map(draw, seeds_of(SEEDS))]


@pytest.fixture(scope="module")
def stock() -> Stock:
    """What stock wandb leaves of all scripts, in one process."""
    return Stock(SCRIPTS)


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant.ranks < 3 or not IS_CI], ids=str)
def test_a_script_leaves_the_run_that_stock_wandb_leaves(stock: Stock, variant: Variant) -> None:
    scripts = SCRIPTS[:FEWER] if variant.guard == "init" and IS_CI else SCRIPTS
    scripts = [script for script in scripts if variant.ranks == 1 or script.name not in ALONE]
    ours = play(scripts, "ours", variant)
    differing = [text for script in scripts for text in stock.differences(script, variant, ours[script.name])]
    assert not differing, "\n".join(differing)


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
def test_two_ranks_of_a_framework_leave_the_run_of_its_own_class(framework: Framework) -> None:
    differing = judge_framework(framework)
    assert not differing, "\n".join(differing)
