"""What W&B has confirmed of a run, read from the log that W&B's own uploader keeps.

``wandb sync`` ends with exit code 0 and marks a run as uploaded also where the server refused it, and sending a run a
second time doubles its rows. But the uploader, online as in ``wandb sync``, logs each request with the number of lines
in it, each reason to try it again, and each answer, at once and unbuffered: that tells what has arrived, also after it
was killed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_wandb.delivery import entries, log_of
from dist_wandb.record_file import NOTHING, Lines

UPLOAD_DIRECTORY = "dist-wandb-upload"
"""Within a run's directory: what dist_wandb keeps of the uploads of the run."""

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


def sent_of(run_file: Path) -> Sent:
    """What W&B has confirmed of a run's file until now: while it was written, and in uploads by dist_wandb.

    Args:
        run_file: A ``.wandb`` file. The logs lie in its directory.
    """
    sent = Sent()
    if not run_file.parent.resolve().name.startswith("offline-"):
        sent = read_log(log_of(run_file.parent))
    for directory in attempt_directories(run_file):
        sent = sent.followed_by(read_attempt(directory))
    return sent


def attempt_directories(run_file: Path) -> list[Path]:
    """The directories of the uploads of a run's file, in the order in which they were made."""
    found = (run_file.parent / UPLOAD_DIRECTORY).glob("attempt-*")
    return sorted(found, key=lambda path: int(path.name.removeprefix("attempt-")))


def read_attempt(directory: Path) -> Sent:
    """What the log of one upload by dist_wandb says; an upload of which there is no log sent nothing."""
    logs = sorted(directory.rglob("debug-sync*.log"))
    return read_log(logs[-1]) if logs else Sent(attempts=1)


def read_log(path: Path) -> Sent:
    """What one log of W&B's uploader says; the log may still be written to.

    Args:
        path: The log; one that is not there says nothing, and counts as no upload.
    """
    try:
        with path.open("rb") as log:
            return _read(log)
    except OSError:
        return Sent()


def _read(log: Iterable[bytes]) -> Sent:
    reader = _Reader()
    for entry in entries(log):
        reader.take(str(entry.get("msg", "")), str(entry.get("level", "")), entry)
    return reader.sent()


class _Reader:
    """Goes through the entries of one log. Requests that carry lines are sent one after the other."""

    def __init__(self) -> None:
        self._lines = NOTHING
        self._completed = self._ended = False
        self._problems: list[str] = []
        self._pending: dict[str, Any] | None = None
        self._refusals: list[bool] = []  # of each time that the pending request was tried
        self._first_console_line: int | None = None
        self._unsure = 0

    def take(self, message: str, level: str, entry: dict[str, Any]) -> None:
        if message == "filestream: sending request":
            self._pending, self._refusals = entry, []
        elif message == "filestream: request sent":
            self._confirm()
        elif message.startswith(("api: retrying", "api: HTTP error")) and _is_of_stream(entry):
            self._refusals.append(_was_refused(entry))
        elif message.startswith("filestream: fatal error"):
            self._give_up(message)
        elif message == "sender: closed":
            self._ended = True
        if level.startswith("ERROR") and not any(part in message for part in _FOLLOWING):
            self._problems.append(_problem(message, entry))

    def sent(self) -> Sent:
        if self._pending is not None:
            self._unsure = self._pending.get("history_lines", 0)
        return Sent(self._lines, self._unsure, self._completed, 1, self._ended, tuple(dict.fromkeys(self._problems)))

    def _confirm(self) -> None:
        if self._pending is not None:
            history, events = (self._pending.get(f"{stream}_lines", 0) for stream in ("history", "events"))
            self._lines += Lines(history, events, self._new_console_lines(self._pending))
            self._completed |= bool(self._pending.get("complete"))
        self._pending = None

    def _new_console_lines(self, request: dict[str, Any]) -> int:
        """How many lines go beyond those confirmed before: a line that changes is sent again."""
        if "console_offset" not in request:
            return 0
        if self._first_console_line is None:
            self._first_console_line = request["console_offset"]
        until: int = request["console_offset"] + request.get("console_lines", 0) - self._first_console_line
        return max(0, until - self._lines.console)

    def _give_up(self, message: str) -> None:
        reason = message.partition("\nwhile retrying:")[0]
        was_under_way = "giving up" in reason and ": context " in reason  # else it was waiting for its next try
        surely_refused = bool(self._refusals) and all(self._refusals) and not was_under_way
        if self._pending is not None and not surely_refused:
            self._unsure = self._pending.get("history_lines", 0)
        self._pending = None


def _is_of_stream(entry: dict[str, Any]) -> bool:
    return "/file_stream" in str(entry.get("url", entry.get("error", "")))


def _was_refused(entry: dict[str, Any]) -> bool:
    """Whether the server surely has nothing of a request: it said no, or it was never reached."""
    if "status" in entry:
        return _FIRST_REFUSAL <= int(entry["status"]) < _FIRST_SERVER_ERROR
    return ": dial tcp" in str(entry.get("error", ""))


def _problem(message: str, entry: dict[str, Any]) -> str:
    """An entry in few words, without what wandb-core puts around it."""
    if message == "api: HTTP error":
        path = re.sub(r"^\w+://[^/]+|\?.*$", "", str(entry.get("url", "")))
        return f"HTTP {entry.get('status')} for {entry.get('method')} {path}"
    text = str(entry.get("error") or message).partition("\nwhile retrying:")[0].partition(". got response:")[0]
    return " ".join(text.split())
