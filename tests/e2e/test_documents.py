"""The Python code in the documents runs: all blocks of a page in order, as one script, offline."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from documents import documents, script
from processes import clean_environment, run_job

from dist_wandb import read_runs

ROOT = Path(__file__).parents[2]
START = ROOT / "docs" / "start.md"
PAGES = [path for path in documents(ROOT) if path != START and script(path.read_text(encoding="utf-8"))]


def run_page(page: Path, directory: Path) -> None:
    """Run the code of a page. Tracebacks have the line numbers of the document."""
    path = directory / f"page_{page.stem}.py"  # pages such as numbers.py would be imported
    path.write_text(script(page.read_text(encoding="utf-8")), encoding="utf-8")
    environment = clean_environment(CUDA_VISIBLE_DEVICES="")  # scripts name devices that the machine may not have
    run_job([sys.executable, path], cwd=directory, environment=environment).check()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path)


def test_the_first_steps_write_numbers_of_both_ranks(tmp_path: Path) -> None:
    run_page(START, tmp_path)
    (run,) = read_runs(tmp_path)
    ranks = run.history("rank")["rank"]
    assert len(ranks) > 10
    assert set(ranks) == {0.5}
