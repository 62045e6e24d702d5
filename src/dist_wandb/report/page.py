"""Write a report, its scripts and its styles as one HTML file that makes no network request.

Data from files is JSON in an element that is not executed, and the page's script turns it into text nodes, never HTML.
A content security policy lists the hashes of the two scripts: nothing else runs, and no connection can be opened.
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

LARGEST = 20 * 10**6  # largest size of a page, in bytes
MARK = b'<meta name="generator" content="dist-wandb report '  # identifies a page: no other file is replaced
_SCRIPTS = ("values.js", "dom.js", "charts.js", "ranks.js", "compare.js", "details.js", "main.js")
_PLOTLY = "plotly/package_data/plotly.min.js"
_MARK_WITHIN = 4096  # first bytes of a file, in which the mark must be


def write_page(report: Report, path: Path) -> int:
    """Write the page of a report over an earlier one, never over another file; return its size in bytes."""
    check_target(path)
    content = page_of(report, plotly_script())
    write_small(path, content, mode=0o666)
    return len(content)


def check_target(path: Path) -> None:
    """Raise `ReadError` if the path is a file that is not a report."""
    try:
        with open(open_ordinary(path), "rb") as opened:  # noqa: PTH123  # of a descriptor
            is_page = MARK in opened.read(_MARK_WITHIN)
    except FileNotFoundError:
        return
    if not is_page:
        raise ReadError(f"{path} exists and is not a dist-wandb report, so it is not replaced. Give another -o FILE.")


def plotly_script() -> str:
    """Return the script of the installed plotly; raise `MissingExtraError` if there is none."""
    try:
        found = Path(str(importlib.metadata.distribution("plotly").locate_file(_PLOTLY)))
        script = found.read_text(encoding="utf-8")
    except (importlib.metadata.PackageNotFoundError, FileNotFoundError):
        raise MissingExtraError(
            "The report needs plotly, which is not installed. Install it: pip install 'dist-wandb[report]'"
        ) from None
    return _as_element_text(script)


def page_of(report: Report, plotly: str) -> bytes:
    """Return the page, with fewer points if it has more than `LARGEST` bytes; raise `ReadError` if that is too much."""
    script = _as_element_text("".join(f"{_asset(name)}\n" for name in _SCRIPTS))
    data = json_of(report)
    room = LARGEST - len(plotly.encode()) - len(script.encode()) - 100_000
    keep = 1.0
    while len(data) > room and keep > 1e-3:  # noqa: PLR2004
        keep /= 2
        data = json_of(report, keep)
    if len(data) > room:
        raise ReadError(
            "The report would be too large, even with few points. Give a narrower directory or use --metric."
        )
    policy = (
        f"default-src 'none'; script-src {_hash(plotly)} {_hash(script)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "POLICY": policy,
        "VERSION": escape(report.version),
        "TITLE": escape(f"{', '.join(Path(one).name or one for one in report.directories)} - dist-wandb report"),
        "STYLE": _as_element_text(_asset("page.css")),
        "DATA": data,
        "PLOTLY": plotly,
        "SCRIPT": script,
    }
    text = _asset("page.html")
    pieces = []
    for name, part in parts.items():  # each once, in this order; inserted text is not searched again
        before, _, text = text.partition(f"%{name}%")
        pieces += [before, part]
    return "".join([*pieces, text]).encode("utf-8", "replace")


def json_of(report: Report, keep: float = 1.0) -> str:
    """Return a report as JSON that is safe within HTML. NaN and infinities become null.

    If `keep` is less than 1, longer curves have only that share of their points.
    """
    text = json.dumps(_plain(report, keep), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plain(value: Any, keep: float) -> Any:
    if keep < 1 and isinstance(value, Chart):
        value = replace(value, thinned=True)
    elif keep < 1 and isinstance(value, Line) and len(value.x) > 32:  # noqa: PLR2004
        value = _sparser(value, max(8, math.ceil(4 / keep)))
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name), keep) for field in fields(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(item, keep) for name, item in value.items()}
    return [_plain(item, keep) for item in value] if isinstance(value, list | tuple) else value


def _sparser(line: Line, size: int) -> Line:
    """Keep four of each `size` points: the first, the last, the smallest and the largest."""
    kept: list[int] = []
    for begin in range(0, len(line.x), size):
        part = range(begin, min(begin + size, len(line.x)))
        least, most = min(part, key=line.y.__getitem__), max(part, key=line.y.__getitem__)
        kept += sorted({part[0], least, most, part[-1]})
    return Line([line.x[index] for index in kept], [line.y[index] for index in kept])


def _asset(name: str) -> str:
    return resources.files(__package__ or "dist_wandb.report").joinpath(name).read_text(encoding="utf-8")


def _as_element_text(script: str) -> str:
    """Escape a script or style so that no HTML parser ends it early, and its hash is that of the parsed text."""
    script = re.sub(r"<(/script|/style|!--)", r"<\\\1", script, flags=re.IGNORECASE)
    return script.replace("\r\n", "\n").replace("\r", "\n")


def _hash(script: str) -> str:
    """Return the source expression of a script for a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
