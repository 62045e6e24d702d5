"""Documents lead to files and sections that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "dist_wandb"
DOCUMENTS = sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
MAPS = ("CONTRIBUTING.md", "docs/architecture.md")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
_MODULE = re.compile(r"[\w/]+\.py\b")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes of headings."""
    headings = _HEADING.findall(document.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_to_files_and_sections(name: str) -> None:
    document = ROOT / name
    for target, anchor in _LINK.findall(document.read_text(encoding="utf-8")):
        path = document.parent / target if target else document
        assert path.exists(), f"{name} links to {target}"
        if anchor:
            assert anchor in anchors(path), f"{name} links to {target}#{anchor}"


@pytest.mark.parametrize("name", MAPS)
def test_maps_of_the_code_name_modules_that_exist(name: str) -> None:
    named = set(_MODULE.findall((ROOT / name).read_text(encoding="utf-8")))
    known = [path.as_posix() for folder in (SOURCES, ROOT / "tests", ROOT / "scripts") for path in folder.rglob("*.py")]
    missing = {module for module in named if not any(path.endswith(f"/{module}") for path in known)}
    assert named
    assert missing == set()
