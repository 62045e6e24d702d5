"""What W&B has confirmed of a run, read from the log that W&B's own uploader keeps.

``wandb sync`` ends with exit code 0 and marks a run as uploaded also where the server refused it, and sending a run a
second time doubles its rows. But the uploader, online as in ``wandb sync``, logs each request with the number of lines
in it, each reason to try it again, and each answer, at once and unbuffered: that shows what has arrived, also after it
was killed.

Lines are *confirmed*, *refused*, or *uncertain*: without an answer, with an error of the server's, or under way when it
was killed. A file is uploaded when its last attempt ended without an error and all its rows are confirmed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

from dist_wandb.errors import ReadError
from dist_wandb.wandb_files.debug_log import count_in, entries, open_log, text_in
from dist_wandb.wandb_files.record_file import NOTHING, Lines

_DEPTH_OF_LOGS = 3  # wandb/logs, within the directory of an upload
_MOST_PROBLEMS, _LONGEST_PROBLEM = 100, 2000  # that are told of one upload; characters of each
_FIRST_REFUSAL, _FIRST_SERVER_ERROR = 400, 500
# Errors that are told beside the one that caused them.
_FOLLOWING = ("didn't print run URL", "runreader: init error")


@dataclass(frozen=True)
class Sent:
    """What is known of the upload of a run's file.

    Args:
        lines: What the server confirmed.
        unsure: Number of history rows that were sent, but neither confirmed nor refused.
        completed: Whether the server confirmed that the run is over.
        attempts: How many uploads there were.
        ended: Whether the last of them came to its end.
        problems: What went wrong in the last of them.
    """

    lines: Lines = NOTHING
    unsure: int = 0
    completed: bool = False
    attempts: int = 0
    ended: bool = False
    problems: tuple[str, ...] = ()

    def followed_by(self, later: Sent) -> Sent:
        """What is known after a later upload, which began where this one had got to."""
        sent_rows = later.lines.history or later.unsure
        return Sent(
            lines=self.lines + later.lines,
            unsure=later.unsure if sent_rows else self.unsure,  # it sent those rows again, and first
            completed=self.completed or later.completed,
            attempts=self.attempts + later.attempts,
            ended=later.ended,
            problems=later.problems,
        )


def read_attempt(directory: Path) -> Sent:
    """What the log of one upload by dist_wandb says; an upload of which there is no log sent nothing."""
    logs = sorted(_logs_below(directory, _DEPTH_OF_LOGS))
    return read_log(logs[-1]) if logs else Sent(attempts=1)


def read_log(path: Path) -> Sent:
    """What one log of W&B's uploader says; the log may still be written to.

    Args:
        path: The log; one that is not there says nothing, and counts as no upload.

    Raises:
        ReadError: There is something, but it cannot be read, so what the server has is not known.
    """
    try:
        with open_log(path) as log:
            return read_entries(log)
    except (FileNotFoundError, NotADirectoryError):
        return Sent()
    except OSError as error:
        raise ReadError(f"{path}: {error.strerror}, so what the server has confirmed is not known.") from None
    except ReadError as error:
        text = str(error)
        raise ReadError(text if str(path) in text else f"{path}: {text}") from None


def read_entries(log: BinaryIO) -> Sent:
    """As `read_log`, of an open file; never fails but for one that is too long."""
    reader = _Reader()
    for entry in entries(log):
        reader.take(text_in(entry, "msg"), text_in(entry, "level"), entry)
    return reader.sent()


def _logs_below(directory: Path, depth: int) -> Iterator[Path]:
    with os.scandir(directory) as found:
        for entry in found:
            if fnmatchcase(entry.name, "debug-sync*.log"):
                yield Path(entry.path)
            elif depth and entry.is_dir(follow_symlinks=False):
                yield from _logs_below(Path(entry.path), depth - 1)


class _Reader:
    """Goes through the entries of one log. Requests that carry lines are sent one after the other."""

    def __init__(self) -> None:
        self._lines = NOTHING
        self._completed = self._ended = False
        self._problems: dict[str, None] = {}
        self._pending: dict[str, Any] | None = None
        self._tries = self._refusals = 0  # of the pending request
        self._first_console_line: int | None = None
        self._unsure = 0

    def take(self, message: str, level: str, entry: dict[str, Any]) -> None:
        if message == "filestream: sending request":
            self._pending, self._tries, self._refusals = entry, 0, 0
        elif message == "filestream: request sent":
            self._confirm()
        elif message.startswith(("api: retrying", "api: HTTP error")) and _is_of_stream(entry):
            self._tries += 1
            self._refusals += _was_refused(entry)
        elif message.startswith("filestream: fatal error"):
            self._give_up(message)
        elif message == "sender: closed":
            self._ended = True
        is_told = len(self._problems) == _MOST_PROBLEMS or any(part in message for part in _FOLLOWING)
        if level.startswith("ERROR") and not is_told:
            self._problems[_problem(message, entry)[:_LONGEST_PROBLEM]] = None

    def sent(self) -> Sent:
        if self._pending is not None:
            self._unsure = count_in(self._pending, "history_lines")
        return Sent(self._lines, self._unsure, self._completed, 1, self._ended, tuple(self._problems))

    def _confirm(self) -> None:
        if self._pending is not None:
            history, events = (count_in(self._pending, f"{stream}_lines") for stream in ("history", "events"))
            self._lines += Lines(history, events, self._new_console_lines(self._pending))
            self._completed |= self._pending.get("complete") is True
        self._pending = None

    def _new_console_lines(self, request: dict[str, Any]) -> int:
        """How many lines go beyond those confirmed before: a line that changes is sent again."""
        if "console_offset" not in request:
            return 0
        if self._first_console_line is None:
            self._first_console_line = count_in(request, "console_offset")
        until = count_in(request, "console_offset") + count_in(request, "console_lines") - self._first_console_line
        return max(0, until - self._lines.console)

    def _give_up(self, message: str) -> None:
        reason = message.partition("\nwhile retrying:")[0]
        was_under_way = "giving up" in reason and ": context " in reason  # else it was waiting for its next try
        surely_refused = 0 < self._tries == self._refusals and not was_under_way
        if self._pending is not None and not surely_refused:
            self._unsure = count_in(self._pending, "history_lines")
        self._pending = None


def _is_of_stream(entry: dict[str, Any]) -> bool:
    return "/file_stream" in (text_in(entry, "url") or text_in(entry, "error"))


def _was_refused(entry: dict[str, Any]) -> bool:
    """Whether the server surely has nothing of a request: it said no, or it was never reached."""
    if "status" in entry:
        return _FIRST_REFUSAL <= count_in(entry, "status") < _FIRST_SERVER_ERROR
    return ": dial tcp" in text_in(entry, "error")


def _problem(message: str, entry: dict[str, Any]) -> str:
    """An entry in few words, without what wandb-core puts around it."""
    if message == "api: HTTP error":
        path = re.sub(r"^\w+://[^/]+", "", text_in(entry, "url").partition("?")[0])
        status = count_in(entry, "status") or "without a status"
        return f"HTTP {status} for {text_in(entry, 'method', 'a request')} {path}"
    text = (text_in(entry, "error") or message).partition("\nwhile retrying:")[0].partition(". got response:")[0]
    return " ".join(text.split())
