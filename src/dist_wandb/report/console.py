"""The last lines that a process printed."""

from __future__ import annotations

import re
from collections import deque

_MOST_LINES = 1000
_LONGEST_LINE = 500  # characters
_LONGEST_PENDING = 64 * 1024
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,1000}(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class ConsoleTail:
    """Assembles pieces of console output into lines, as a terminal without colors would show them."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_MOST_LINES)
        self.count: int = 0
        """Number of all lines, including those that were dropped."""
        self._pending = ""

    def add(self, text: str) -> None:
        """Add a piece, which may start and end in the middle of a line."""
        *ended, self._pending = (self._pending + text).split("\n")
        if len(self._pending) > _LONGEST_PENDING:
            ended.append(self._pending)
            self._pending = ""
        for line in ended:
            self._put(line)

    def end(self) -> None:
        """Add an incomplete last line."""
        if self._pending:
            self._put(self._pending)
        self._pending = ""

    def _put(self, line: str) -> None:
        self.count += 1
        self.lines.append(plain(line.rstrip("\r").rpartition("\r")[2])[:_LONGEST_LINE])


def plain(text: str) -> str:
    """Return a text without escape sequences; control characters are replaced by U+FFFD."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", _ESCAPE.sub("", text))
