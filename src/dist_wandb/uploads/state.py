"""What this user has uploaded, in the user's own state directory.

A run's directory may come from anybody, so nothing in it is believed about what was uploaded, and nothing is written
there but W&B's mark. The state of a file is found by its run record, which W&B makes unique for each writer, so that it
is found again after the directory was moved or copied. An upload notes how much of the file there was, and its digest:
another file with the same run record is not taken for it, while a file that has grown since is.

What a directory claims (W&B's mark) is a reason to refuse, which ``--trust`` settles and remembers. The exception is
W&B's own log of an online run, ``logs/debug-internal.log``: nothing else shows what arrived. It is believed, and the
plan names it as the source.

One folder per file: ``lock``, ``syncstate`` (W&B's own note of the step that the run began at), and ``attempt-N`` with
what was known before the upload, W&B's log and its output.
"""

from __future__ import annotations

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
from typing import Any

from dist_wandb.errors import ReadError, UploadError
from dist_wandb.runs.directories import state_directory
from dist_wandb.uploads.log import Sent, read_attempt
from dist_wandb.wandb_files.record_file import Lines, run_record_of
from dist_wandb.wandb_files.small_files import open_ordinary, parse_json, read_small, write_small

COPY = "copy"
"""Within an attempt, while it lasts: the private copy from which the file is uploaded."""

_NOTE = "attempt.json"
_LARGEST_NOTE = 1 << 20  # bytes; the problems of an upload are in it
_LONGEST_OWNER = 200  # bytes that the line in the lock has, so that it is replaced without being truncated
_PIECE = 1 << 20


@dataclass(frozen=True)
class _Attempt:
    """One upload, as it was noted when it began."""

    directory: Path
    path: str
    size: int
    digest: str
    before: Sent
    uploads: bool

    def total(self) -> Sent:
        """What is known since then."""
        return self.before.followed_by(read_attempt(self.directory)) if self.uploads else self.before


class FileState:
    """What this user has uploaded of one ``.wandb`` file.

    Args:
        path: The file.

    Raises:
        ReadError: It is no ordinary file.
        UploadError: There is no state directory, as there is no home.
        OSError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            top = state_directory()
        except RuntimeError as error:
            raise UploadError(f"{error} Set XDG_STATE_HOME to a directory of yours.") from None
        self.path = path
        self.directory = top / "uploads" / _key(path)

    def sent(self) -> Sent | None:
        """What W&B has confirmed of the file in this user's uploads; `None` if there were none.

        Raises:
            UploadError: The file was uploaded, and has changed since, so that nobody knows what of it has arrived.
            ReadError: The state is not what dist_wandb writes.
        """
        attempts = self._attempts()
        digests = _digests(self.path, {attempt.size for attempt in attempts})
        matching = [attempt for attempt in attempts if digests.get(attempt.size) == attempt.digest]
        if matching:
            return matching[-1].total()
        if any(attempt.path == str(self.path.resolve()) for attempt in attempts):
            raise UploadError(
                f"{self.path}: you have uploaded from this file, and what was there then has changed since, so nobody "
                "knows which of its rows have arrived. Look at the run. --again uploads all of them."
            )
        return None

    def begin(self, before: Sent, *, uploads: bool = True) -> Path:
        """Note that an upload begins; whoever calls holds the lock.

        Args:
            before: What is known to have arrived.
            uploads: Whether something is uploaded at all, or only `before` is to be remembered.

        Returns:
            The directory of the upload, new and empty but for the note.
        """
        last = max((_number_of(path) for path in self._directories()), default=0)
        for left_behind in self._directories():  # of uploads that were killed
            shutil.rmtree(left_behind / COPY, ignore_errors=True)
        size = self.path.stat().st_size
        note = {
            "path": str(self.path.resolve()),
            "size": size,
            "digest": _digests(self.path, {size}).get(size, ""),
            "before": asdict(before),
            "uploads": uploads,
        }
        attempt = self.directory / f"attempt-{last + 1}"
        attempt.mkdir(mode=0o700)
        write_small(attempt / _NOTE, json.dumps(note).encode())
        return attempt

    def begun_at(self) -> bytes | None:
        """W&B's note of the step that the run began at: our own uploads', else the one that lies beside the file."""
        for place in (self.directory / "syncstate", self.path.with_name(f"{self.path.name}.syncstate")):
            with suppress(FileNotFoundError):
                return read_small(place)
        return None

    def keep_begun_at(self, copy: Path) -> None:
        """Keep that note of an upload from `copy`, for the uploads that go on behind it."""
        with suppress(FileNotFoundError):
            write_small(self.directory / "syncstate", read_small(copy.with_name(f"{copy.name}.syncstate")))

    def uploader(self) -> str | None:
        """Who is uploading the file at this moment, as ``"pid 4711"``; `None` if nobody is."""
        with suppress(FileNotFoundError, ImportError):
            import fcntl

            handle = open_ordinary(self.directory / "lock", os.O_RDWR, owned=True)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return _owner_of(handle)
            finally:
                os.close(handle)
        return None

    @contextmanager
    def locked(self) -> Iterator[Lock]:
        """Hold the right to upload the file.

        ``wandb sync`` inherits it, so it lasts until that has ended, come what may.

        Raises:
            UploadError: Another process holds it, or the state directory cannot be written to.
        """
        _make_private(self.directory)
        handle = open_ordinary(self.directory / "lock", os.O_RDWR | os.O_CREAT, owned=True)
        try:
            _lock(handle, self.path)
            lock = Lock(handle)
            lock.name_owners(os.getpid())
            yield lock
        finally:
            os.close(handle)

    def _attempts(self) -> list[_Attempt]:
        return [_read_note(path) for path in self._directories()]

    def _directories(self) -> list[Path]:
        try:
            found = [path for path in self.directory.iterdir() if re.fullmatch(r"attempt-\d{1,9}", path.name)]
        except FileNotFoundError:
            return []
        return sorted(found, key=_number_of)


@dataclass(frozen=True)
class Lock:
    """The right to upload a file: an open file that is locked.

    Args:
        handle: Its descriptor, for processes that are to hold the lock as well.
    """

    handle: int

    def name_owners(self, *pids: int) -> None:
        """Tell others which processes hold the lock."""
        owner = json.dumps({"host": socket.gethostname()[:64], "pids": pids}).encode()
        os.pwrite(self.handle, owner.ljust(_LONGEST_OWNER), 0)


def remove_left_copies() -> None:
    """Remove the private copies of uploads that were killed: they may be as large as the runs.

    Uploads that are under way hold their locks, and keep their copies.
    """
    try:
        import fcntl

        left = list((state_directory() / "uploads").glob(f"*/attempt-*/{COPY}"))
    except (ImportError, OSError, RuntimeError):
        return
    for copy in left:
        with suppress(OSError, ReadError):
            handle = open_ordinary(copy.parents[1] / "lock", os.O_RDWR, owned=True)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(copy)
            finally:
                os.close(handle)


def another_upload(who: str) -> str:
    """What is said of a file that is being uploaded by somebody else."""
    return f"another upload of this file is under way ({who}). Wait until it has ended."


def _lock(handle: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not a Unix
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UploadError(f"{path}: {another_upload(_owner_of(handle))}") from None


def _owner_of(handle: int) -> str:
    """Who holds a lock; the first process of those that are named and live, as the first one started the others."""
    try:
        owner = parse_json(os.pread(handle, _LONGEST_OWNER, 0))
        host, pids = str(owner["host"]), [int(pid) for pid in owner["pids"]]
    except (ValueError, KeyError, TypeError):
        return "of a process that is not known"
    if host != socket.gethostname()[:64]:
        return f"pid {pids[0]} on {host}"
    return f"pid {next(filter(_lives, pids), pids[0])}"


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _make_private(directory: Path) -> None:
    """Make a folder of the state directory, and those above it, for this user alone."""
    top = state_directory()
    try:
        top.parent.mkdir(parents=True, exist_ok=True)
        for place in (top, *reversed([p for p in directory.parents if top in p.parents]), directory):
            with suppress(FileExistsError):
                place.mkdir(mode=0o700)
            _check_private(place)
    except OSError as error:
        raise UploadError(
            f"{directory} cannot be written to ({error.strerror or error}), and what was uploaded is kept there. Make "
            "it writable, or set XDG_STATE_HOME to a directory of yours that is."
        ) from None


def _check_private(place: Path) -> None:
    found = place.lstat()
    if not place.is_dir() or place.is_symlink():
        raise UploadError(f"{place} is no directory, and what was uploaded is kept there. Remove it.")
    if found.st_uid != os.getuid():
        raise UploadError(
            f"{place} belongs to user {found.st_uid}, while this process runs as {os.getuid()}. Set XDG_STATE_HOME to "
            "a directory of yours."
        )
    if found.st_mode & 0o077:
        place.chmod(0o700)


def _key(path: Path) -> str:
    """The name of the folder of a file: a digest of its run record, or, where it has none, of its place."""
    record = run_record_of(path)
    what = b"record " + record if record is not None else b"place " + os.fsencode(path.resolve())
    return hashlib.sha256(what).hexdigest()[:32]


def _digests(path: Path, sizes: Iterable[int]) -> dict[int, str]:
    """Digests of the first bytes of a file, by their number; a file that is shorter has none."""
    found: dict[int, str] = {}
    digest = hashlib.sha256()
    wanted = sorted(sizes)
    if not wanted:
        return found
    with os.fdopen(open_ordinary(path), "rb") as file:
        for size in wanted:
            while file.tell() < size:
                piece = file.read(min(_PIECE, size - file.tell()))
                if not piece:
                    return found
                digest.update(piece)
            found[size] = digest.hexdigest()
    return found


def _number_of(attempt: Path) -> int:
    return int(attempt.name.removeprefix("attempt-"))


def _read_note(attempt: Path) -> _Attempt:
    try:
        note = parse_json(read_small(attempt / _NOTE, limit=_LARGEST_NOTE, owned=True))
        return _Attempt(
            attempt,
            str(note["path"]),
            int(note["size"]),
            str(note["digest"]),
            _sent_in(note["before"]),
            bool(note["uploads"]),
        )
    except FileNotFoundError:  # killed before it was written: nothing was uploaded
        return _Attempt(attempt, "", 0, "", Sent(), uploads=False)
    except (ValueError, KeyError, TypeError):
        raise ReadError(
            f"{attempt / _NOTE} is not what dist_wandb writes, so what was uploaded is not known. Remove {attempt} to "
            "have it forgotten."
        ) from None


def _sent_in(note: dict[str, Any]) -> Sent:
    values = dict(note)
    lines = Lines(**{name: int(value) for name, value in values.pop("lines").items()})
    return Sent(
        lines=lines,
        unsure=int(values["unsure"]),
        completed=bool(values["completed"]),
        attempts=int(values["attempts"]),
        ended=bool(values["ended"]),
        problems=tuple(map(str, values["problems"])),
    )
