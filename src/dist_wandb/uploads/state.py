"""The state of this user's uploads, in the user's own state directory.

A run's directory may come from anybody, so its claims about uploads are ignored, and only W&B's mark is written there.
The state of a file is keyed by its run record, which W&B makes unique for each writer, so the state is found again
after the directory was moved or copied. Each upload records size and digest of the file: another file with the same run
record does not match, a file that has grown does.

W&B's mark in a directory is a reason to refuse, which ``--trust`` settles and records. W&B's own log of an online run,
``logs/debug-internal.log``, is the only evidence of what arrived, so it counts, and the plan names it as the source.

One folder per file: ``lock``, ``syncstate`` (W&B's own record of the run's first step), and ``attempt-N`` with the
state before the upload, W&B's log and its output.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dist_wandb.errors import ReadError, UploadError
from dist_wandb.uploads.log import Sent, read_attempt
from dist_wandb.wandb_files.environment import state_directory
from dist_wandb.wandb_files.reading import StoredRun
from dist_wandb.wandb_files.record_file import Lines, run_record_of
from dist_wandb.wandb_files.small_files import (
    open_ordinary,
    own_directory,
    parse_json,
    read_small,
    write_small,
)

COPY = "copy"
"""The private copy from which a file is uploaded; it is in the attempt's directory during the upload."""

_RECORD = "attempt.json"
_LARGEST_RECORD = 1 << 20  # bytes; it includes the problems of an upload
_LONGEST_OWNER = 200  # bytes; the fixed length allows replacing the owner without truncating the file
_PIECE = 1 << 20


@dataclass(frozen=True)
class _Attempt:
    """One upload, as recorded when it began."""

    directory: Path
    path: str
    size: int  # bytes of the file; it may have grown since
    digest: str  # of these bytes
    before: Sent  # the lines confirmed until then
    uploads: bool  # else only `before` was recorded

    def total(self) -> Sent:
        """Return the lines confirmed after this upload."""
        return self.before.followed_by(read_attempt(self.directory)) if self.uploads else self.before


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
        """Return the lines of the file that W&B has confirmed in this user's uploads; `None` without uploads.

        Raises `UploadError` if the file changed after an upload, and `ReadError` if the state is damaged.
        """
        attempts = [_read_attempt_record(path) for _, path in self._attempts()]
        digests = self._digests({attempt.size for attempt in attempts})
        matching = [attempt for attempt in attempts if digests.get(attempt.size) == attempt.digest]
        if matching:
            return matching[-1].total()
        if any(attempt.path == str(self._path.resolve()) for attempt in attempts):
            raise UploadError(
                f"{self._path}: the file has changed since you uploaded it, so it is unknown which of its rows have "
                "arrived. Look at the run. --again uploads all of them."
            )
        return None

    def begin(self, before: Sent, *, uploads: bool = True) -> Path:
        """Record that an upload begins, or just the confirmed lines, under the lock; return its new directory."""
        last = 0
        for last, attempt in self._attempts():  # noqa: B007  # used after the loop
            shutil.rmtree(attempt / COPY, ignore_errors=True)  # of a killed upload
        with os.fdopen(open_ordinary(self._path, within=self._within), "rb") as file:
            size = os.fstat(file.fileno()).st_size
        record = {
            "path": str(self._path.resolve()),
            "size": size,
            "digest": self._digests({size}).get(size, ""),
            "before": asdict(before),
            "uploads": uploads,
        }
        attempt = self.directory / f"attempt-{last + 1}"
        attempt.mkdir(mode=0o700)
        write_small(attempt / _RECORD, json.dumps(record).encode())
        return attempt

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
        with suppress(FileNotFoundError), _lock_file(self.directory) as handle:
            return _lock_or_holder(handle)
        return None

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the lock of the file; yield the descriptor. Raises `UploadError` if another process holds it."""
        _make_private(self.directory)
        with _lock_file(self.directory, os.O_CREAT) as handle:
            holder = _lock_or_holder(handle)
            if holder is not None:
                raise UploadError(f"{self._path}: {another_upload(holder)}")
            name_owners(handle, os.getpid())
            yield handle

    def _digests(self, sizes: Iterable[int]) -> dict[int, str]:
        """Return digests of the first N bytes of the file, by N; sizes beyond its end are left out."""
        found: dict[int, str] = {}
        digest = hashlib.sha256()
        with os.fdopen(open_ordinary(self._path, within=self._within), "rb") as file:
            for size in sorted(sizes):
                while file.tell() < size:
                    piece = file.read(min(_PIECE, size - file.tell()))
                    if not piece:
                        return found
                    digest.update(piece)
                found[size] = digest.hexdigest()
        return found

    def _attempts(self) -> list[tuple[int, Path]]:
        """Return numbers and directories of the uploads, in their order."""
        with suppress(FileNotFoundError):
            found = [(re.fullmatch(r"attempt-(\d{1,9})", path.name), path) for path in self.directory.iterdir()]
            return sorted((int(name[1]), path) for name, path in found if name)
        return []


def name_owners(lock: int, *pids: int) -> None:
    """Write the processes that hold a lock into the lock file."""
    owner = json.dumps({"host": socket.gethostname()[:64], "pids": pids}).encode()
    os.pwrite(lock, owner.ljust(_LONGEST_OWNER), 0)


def remove_left_copies() -> None:
    """Remove the private copies of killed uploads, which may be as large as the runs; those in progress hold a lock."""
    try:
        left = list((state_directory() / "uploads").glob(f"*/attempt-*/{COPY}"))
    except (OSError, RuntimeError):
        return
    for copy in left:
        with suppress(OSError, ReadError), _lock_file(copy.parents[1]) as handle:
            if _lock_or_holder(handle) is None:
                shutil.rmtree(copy)


def another_upload(holder: str) -> str:
    """Return the reason to refuse a file that another process is uploading."""
    return f"another upload of this file is under way ({holder}). Wait until it has ended."


@contextmanager
def _lock_file(directory: Path, flags: int = 0) -> Iterator[int]:
    handle = open_ordinary(directory / "lock", os.O_RDWR | flags, owned=True)
    try:
        yield handle
    finally:
        os.close(handle)


def _lock_or_holder(handle: int) -> str | None:
    """Lock an open lock file; return its holder if another process has locked it."""
    with suppress(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None
    try:  # the first of the recorded processes that is alive has started the others
        owner = parse_json(os.pread(handle, _LONGEST_OWNER, 0))
        host, pids = str(owner["host"]), [int(pid) for pid in owner["pids"]]
    except (ValueError, KeyError, TypeError):
        return "by an unknown process"
    if host != socket.gethostname()[:64]:
        return f"pid {pids[0]} on {host}"
    return f"pid {next((pid for pid in pids if Path('/proc', str(pid)).exists()), pids[0])}"


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


def _read_attempt_record(attempt: Path) -> _Attempt:
    try:
        record = parse_json(read_small(attempt / _RECORD, limit=_LARGEST_RECORD, owned=True))
        before = record["before"]
        sent = Sent(
            lines=Lines(**{name: int(value) for name, value in before["lines"].items()}),
            unsure=int(before["unsure"]),
            completed=bool(before["completed"]),
            attempts=int(before["attempts"]),
            ended=bool(before["ended"]),
            problems=tuple(map(str, before["problems"])),
        )
        path, size, digest = str(record["path"]), int(record["size"]), str(record["digest"])
        return _Attempt(attempt, path, size, digest, sent, bool(record["uploads"]))
    except FileNotFoundError:  # killed before the record was written: nothing was uploaded
        return _Attempt(attempt, "", 0, "", Sent(), uploads=False)
    except (ValueError, KeyError, TypeError):
        raise ReadError(
            f"{attempt / _RECORD} is not in dist_wandb's format, so it is unknown what was uploaded. Remove {attempt} "
            "to discard the record of this upload."
        ) from None
