"""Hooks of mkdocs that add files outside of ``docs`` to the site.

Documents link to each other by their paths in the repository, so that the links also work there. If a page of ``docs``
links to a file outside of it, such as ``../examples/README.md``, the file becomes a page of the site: Markdown as is,
other files as a block of code. Links are rewritten accordingly. mkdocs reports links to directories and missing files.
Pages load nothing from other servers, so that they can be read without a network.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BESIDE = tuple(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))
_LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]+)((?:#[^)\s]+)?)\)")
_ELSEWHERE = re.compile(
    r"<(?:script|img|iframe)\b[^>]*\bsrc=\"?https?:[^>]*>|<link\b[^>]*(?:stylesheet|preconnect)[^>]*https?:[^>]*>"
)
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_log = logging.getLogger("mkdocs.hooks.site")  # mkdocs counts its warnings
_LANGUAGES = {".json": "json", ".py": "python", ".toml": "toml", ".yaml": "yaml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files to which pages link."""
    for path in sorted(_led_to([*DOCS.glob("*.md"), *BESIDE])):
        files.append(File.generated(config, _place(path), content=_content(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Rewrite links to paths of the site, and remove comments."""
    place = page.file.src_uri
    source = next((path for path in (DOCS / place, ROOT / place) if path.is_file()), None)
    text = _COMMENT.sub("", markdown)
    return text if source is None else _LINK.sub(lambda link: _rewritten(link, source, place), text)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:  # noqa: ARG001
    """Log a warning for each address on another server that a page loads."""
    for found in _ELSEWHERE.findall(output):
        _log.warning("%s loads something from another server: %s", page.file.src_uri, found)
    return output


def _led_to(documents: Iterable[Path]) -> set[Path]:
    """Return the files outside of ``docs`` to which documents link, directly or through such files."""
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


def _target(document: Path, link: str) -> Path:
    return Path(os.path.normpath(document.parent / link))


def _place(path: Path) -> str:
    """Return the path of a repository file in the sources of the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    place = path.relative_to(ROOT).as_posix()
    return place if path.suffix == ".md" else f"{place}.md"


def _content(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    return text if path.suffix == ".md" else f"# {name}\n\n````{_LANGUAGES.get(path.suffix, 'text')}\n{text}````\n"


def _rewritten(link: re.Match[str], document: Path, place: str) -> str:
    target = _target(document, link[1])
    if not target.is_file():
        return link[0]
    return f"]({os.path.relpath(_place(target), Path(place).parent)}{link[2]})"
