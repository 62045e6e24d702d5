"""`dist-wandb report`: its page; e2e/test_report.py has the scripts, policy and requests of the page."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import webbrowser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import Limit
from record_files import write_run

from dist_wandb.cli import main
from dist_wandb.cli.report import page
from dist_wandb.cli.report.page import json_of, page_of
from dist_wandb.cli.report.thinning import Budget, Curve
from dist_wandb.errors import ReadError

pytestmark = pytest.mark.newest  # wandb 0.31 is the first version that reads its own files


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses for which a browser is started; none can be if there is an empty one among them."""
    addresses: list[str] = []

    def open_it(address: str) -> bool:
        addresses.append(address)
        return all(addresses)

    monkeypatch.setattr(webbrowser, "open", open_it)
    return addresses


def test_a_page_of_the_wanted_metrics_is_written_and_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    assert main(["report", ".", "--open"]) == 0
    assert capsys.readouterr().out.startswith("1 run in report.html (")
    assert opened == [(tmp_path / "report.html").as_uri()]
    assert b'"run_id":"exp"' in (tmp_path / "report.html").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "wandb"]
    opened.append("")
    assert main(["report", ".", "--open", "--metric", "val/*"]) == 0
    assert "No browser could be started" in capsys.readouterr().out
    assert b'"charts":[]' in (tmp_path / "report.html").read_bytes()


def test_unreadable_files_are_reported_with_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "good")
    (write_run(tmp_path / "bad\x1b[31m", "bad") / "run-bad.wandb").write_bytes(b"")
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "a.html")]) == 1
    out = capsys.readouterr().out
    assert "run-bad.wandb" in out
    assert "\x1b" not in out
    assert (tmp_path / "a.html").exists()


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("thesis.html", "is not a dist-wandb report"),
        ("link.html", "not the expected file"),
        ("pipe.html", "not the expected file"),
        ("directory", "not the expected file"),
        ("missing/a.html", "cannot be written: No such file or directory"),
    ],
)
def test_nothing_but_an_earlier_page_is_replaced_as_is_said_before_runs_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, reason: str
) -> None:
    thesis = tmp_path / "thesis.html"
    thesis.write_text("my thesis")
    (tmp_path / "link.html").symlink_to(thesis)
    os.mkfifo(tmp_path / "pipe.html")
    (tmp_path / "directory").mkdir()
    assert main(["report", str(tmp_path), "-o", str(tmp_path / place)]) == 1
    message = capsys.readouterr().err
    assert (place in message, reason in message) == (True, True)
    assert thesis.read_text() == "my thesis"
    before = sorted(tmp_path.iterdir())
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "a.html")]) == 1
    assert "No W&B run was found below" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_runs_of_several_directories_are_selected_as_in_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, rate in {"a": 0.1, "b": 0.2, "c": 0.3}.items():
        write_run(tmp_path / name, name, config={"lr": rate})
    place = tmp_path / "a.html"

    def reported(*arguments: str) -> list[str]:
        assert main(["report", "-o", str(place), str(tmp_path / "a"), str(tmp_path / "b"), *arguments]) == 0
        return sorted(set(re.findall(r'"run_id":"(\w)"', place.read_text())))

    assert reported() == ["a", "b"]
    assert reported("--where", "lr>0.1", "--where", "loss<9") == ["b"]
    assert reported("--last") == ["b"]
    assert reported("a") == ["a"]
    capsys.readouterr()
    assert main(["report", str(tmp_path), "-o", str(place), "--where", "lr>1"]) == 2
    assert f"No run below {str(tmp_path)!r} is selected. Give other names" in capsys.readouterr().err


# --- the page ---------------------------------------------------------------------------------------------------------

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
    text = page_of({**REPORT, "directories": ["%DATA%%SCRIPT%"]}, "var a = '%SCRIPT%';").decode()
    scripts = re.findall(r"<script(?: [^>]*)?>(.*?)</script>", text, re.DOTALL)
    assert (len(scripts), scripts[1]) == (3, "var a = '%SCRIPT%';")  # inserted text is not searched again


def test_no_page_is_too_large_or_replaces_a_file_that_appears_while_the_runs_are_read(
    tmp_path: Path, limit: Limit
) -> None:
    limit(page, LARGEST=1000)
    with pytest.raises(ReadError, match="report would be too large, even with few points"):
        page_of(REPORT, "x" * 10)
    (tmp_path / "report.html").write_text("my thesis")
    with pytest.raises(ReadError, match="is not a dist-wandb report"):
        page.write_page(REPORT, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == "my thesis"


def test_the_script_of_plotly_has_no_character_that_changes_its_hash_and_without_it_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = page.plotly_script()
    assert "plotly.js" in script[:200]
    assert "\r" not in script
    assert not re.search(r"</script|<!--", script, re.IGNORECASE)
    write_run(tmp_path)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "a.html")]) == 1
    assert "pip install 'dist-wandb[report]'" in capsys.readouterr().err


# --- curves with few points -------------------------------------------------------------------------------------------


def curve_of(ys: list[float], budget: Budget | None = None) -> Curve:
    return Curve(budget or Budget(10**6), "_step", np.arange(len(ys), dtype=float), np.array(ys, float))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.sampled_from([16, 32, 512]))
def test_minima_maxima_sums_and_numbers_are_kept(ys: list[float], most: int) -> None:
    curve = curve_of(ys)
    stretches = curve.stretches(most)
    points = curve.points(most)
    assert len(stretches.number) <= most
    assert stretches.number.sum() == len(ys)
    assert stretches.total.sum() == pytest.approx(sum(ys), abs=1e-3)
    assert {min(y for _, y in points), max(y for _, y in points)} == {min(ys), max(ys)}
    assert {(x, y) for x, y in points} <= set(enumerate(ys))


def test_curves_share_a_budget_and_values_that_are_not_finite_are_counted_and_leave_a_gap() -> None:
    curve = curve_of([1.0, math.nan, math.inf, 2.0, -math.inf])
    assert curve.points() == [(0, 1.0), (3, 2.0)]
    assert (curve.gaps, curve.last) == (3, -math.inf)
    budget = Budget(1000)
    curves = [curve_of(list(map(float, range(5000))), budget=budget) for _ in range(20)]
    assert sum(len(curve.stretches().number) for curve in curves) <= 1000
    for curve in curves:
        assert {0.0, 4999.0} <= {y for _, y in curve.points()}
