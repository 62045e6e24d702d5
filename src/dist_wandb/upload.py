"""Offline runs to W&B's server: what goes together, in which order, what is there already, and the upload itself.

The upload is W&B's own ``wandb sync``, one file after the other. What dist_wandb adds: ranks of a shared run are sent
as its writers, secondaries first, so that the primary describes the run last and its one completion is the last thing
that arrives; a file that was cut off is continued behind the last row that the server confirmed; and nothing counts as
uploaded because ``wandb sync`` says so, only because the server confirmed it (`upload_log`).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dist_wandb.errors import UploadError
from dist_wandb.offline import RUN_RECORD_LOST, Sidecar, StoredRun, natural_order
from dist_wandb.record_file import copy_without
from dist_wandb.run import SIDECAR_NAME, upload_environment
from dist_wandb.upload_log import UPLOAD_DIRECTORY, Sent, attempt_directories, read_attempt, sent_of

IS_LIVE_FOR = 60.0
"""Seconds since its last change in which a file without an end counts as being written: W&B writes every 15 s."""

_POLL = 0.2  # seconds
_TIME_TO_END = 10.0  # seconds that `wandb sync`, and the process it starts, get when they are ended
_QUIET = 2.0  # seconds without a new entry in its log after which W&B's process counts as ended
_NAMED_RANKS = 8


@dataclass(frozen=True)
class UploadFile:
    """One ``.wandb`` file on its way to the server.

    Args:
        run: What the file holds.
        sent: What the server has confirmed of it.
        is_marked: Whether W&B marked it as uploaded, and dist_wandb did not upload it.
        finishes: Whether its end is the end of the run. In a shared run only the primary's last file is.
        resumes: Whether it goes on behind an earlier file of the same plain run.
    """

    run: StoredRun
    sent: Sent
    is_marked: bool
    finishes: bool
    resumes: bool

    @property
    def path(self) -> Path:
        """The ``.wandb`` file."""
        return self.run.path

    @property
    def is_uploaded(self) -> bool:
        """Whether nothing is left to be done."""
        sent = self.sent
        all_confirmed = sent.ended and not sent.problems and not sent.unsure and sent.lines.history >= self.run.rows
        return self.is_marked or (sent.attempts > 0 and all_confirmed)

    @property
    def rows_left(self) -> int:
        """Number of history rows that the server has not confirmed."""
        return 0 if self.is_uploaded else max(0, self.run.rows - self.sent.lines.history)

    @property
    def shared_as(self) -> Sidecar | None:
        """Label and role of the file's writer in a shared run; `None` in a plain one."""
        return self.run.sidecar if self.run.sidecar and self.run.sidecar.shared else None


@dataclass(frozen=True)
class UploadRun:
    """One W&B run, and the files it is uploaded from.

    Args:
        run_id: Id of the run.
        project: Its project; `None` for the user's default.
        files: In the order in which they are uploaded.
        refusals: Why it is not uploaded unless forced, as sentences; empty where nothing stands against it.
        notes: What is worth knowing, as sentences.
    """

    run_id: str
    project: str | None
    files: tuple[UploadFile, ...]
    refusals: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def is_shared(self) -> bool:
        """Whether several ranks wrote into the run."""
        return self.files[0].shared_as is not None

    @property
    def is_uploaded(self) -> bool:
        """Whether nothing is left to be done."""
        return all(file.is_uploaded for file in self.files)

    @property
    def describing(self) -> StoredRun:
        """The file whose name, config and tags become the run's: the one uploaded last."""
        return self.files[-1].run


@dataclass(frozen=True)
class Outcome:
    """What became of the upload of one file.

    Args:
        sent: What the server has confirmed of the file, all uploads together.
        url: Address of the run, where the server told it.
        problem: Why the file is not uploaded; `None` where it is.
        concerns_all: Whether other uploads would fail for the same reason: no connection, or no access.
    """

    sent: Sent
    url: str | None
    problem: str | None
    concerns_all: bool = False


# --- what to do -------------------------------------------------------------------------------------------------------


def plan_uploads(runs: Iterable[StoredRun], *, now: float | None = None) -> list[UploadRun]:
    """Say what is to be uploaded, in which order, and what speaks against it. Nothing is written or sent.

    Args:
        runs: The files, as `offline.read_runs` reads them.
        now: Seconds since the epoch, to tell files that are still written to; the present if `None`.

    Returns:
        One entry per W&B run, those of equal id together, in the order in which their first files came.

    Example:
        Of a shared run of two ranks, rank 1's file comes first, and rank 0's, the primary's, last.
    """
    now = time.time() if now is None else now
    together: dict[tuple[str | None, str], list[StoredRun]] = defaultdict(list)
    for run in runs:
        together[run.project, run.run_id].append(run)
    return [_planned(run_id, project, files, now) for (project, run_id), files in together.items()]


def is_uploaded(run: StoredRun) -> bool:
    """Whether a file is uploaded: the server has confirmed all of it, or ``wandb sync`` marked it."""
    return _file(run, 0, [run]).is_uploaded


def _planned(run_id: str, project: str | None, runs: list[StoredRun], now: float) -> UploadRun:
    ordered = sorted(runs, key=_place_in_order)
    files = tuple(_file(run, number, ordered) for number, run in enumerate(ordered))
    if all(file.is_uploaded for file in files):
        return UploadRun(run_id, project, files, (), ())
    own = [reason for file in files if not file.is_uploaded for reason in _against_file(file, now)]
    return UploadRun(run_id, project, files, (*_against_run(ordered), *own), tuple(_notes(files)))


def _place_in_order(run: StoredRun) -> tuple[bool, str, list[str]]:
    """Secondaries before primaries; of equal ones that which was started first."""
    is_primary = run.sidecar is not None and run.sidecar.shared and run.sidecar.primary
    return is_primary, run.started or "", natural_order(str(run.path))


def _file(run: StoredRun, number: int, ordered: Sequence[StoredRun]) -> UploadFile:
    shared_as = run.sidecar if run.sidecar and run.sidecar.shared else None
    sent = sent_of(run.path)
    return UploadFile(
        run,
        sent,
        is_marked=_mark_of(run.path).exists() and not attempt_directories(run.path),
        finishes=shared_as is None or (shared_as.update_finish_state and number == len(ordered) - 1),
        resumes=shared_as is None and number > 0,
    )


def _mark_of(path: Path) -> Path:
    """The file by which ``wandb sync`` marks a run as uploaded, and ``wandb clean`` takes it for removable."""
    return path.with_name(f"{path.name}.synced")


def _against_run(runs: Sequence[StoredRun]) -> list[str]:
    """What speaks against uploading these files as one run."""
    reasons = list(_copies(runs))
    shared = [run.sidecar for run in runs if run.sidecar is not None and run.sidecar.shared]
    if not shared:
        return reasons
    reasons += [
        f"{run.path.parent} has no dist-wandb.json, so its place in this shared run is not known. Restore that file, "
        "or leave the directory out."
        for run in runs
        if run.sidecar is None or not run.sidecar.shared
    ]
    primaries = {sidecar.label for sidecar in shared if sidecar.primary}
    if not primaries:
        reasons.append(
            "The primary's file is not here, and it has the run's name, its plain metrics and its end. Give its "
            "directory too, or copy it here."
        )
    elif len(primaries) > 1:
        reasons.append(f"It has several primaries: {', '.join(map(repr, sorted(map(str, primaries))))}.")
    missing = _missing_ranks(shared)
    if missing:
        reasons.append(
            f"Of its {shared[0].world_size} ranks, {missing} not here. Give their directories too, or copy them here: "
            "W&B may lose rows where a writer joins a shared run after the primary's rows."
        )
    return reasons


def _copies(runs: Sequence[StoredRun]) -> Iterator[str]:
    starts = Counter((run.label, run.started) for run in runs if run.started)
    for (label, started), number in starts.items():
        if number > 1:
            places = [str(run.path.parent) for run in runs if (run.label, run.started) == (label, started)]
            yield f"{' and '.join(places)} are copies of one file: their rows would be uploaded {number} times."


def _missing_ranks(shared: Sequence[Sidecar]) -> str:
    """The ranks of which there is no file.

    With worker scope the number of a run's ranks is not known; where ranks only attached for their nodes' hardware, nor
    is theirs.
    """
    if any(sidecar.rank_scope != "global" or sidecar.run_mode != "shared" for sidecar in shared):
        return ""
    world_size = max(sidecar.world_size for sidecar in shared)
    missing = sorted(set(range(world_size)) - {sidecar.global_rank for sidecar in shared})
    if not missing:
        return ""
    named = ", ".join(map(str, missing[:_NAMED_RANKS])) + (" and others" if len(missing) > _NAMED_RANKS else "")
    return f"rank {named} is" if len(missing) == 1 else f"ranks {named} are"


def _against_file(file: UploadFile, now: float) -> Iterator[str]:
    run, sent = file.run, file.sent
    with suppress(OSError):
        if run.exit_code is None and now - run.path.stat().st_mtime < IS_LIVE_FOR:
            yield f"{run.path.parent} is still written to: it has no end, and changed less than a minute ago. Wait."
    for problem in run.problems:
        if SIDECAR_NAME in problem or RUN_RECORD_LOST in problem:
            yield f"{run.path}: {problem}"
    if sent.unsure:
        yield (
            f"{run.path.parent}: of its {run.rows} rows the server has confirmed {sent.lines.history}, and of "
            f"{sent.unsure} more it is not known whether they arrived: the connection broke, or the upload was killed, "
            f"while they were sent. Look at the run. --force sends these {sent.unsure} rows (again)."
        )
    says_nothing = not sent.attempts or (sent.ended and not sent.problems)
    if _is_online(file) and run.rows and not sent.lines.history and says_nothing:
        yield (
            f"{run.path.parent} was written online, and W&B's log of it (logs/debug-internal.log) does not tell which "
            "rows arrived. Look at the run. --force uploads all of them, so they may be there twice."
        )


def _is_online(file: UploadFile) -> bool:
    return not file.path.parent.resolve().name.startswith("offline-")


def _notes(files: Sequence[UploadFile]) -> Iterator[str]:
    for file in files:
        run, sent = file.run, file.sent
        if run.problems:
            yield f"{run.path.parent}: what can be read is uploaded, but {'; '.join(run.problems)}."
        if file.is_marked:
            yield f"{run.path.parent} is left out: `wandb sync` marked it as uploaded ({_mark_of(run.path).name})."
        elif not file.is_uploaded and sent.lines.history:
            yield f"{run.path.parent} goes on behind the {sent.lines.history} rows that the server has confirmed."
        if file.finishes and run.exit_code is None and not file.is_uploaded:
            yield f"{run.path.parent} records no end, as its process was killed: the run is marked as failed."
    shared = [file.run for file in files if file.shared_as]
    unequal = [what for what in ("name", "group", "tags", "config") if len({str(getattr(r, what)) for r in shared}) > 1]
    if unequal:
        yield f"The ranks have unequal {', '.join(unequal)}: the run gets the primary's."


# --- doing it ---------------------------------------------------------------------------------------------------------


def upload(file: UploadFile, on_progress: Callable[[int], None] = lambda _rows: None) -> Outcome:
    """Upload one file, or what is left of it. Whoever calls decided that nothing speaks against it.

    Args:
        file: The file, as `plan_uploads` gives it.
        on_progress: Called now and then with the number of history rows of the file that the server has confirmed.

    Returns:
        What became of it. W&B's own output and log are kept in ``dist-wandb-upload/attempt-N`` beside the file.

    Raises:
        UploadError: Another process uploads the file at this moment, or the directory cannot be written to.
        KeyboardInterrupt: As it came, after W&B's processes were ended; a later upload goes on where this one got to.
    """
    try:
        with _locked(file.path) as lock:
            before = sent_of(file.path)
            if before != file.sent:
                raise UploadError(f"{file.path}: another process has uploaded from it meanwhile. Start again.")
            return _upload(file, lock, on_progress)
    except OSError as error:
        raise UploadError(f"{file.path}: {error}. An upload needs to write beside it.") from error


def _upload(file: UploadFile, lock: int | None, on_progress: Callable[[int], None]) -> Outcome:
    attempt = file.path.parent / UPLOAD_DIRECTORY / f"attempt-{len(attempt_directories(file.path)) + 1}"
    attempt.mkdir()
    had_mark = _mark_of(file.path).exists()
    try:
        as_it_is = not file.sent.lines and not file.run.problems and file.run.exit_code is not None
        source = file.path if as_it_is else _rest_of(file, attempt)
        said = _run_wandb_sync(source, file, attempt, lock, lambda rows: on_progress(file.sent.lines.history + rows))
    finally:
        shutil.rmtree(attempt / "rest", ignore_errors=True)
        if not had_mark:  # not to be trusted: it is there whatever the server answered
            _mark_of(file.path).unlink(missing_ok=True)
    this_time = read_attempt(attempt)
    outcome = _outcome(file, this_time, said)
    if outcome.problem is None:
        _mark_of(file.path).touch()
    return outcome


def _rest_of(file: UploadFile, attempt: Path) -> Path:
    """A copy of a run's directory whose file lacks what the server has, and what is damaged; other files are linked."""
    rest = attempt / "rest"  # no run's directory by its name, so it is never taken for another run
    (rest / "files").mkdir(parents=True)
    copy_without(file.path, rest / file.path.name, file.sent.lines)
    state = file.path.with_name(f"{file.path.name}.syncstate")  # where W&B keeps the step that the run began at
    if state.exists():
        shutil.copy(state, rest)
    files = file.path.parent / "files"
    for entry in files.iterdir() if files.is_dir() else ():
        if entry.name != "output.log":  # written anew by the upload, which has only the rest of it
            (rest / "files" / entry.name).symlink_to(entry.resolve())
    return rest / file.path.name


def _run_wandb_sync(
    source: Path, file: UploadFile, attempt: Path, lock: int | None, on_progress: Callable[[int], None]
) -> str:
    """Run ``wandb sync`` to its end; what it said."""
    shared_as = file.shared_as
    environment = upload_environment(
        attempt,
        label=shared_as.label if shared_as else None,
        primary=shared_as is None or shared_as.primary,
        shared=shared_as is not None,
        finishes=file.finishes and not (file.sent.completed and file.rows_left == 0),
        resume=_resume(file),
    )
    command = [sys.executable, "-m", "wandb", "sync", "--include-online", "--include-synced", str(source.resolve())]
    output = attempt / "output.txt"
    with output.open("wb") as written:
        process = subprocess.Popen(  # noqa: S603  # the interpreter that runs this, no shell
            command,
            cwd=attempt,  # `python -m` would import modules of that name from another one
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt of the terminal's comes to us, and we end it in order
            pass_fds=() if lock is None else (lock,),
        )
        try:
            while process.poll() is None:
                on_progress(read_attempt(attempt).lines.history)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL)
        except BaseException:
            _end(process, attempt)
            raise
    return output.read_text(encoding="utf-8", errors="replace")


def _resume(file: UploadFile) -> str | None:
    """How a plain run is opened. Without resuming, system metrics and console would overwrite what is there."""
    if file.shared_as:
        return None
    if file.sent.lines:
        return "must"
    return "allow" if file.resumes else None


def _end(process: subprocess.Popen[bytes], attempt: Path) -> None:
    """End ``wandb sync``, and wait for the process that it started, which ends by itself and logs until then."""
    process.terminate()
    try:
        process.wait(_TIME_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
    deadline, quiet_since, before = time.monotonic() + _TIME_TO_END, time.monotonic(), read_attempt(attempt)
    while time.monotonic() < deadline and not before.ended and time.monotonic() - quiet_since < _QUIET:
        time.sleep(_POLL)
        after = read_attempt(attempt)
        if after != before:
            before, quiet_since = after, time.monotonic()


def _outcome(file: UploadFile, this_time: Sent, said: str) -> Outcome:
    sent = file.sent.followed_by(this_time)
    address = re.search(r"View run .*at (https?://\S+)", said)
    url = address[1] if address else None
    if this_time.problems:
        problem = next((text for text in this_time.problems if text.startswith("HTTP ")), this_time.problems[0])
        return Outcome(sent, url, f"{problem}. {_advice(problem)}", _concerns_all(problem))
    if not this_time.ended:
        return Outcome(sent, url, _last_words(said), concerns_all=not this_time.lines)
    if sent.lines.history < file.run.rows:
        return Outcome(sent, url, f"the server confirmed {sent.lines.history} of {file.run.rows} rows. Start it again.")
    return Outcome(sent, url, None)


def _advice(problem: str) -> str:
    if re.search(r"HTTP 40[13]\b", problem):
        return "W&B does not accept who you are: run `wandb login`, or set WANDB_API_KEY. Then start it again."
    if "HTTP 404" in problem:
        return (
            "W&B knows no such entity or project, or you may not write to it: see WANDB_ENTITY, and WANDB_BASE_URL. "
            "Then start it again."
        )
    return "Start it again once W&B can be reached: it goes on where it got to."


def _concerns_all(problem: str) -> bool:
    return bool(re.search(r"HTTP 40[13]\b", problem)) or "HTTP" not in problem


def _last_words(said: str) -> str:
    lines = [line.removeprefix("wandb: ").strip() for line in said.splitlines()]
    words = " ".join([line for line in lines if line][-2:])
    return f"`wandb sync` ended without uploading it: {words or 'it said nothing'}"


@contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    """Hold the right to upload a file. ``wandb sync`` inherits it, so it lasts until that has ended, come what may."""
    directory = path.parent / UPLOAD_DIRECTORY
    directory.mkdir(exist_ok=True)
    try:
        import fcntl
    except ImportError:  # not a Unix
        yield None
        return
    with (directory / "lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UploadError(f"{path}: another process uploads it at this moment. Wait until it has ended.") from None
        yield lock.fileno()
