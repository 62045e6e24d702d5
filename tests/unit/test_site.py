"""What the site shows besides the text of its pages (`scripts/site_pages.py`)."""

from __future__ import annotations

import re

import pytest
import site_pages
from site_pages import DOCS, ROOT

from dist_wandb.cli import _parser

PAGES = sorted(DOCS.glob("*.md"))


def test_pages_do_not_overwrite_each_other_on_any_system() -> None:
    """Names that differ only by case are one file on macOS and Windows."""
    files = {*PAGES, *site_pages.linked_files([*PAGES, *site_pages.OUTSIDE])}
    pages = [site_pages.page_of(path) for path in files]
    assert len({page.lower() for page in pages}) == len(pages)
    assert {site_pages.source_of(site_pages.page_of(path)) for path in site_pages.OUTSIDE} == set(site_pages.OUTSIDE)


@pytest.mark.parametrize("command", re.findall(r"^    (\w+)  ", _parser().format_help(), re.MULTILINE))
def test_the_page_of_the_command_line_has_the_help_of_every_command(command: str) -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    shown = site_pages.rewritten(page, "cli.md")
    assert f"## {command}\n\n```text\nusage: dist-wandb {command} [-h]" in shown
    assert "<!--" not in shown
    helps = re.findall(r"```text\n(.*?)```", shown, re.DOTALL)
    assert max(len(line) for text in helps for line in text.splitlines()) <= 84


def test_links_lead_to_pages_of_the_site() -> None:
    text = "[](../SECURITY.md) [](../examples/README.md#start-them) [](../examples/torch/train_digits.py) [](no.md)"
    shown = "[](vulnerabilities.md) [](examples/README.md#start-them) [](examples/torch/train_digits.py.md) [](no.md)"
    assert site_pages.rewritten(text, "security.md") == shown
    assert site_pages.rewritten("[a](docs/security.md)", "vulnerabilities.md") == "[a](security.md)"


def test_the_search_of_the_site_finds_names_of_the_package() -> None:
    """The site splits texts and queries alike."""
    (separator,) = re.findall("^ +separator: '(.*)'$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    text = "`dist_wandb/degraded`, NAME/argmax_rank. wandb's wandb.log (0.5); 'shared' &lt;b&gt;"
    words = [word for word in re.split(separator.replace("''", "'"), text) if word]
    assert words == ["dist_wandb", "degraded", "NAME", "argmax_rank", "wandb", "wandb.log", "0.5", "shared", "b"]


def test_the_page_for_missing_pages_works_below_any_path() -> None:
    html = (
        '<link href="/assets/a.css"><script src="/b.js"></script><a href="/.">'
        '{"base": "/", "x": "/y"} new URL("/",location)'
    )
    assert site_pages.relative(html) == (
        '<link href="./assets/a.css"><script src="./b.js"></script><a href="./.">'
        '{"base": "./", "x": "/y"} new URL("./",location)'
    )
    assert (
        site_pages.relative('<a href="//host/"><a href="https://host/">')
        == '<a href="//host/"><a href="https://host/">'
    )


def test_docstrings_become_markdown() -> None:
    example = "Example:\n    Two ranks::\n\n        log()"
    arguments = "Args:\n    step: Position, see\n        ``docs/timings.md``.\n\n    weight: Weight."
    value = f"Log.\n\n{arguments}\n\n{example}"
    assert site_pages.docstring_of(value, has_arguments=True) == value.replace("::", ":").replace(
        "``docs/timings.md``", "[Slow ranks](timings.md)"
    )
    shown = "Log.\n\nExample:\n    Two ranks:\n\n        log()"
    assert site_pages.docstring_of(value, has_arguments=False) == shown
    assert site_pages.docstring_of("One line.", has_arguments=False) == "One line."
    assert site_pages.docstring_of("See docs/show.md.", has_arguments=True) == "See [Reading runs](show.md)."


@pytest.mark.source
def test_pages_that_docstrings_name_exist() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    names = set(re.findall(r"\bdocs/([\w-]+)\.md\b", sources))
    assert names
    assert {name for name in names if not (DOCS / f"{name}.md").is_file()} == set()
