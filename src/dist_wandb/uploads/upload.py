"""Offline runs to W&B's server: what goes together, in which order, what is there already, and the upload itself.

The upload is W&B's own ``wandb sync``, one file after the other. What dist_wandb adds: ranks of a shared run are sent
as its writers, secondaries first, so that the primary describes the run last and its one completion is the last thing
that arrives; a file that was cut off is continued behind the last row that the server confirmed; and nothing counts as
uploaded because ``wandb sync`` says so, only because the server confirmed it (`upload_log`).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path

from dist_wandb.errors import ReadError, UploadError, in_words
from dist_wandb.runs.client_settings import default_entity, own_entities
from dist_wandb.runs.directories import artifact_staging
from dist_wandb.runs.upload_environment import upload_environment
from dist_wandb.uploads.copy import Entry, copy_below, copy_files, entries_below, link_in_words
from dist_wandb.uploads.log import UPLOAD_DIRECTORY, Sent, attempt_directories, read_attempt, read_log, sent_of
from dist_wandb.uploads.records import Rules, against, revised
from dist_wandb.uploads.state import COPY, FileState, Lock, another_upload
from dist_wandb.wandb_files.debug_log import log_of
from dist_wandb.wandb_files.finding import is_in_run_directory, natural_order
from dist_wandb.wandb_files.reading import RUN_RECORD_LOST, StoredRun
from dist_wandb.wandb_files.record_file import Lines, copy_without
from dist_wandb.wandb_files.sidecar import SIDECAR_NAME, Sidecar
from dist_wandb.wandb_files.small_files import write_small

IS_LIVE_FOR = 60.0
"""Seconds since its last change in which a file without an end counts as being written: W&B writes every 15 s."""

_POLL = 0.2  # seconds
_TIME_TO_END = 10.0  # seconds that `wandb sync`, and the process it starts, get when they are ended
_QUIET = 2.0  # seconds without a new entry in its log after which W&B's process counts as ended
_NAMED_RANKS = _NAMED_COPIES = 8
_NAMED_ENTRIES = 3


@dataclass(frozen=True)
class Terms:
    """What the user has said of an upload.

    Args:
        trust: Whether the directories are the user's own: what they say of uploads is believed, links are followed, and
            their records may name any file and owner.
        again: Whether to upload everything, as if nothing had been uploaded yet.
        entity: Who is to own what is uploaded, whatever the files say; `None` to go by them.
        server: Address of W&B's server; `None` for the one that W&B's settings name.
    """

    trust: bool = False
    again: bool = False
    entity: str | None = None
    server: str | None = field(default=None, repr=False)


CAUTIOUS = Terms()
_NO_WAY = re.compile(
    r"\bdial (tcp|udp)\b|connection (refused|reset)|no such host|network is unreachable|proxyconnect|timeout|\bTLS\b|"
    r"x509|EOF|context (deadline|canceled)|giving up after"
)
_NO_KEY = re.compile(r"api[ _-]?key|\blog ?in\b", re.IGNORECASE)
_OF_A_RECORD = re.compile(r"sender: |failed to parse|failed to unmarshal")
NOTHING_SENT = Sent()


@dataclass(frozen=True)
class UploadFile:
    """One ``.wandb`` file on its way to the server.

    Args:
        run: What the file holds.
        sent: What the server has confirmed of it.
        is_marked: Whether W&B marked it as uploaded, dist_wandb did not upload it, and the directory is trusted.
        finishes: Whether its end is the end of the run. In a shared run only the primary's last file is.
        resumes: Whether it goes on behind an earlier file of the same plain run.
        problem: Why it is not known what the server has of it; `None` where it is.
        by_log: Whether `sent` is what W&B's log beside the file says, from when the run was written online.
        doubts: Why it is not known what was uploaded, as sentences.
        terms: What the user has said of it.
    """

    run: StoredRun
    sent: Sent
    is_marked: bool
    finishes: bool
    resumes: bool
    problem: str | None = None
    by_log: bool = False
    doubts: tuple[str, ...] = ()
    terms: Terms = CAUTIOUS

    @property
    def path(self) -> Path:
        """The ``.wandb`` file."""
        return self.run.path

    @property
    def is_uploaded(self) -> bool:
        """Whether nothing is left to be done."""
        if self.problem is not None:
            return False
        return self.is_marked or _is_complete(self.sent, self.run)

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
        dangers: Why it is not uploaded unless its directories are trusted, as sentences.
        entity: Who is to own it; `None` for the user's default.
        notes: What is worth knowing, as sentences.
    """

    run_id: str
    project: str | None
    files: tuple[UploadFile, ...]
    refusals: tuple[str, ...]
    notes: tuple[str, ...]
    dangers: tuple[str, ...] = ()
    entity: str | None = None

    @property
    def is_shared(self) -> bool:
        """Whether several ranks wrote into the run."""
        return self.files[0].shared_as is not None

    @property
    def is_uploaded(self) -> bool:
        """Whether nothing is left to be done."""
        return all(file.is_uploaded for file in self.files)

    @property
    def is_uploaded_by_log(self) -> bool:
        """Whether nothing is left to be done, and of some file only W&B's log beside it says so."""
        return self.is_uploaded and any(file.by_log for file in self.files)

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


def plan_uploads(runs: Iterable[StoredRun], *, now: float | None = None, terms: Terms = CAUTIOUS) -> list[UploadRun]:
    """Say what is to be uploaded, in which order, and what speaks against it. Nothing is written or sent.

    Args:
        runs: The files, as `read_runs` reads them.
        now: Seconds since the epoch, to tell files that are still written to; the present if `None`.
        terms: What the user has said of the upload.

    Returns:
        One entry per W&B run, those of equal id together, in the order in which their first files came.

    Example:
        Of a shared run of two ranks, rank 1's file comes first, and rank 0's, the primary's, last.
    """
    now = time.time() if now is None else now
    together: dict[tuple[str | None, str], list[StoredRun]] = defaultdict(list)
    for run in runs:
        together[run.project, run.run_id].append(run)
    return [_planned_or_refused(run_id, project, files, now, terms) for (project, run_id), files in together.items()]


def is_uploaded(run: StoredRun) -> bool:
    """Whether a file is uploaded, as far as this user's own uploads and W&B's log of an online run tell."""
    return _file(run, 0, [run], CAUTIOUS).is_uploaded


def _planned_or_refused(run_id: str, project: str | None, runs: list[StoredRun], now: float, terms: Terms) -> UploadRun:
    try:
        return _planned(run_id, project, runs, now, terms)
    except Exception as error:  # noqa: BLE001  # whatever its files have brought about: it concerns this run alone
        problem = in_words(error, runs[0].path)
    files = tuple(
        UploadFile(run, NOTHING_SENT, is_marked=False, finishes=False, resumes=False, problem=problem, terms=terms)
        for run in runs
    )
    danger = f"What an upload would do is not known, so it is not made: {problem}"
    return UploadRun(run_id, project, files, (), (), dangers=(danger,))


def _planned(run_id: str, project: str | None, runs: list[StoredRun], now: float, terms: Terms) -> UploadRun:
    ordered = sorted(runs, key=_place_in_order)
    files = tuple(_file(run, number, ordered, terms) for number, run in enumerate(ordered))
    entity = terms.entity or files[-1].run.entity or None
    if all(file.is_uploaded for file in files):
        return UploadRun(run_id, project, files, (), (), entity=entity)
    left = [file for file in files if not file.is_uploaded]
    under_way = [f"{file.path.parent}: {another_upload(who)}" for file in left if (who := _uploader(file))]
    if under_way:  # what it has reached changes while one looks
        return UploadRun(run_id, project, files, tuple(under_way), (), entity=entity)
    own = [reason for file in left for reason in _against_file(file, now)]
    beside = [(file, [e for e in entries_below(_files_of(file.path)) if not e.is_file]) for file in left]
    return UploadRun(
        run_id,
        project,
        files,
        refusals=(*_against_run(ordered), *own),
        notes=(*_notes(files), *(note for file, entries in beside for note in _left_out(file, entries))),
        dangers=tuple(reason for file, entries in beside for reason in _dangers(file, entries)),
        entity=entity or default_entity(),
    )


def _uploader(file: UploadFile) -> str | None:
    """Who uploads the file at this moment."""
    with suppress(ReadError, OSError):
        return FileState(file.path).uploader()
    return None


def _place_in_order(run: StoredRun) -> tuple[bool, str, list[str]]:
    """Secondaries before primaries; of equal ones that which was started first."""
    is_primary = run.sidecar is not None and run.sidecar.shared and run.sidecar.primary
    return is_primary, run.started or "", natural_order(str(run.path))


def _file(run: StoredRun, number: int, ordered: Sequence[StoredRun], terms: Terms) -> UploadFile:
    shared_as = run.sidecar if run.sidecar and run.sidecar.shared else None
    known = _known(run, terms)
    return UploadFile(
        run,
        known.sent,
        is_marked=known.is_marked,
        finishes=shared_as is None or (shared_as.update_finish_state and number == len(ordered) - 1),
        resumes=shared_as is None and number > 0,
        by_log=known.by_log,
        doubts=known.doubts,
        problem=known.problem,
        terms=terms,
    )


@dataclass(frozen=True)
class _Known:
    """What is known of the uploads of a file."""

    sent: Sent = NOTHING_SENT
    is_marked: bool = False
    by_log: bool = False
    doubts: tuple[str, ...] = ()
    problem: str | None = None


def _known(run: StoredRun, terms: Terms) -> _Known:
    """What is known of the uploads of a file; what its directory says counts only if that is trusted.

    Of a run that was written online W&B's own log is all there is, so it is believed, and told.
    """
    if terms.again:
        return _Known()
    try:
        own = FileState(run.path).sent()
        return _said_by_directory(run, terms) if own is None else _Known(own)
    except Exception as error:  # noqa: BLE001  # whatever lies there: it concerns this file alone
        return _Known(problem=in_words(error, run.path))


def _said_by_directory(run: StoredRun, terms: Terms) -> _Known:
    mark, attempts = _mark_of(run.path), attempt_directories(run.path)
    is_marked = os.path.lexists(mark) and not attempts
    if terms.trust:
        return _Known(sent_of(run.path), is_marked)
    logged = read_log(log_of(run.path.parent)) if _is_online(run) else Sent()
    known = _Known(logged, by_log=bool(logged.attempts))
    if _is_complete(logged, run) or not (attempts or is_marked):
        return known
    what = f"`wandb sync` has marked it ({mark.name})" if is_marked else f"it has {UPLOAD_DIRECTORY}/"
    doubt = (
        f"{run.path.parent} says that it was uploaded, as {what}, but you have not uploaded it from this account. "
        "--trust believes the directory, if it is yours, and remembers that. --force uploads it."
    )
    return replace(known, doubts=(doubt,))


def _is_complete(sent: Sent, run: StoredRun) -> bool:
    """Whether the server has confirmed all of a file, and nothing went wrong."""
    all_confirmed = sent.ended and not sent.problems and not sent.unsure and sent.lines.history >= run.rows
    return sent.attempts > 0 and all_confirmed


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
    starts: dict[tuple[str | None, str], list[Path]] = defaultdict(list)
    for run in runs:
        if run.started:
            starts[run.label, run.started].append(run.path.parent)
    for places in starts.values():
        if len(places) > 1:
            named = [*map(str, places[:_NAMED_COPIES]), *(["others"] if len(places) > _NAMED_COPIES else [])]
            times = len(places)
            yield f"{' and '.join(named)} are copies of one file: their rows would be uploaded {times} times."


def _missing_ranks(shared: Sequence[Sidecar]) -> str:
    """The ranks of which there is no file.

    With worker scope the number of a run's ranks is not known; where ranks only attached for their nodes' hardware, nor
    is theirs.
    """
    if any(sidecar.rank_scope != "global" or sidecar.run_mode != "shared" for sidecar in shared):
        return ""
    world_size = max(sidecar.world_size for sidecar in shared)
    present = {sidecar.global_rank for sidecar in shared}
    # As many as are named, and one more: the number of ranks is what a file says.
    missing = list(islice((rank for rank in range(world_size) if rank not in present), _NAMED_RANKS + 1))
    if not missing:
        return ""
    named = ", ".join(map(str, missing[:_NAMED_RANKS])) + (" and others" if len(missing) > _NAMED_RANKS else "")
    return f"rank {named} is" if len(missing) == 1 else f"ranks {named} are"


def _against_file(file: UploadFile, now: float) -> Iterator[str]:
    run, sent = file.run, file.sent
    if file.problem is not None:
        yield f"What the server has of it is not known: {file.problem}"
        return
    with suppress(OSError):
        if run.exit_code is None and now - run.path.stat().st_mtime < IS_LIVE_FOR:
            yield f"{run.path.parent} is still written to: it has no end, and changed less than a minute ago. Wait."
    yield from file.doubts
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
    if _is_online(run) and run.rows and not sent.lines.history and says_nothing and not file.terms.again:
        yield (
            f"{run.path.parent} was written online, and W&B's log of it (logs/debug-internal.log) does not tell which "
            "rows arrived. Look at the run. --force uploads all of them, so they may be there twice."
        )


def _dangers(file: UploadFile, entries: Sequence[Entry]) -> Iterator[str]:
    """What would be uploaded, read or written outside of the run's directory."""
    yield from against(file.path, _rules(file))
    links = [] if file.terms.trust else [entry for entry in entries if entry.is_link]
    yield from map(link_in_words, links[:_NAMED_ENTRIES])
    if len(links) > _NAMED_ENTRIES:
        yield f"{file.path.parent} has {len(links) - _NAMED_ENTRIES} more links."


def _left_out(file: UploadFile, entries: Sequence[Entry]) -> Iterator[str]:
    """What lies among the files of a run and is none."""
    others = [entry for entry in entries if not entry.is_link]
    yield from (f"{entry.path} is {entry.in_words}: it is left out." for entry in others[:_NAMED_ENTRIES])
    if len(others) > _NAMED_ENTRIES:
        yield f"{file.path.parent} has {len(others) - _NAMED_ENTRIES} more of that kind."


def _rules(file: UploadFile) -> Rules:
    terms = file.terms
    return Rules(
        file.path.parent,
        artifact_staging(),
        owners=own_entities(),
        default=default_entity(),
        owner=terms.entity,
        trust=terms.trust,
    )


def _files_of(path: Path) -> Path:
    """Where W&B keeps the files of a run; of a file that lies somewhere else, nothing beside it is the run's."""
    return path.parent / "files" if is_in_run_directory(path) else path.parent / f"{path.name}.files"


def _is_online(run: StoredRun) -> bool:
    return not run.path.parent.resolve().name.startswith("offline-")


def _notes(files: Sequence[UploadFile]) -> Iterator[str]:
    for file in files:
        run, sent = file.run, file.sent
        if run.problems:
            yield f"{run.path.parent}: what can be read is uploaded, but {'; '.join(run.problems)}."
        if file.is_marked:
            yield f"{run.path.parent} is left out: `wandb sync` marked it as uploaded ({_mark_of(run.path).name})."
        elif not file.is_uploaded and sent.lines.history:
            rows = f"{sent.lines.history} rows that the server has confirmed"
            source = ", as W&B's log beside it says" if file.by_log else ""
            yield f"{run.path.parent} goes on behind the {rows}{source}."
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
        What became of it. W&B's own output and log are kept in the user's state directory.

    Raises:
        UploadError: Another process uploads the file at this moment, it is not to be trusted, or something cannot be
            read or written.
        KeyboardInterrupt: As it came, after W&B's processes were ended; a later upload goes on where this one got to.
    """
    try:
        state = FileState(file.path)
        with state.locked() as lock:
            _check_unchanged(file)
            return _upload(file, state, lock, on_progress)
    except UploadError:
        raise
    except Exception as error:  # whatever the file, or what lies beside it, has brought about: it concerns it alone
        raise UploadError(in_words(error, file.path)) from error


def _check_unchanged(file: UploadFile) -> None:
    now = _known(file.run, file.terms)
    if now.problem is not None:
        raise UploadError(now.problem)
    if now.sent != file.sent or now.doubts != file.doubts:
        raise UploadError(f"{file.path}: another process has uploaded from it meanwhile. Start again.")


def remember(file: UploadFile) -> None:
    """Remember of a file that is uploaded, as its trusted directory says, that it is, for later uploads without trust.

    Raises:
        UploadError: The state directory cannot be written to.
    """
    try:
        state = FileState(file.path)
        with state.locked():
            if state.sent() is None:
                everything = Sent(Lines(history=file.run.rows), completed=True, attempts=1, ended=True)
                state.begin(everything if file.is_marked else file.sent, uploads=False)
    except UploadError:
        raise
    except Exception as error:
        raise UploadError(in_words(error, file.path)) from error


def _upload(file: UploadFile, state: FileState, lock: Lock, on_progress: Callable[[int], None]) -> Outcome:
    attempt = state.begin(file.sent)
    copy = attempt / COPY
    try:
        copy.mkdir(mode=0o700)
        source = copy / file.path.name
        _copy(file, state, source)
        said = _run_wandb_sync(source, file, attempt, lock, lambda rows: on_progress(file.sent.lines.history + rows))
        state.keep_begun_at(source)
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    outcome = _outcome(file, read_attempt(attempt), said)
    if outcome.problem is None:
        _mark(file.path)
    return outcome


def _copy(file: UploadFile, state: FileState, target: Path) -> None:
    """The private copy of a run's directory. Its file lacks what the server has, and what is damaged."""
    local = target.parent / "local"
    local.mkdir(mode=0o700)
    numbers = count()
    rules = _rules(file)

    def take(top: Path, below: Path) -> Path:
        copy = local / str(next(numbers))
        copy_below(top, below, copy)
        return copy

    copy_without(file.path, target, file.sent.lines, lambda record, parts: revised(record, parts, rules, take))
    begun_at = state.begun_at()
    if begun_at is not None:
        write_small(target.with_name(f"{target.name}.syncstate"), begun_at)
    goes_on = bool(file.sent.lines) or bool(file.run.problems) or file.run.exit_code is None
    written_anew = frozenset({"output.log"}) if goes_on else frozenset()  # by the upload, which has only the rest of it
    copy_files(_files_of(file.path), target.parent / "files", follow=file.terms.trust, leave_out=written_anew)


def _mark(path: Path) -> None:
    """Leave W&B's mark, for ``wandb clean``. Nothing of ours depends on it, so a directory may be read-only."""
    with suppress(OSError):
        os.close(os.open(_mark_of(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644))


def _run_wandb_sync(
    source: Path, file: UploadFile, attempt: Path, lock: Lock, on_progress: Callable[[int], None]
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
        server=file.terms.server,
    )
    command = [sys.executable, "-m", "wandb", "sync", "--include-online", "--include-synced", str(source)]
    output = attempt / "output.txt"
    with output.open("xb") as written:
        process = subprocess.Popen(  # noqa: S603  # the interpreter that runs this, no shell
            command,
            cwd=attempt,  # `python -m` would import modules of that name from another one
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt of the terminal's comes to us, and we end it in order
            pass_fds=(lock.handle,),
        )
        try:
            lock.name_owners(os.getpid(), process.pid)
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
    try:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TIME_TO_END)
        process.kill()
        deadline, quiet_since, before = time.monotonic() + _TIME_TO_END, time.monotonic(), read_attempt(attempt)
        while time.monotonic() < deadline and not before.ended and time.monotonic() - quiet_since < _QUIET:
            time.sleep(_POLL)
            after = read_attempt(attempt)
            if after != before:
                before, quiet_since = after, time.monotonic()
    finally:  # also if the user does not want to wait
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _outcome(file: UploadFile, this_time: Sent, said: str) -> Outcome:
    sent = file.sent.followed_by(this_time)
    address = re.search(r"View run .*at (https?://\S+)", said)
    url = address[1] if address else None
    if this_time.problems:
        problem = next((text for text in this_time.problems if text.startswith("HTTP ")), this_time.problems[0])
        return Outcome(sent, url, f"{problem}. {_advice(problem)}", _concerns_all(problem))
    if not this_time.ended:
        words = _last_words(said)
        return Outcome(sent, url, words, concerns_all=not this_time.lines and bool(_NO_KEY.search(words)))
    if sent.lines.history < file.run.rows:
        return Outcome(sent, url, f"the server confirmed {sent.lines.history} of {file.run.rows} rows. Start it again.")
    return Outcome(sent, url, None)


def _advice(problem: str) -> str:
    if re.search(r"HTTP 40[13]\b", problem):
        return "Authentication failed: run `wandb login` or set WANDB_API_KEY, then start it again."
    if "HTTP 404" in problem:
        return (
            "W&B knows no such entity or project, or you may not write to it: see WANDB_ENTITY, and WANDB_BASE_URL. "
            "Then start it again."
        )
    return "Start it again once W&B can be reached: it continues where it stopped."


def _concerns_all(problem: str) -> bool:
    """Whether it is the way to the server, or the user's access, and not what one file holds."""
    return bool(re.match(r"HTTP 40[13]\b", problem) or (_NO_WAY.search(problem) and not _OF_A_RECORD.match(problem)))


def _last_words(said: str) -> str:
    lines = [line.removeprefix("wandb: ").strip() for line in said.splitlines()]
    words = " ".join([line for line in lines if line][-2:])
    return f"`wandb sync` ended without uploading it: {words or 'it said nothing'}"
