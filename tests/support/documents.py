"""Extract the Python code of a document as a script. Blocks keep their order, and lines their line numbers.

A block may need code that readers do not need. A comment that starts with ``<!-- before the code:`` contains it on
separate lines, and is run as well. A block that cannot be run follows the comment ``<!-- not run: REASON -->``.
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
    """A block of code."""

    line: int  # line number in the document after the opening fence, from 0
    language: str  # language in the opening fence
    text: str  # lines of the block, without common indentation
    is_left_out: bool  # whether a comment gives a reason not to run the block


def blocks(document: str) -> list[Block]:
    """Yield all blocks of a document, including code in comments."""
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
    """Return the Python code of a document; an empty string if there is none."""
    lines: list[str] = []
    for block in blocks(document):
        if block.language == "python" and not block.is_left_out:
            lines += [""] * (block.line - len(lines))
            lines += block.text.splitlines()
    return "\n".join(lines)


def documents(root: Path) -> list[Path]:
    """Return the documents for users: the pages of the site, and the documents in the root of the repository."""
    return sorted([*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("examples/*.md")])
