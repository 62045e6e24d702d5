"""The Python code in the documents runs: all blocks of a page in order, as one script, offline."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from documents import documents, script
from processes import clean_environment, run_job

from dist_wandb import read_runs

ROOT = Path(__file__).parents[2]
PAGES = [path for path in documents(ROOT) if script(path.read_text(encoding="utf-8"))]
assert "start.md" in {page.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    """Tracebacks have the line numbers of the document. The first steps write numbers of both ranks."""
    path = tmp_path / f"page_{page.stem}.py"  # pages such as numbers.py would be imported
    path.write_text(script(page.read_text(encoding="utf-8")), encoding="utf-8")
    environment = clean_environment(CUDA_VISIBLE_DEVICES="")  # scripts name devices that the machine may not have
    run_job([sys.executable, path], cwd=tmp_path, environment=environment).check()
    if page.name == "start.md":
        (run,) = read_runs(tmp_path)
        ranks = run.history("rank")["rank"]
        assert len(ranks) > 10
        assert set(ranks) == {0.5}
