"""The Python of a document as a script: its blocks in their order, each line where it is in the document.

A block may need what is no business of the reader. A comment that begins with ``<!-- before the code:`` has it, in
lines of its own, and is run as well. A block that cannot be run has a comment before it, ``<!-- not run: REASON -->``.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^( *)(`{3,})(.*)$")
_LEFT_OUT = re.compile(r"^ *<!-- not run: \w.* -->$")
_BEFORE, _BEFORE_ENDS = "<!-- before the code:", "-->"


@dataclass(frozen=True)
class Block:
    """A block of code.

    Args:
        line: The line of the document, from 0, after its first fence.
        language: What the fence says that it is.
        text: Its lines, without the indent that they share.
        is_left_out: Whether a comment gives a reason why it is not run.
    """

    line: int
    language: str
    text: str
    is_left_out: bool


def blocks(document: str) -> list[Block]:
    """All blocks of a document, the code before them included."""
    found: list[Block] = []
    lines = iter(enumerate(document.splitlines()))
    above = ""
    for number, line in lines:
        fence = _FENCE.match(line)
        is_before = line.strip() == _BEFORE
        if fence or is_before:
            last = fence[1] + fence[2] if fence else _BEFORE_ENDS
            inside: list[str] = []
            for _, one in lines:
                if one.rstrip() == last:
                    break
                inside.append(one)
            text = textwrap.dedent("\n".join(inside))
            language = fence[3].strip() if fence else "python"
            found.append(Block(number + 1, language, text, is_left_out=bool(_LEFT_OUT.match(above))))
        if line.strip():
            above = line
    return found


def script(document: str) -> str:
    """The Python of a document; empty if there is none."""
    lines: list[str] = []
    for block in blocks(document):
        if block.language == "python" and not block.is_left_out:
            lines += [""] * (block.line - len(lines))
            lines += block.text.splitlines()
    return "\n".join(lines)


def documents(root: Path) -> list[Path]:
    """What users read: the site's pages, and the documents in the root of the repository."""
    return sorted([*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("examples/*.md")])
