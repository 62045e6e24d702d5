from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from pathlib import Path

import pytest
from limits import Limit

from dist_wandb.cli.report import page
from dist_wandb.cli.report.page import json_of, page_of
from dist_wandb.errors import ReadError

EVIL = "</script><!--<img src=x onerror=alert(1)>\u2028&amp;"
LINE = {"x": [0, 1], "y": [0.5, math.nan]}
RUN = {"name": EVIL, "facts": {EVIL: EVIL}, "charts": [{"name": EVIL, "line": LINE}], "notes": [EVIL]}
REPORT = {"directories": [f"dir{EVIL}"], "version": "1.0", "runs": [RUN], "unreadable": [EVIL]}


def elements(text: str, tag: str) -> list[str]:
    return re.findall(rf"<{tag}(?: [^>]*)?>(.*?)</{tag}>", text, re.DOTALL)


def test_texts_of_files_cannot_leave_the_data() -> None:
    text = json_of(REPORT)
    assert not set("<>&\u2028") & set(text)
    data = json.loads(text)
    assert data["runs"][0]["facts"] == {EVIL: EVIL}
    assert data["runs"][0]["charts"][0]["line"]["y"] == [0.5, None]


def test_a_page_has_three_script_elements_and_no_address() -> None:
    text = page_of(REPORT, "var Plotly = 1;").decode()
    data, plotly, script = elements(text, "script")
    assert json.loads(data)["runs"][0]["name"] == EVIL
    assert plotly == "var Plotly = 1;"
    assert EVIL not in text
    assert "<img" not in text
    assert set(re.findall(r"<\w[^>]*\s(?:src|href)=([^\s>]*)", text.replace(script, ""))) == {'"#charts"'}
    assert "innerHTML" not in script
    assert "eval(" not in script


def test_the_policy_names_the_scripts_and_allows_no_connection() -> None:
    text = page_of(REPORT, "var Plotly = 1;").decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1].split(";"))
    _, *scripts = elements(text, "script")
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in scripts}
    assert set(rules["script-src"].split()) == hashes
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data: blob:"  # blob: PNGs that the page itself makes
    assert not {"connect-src", "frame-src", "font-src", "object-src"} & rules.keys()


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
    assert len(elements(text, "script")) == 3
    assert elements(text, "script")[1] == "var a = '%SCRIPT%';"
