"""Documents: links lead to files and sections, and tables, pictures, commands and names are those of the package."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import diagrams
import pytest
from documents import blocks, documents
from lightning.pytorch.loggers import WandbLogger

import dist_wandb
from dist_wandb.cli import _parser, main

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "dist_wandb"
DOCUMENTS = sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
INTEGRATIONS = ("DistWandbCallback", "DistWandbLogger", "DistWandbTracker")
MAPS = ("CONTRIBUTING.md", "docs/architecture.md")
COMMANDS = {
    line.partition("dist-wandb ")[2]
    for path in documents(ROOT)
    for line in path.read_text(encoding="utf-8").splitlines()
    if line.startswith("$ ") and "dist-wandb " in line
}
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
_MODULE = re.compile(r"[\w/]+\.py\b")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub generates for headings."""
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


@pytest.mark.source
@pytest.mark.parametrize("name", MAPS)
def test_maps_of_the_code_name_modules_that_exist(name: str) -> None:
    named = set(_MODULE.findall((ROOT / name).read_text(encoding="utf-8")))
    known = [path.as_posix() for folder in (SOURCES, ROOT / "tests", ROOT / "scripts") for path in folder.rglob("*.py")]
    missing = {module for module in named if not any(path.endswith(f"/{module}") for path in known)}
    assert named
    assert missing == set()


@pytest.mark.parametrize("name", sorted({*dist_wandb.__all__, *INTEGRATIONS} - {"__version__"}))
def test_the_reference_has_every_public_name(name: str) -> None:
    pages = [path.read_text(encoding="utf-8") for path in ROOT.glob("docs/api*.md")]
    described = set(re.findall(r"^::: [\w.]+\.(\w+)$", "\n".join(pages), re.MULTILINE))
    assert name in described or hasattr(dist_wandb.errors, name)


@pytest.mark.parametrize(
    "name",
    sorted({*inspect.signature(WandbLogger).parameters, *(name for name in dir(WandbLogger) if name[0] != "_")}),
)
def test_every_name_of_the_stock_logger_is_in_the_table_of_compatible_names(name: str) -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## WandbLogger\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    cells = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)
    assert name in {one for cell in cells for one in re.findall(r"`\**(\w+)", cell)}


def test_pictures_of_run_modes_match_the_plan() -> None:
    drawn = diagrams.drawn()
    assert {name: (diagrams.IMAGES / name).read_text(encoding="utf-8") for name in drawn} == drawn
    shown = (ROOT / "docs" / "run-modes.md").read_text(encoding="utf-8")
    assert [name for name in drawn if f"](images/{name})" not in shown] == []


@pytest.mark.parametrize("path", documents(ROOT), ids=lambda path: path.stem)
def test_code_blocks_name_their_language(path: Path) -> None:
    """Otherwise, a Python block might not be run without anyone noticing."""
    languages = {block.language for block in blocks(path.read_text(encoding="utf-8"))}
    assert languages <= {"python", "console", "bash", "text", "yaml"}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_commands_in_the_documents_are_valid(command: str) -> None:
    words = shlex.split(command, comments=True)
    assert _parser().parse_args(words[: words.index(">")] if ">" in words else words)


def test_the_plan_in_the_documents_is_the_output_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "run-modes.md").read_text(encoding="utf-8")
    (shown,) = [block.text for block in blocks(page) if block.text.startswith("$ dist-wandb plan")]
    command, _, output = shown.partition("\n")
    assert main(shlex.split(command)[2:]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == output.splitlines()


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
