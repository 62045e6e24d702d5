"""The page: a report, the scripts and the styles, as one HTML file that asks no network for anything.

What comes from files is JSON in an element that is no script, and the page's script makes text nodes of it, never HTML.
A content security policy names the hashes of the two scripts: nothing else runs, and no connection can be opened.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import math
import re
from dataclasses import fields, is_dataclass, replace
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from dist_wandb.errors import MissingExtraError, ReadError
from dist_wandb.report.model import Chart, Line, Report
from dist_wandb.wandb_files.small_files import open_ordinary, write_small

LARGEST = 20 * 10**6
"""Largest size of a page, in bytes."""

MARK = b'<meta name="generator" content="dist-wandb report '
"""How a page is known: only such a file is replaced."""

_SCRIPTS = ("values.js", "dom.js", "charts.js", "ranks.js", "details.js", "main.js")
_PLOTLY = "plotly/package_data/plotly.min.js"
_BEGINNING = 4096  # bytes of a file in which the mark must be


def write_page(report: Report, path: Path) -> int:
    """Write the page of a report.

    Args:
        report: What it shows.
        path: The file. A page that an earlier call has written is replaced.

    Returns:
        The size of the page in bytes.

    Raises:
        MissingExtraError: plotly is not installed.
        ReadError: There is another file of this name.
        OSError: It cannot be written.
    """
    check_target(path)
    content = page_of(report, plotly_script())
    write_small(path, content, mode=0o666)
    return len(content)


def check_target(path: Path) -> None:
    """Refuse to replace what is no report.

    Raises:
        ReadError: There is another file of this name.
        OSError: It cannot be read.
    """
    try:
        with open(open_ordinary(path), "rb") as opened:  # noqa: PTH123  # of a descriptor
            is_page = MARK in opened.read(_BEGINNING)
    except FileNotFoundError:
        return
    if not is_page:
        raise ReadError(f"{path} exists, and is no report of dist-wandb, so it is not replaced. Give another -o FILE.")


def plotly_script() -> str:
    """The script of the installed plotly.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    try:
        found = Path(str(importlib.metadata.distribution("plotly").locate_file(_PLOTLY)))
        script = found.read_text(encoding="utf-8")
    except (importlib.metadata.PackageNotFoundError, FileNotFoundError):
        raise MissingExtraError(
            "The report is drawn by plotly, which is not installed. Install it: pip install 'dist-wandb[report]'"
        ) from None
    return _as_element_text(script)


def page_of(report: Report, plotly: str) -> bytes:
    """The page, in no more than `LARGEST` bytes: where the data take more, curves get fewer points.

    Args:
        report: What it shows.
        plotly: The library's script.
    """
    script = _as_element_text("".join(f"{_asset(name)}\n" for name in _SCRIPTS))
    data = json_of(report)
    room = LARGEST - len(plotly.encode()) - len(script.encode()) - 100_000
    keep = 1.0
    while len(data) > room and keep > 1e-3:  # noqa: PLR2004
        keep /= 2
        data = json_of(_sparser(report, keep))
    if len(data) > room:
        raise ReadError("The report would be too large, even with few points. Give a narrower directory, or --metric.")
    policy = (
        f"default-src 'none'; script-src {_hash(plotly)} {_hash(script)}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "POLICY": policy,
        "VERSION": escape(report.version),
        "TITLE": escape(f"{Path(report.directory).name or report.directory} - dist-wandb report"),
        "STYLE": _as_element_text(_asset("page.css")),
        "DATA": data,
        "PLOTLY": plotly,
        "SCRIPT": script,
    }
    text = _asset("page.html")
    pieces = []
    for name, part in parts.items():  # each once, in this order: what is filled in is not searched again
        before, _, text = text.partition(f"%{name}%")
        pieces += [before, part]
    return "".join([*pieces, text]).encode("utf-8", "replace")


def json_of(report: Report) -> str:
    """A report as JSON that may stand in HTML, without NaN and infinities."""
    text = json.dumps(_plain(report), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _sparser(report: Report, keep: float) -> Report:
    """The same report with a share of the points of its longer curves."""

    def line(one: Line | None) -> Line | None:
        if one is None or len(one.x) <= 32:  # noqa: PLR2004
            return one
        size = max(8, math.ceil(4 / keep))  # points of which four stay
        kept: list[int] = []
        for begin in range(0, len(one.x), size):
            places = range(begin, min(begin + size, len(one.x)))
            least, most = min(places, key=one.y.__getitem__), max(places, key=one.y.__getitem__)
            kept += sorted({places[0], least, most, places[-1]})
        return Line([one.x[place] for place in kept], [one.y[place] for place in kept])

    def chart(one: Chart) -> Chart:
        band = (line(one.band[0]) or one.band[0], line(one.band[1]) or one.band[1]) if one.band else None
        ranks = {rank: line(of_rank) or of_rank for rank, of_rank in one.ranks.items()}
        return replace(one, line=line(one.line), band=band, ranks=ranks, thinned=True)

    runs = [
        replace(run, charts=[chart(one) for one in run.charts], system=[chart(one) for one in run.system])
        for run in report.runs
    ]
    return replace(report, runs=runs)


def _asset(name: str) -> str:
    return resources.files(__package__ or "dist_wandb.report").joinpath(name).read_text(encoding="utf-8")


def _as_element_text(script: str) -> str:
    """A script or style that no HTML parser ends early, and whose text is what it hashes."""
    script = re.sub(r"<(/script|/style|!--)", r"<\\\1", script, flags=re.IGNORECASE)
    return script.replace("\r\n", "\n").replace("\r", "\n")


def _hash(script: str) -> str:
    """The source expression of a script in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
