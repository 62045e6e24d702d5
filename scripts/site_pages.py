"""The pages of the site, as text: which files of the repository are pages, their links, and generated content."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from unittest.mock import patch

from dist_wandb.cli import main as dist_wandb

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OUTSIDE = tuple(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))
"""Pages outside of `docs` that are in the navigation."""
_RENAMED = {"SECURITY.md": "vulnerabilities.md"}  # docs/security.md has the same name on macOS and Windows
_LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]+)((?:#[^)\s]+)?)\)")
_HELP = re.compile(r"^<!-- help: (\w+) -->$", re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_OURS = re.compile(r"\bdist_wandb\b|\bDistWandb")  # lines of code that are highlighted
_LANGUAGES = {".json": "json", ".py": "python", ".sbatch": "bash", ".toml": "toml", ".yaml": "yaml"}
_NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
_COLUMNS = 84  # width of the help of commands
_ARGUMENTS = re.compile(r"^( *)Args:\n(?:\1 +.*\n|\n)+", re.MULTILINE)
_PAGE = re.compile(r"(?:``)?\bdocs/([\w-]+)\.md(?:``)?")


def linked_files(documents: Iterable[Path]) -> set[Path]:
    """Return the files outside of `docs` that documents link to, directly or through other such files."""
    found: set[Path] = set()
    waiting = list(documents)
    while waiting:
        document = waiting.pop()
        if not document.is_relative_to(DOCS):
            found.add(document)
        if document.suffix == ".md":
            targets = {_target(document, link[1]) for link in _LINK.finditer(document.read_text(encoding="utf-8"))}
            waiting += [path for path in targets if not (path.is_relative_to(DOCS) or path in found or path.is_dir())]
    return found


def page_of(path: Path) -> str:
    """Return the path of a file's page, relative to the site's sources."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return _RENAMED.get(name, name if path.suffix == ".md" else f"{name}.md")


def source_of(page: str) -> Path | None:
    """Return the Markdown file of a page; `None` for other pages."""
    names = {renamed: name for name, renamed in _RENAMED.items()}
    return next((path for path in (DOCS / page, ROOT / names.get(page, page)) if path.is_file()), None)


def content_of(path: Path) -> str:
    """Return the Markdown of a file: its text, or blocks of code that the site's search ignores."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    name = path.relative_to(ROOT).as_posix()
    if path.suffix == ".ipynb":
        return f"{_NOT_SEARCHED}{_cells(text)}"
    return f"{_NOT_SEARCHED}# {name}\n\n{_code(text, _LANGUAGES.get(path.suffix, 'text'))}"


def rewritten(markdown: str, page: str) -> str:
    """Insert the help of commands, remove comments, and point links to pages of the site."""
    text = _COMMENT.sub("", _HELP.sub(lambda marker: f"```text\n{_help_of(marker[1])}```", markdown))
    source = source_of(page)
    return text if source is None else _LINK.sub(lambda link: _rewritten_link(link, source, page), text)


def relative(html: str) -> str:
    """Make absolute addresses of an HTML page relative, so that it works below any path and without a server."""
    return re.sub(r'((?:href=|src=|"base": |new URL\()")/(?!/)', r"\1./", html)


def docstring_of(value: str, *, has_arguments: bool) -> str:
    """Convert a docstring to what the site shows.

    Args:
        value: The docstring.
        has_arguments: Whether users pass its arguments; otherwise they are left out.

    Returns:
        The docstring with Markdown's colon before blocks of code, and with links to pages of the site.
    """
    text = value if has_arguments else _ARGUMENTS.sub("", value + "\n").rstrip()
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    return _PAGE.sub(lambda name: f"[{_title_of(name[1])}]({name[1]}.md)", text)


def _title_of(page: str) -> str:
    first_line = (DOCS / f"{page}.md").read_text(encoding="utf-8").partition("\n")[0]
    return first_line.removeprefix("# ")


def _help_of(command: str) -> str:
    output = io.StringIO()
    with patch.dict(os.environ, COLUMNS=str(_COLUMNS), NO_COLOR="1"), redirect_stdout(output), suppress(SystemExit):
        dist_wandb([command, "--help"])
    return output.getvalue()


def _cells(notebook: str) -> str:
    """Return the cells of a notebook, without their output."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(notebook)["cells"]]
    return "\n".join(f"{text}\n" if kind == "markdown" else _code(f"{text}\n", "python") for kind, text in cells)


def _code(text: str, language: str) -> str:
    """Return a block of code, in which the lines that name this package are highlighted."""
    numbers = [str(number) for number, line in enumerate(text.splitlines(), 1) if _OURS.search(line)]
    lines = f' hl_lines="{" ".join(numbers)}"' if numbers else ""
    return f"````{language}{lines}\n{text}````\n"


def _target(document: Path, link: str) -> Path:
    return Path(os.path.normpath(document.parent / link))


def _rewritten_link(link: re.Match[str], document: Path, page: str) -> str:
    target = _target(document, link[1])
    if not target.is_file():
        return link[0]
    return f"]({os.path.relpath(page_of(target), Path(page).parent)}{link[2]})"
