"""Plan uploads: which files belong to which run, in which order, and why to refuse. Writes and sends nothing."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from stat import S_IFLNK, S_IFREG

from dist_wandb.cli.uploads.contents import Entry, Terms, entries_below, link_in_words, violations
from dist_wandb.cli.uploads.state import FileState, Sent, another_upload, read_log
from dist_wandb.errors import ReadError, in_words
from dist_wandb.wandb_files.debug_log import log_of
from dist_wandb.wandb_files.finding import is_in_run_directory, path_order
from dist_wandb.wandb_files.reading import RUN_RECORD_LOST, StoredRun
from dist_wandb.wandb_files.sidecar import SIDECAR_NAME
from dist_wandb.wandb_files.small_files import KINDS, open_ordinary

_IS_LIVE_FOR = 60.0  # seconds since its last change; W&B writes every 15 s
_NAMED, _NAMED_ENTRIES = 8, 3


CAUTIOUS = Terms()


@dataclass(frozen=True)
class UploadFile:
    """One ``.wandb`` file to upload."""

    run: StoredRun
    terms: Terms
    sent: Sent = field(default_factory=Sent)  # the lines confirmed by the server
    is_marked: bool = False  # W&B marked it as uploaded, and dist_wandb did not upload it
    by_log: bool = False  # `sent` comes from W&B's log beside the file, written when the run was online
    problem: str | None = None  # why it is unknown what the server has; `None` if it is known
    finishes: bool = False  # its end is the end of the run; in a shared run, only that of the primary's last file
    earlier: tuple[StoredRun, ...] = ()  # files of the same plain run that it continues at their end, not at a branch

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def is_uploaded(self) -> bool:
        sent, is_known = self.sent, self.problem is None
        return is_known and sent.ended and not sent.problems and not sent.unsure and sent.history >= self.run.rows

    @property
    def rows_left(self) -> int:  # not confirmed by the server
        return 0 if self.is_uploaded else max(0, self.run.rows - self.sent.history)


@dataclass(frozen=True)
class UploadRun:
    """One W&B run, and the files that it is uploaded from."""

    run_id: str
    project: str | None  # `None` for the user's default
    files: tuple[UploadFile, ...]  # in upload order
    refusals: tuple[str, ...] = ()  # reasons to refuse the upload unless it is forced, as sentences
    notes: tuple[str, ...] = ()  # remarks, as sentences
    dangers: tuple[str, ...] = ()  # reasons to refuse it that `--force` does not lift, as sentences
    entity: str | None = None  # owner; `None` for the user's default

    @property
    def is_uploaded(self) -> bool:
        return all(file.is_uploaded for file in self.files)

    @property
    def is_uploaded_by_log(self) -> bool:
        """Whether nothing is left to upload, and W&B's log is the only evidence for some file."""
        return self.is_uploaded and any(file.by_log for file in self.files)


def mark_of(path: Path) -> Path:
    """Return the file by which ``wandb sync`` marks a run as uploaded, and ``wandb clean`` as removable."""
    return path.with_name(f"{path.name}.synced")


def files_of(path: Path) -> Path:
    """Return the folder of a run's files. Those beside a file outside of a run directory are not the run's."""
    return path.parent / "files" if is_in_run_directory(path) else path.parent / f"{path.name}.files"


def is_online(run: StoredRun) -> bool:
    return not run.path.parent.resolve().name.startswith("offline-")


def problems_of_run(runs: Sequence[StoredRun]) -> Iterator[str]:
    starts: dict[tuple[str | None, str], list[Path]] = defaultdict(list)
    for run in runs:
        if run.started:
            starts[run.sidecar.label if run.sidecar else None, run.started].append(run.path.parent)
    for copies in starts.values():
        if len(copies) > 1:
            yield f"{_named(copies, ' and ')} are copies of one file: their rows would be uploaded {len(copies)} times."
    shared = [run.shared_as for run in runs if run.shared_as is not None]
    if not shared:
        return
    for run in runs:
        if run.shared_as is None:
            yield (
                f"{run.path.parent} has no dist-wandb.json, so its writer in this shared run is unknown. Restore that "
                "file, or leave the directory out."
            )
    primaries = {sidecar.label for sidecar in shared if sidecar.primary}
    if not primaries:
        yield (
            "The primary's file is missing; it contains the run's name, its plain metrics and its end. Give its "
            "directory too, or copy it here."
        )
    elif len(primaries) > 1:
        yield f"It has several primaries: {', '.join(map(repr, sorted(map(str, primaries))))}."
    # The number of ranks is unknown with worker scope, and if ranks only record the hardware of their nodes.
    if all(sidecar.rank_scope == "global" and sidecar.run_mode == "shared" for sidecar in shared):
        ranks, present = max(sidecar.world_size for sidecar in shared), {sidecar.global_rank for sidecar in shared}
        # Bounded, because the number of ranks comes from a file.
        missing = list(islice((rank for rank in range(ranks) if rank not in present), _NAMED + 1))
        if missing:
            are_missing = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {_named(missing, ', ')} are"
            yield (
                f"Of its {shared[0].world_size} ranks, {are_missing} missing. Give their directories too, or copy them "
                "here: W&B may lose rows if a writer joins a shared run after the primary's rows."
            )


def _named(found: Sequence[object], between: str) -> str:
    return between.join(map(str, found[:_NAMED])) + (" and others" if len(found) > _NAMED else "")


def problems_of_file(file: UploadFile) -> Iterator[str]:
    """Yield reasons to refuse the upload of one file unless it is forced."""
    run, sent = file.run, file.sent
    with suppress(OSError):
        if run.exit_code is None and time.time() - run.path.stat().st_mtime < _IS_LIVE_FOR:
            yield f"{run.path.parent} is still being written: it has no end, and changed less than a minute ago. Wait."
    if run.branches and run.shared_as and run.shared_as.world_size > 1 and not sent.attempts:
        yield (
            f"{run.path.parent} begins by rewinding or forking the shared run, after the files of its other ranks were "
            "sent: W&B would drop what they have logged after that point. Rewind or fork with access to the server, or "
            "with run_mode='auto'. --force uploads what remains."
        )
    if file.is_marked:
        yield (
            f"{run.path.parent} was marked as uploaded by `wandb sync` ({mark_of(run.path).name}), but you have not "
            "uploaded it from this account. --trust accepts the mark, if the directory is yours, and remembers it. "
            "--force uploads the run."
        )
    for problem in run.problems:
        if SIDECAR_NAME in problem or RUN_RECORD_LOST in problem:
            yield f"{run.path}: {problem}"
    if sent.unsure:
        yield (
            f"{run.path.parent}: the server has confirmed {sent.history} of its {run.rows} rows, and may have "
            f"{sent.unsure} more: the connection broke, or the upload was killed, while they were sent. Check the run. "
            f"--force sends these {sent.unsure} rows (again)."
        )
    shows_nothing = not sent.attempts or (sent.ended and not sent.problems)
    if is_online(run) and run.rows and not sent.history and shows_nothing and not file.terms.again:
        yield (
            f"{run.path.parent} was written online, and W&B's log of it (logs/debug-internal.log) does not show which "
            "rows arrived. Look at the run. --force uploads all of them, so they may be duplicated."
        )


def dangers_of(file: UploadFile, entries: Sequence[Entry]) -> Iterator[str]:
    """Yield reasons to refuse the upload unless trusted: another user's run, and files and owners outside of it."""
    if file.problem is not None:  # in any case
        yield f"It is unknown what the server has of it: {file.problem}"
    if file.terms.trust:
        yield from violations(file.path, file.run.directory, file.terms)
        return
    owners: dict[Path, int] = {}
    with os.fdopen(open_ordinary(file.path, within=file.run.directory)) as opened:
        owners[file.path] = os.fstat(opened.fileno()).st_uid
    if is_in_run_directory(file.path):
        with file.run.directory.opened() as folder:
            owners = {file.path.parent: os.fstat(folder).st_uid, **owners}
    others = {path: owner for path, owner in owners.items() if owner != os.getuid()}
    for path, owner in others.items():  # who could replace anything in it while it is uploaded
        yield (
            f"{path} belongs to user {owner}, not to you (user {os.getuid()}). Copy the directory, which makes it "
            "yours, and upload the copy. If the run is your own, give --trust."
        )
    if not others:
        yield from violations(file.path, file.run.directory, file.terms)
        yield from _first([link_in_words(path) for path, kind in entries if kind == S_IFLNK], file, "links")


def left_out(file: UploadFile, entries: Sequence[Entry]) -> Iterator[str]:
    others = [(path, KINDS.get(kind, "not a file")) for path, kind in entries if kind != S_IFLNK]
    lines = [f"{path} is {what}: it is left out." for path, what in others]
    yield from _first(lines, file, "of that kind")


def _first(lines: Sequence[str], file: UploadFile, what: str) -> Iterator[str]:
    yield from lines[:_NAMED_ENTRIES]
    if len(lines) > _NAMED_ENTRIES:
        yield f"{file.path.parent} has {len(lines) - _NAMED_ENTRIES} more {what}."


def notes_on(files: Sequence[UploadFile]) -> Iterator[str]:
    for file in files:
        run, sent = file.run, file.sent
        if run.problems:
            yield f"{run.path.parent}: the readable part is uploaded, but {'; '.join(run.problems)}."
        if file.is_marked and file.terms.trust:
            yield f"{run.path.parent} is left out: `wandb sync` marked it as uploaded ({mark_of(run.path).name})."
        elif not file.is_uploaded and sent.history:
            rows = f"{sent.history} rows confirmed by the server"
            source = ", according to W&B's log beside it" if file.by_log else ""
            yield f"{run.path.parent} continues after {rows}{source}."
        if file.finishes and run.exit_code is None and not file.is_uploaded:
            yield f"{run.path.parent} records no end because its process was killed: the run is marked as failed."
    shared = [file.run for file in files if file.run.shared_as]
    unequal = [what for what in ("name", "group", "tags", "config") if len({str(getattr(r, what)) for r in shared}) > 1]
    if unequal:
        yield f"The ranks differ in {', '.join(unequal)}: the run gets the primary's."


def plan_uploads(runs: Iterable[StoredRun], terms: Terms = CAUTIOUS) -> list[UploadRun]:
    together: dict[tuple[str | None, str], list[StoredRun]] = defaultdict(list)
    for run in runs:
        together[run.project, run.run_id].append(run)
    plan: list[UploadRun] = []
    for (project, run_id), parts in together.items():
        try:
            plan.append(_planned(parts, terms))
        except Exception as error:  # noqa: BLE001, PERF203  # any failure affects this run only
            problem = in_words(error, parts[0].path)
            files = tuple(UploadFile(part, terms, problem=problem) for part in parts)
            danger = f"It is unknown what an upload would do, so it is refused: {problem}"
            plan.append(UploadRun(run_id, project, files, dangers=(danger,)))
    return plan


def is_uploaded(run: StoredRun) -> bool:
    """Return whether a file is uploaded, according to this user's own uploads and W&B's log of an online run."""
    return known_of(run, CAUTIOUS).is_uploaded


def known_of(run: StoredRun, terms: Terms) -> UploadFile:
    """Return a file with what is known of earlier uploads: of this user's own, else by what W&B left beside it."""
    file = UploadFile(run, terms)
    if terms.again:
        return file
    try:
        if (sent := FileState(run).sent()) is not None:
            return replace(file, sent=sent)
        file = replace(file, is_marked=os.path.lexists(mark_of(run.path)))
        if file.is_marked and terms.trust:
            return replace(file, sent=Sent(history=run.rows, completed=True, attempts=1, ended=True))
        logged = read_log(log_of(run.path.parent), run.directory) if is_online(run) else Sent()
    except Exception as error:  # noqa: BLE001  # any failure affects this file only
        return replace(file, problem=in_words(error, run.path))
    return replace(file, sent=logged, by_log=bool(logged.attempts) and not terms.trust)


def _planned(runs: Sequence[StoredRun], terms: Terms) -> UploadRun:
    def order(run: StoredRun) -> tuple[bool, str, object]:
        is_primary = run.shared_as is not None and run.shared_as.primary
        return is_primary, run.started or "", path_order(run.path)

    ordered = sorted(runs, key=order)
    files: list[UploadFile] = []
    branch = 0  # place of the last file that rewinds or forks the run
    for number, run in enumerate(ordered):
        role = run.shared_as
        finishes = role is None or (role.primary and number == len(ordered) - 1)
        is_continued = role is None and not run.branches  # resuming would drop its branch point
        earlier = tuple(ordered[branch:number]) if is_continued else ()
        files.append(replace(known_of(run, terms), finishes=finishes, earlier=earlier))
        branch = number if run.branches else branch
    planned = UploadRun(
        runs[0].run_id, runs[0].project, tuple(files), entity=terms.entity or ordered[-1].entity or None
    )
    left = [file for file in files if not file.is_uploaded]
    if not left:
        return planned
    under_way = []
    for file in left:
        with suppress(ReadError, OSError):
            if (uploader := FileState(file.run).uploader()) is not None:
                under_way.append(f"{file.path.parent}: {another_upload(uploader)}")
    if under_way:  # its progress changes meanwhile
        return replace(planned, dangers=tuple(under_way))
    own = [reason for file in left for reason in problems_of_file(file)]
    listed = [(file, entries_below(files_of(file.path), file.run.directory)) for file in left]
    beside = [(file, [entry for entry in entries if entry[1] != S_IFREG]) for file, entries in listed]
    return replace(
        planned,
        refusals=(*problems_of_run(ordered), *own),
        notes=(*notes_on(files), *(note for file, entries in beside for note in left_out(file, entries))),
        dangers=tuple(reason for file, entries in beside for reason in dangers_of(file, entries)),
        entity=planned.entity or terms.default,
    )
