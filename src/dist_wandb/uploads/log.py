"""Read from the log of W&B's uploader which lines of a run the server has confirmed.

``wandb sync`` exits with 0 and marks a run as uploaded even if the server refused it, and sending a run twice doubles
its rows. But the uploader logs each request with its number of lines, each reason for a retry, and each response,
unbuffered, so the log shows what has arrived even after the uploader was killed.

Lines are *confirmed*, *refused*, or *uncertain*: no response, a server error, or in flight when the uploader was
killed. A file is uploaded when its last attempt ended without an error and all its rows are confirmed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from dist_wandb.errors import ReadError, in_words
from dist_wandb.wandb_files.debug_log import count_in, entries, text_in
from dist_wandb.wandb_files.record_file import NOTHING, Lines
from dist_wandb.wandb_files.small_files import Directory, open_ordinary

_MOST_PROBLEMS, _LONGEST_PROBLEM = 100, 2000  # of one upload; characters of each
_REFUSALS_OF_A_RUN = (404, 409, 410)
_FIRST_REFUSAL, _FIRST_SERVER_ERROR = 400, 500
_GAVE_UP = re.compile(r"//[^/\s]*(/\S*) giving up after (\d+) attempt")
# Errors that only follow from another one.
_FOLLOWING = ("didn't print run URL", "runreader: init error")


@dataclass(frozen=True)
class Sent:
    """The upload state of a run's file."""

    lines: Lines = NOTHING  # confirmed
    unsure: int = 0  # history rows that were sent, but neither confirmed nor refused
    completed: bool = False  # whether the server confirmed the end of the run
    attempts: int = 0  # number of uploads
    ended: bool = False  # whether the last upload ran to its end
    problems: tuple[str, ...] = ()  # errors of the last upload
    retried: str = field(default="", compare=False)  # why the last upload has sent a request again; "" if it has not
    tries: int = field(default=0, compare=False)  # how often it has done so
    refused: bool = field(default=False, compare=False)  # although the server refuses the run

    def followed_by(self, later: Sent) -> Sent:
        """The state after a later upload, which continued this one."""
        sent_rows = later.lines.history or later.unsure
        return replace(
            later,
            lines=self.lines + later.lines,
            unsure=later.unsure if sent_rows else self.unsure,  # it sent those rows again first
            completed=self.completed or later.completed,
            attempts=self.attempts + later.attempts,
        )


def read_attempt(directory: Path) -> Sent:
    """Read the log of one upload by dist_wandb; an upload without a log sent nothing."""
    # Not in the copy beside it: a run may have a file of that name.
    logs = sorted((directory / "wandb").glob("**/debug-sync*.log"))
    return read_log(logs[-1]) if logs else Sent(attempts=1)


def read_log(path: Path, within: Directory | None = None) -> Sent:
    """Read a log of W&B's uploader, perhaps still written; a missing one counts as no upload. Raises `ReadError`."""
    try:
        with os.fdopen(open_ordinary(path, within=within), "rb") as log:
            return read_entries(log)
    except (FileNotFoundError, NotADirectoryError):
        return Sent()
    except OSError as error:
        raise ReadError(f"{path}: {error.strerror}, so it is unknown what the server has confirmed.") from None
    except ReadError as error:
        raise ReadError(in_words(error, path)) from None


def read_entries(log: BinaryIO) -> Sent:
    """As `read_log`, from an open file; fails only if it is too long."""
    reader = _Reader()
    for entry in entries(log):
        reader.add(text_in(entry, "msg"), text_in(entry, "level"), entry)
    return reader.sent()


class _Reader:
    """Processes the entries of one log. Requests with lines are sent one after the other."""

    def __init__(self) -> None:
        self._lines = NOTHING
        self._completed = self._ended = False
        self._problems: dict[str, None] = {}
        self._pending: dict[str, Any] | None = None
        self._tries, self._refusals = -1, 0  # of the pending request; -1 before the first
        self._first_console_line: int | None = None
        self._unsure = 0
        self._retried: dict[str, Any] = {}

    def add(self, message: str, level: str, entry: dict[str, Any]) -> None:
        if message == "filestream: sending request":
            self._pending, self._tries, self._refusals = entry, 0, 0
        elif message == "filestream: request sent" and self._pending is not None:
            history, events = (count_in(self._pending, f"{stream}_lines") for stream in ("history", "events"))
            self._lines += Lines(history, events, self._new_console_lines(self._pending))
            self._completed |= self._pending.get("complete") is True
            self._pending = None
        if message.startswith("api: retrying"):
            self._retried = {"method": "requests to", **entry, "times": self._retried.get("times", 0) + 1}
        address = text_in(entry, "url") or text_in(entry, "error")
        if message.startswith(("api: retrying", "api: HTTP error")) and "/file_stream" in address:
            self._tries += 1
            self._refusals += _was_refused(entry)
        elif message.startswith("filestream: fatal error"):
            self._give_up(message)
        elif message == "sender: closed":
            self._ended = True
        is_dropped = len(self._problems) == _MOST_PROBLEMS or any(part in message for part in _FOLLOWING)
        if level.startswith("ERROR") and not is_dropped:
            self._problems[_problem(message, entry)[:_LONGEST_PROBLEM]] = None

    def sent(self) -> Sent:
        if self._pending is not None:
            self._unsure = count_in(self._pending, "history_lines")
        kind = "api: HTTP error" if "status" in self._retried else ""
        retried = _problem(kind, self._retried)[:_LONGEST_PROBLEM]
        refused = self._tries < 0 and count_in(self._retried, "status") in _REFUSALS_OF_A_RUN
        again = (retried, count_in(self._retried, "times"), refused)
        return Sent(self._lines, self._unsure, self._completed, 1, self._ended, tuple(self._problems), *again)

    def _new_console_lines(self, request: dict[str, Any]) -> int:
        """Number of lines beyond those confirmed before: a line that changes is sent again."""
        if "console_offset" not in request:
            return 0
        if self._first_console_line is None:
            self._first_console_line = count_in(request, "console_offset")
        until = count_in(request, "console_offset") + count_in(request, "console_lines") - self._first_console_line
        return max(0, until - self._lines.console)

    def _give_up(self, message: str) -> None:
        reason = message.partition("\nwhile retrying:")[0]
        was_in_flight = "giving up" in reason and ": context " in reason  # else it was waiting for its next try
        surely_refused = 0 < self._tries == self._refusals and not was_in_flight
        if self._pending is not None and not surely_refused:
            self._unsure = count_in(self._pending, "history_lines")
        self._pending = None


def _was_refused(entry: dict[str, Any]) -> bool:
    """Whether the server certainly has nothing of a request: it refused it, or was never reached."""
    if "status" in entry:
        return _FIRST_REFUSAL <= count_in(entry, "status") < _FIRST_SERVER_ERROR
    return ": dial tcp" in text_in(entry, "error")


def _problem(message: str, entry: dict[str, Any]) -> str:
    """A short text of an entry, without wandb-core's additions."""
    if message == "api: HTTP error":
        path = re.sub(r"^\w+://[^/]+", "", text_in(entry, "url").partition("?")[0])
        status = count_in(entry, "status") or "without a status"
        return f"HTTP {status} for {text_in(entry, 'method', 'a request')} {path}"
    text, _, status = (text_in(entry, "error") or message).partition("\nwhile retrying:")
    gave_up = _GAVE_UP.search(text[-_LONGEST_PROBLEM:]) if status.startswith(" HTTP ") else None
    if gave_up:
        return f"{status[1:9]} for {gave_up[1]}, {gave_up[2]} times"
    return " ".join(text.partition(". got response:")[0].split())
