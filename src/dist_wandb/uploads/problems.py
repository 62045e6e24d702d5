"""Reasons to refuse an upload, and remarks about it, as sentences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from dist_wandb.uploads.copy import Entry, link_in_words
from dist_wandb.uploads.model import UploadFile, is_online, mark_of, rules_of
from dist_wandb.uploads.records import violations
from dist_wandb.wandb_files.reading import RUN_RECORD_LOST, StoredRun
from dist_wandb.wandb_files.sidecar import SIDECAR_NAME, Sidecar
from dist_wandb.wandb_files.small_files import KINDS

IS_LIVE_FOR = 60.0
"""Seconds since its last change for which a file without an end counts as being written: W&B writes every 15 s."""

_NAMED_RANKS = _NAMED_COPIES = 8
_NAMED_ENTRIES = 3


def problems_of_run(runs: Sequence[StoredRun]) -> list[str]:
    """Return reasons to refuse the upload of these files as one run."""
    reasons = list(_copies(runs))
    shared = [run.shared_as for run in runs if run.shared_as is not None]
    if not shared:
        return reasons
    reasons += [
        f"{run.path.parent} has no dist-wandb.json, so its writer in this shared run is unknown. Restore that file, or "
        "leave the directory out."
        for run in runs
        if run.shared_as is None
    ]
    primaries = {sidecar.label for sidecar in shared if sidecar.primary}
    if not primaries:
        reasons.append(
            "The primary's file is missing; it contains the run's name, its plain metrics and its end. Give its "
            "directory too, or copy it here."
        )
    elif len(primaries) > 1:
        reasons.append(f"It has several primaries: {', '.join(map(repr, sorted(map(str, primaries))))}.")
    missing = _missing_ranks(shared)
    if missing:
        reasons.append(
            f"Of its {shared[0].world_size} ranks, {missing} missing. Give their directories too, or copy them here: "
            "W&B may lose rows if a writer joins a shared run after the primary's rows."
        )
    return reasons


def _copies(runs: Sequence[StoredRun]) -> Iterator[str]:
    starts: dict[tuple[str | None, str], list[Path]] = defaultdict(list)
    for run in runs:
        if run.started:
            starts[run.label, run.started].append(run.path.parent)
    for directories in starts.values():
        if len(directories) > 1:
            named = [*map(str, directories[:_NAMED_COPIES]), *(["others"] if len(directories) > _NAMED_COPIES else [])]
            times = len(directories)
            yield f"{' and '.join(named)} are copies of one file: their rows would be uploaded {times} times."


def _missing_ranks(shared: Sequence[Sidecar]) -> str:
    """Return the ranks without a file, in words; an empty string if there is none."""
    # The number of ranks is unknown with worker scope, and if ranks only record the hardware of their nodes.
    if any(sidecar.rank_scope != "global" or sidecar.run_mode != "shared" for sidecar in shared):
        return ""
    world_size = max(sidecar.world_size for sidecar in shared)
    present = {sidecar.global_rank for sidecar in shared}
    # Bounded, because the number of ranks comes from a file.
    missing = list(islice((rank for rank in range(world_size) if rank not in present), _NAMED_RANKS + 1))
    if not missing:
        return ""
    named = ", ".join(map(str, missing[:_NAMED_RANKS])) + (" and others" if len(missing) > _NAMED_RANKS else "")
    return f"rank {named} is" if len(missing) == 1 else f"ranks {named} are"


def problems_of_file(file: UploadFile, now: float) -> Iterator[str]:
    """Yield reasons to refuse the upload of one file unless it is forced."""
    run, sent = file.run, file.sent
    if file.problem is not None:
        yield f"It is unknown what the server has of it: {file.problem}"
        return
    with suppress(OSError):
        if run.exit_code is None and now - run.path.stat().st_mtime < IS_LIVE_FOR:
            yield f"{run.path.parent} is still being written: it has no end, and changed less than a minute ago. Wait."
    if run.branches and file.shared_as and file.shared_as.world_size > 1 and not sent.attempts:
        yield (
            f"{run.path.parent} begins by rewinding or forking the shared run, after the files of its other ranks were "
            "sent: W&B would drop what they have logged after that point. Rewind or fork with access to the server, or "
            "with run_mode='auto'. --force uploads what remains."
        )
    yield from file.doubts
    for problem in run.problems:
        if SIDECAR_NAME in problem or RUN_RECORD_LOST in problem:
            yield f"{run.path}: {problem}"
    if sent.unsure:
        yield (
            f"{run.path.parent}: the server has confirmed {sent.lines.history} of its {run.rows} rows, and may have "
            f"{sent.unsure} more: the connection broke, or the upload was killed, while they were sent. Check the run. "
            f"--force sends these {sent.unsure} rows (again)."
        )
    shows_nothing = not sent.attempts or (sent.ended and not sent.problems)
    if is_online(run) and run.rows and not sent.lines.history and shows_nothing and not file.terms.again:
        yield (
            f"{run.path.parent} was written online, and W&B's log of it (logs/debug-internal.log) does not show which "
            "rows arrived. Look at the run. --force uploads all of them, so they may be duplicated."
        )


def dangers_of(file: UploadFile, entries: Sequence[Entry]) -> Iterator[str]:
    """Yield reasons to refuse the upload unless trusted: files and owners outside of the run."""
    yield from violations(file.path, rules_of(file), file.run.directory)
    links = [] if file.terms.trust else [entry for entry in entries if entry.is_link]
    yield from map(link_in_words, links[:_NAMED_ENTRIES])
    if len(links) > _NAMED_ENTRIES:
        yield f"{file.path.parent} has {len(links) - _NAMED_ENTRIES} more links."


def left_out(file: UploadFile, entries: Sequence[Entry]) -> Iterator[str]:
    """Yield remarks about entries that are neither files nor links."""
    others = [entry for entry in entries if not entry.is_link]
    for entry in others[:_NAMED_ENTRIES]:
        yield f"{entry.path} is {KINDS.get(entry.kind, 'not a file')}: it is left out."
    if len(others) > _NAMED_ENTRIES:
        yield f"{file.path.parent} has {len(others) - _NAMED_ENTRIES} more of that kind."


def notes_on(files: Sequence[UploadFile]) -> Iterator[str]:
    """Yield remarks about the upload of these files as one run."""
    for file in files:
        run, sent = file.run, file.sent
        if run.problems:
            yield f"{run.path.parent}: the readable part is uploaded, but {'; '.join(run.problems)}."
        if file.is_marked:
            yield f"{run.path.parent} is left out: `wandb sync` marked it as uploaded ({mark_of(run.path).name})."
        elif not file.is_uploaded and sent.lines.history:
            rows = f"{sent.lines.history} rows confirmed by the server"
            source = ", according to W&B's log beside it" if file.by_log else ""
            yield f"{run.path.parent} continues after {rows}{source}."
        if file.finishes and run.exit_code is None and not file.is_uploaded:
            yield f"{run.path.parent} records no end because its process was killed: the run is marked as failed."
    shared = [file.run for file in files if file.shared_as]
    unequal = [what for what in ("name", "group", "tags", "config") if len({str(getattr(r, what)) for r in shared}) > 1]
    if unequal:
        yield f"The ranks differ in {', '.join(unequal)}: the run gets the primary's."
