"""What the server has confirmed: the logs of W&B's uploader, and the state of this user's uploads.

*The log.* ``wandb sync`` exits with 0 and marks a run as uploaded even if the server refused it, and sending a run
twice doubles its rows. But the uploader logs each request with its number of lines, each reason for a retry, and each
response, unbuffered, so the log shows what has arrived even after the uploader was killed. Lines are *confirmed*,
*refused*, or *uncertain*: no response, a server error, or in flight when the uploader was killed. A file is uploaded
when its last attempt ended without an error and all its rows are confirmed.

*The state* is in the user's own state directory. A run's directory may come from anybody, so its claims about uploads
are ignored, and only W&B's mark is written there. The state of a file is keyed by its run record, which W&B makes
unique for each writer, so it is found again after the directory was moved or copied. It has size and digest of each
content that was uploaded: another file with the same run record does not match, a file that has grown does.

W&B's mark in a directory is a reason to refuse, which ``--trust`` settles and records. W&B's own log of an online run,
``logs/debug-internal.log``, is the only evidence of what arrived, so it counts, and the plan names it as the source.

One folder per file: ``state.json``, ``lock``, ``syncstate`` (W&B's own record of the run's first step), and
``upload-*`` of the last upload, with W&B's log and its output. What that log shows is read together with the state, and
added to it when the next upload begins, so that a killed upload counts as well.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from dist_wandb.errors import ReadError, UploadError, in_words
from dist_wandb.runs.client_settings import state_directory
from dist_wandb.wandb_files.debug_log import count_in, entries, text_in
from dist_wandb.wandb_files.reading import StoredRun
from dist_wandb.wandb_files.record_file import run_record_of
from dist_wandb.wandb_files.small_files import (
    Directory,
    open_ordinary,
    own_directory,
    parse_json,
    read_small,
    write_small,
)

COPY = "copy"  # from which a file is uploaded; private, in the upload's directory until the upload ends
_LARGEST_STATE = 1 << 26  # bytes; it includes the problems of uploads
_LONGEST_OWNER = 100  # bytes; the fixed length allows replacing the owner without truncating the file
_PIECE = 1 << 20
_MOST_PROBLEMS, _LONGEST_PROBLEM = 100, 2000  # of one upload; characters of each
_REFUSALS_OF_A_RUN = (404, 409, 410)
_FIRST_REFUSAL, _FIRST_SERVER_ERROR = 400, 500
_GAVE_UP = re.compile(r"//[^/\s]*(/\S*) giving up after (\d+) attempt")
# Errors that only follow from another one.
_FOLLOWING = ("didn't print run URL", "runreader: init error")


@dataclass(frozen=True)
class Sent:
    """The upload state of a run's file."""

    # Numbers of confirmed lines of the three streams of a run:
    history: int = 0  # history rows
    events: int = 0  # samples of system metrics
    console: int = 0  # lines of console output
    unsure: int = 0  # history rows that were sent, but neither confirmed nor refused
    completed: bool = False  # whether the server confirmed the end of the run
    attempts: int = 0  # number of uploads
    ended: bool = False  # whether the last upload ran to its end
    problems: tuple[str, ...] = ()  # errors of the last upload
    retried: str = field(default="", compare=False)  # why the last upload has sent a request again; "" if it has not
    tries: int = field(default=0, compare=False)  # how often it has done so
    refused: bool = field(default=False, compare=False)  # although the server refuses the run

    @property
    def has_lines(self) -> bool:
        return bool(self.history or self.events or self.console)

    def followed_by(self, later: Sent) -> Sent:
        sent_rows = later.history or later.unsure
        return replace(
            later,
            history=self.history + later.history,
            events=self.events + later.events,
            console=self.console + later.console,
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


@dataclass(frozen=True)
class _Content:
    """A content of the file that was uploaded, wholly or in part."""

    path: str
    size: int  # bytes; the file may have grown since
    digest: str
    sent: Sent  # what the server has confirmed
    folder: str = ""  # of an upload whose log shows what else it has confirmed


class FileState:
    """The state of this user's uploads of one ``.wandb`` file; `UploadError` without a state directory."""

    def __init__(self, run: StoredRun) -> None:
        try:
            top = state_directory()
        except RuntimeError as error:
            raise UploadError(f"Uploads need a directory: {error} Set XDG_STATE_HOME to one of yours.") from None
        self._path, self._within = run.path, run.directory
        record = run_record_of(run.path, run.directory)
        key = b"record " + record if record is not None else b"path " + os.fsencode(run.path.resolve())
        self.directory: Path = top / "uploads" / hashlib.sha256(key).hexdigest()[:32]

    def sent(self) -> Sent | None:
        # `None` without uploads. Raises `UploadError` if the file changed after one, and `ReadError` if the state is
        # damaged.
        uploaded = self._uploaded()
        digests = self._digests(content.size for content in uploaded)
        for content in reversed(uploaded):
            if digests.get(content.size) == content.digest:
                return content.sent
        if any(content.path == str(self._path.resolve()) for content in uploaded):
            raise UploadError(
                f"{self._path}: the file has changed since you uploaded it, so it is unknown which of its rows have "
                "arrived. Look at the run. --again uploads all of them."
            )
        return None

    def begin(self, before: Sent) -> Path:  # the upload's new directory; the lock is held
        upload = Path(tempfile.mkdtemp(prefix="upload-", dir=self.directory))
        self.record(before, upload.name)
        for left in self.directory.glob("upload-*"):
            if left != upload:
                shutil.rmtree(left, ignore_errors=True)
        return upload

    def record(self, sent: Sent, folder: str = "") -> None:
        """Record which lines of the file are confirmed, and where the log of an upload that begins will be."""
        with os.fdopen(open_ordinary(self._path, within=self._within), "rb") as file:
            size = os.fstat(file.fileno()).st_size
        new = _Content(str(self._path.resolve()), size, self._digests({size}).get(size, ""), sent, folder)
        others = [replace(one, folder="") for one in self._uploaded() if (one.size, one.digest) != (size, new.digest)]
        write_small(self.directory / "state.json", json.dumps([asdict(one) for one in (*others, new)]).encode())

    def sync_state(self) -> bytes | None:
        """Return W&B's record of the run's first step, from this user's uploads, else from the run's directory."""
        with suppress(FileNotFoundError):
            return read_small(self.directory / "syncstate")
        with suppress(FileNotFoundError):
            return read_small(self._path.with_name(f"{self._path.name}.syncstate"), within=self._within)
        return None

    def keep_sync_state(self, copy: Path) -> None:
        """Keep W&B's record of the first step after an upload from `copy`, for uploads that continue it."""
        with suppress(FileNotFoundError):
            write_small(self.directory / "syncstate", read_small(copy.with_name(f"{copy.name}.syncstate")))

    def uploader(self) -> str | None:
        """Return the process that is uploading the file now, as ``"pid 4711"``; `None` if there is none."""
        with suppress(FileNotFoundError), _lock_of(self.directory) as (_, holder):
            return holder
        return None

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the lock of the file; yield the descriptor. Raises `UploadError` if another process holds it."""
        _make_private(self.directory)
        with _lock_of(self.directory, os.O_CREAT) as (handle, holder):
            if holder is not None:
                raise UploadError(f"{self._path}: {another_upload(holder)}")
            name_owner(handle, os.getpid())
            yield handle

    def _digests(self, sizes: Iterable[int]) -> dict[int, str]:
        """Return digests of the first N bytes of the file, by N; sizes beyond its end are left out."""
        found: dict[int, str] = {}
        digest = hashlib.sha256()
        with os.fdopen(open_ordinary(self._path, within=self._within), "rb") as file:
            for size in sorted(set(sizes)):
                while file.tell() < size:
                    piece = file.read(min(_PIECE, size - file.tell()))
                    if not piece:
                        return found
                    digest.update(piece)
                found[size] = digest.hexdigest()
        return found

    def _uploaded(self) -> list[_Content]:
        state = self.directory / "state.json"
        try:
            return [
                self._content(**one) for one in parse_json(read_small(state, limit=_LARGEST_STATE, owner=os.getuid()))
            ]
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError):
            raise ReadError(
                f"{state} is not in dist_wandb's format, so it is unknown what was uploaded. Remove {self.directory} "
                "to discard the record of these uploads."
            ) from None

    def _content(self, path: str, size: int, digest: str, sent: dict[str, Any], folder: str) -> _Content:
        known = Sent(**{**sent, "problems": tuple(sent["problems"])})
        known = known.followed_by(read_attempt(self.directory / folder)) if folder else known
        return _Content(path, size, digest, known, folder)


def name_owner(lock: int, pid: int) -> None:
    os.pwrite(lock, f"{pid} {socket.gethostname()[:64]}".encode().ljust(_LONGEST_OWNER), 0)


def remove_left_copies() -> None:
    """Remove the private copies of killed uploads, which may be as large as the runs; those in progress hold a lock."""
    try:
        left = list((state_directory() / "uploads").glob(f"*/upload-*/{COPY}"))
    except (OSError, RuntimeError):
        return
    for copy in left:
        with suppress(OSError, ReadError), _lock_of(copy.parents[1]) as (_, holder):
            if holder is None:
                shutil.rmtree(copy)


def another_upload(holder: str) -> str:
    return f"another upload of this file is under way ({holder}). Wait until it has ended."


@contextmanager
def _lock_of(directory: Path, flags: int = 0) -> Iterator[tuple[int, str | None]]:
    """Lock a folder's lock file; yield the descriptor, and the holder if another process has locked it."""
    handle = open_ordinary(directory / "lock", os.O_RDWR | flags, owner=os.getuid())
    try:
        holder = None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, _, host = os.pread(handle, _LONGEST_OWNER, 0).decode(errors="replace").strip().partition(" ")
            where = "" if host == socket.gethostname()[:64] else f" on {host}"
            holder = f"pid {pid}{where}" if pid else "by an unknown process"  # the latter has just locked it
        yield handle, holder
    finally:
        os.close(handle)


def _make_private(directory: Path) -> None:
    """Make a folder of the state directory, and its parents, accessible to this user only."""
    top = state_directory()
    try:
        top.parent.mkdir(parents=True, exist_ok=True)
        for path in (top, directory.parent, directory):
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
            own_directory(path)
    except ReadError as error:
        raise UploadError(
            f"{error} The state of uploads is kept there. Set XDG_STATE_HOME to a directory of yours."
        ) from None
    except OSError as error:
        raise UploadError(
            f"{directory} cannot be written to ({error.strerror or error}), and the state of uploads is kept there. "
            "Make it writable, or set XDG_STATE_HOME to a directory of yours that is."
        ) from None


# --- the log of W&B's uploader ----------------------------------------------------------------------------------------


def read_entries(log: BinaryIO) -> Sent:
    """Return what the entries of one log show. Requests with lines are sent one after the other."""
    history = events = console = unsure = 0
    is_complete = has_ended = False
    pending: dict[str, Any] | None = None
    tries, refusals = -1, 0  # of the pending request; -1 before the first
    first_console_line: int | None = None
    retried: dict[str, Any] = {}
    problems: dict[str, None] = {}
    for entry in entries(log):
        message, level = text_in(entry, "msg"), text_in(entry, "level")
        if message == "filestream: sending request":
            pending, tries, refusals = entry, 0, 0
        elif message == "filestream: request sent" and pending is not None:
            history += count_in(pending, "history_lines")
            events += count_in(pending, "events_lines")
            if "console_offset" in pending:
                begin = count_in(pending, "console_offset")
                first_console_line = begin if first_console_line is None else first_console_line
                # A line that changes is sent again.
                console = max(console, begin + count_in(pending, "console_lines") - first_console_line)
            is_complete |= pending.get("complete") is True
            pending = None
        elif message == "sender: closed":
            has_ended = True
        elif message.startswith("filestream: fatal error"):
            reason = message.partition("\nwhile retrying:")[0]
            was_in_flight = "giving up" in reason and ": context " in reason  # else it was waiting for its next try
            if pending is not None and (was_in_flight or not 0 < tries == refusals):
                unsure = count_in(pending, "history_lines")
            pending = None
        if message.startswith("api: retrying"):
            retried = {"method": "requests to", **entry, "times": retried.get("times", 0) + 1}
        address = text_in(entry, "url") or text_in(entry, "error")
        if message.startswith(("api: retrying", "api: HTTP error")) and "/file_stream" in address:
            tries += 1
            is_answer = _FIRST_REFUSAL <= count_in(entry, "status") < _FIRST_SERVER_ERROR
            # The server certainly has nothing of it: it refused it, or was never reached.
            refusals += is_answer if "status" in entry else ": dial tcp" in text_in(entry, "error")
        is_dropped = len(problems) == _MOST_PROBLEMS or any(part in message for part in _FOLLOWING)
        if level.startswith("ERROR") and not is_dropped:
            problems[_problem(message, entry)[:_LONGEST_PROBLEM]] = None
    if pending is not None:
        unsure = count_in(pending, "history_lines")
    return Sent(
        *(history, events, console, unsure),
        completed=is_complete,
        attempts=1,
        ended=has_ended,
        problems=tuple(problems),
        retried=_problem("api: HTTP error" if "status" in retried else "", retried)[:_LONGEST_PROBLEM],
        tries=count_in(retried, "times"),
        refused=tries < 0 and count_in(retried, "status") in _REFUSALS_OF_A_RUN,
    )


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
