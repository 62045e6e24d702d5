"""Hooks of mkdocs: add files outside of ``docs`` to the site, and rewrite pages.

Documents link to each other as the files lie in the repository, so the links work there as well. A file outside of
``docs`` that a page links to, such as ``../examples/README.md``, becomes a page of the site. Links are rewritten
accordingly; a link to a directory or to a missing file stays, and mkdocs reports it. Pages request nothing from other
hosts, so that they can be read without a network.
"""

from __future__ import annotations

import logging
import re

import site_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_OTHER_HOST = re.compile(
    r"<(?:script|img|iframe)\b[^>]*\bsrc=\"?https?:[^>]*>|<link\b[^>]*(?:stylesheet|preconnect)[^>]*https?:[^>]*>"
)
_log = logging.getLogger("mkdocs.hooks.site")  # mkdocs counts its warnings


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of ``docs`` that pages link to."""
    for path in sorted(site_pages.linked_files([*site_pages.DOCS.glob("*.md"), *site_pages.OUTSIDE])):
        files.append(File.generated(config, site_pages.page_of(path), content=site_pages.content_of(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Rewrite links, insert generated text and remove comments."""
    return site_pages.rewritten(markdown, page.file.src_uri)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:  # noqa: ARG001
    """Warn of requests to other hosts."""
    for found in _OTHER_HOST.findall(output):
        _log.warning("%s requests something from another host: %s", page.file.src_uri, found)
    return output


def on_post_template(output: str, *, template_name: str, config: MkDocsConfig) -> str:  # noqa: ARG001
    """Make the addresses of the page for missing pages relative."""
    return site_pages.relative(output) if template_name == "404.html" else output
