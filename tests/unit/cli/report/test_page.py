"""The page of a report, and its curves with few points; e2e/test_report.py has its scripts, policy and requests."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import Limit

from dist_wandb.cli.report import page
from dist_wandb.cli.report.page import json_of, page_of
from dist_wandb.cli.report.thinning import Budget, Curve
from dist_wandb.errors import ReadError

EVIL = "</script><!--<img src=x onerror=alert(1)>\u2028&amp;"
LINE = {"x": [0, 1], "y": [0.5, math.nan]}
RUN = {"name": EVIL, "facts": {EVIL: EVIL}, "charts": [{"name": EVIL, "line": LINE}], "notes": [EVIL]}
REPORT = {"directories": [f"dir{EVIL}"], "version": "1.0", "runs": [RUN], "unreadable": [EVIL]}


def test_texts_of_files_cannot_leave_the_data() -> None:
    text = json_of(REPORT)
    assert not set("<>&\u2028") & set(text)
    data = json.loads(text)
    assert data["runs"][0]["facts"] == {EVIL: EVIL}
    assert data["runs"][0]["charts"][0]["line"]["y"] == [0.5, None]
    assert EVIL not in page_of(REPORT, "var Plotly = 1;").decode()


def test_a_page_that_would_be_too_large_is_refused(limit: Limit) -> None:
    limit(page, LARGEST=1000)
    with pytest.raises(ReadError, match="report would be too large, even with few points"):
        page_of(REPORT, "x" * 10)


def test_a_file_that_appears_while_the_runs_are_read_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("my thesis")
    with pytest.raises(ReadError, match="is not a dist-wandb report"):
        page.write_page(REPORT, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == "my thesis"


def test_the_script_of_plotly_has_no_character_that_changes_its_hash() -> None:
    script = page.plotly_script()
    assert "plotly.js" in script[:200]
    assert "\r" not in script
    assert not re.search(r"</script|<!--", script, re.IGNORECASE)


def test_inserted_text_is_not_searched_again() -> None:
    text = page_of({**REPORT, "directories": ["%DATA%%SCRIPT%"]}, "var a = '%SCRIPT%';").decode()
    scripts = re.findall(r"<script(?: [^>]*)?>(.*?)</script>", text, re.DOTALL)
    assert (len(scripts), scripts[1]) == (3, "var a = '%SCRIPT%';")


# --- curves with few points -------------------------------------------------------------------------------------------

finite = st.floats(-1e6, 1e6)


def curve_of(ys: list[float], xs: list[float] | None = None, budget: Budget | None = None) -> Curve:
    x = np.array(xs or range(len(ys)), float)
    return Curve(budget or Budget(10**6), "_step", x, np.array(ys, float))


@given(st.lists(finite, min_size=1, max_size=300), st.sampled_from([16, 32, 512]))
def test_minima_maxima_sums_and_numbers_are_kept(ys: list[float], most: int) -> None:
    curve = curve_of(ys)
    stretches = curve.stretches(most)
    points = curve.points(most)
    assert len(stretches.number) <= most
    assert stretches.number.sum() == len(ys)
    assert stretches.total.sum() == pytest.approx(sum(ys), abs=1e-3)
    assert {min(y for _, y in points), max(y for _, y in points)} == {min(ys), max(ys)}
    assert {(x, y) for x, y in points} <= set(enumerate(ys))


def test_curves_share_a_budget() -> None:
    budget = Budget(1000)
    curves = [curve_of(list(map(float, range(5000))), budget=budget) for _ in range(20)]
    assert sum(len(curve.stretches().number) for curve in curves) <= 1000
    for curve in curves:
        assert {0.0, 4999.0} <= {y for _, y in curve.points()}


def test_values_that_are_not_finite_are_counted_and_leave_a_gap() -> None:
    curve = curve_of([1.0, math.nan, math.inf, 2.0, -math.inf])
    assert curve.points() == [(0, 1.0), (3, 2.0)]
    assert (curve.gaps, curve.last) == (3, -math.inf)
