"""The page of a report: its contents as plain data, and how they become one HTML file that makes no network request.

The data, from files, is JSON in an element that is not executed; the page's script turns it into text nodes, never
HTML. A content security policy lists the hashes of the two scripts: nothing else runs, and no connection can be opened.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from dist_wandb.errors import MissingExtraError, ReadError
from dist_wandb.wandb_files.records import whole
from dist_wandb.wandb_files.small_files import open_ordinary, write_small

LARGEST = 20 * 10**6  # largest size of a page, in bytes
MARK = b'<meta name="generator" content="dist-wandb report '  # identifies a page: no other file is replaced
_SCRIPTS = ("values.js", "dom.js", "charts.js", "ranks.js", "compare.js", "details.js", "main.js")
_MARK_WITHIN = 4096  # first bytes of a file, in which the mark must be
DIGITS_OF_X = 12  # number of significant digits of a position on an x axis
_DIGITS = 6

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,1000}(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

Part = dict[str, Any]
"""A part of the page, by the names under which its script reads it. NaN and infinities become null."""


def line_of(points: Iterable[tuple[float, float]], digits: int = _DIGITS) -> Part:
    """Return the curve through points in the order of the x axis, with only the digits that are visible in a chart."""
    pairs = [(shortened(x, DIGITS_OF_X), shortened(y, digits)) for x, y in points]
    return {"x": [x for x, _ in pairs], "y": [y for _, y in pairs]}


def shortened(value: float, digits: int = _DIGITS) -> float:
    return float(f"{value:.{digits}g}") if value % 1 else whole(value)  # an integer is kept


def plain(text: str) -> str:
    """Return a text without escape sequences; control characters are replaced by U+FFFD."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", _ESCAPE.sub("", text))


def write_page(report: Part, path: Path) -> int:
    check_target(path)
    content = page_of(report, plotly_script())
    write_small(path, content, mode=0o666)
    return len(content)


def check_target(path: Path) -> None:
    """Raise `ReadError` if the path is a file that is not a report, and `OSError` if its directory does not exist."""
    try:
        with open(open_ordinary(path), "rb") as opened:  # noqa: PTH123  # of a descriptor
            is_page = MARK in opened.read(_MARK_WITHIN)
    except FileNotFoundError:
        path.parent.stat()
        return
    if not is_page:
        raise ReadError(f"{path} exists and is not a dist-wandb report, so it is not replaced. Give another -o FILE.")


def plotly_script() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise MissingExtraError(
            "The report needs plotly, which is not installed. Install it: pip install 'dist-wandb[report]'"
        ) from None
    return _as_element_text(get_plotlyjs())


def page_of(report: Part, plotly: str) -> bytes:
    script = _as_element_text("".join(f"{_asset(name)}\n" for name in _SCRIPTS))
    policy = (
        f"default-src 'none'; script-src {_hash(plotly)} {_hash(script)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "POLICY": policy,
        "VERSION": escape(report["version"]),
        "TITLE": escape(f"{', '.join(Path(one).name or one for one in report['directories'])} - dist-wandb report"),
        "STYLE": _as_element_text(_asset("page.css")),
        "DATA": json_of(report),
        "PLOTLY": plotly,
        "SCRIPT": script,
    }
    text = _asset("page.html")
    pieces = []
    for name, part in parts.items():  # each once, in this order; inserted text is not searched again
        before, _, text = text.partition(f"%{name}%")
        pieces += [before, part]
    page = "".join([*pieces, text]).encode("utf-8", "replace")
    if len(page) > LARGEST:
        raise ReadError(
            "The report would be too large, even with few points. Give a narrower directory or use --metric."
        )
    return page


def json_of(report: Part) -> str:
    """Return a report as JSON that is safe within HTML. NaN and infinities become null."""
    finite = json.loads(json.dumps(report), parse_constant=lambda _: None)
    text = json.dumps(finite, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return resources.files(__package__ or "dist_wandb.cli.report").joinpath(name).read_text(encoding="utf-8")


def _as_element_text(script: str) -> str:
    """Escape a script or style so that no HTML parser ends it early, and its hash is that of the parsed text."""
    script = re.sub(r"<(/script|/style|!--)", r"<\\\1", script, flags=re.IGNORECASE)
    return script.replace("\r\n", "\n").replace("\r", "\n")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
