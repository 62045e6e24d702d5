"""Upload files, one after the other, by W&B's own ``wandb sync``.

dist_wandb's additions: ranks of a shared run are sent as its writers, with the label and the role of their sidecar; a
partly uploaded file continues after the last confirmed row; and a file counts as uploaded only if the server confirmed
it (`state.py`), whatever the exit code of ``wandb sync``.

*Order.* Files of one project and run id are one run. Secondaries go first, the primary last, one after the other:
writers that take turns lose rows (wandb issue 12269), the server keeps the primary's name, tags and config, and its one
completion arrives last. After restarts a rank has several files: they are sent in the order of their start, and only
the primary's last file completes the run. Files of a resumed plain run are sent with ``resume="allow"``; otherwise
events and console would begin at line 0 again.

*Continued.* The copy lacks the confirmed lines, damaged records, and an incomplete last record, at which
``wandb sync`` would stop. In a shared run it is sent as one more writer with the same label; a plain run is opened with
``resume="must"``, so that the server decides where it continues. After an interrupted console, ``output.log`` on the
server has only the rest, because W&B's client rewrites it; the console's lines are complete.

*Locked.* A file is locked while it is uploaded (`flock`, inherited by ``wandb sync``, which outlives a killed parent;
SIGTERM and SIGHUP end both, as Ctrl-C does). After a kill of everything the log has a request without an answer, and
``sync`` refuses to guess.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from dist_wandb.cli.uploads.contents import SUMMARY, copy_file, copy_files, revised, summary_of
from dist_wandb.cli.uploads.plan import UploadFile, files_of, known_of, mark_of
from dist_wandb.cli.uploads.state import COPY, FileState, Sent, name_owner, read_attempt
from dist_wandb.errors import ReadError, UploadError, in_words
from dist_wandb.runs.client_settings import upload_environment
from dist_wandb.wandb_files.record_file import Field, copy_without, field_of
from dist_wandb.wandb_files.small_files import Directory, open_ordinary, write_small

_POLL = 0.2  # seconds
_PAUSE_IN_LOG = 0.05  # seconds between two looks at a log that is about to end
_TIME_TO_END = 10.0  # seconds for `wandb sync` and the process it starts to end after a signal
_PAUSE = 10.0  # seconds between two lines about requests that W&B's client sends again
_QUIET = 2.0  # seconds without a new log entry after which W&B's process counts as ended
_UNREACHABLE = re.compile(
    r"\bdial (tcp|udp)\b|connection (refused|reset)|no such host|network is unreachable|proxyconnect|timeout|\bTLS\b|"
    r"x509|EOF|context (deadline|canceled)|giving up after"
)
_NO_KEY = re.compile(r"api[ _-]?key|\blog ?in\b", re.IGNORECASE)
_OF_A_RECORD = re.compile(r"sender: |failed to parse|failed to unmarshal")


@dataclass(frozen=True)
class UploadOutcome:
    """The outcome of the upload of one file."""

    sent: Sent  # the lines of the file that the server confirmed in all uploads
    url: str | None  # of the run, if it is known
    problem: str | None  # why the file is not uploaded; `None` if it is
    concerns_all: bool = False  # whether other uploads would fail for the same reason: no connection, or no access


@contextmanager
def _locked(file: UploadFile) -> Iterator[tuple[FileState, int]]:
    """Hold the lock of a file. Any error is raised as an `UploadError` of the file: it affects this file only."""
    try:
        state = FileState(file.run)
        with state.locked() as lock:
            yield state, lock
    except UploadError:
        raise
    except Exception as error:
        raise UploadError(in_words(error, file.path)) from error


def remember(file: UploadFile) -> None:
    """Record a file as uploaded if its trusted directory is marked as uploaded, for later uploads without trust."""
    with _locked(file) as (state, _):
        if state.sent() is None:
            state.record(file.sent)


def upload(
    file: UploadFile,
    on_progress: Callable[[int], None] = lambda _rows: None,  # repeatedly gets the number of newly confirmed rows
    say: Callable[[str], None] = lambda _text: None,  # gets a line for the user about what the upload waits for
) -> UploadOutcome:
    # The caller has checked that nothing prohibits it. W&B's own output and log are kept in the user's state directory.
    # A `KeyboardInterrupt` is raised after W&B's processes were ended; a later upload continues.
    with _locked(file) as (state, lock):
        now = known_of(file.run, file.terms)
        if now.problem is not None:
            raise UploadError(now.problem)
        if now.sent != file.sent or now.is_marked != file.is_marked:
            raise UploadError(f"{file.path}: another process has uploaded from it meanwhile. Run the command again.")
        return _Attempt(file, state, on_progress, say).run(lock)


class _Attempt:
    """One upload of a file by ``wandb sync``, in a new directory of the state."""

    def __init__(
        self, file: UploadFile, state: FileState, on_progress: Callable[[int], None], say: Callable[[str], None]
    ) -> None:
        self._file, self._state, self._on_progress, self.say = file, state, on_progress, say
        self._directory = state.begin(file.sent)
        self._told, self._told_of, self._told_at = {""}, 0, 0.0  # reasons of retries; tries; when

    def run(self, lock: int) -> UploadOutcome:
        file, copy = self._file, self._directory / COPY
        source = copy / file.path.name
        try:
            copy.mkdir(mode=0o700)
            self._copy(source)
            output = self._run_wandb_sync(source, lock)
            self._state.keep_sync_state(source)
        finally:
            shutil.rmtree(copy, ignore_errors=True)
        outcome = _outcome(file, read_attempt(self._directory), output)
        if outcome.problem is None:
            with suppress(OSError, ReadError):  # W&B's mark, for ``wandb clean``; the directory may be read-only
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                os.close(open_ordinary(mark_of(file.path), flags, mode=0o644, within=file.run.directory))
        return outcome

    def _copy(self, target: Path) -> None:
        """Make the private copy of a run's directory. Its file lacks confirmed lines and damaged records."""
        file, numbers, local = self._file, count(), target.parent / "local"
        local.mkdir(mode=0o700)
        earlier = summary_of((run.path, run.directory) for run in file.earlier)

        def make_copy(path: Path, within: Directory) -> Path:
            copy = local / str(next(numbers))
            copy_file(path, copy, within)
            return copy

        def revise(record: bytes, parts: list[Field]) -> bytes:
            nonlocal earlier
            if earlier and any(number == SUMMARY for number, *_ in parts):  # it may replace the earlier values
                record, earlier = field_of(SUMMARY, earlier) + record, b""
            return revised(record, parts, file.run.directory, file.terms, make_copy)

        handle = open_ordinary(file.path, owner=None if file.terms.trust else os.getuid(), within=file.run.directory)
        with os.fdopen(handle, "rb") as opened, target.open("wb") as copy:
            sent = file.sent
            copy_without(opened, copy, revise, history=sent.history, events=sent.events, console=sent.console)
        sync_state = self._state.sync_state()
        if sync_state is not None:
            write_small(target.with_name(f"{target.name}.syncstate"), sync_state)
        continues = file.sent.has_lines or bool(file.run.problems) or file.run.exit_code is None
        rewritten = frozenset({"output.log"}) if continues else frozenset()  # by the upload, from the rest of the file
        files, follow = files_of(file.path), file.terms.trust
        copy_files(files, target.parent / "files", file.run.directory, follow=follow, leave_out=rewritten)

    def _run_wandb_sync(self, source: Path, lock: int) -> str:
        file, shared_as = self._file, self._file.run.shared_as
        is_end = file.finishes and not (file.sent.completed and file.rows_left == 0)
        role = {
            "WANDB_MODE": "shared" if shared_as else "online",
            "WANDB_X_LABEL": shared_as.label if shared_as else None,
            "WANDB_X_PRIMARY": str(shared_as is None or shared_as.primary).lower(),
            "WANDB_X_UPDATE_FINISH_STATE": str(is_end).lower(),
            # A plain run that is not resumed would overwrite system metrics and console.
            "WANDB_RESUME": "must" if file.sent.has_lines and not shared_as else "allow" if file.earlier else None,
            "WANDB_BASE_URL": file.terms.server,
        }
        output = self._directory / "output.txt"
        with output.open("xb") as written:
            process = subprocess.Popen(  # noqa: S603  # the interpreter that runs this, no shell
                [sys.executable, "-m", "wandb", "sync", "--include-online", "--include-synced", str(source)],
                cwd=self._directory,  # `python -m` would import modules of that name from another one
                env=upload_environment(self._directory, role),
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C reaches only this process, which ends the child in order
                pass_fds=(lock,),
            )
            try:
                name_owner(lock, process.pid)  # it may outlive this process
                while process.poll() is None:
                    sent = read_attempt(self._directory)
                    self._follow(sent)
                    if sent.refused:  # W&B's client would try again for two minutes
                        self._end(process)
                        break
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_POLL)
            except BaseException:
                self._end(process)
                raise
        return output.read_text(encoding="utf-8", errors="replace")

    def _follow(self, sent: Sent) -> None:
        self._on_progress(sent.history)
        is_due = sent.tries > self._told_of and time.monotonic() - self._told_at > _PAUSE
        if not sent.refused and (sent.retried not in self._told or is_due):
            self._told.add(sent.retried)
            self._told_of, self._told_at = sent.tries, time.monotonic()
            self.say(f"{sent.retried}. W&B's client tries again; Ctrl-C ends it.")

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End ``wandb sync``, and wait for its child process, which ends on its own and logs until then."""
        sent = read_attempt(self._directory)
        try:
            if sent.unsure:  # W&B's client drops a request when it is ended, and nobody knows what has arrived
                self.say(
                    f"Waiting up to {_TIME_TO_END:g} s for the server's answer about {sent.unsure} rows that were sent."
                )
                sent = self._wait(lambda sent, _: not sent.unsure)
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TIME_TO_END)
            process.kill()
            sent = self._wait(lambda _, quiet: quiet > _QUIET)
        finally:  # also after a second Ctrl-C
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if sent.unsure:
                self.say(
                    f"{sent.unsure} rows were sent, but the server has not confirmed them. Look at the run: if they "
                    "are missing, --force sends them."
                )

    def _wait(self, is_over: Callable[[Sent, float], bool]) -> Sent:
        """Read the log until it has ended, or `is_over` says so of it and of the seconds without a new entry."""
        sent, quiet_since = read_attempt(self._directory), time.monotonic()
        deadline = quiet_since + _TIME_TO_END
        while not (sent.ended or is_over(sent, time.monotonic() - quiet_since) or time.monotonic() > deadline):
            time.sleep(_PAUSE_IN_LOG)
            after = read_attempt(self._directory)
            if after != sent:
                sent, quiet_since = after, time.monotonic()
        return sent


def _outcome(file: UploadFile, this_time: Sent, output: str) -> UploadOutcome:
    sent = file.sent.followed_by(this_time)
    address = re.search(r"View run .*at (https?://\S+)", output)
    url = address[1] if address else None
    if this_time.refused:
        return UploadOutcome(sent, url, f"{this_time.retried}. {_advice(this_time.retried)}")
    if this_time.problems:
        problem = next((text for text in this_time.problems if text.startswith("HTTP ")), this_time.problems[0])
        is_access = re.match(r"HTTP (40[13]|429|5\d\d)\b", problem)
        concerns_all = bool(is_access or (_UNREACHABLE.search(problem) and not _OF_A_RECORD.match(problem)))
        return UploadOutcome(sent, url, f"{problem}. {_advice(problem)}", concerns_all)
    if not this_time.ended:
        lines = [line.removeprefix("wandb: ").strip() for line in output.splitlines()]
        last = " ".join([line for line in lines if line][-2:])
        message = f"`wandb sync` ended without uploading it: {last or 'without output'}"
        return UploadOutcome(sent, url, message, concerns_all=not this_time.has_lines and bool(_NO_KEY.search(message)))
    if sent.history < file.run.rows:
        return UploadOutcome(
            sent, url, f"the server confirmed {sent.history} of {file.run.rows} rows. Run the command again."
        )
    return UploadOutcome(sent, url, None)


def _advice(problem: str) -> str:
    if re.search(r"HTTP 40[13]\b", problem):
        return "Authentication failed: run `wandb login` or set WANDB_API_KEY, then run the command again."
    if re.search(r"HTTP 4(09|10)\b", problem):
        return (
            "W&B refuses the run's id: the ids of deleted runs cannot be used again. `wandb sync --id NEW FILE` "
            "uploads a plain run under another id."
        )
    if "HTTP 404" in problem:
        return (
            "The entity or project does not exist, or you may not write to it: check WANDB_ENTITY and WANDB_BASE_URL, "
            "then run the command again."
        )
    return "Run the command again once W&B can be reached: it continues where it stopped."
