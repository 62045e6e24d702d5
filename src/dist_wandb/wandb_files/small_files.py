"""Read and write small files in directories that others can write to.

A run directory may come from an untrusted source, a scratch directory belongs to a group, and everybody can write to
the temporary directory. Instead of an expected file there may be a link to a file of the user, a named pipe that
blocks, an endless device, or JSON deeper than the parser's stack. No other module of the package opens records,
sidecars, marks or logs.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_wandb.errors import ReadError

LIMIT = 64 * 1024  # bytes of a small file
DEPTH = 64  # largest nesting of JSON
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # of a directory that is no link


@dataclass(frozen=True)
class Directory:
    """A directory in which others may write, such as a run's, from the moment when it was found.

    There may be more runs than descriptors, so it is opened for each use, but only if it is still the same one. What is
    below it is opened by its descriptor, and no link is followed in any part: a path that was checked is never looked
    up again. Otherwise somebody could put a link to a private directory of this user in its place meanwhile.
    """

    path: Path
    device: int
    inode: int

    @classmethod
    def at(cls, path: Path) -> Directory:
        """Return the directory that is at a path now; links are followed."""
        return cls.of(path, path.stat())

    @classmethod
    def of(cls, path: Path, found: os.stat_result) -> Directory:
        return cls(path, found.st_dev, found.st_ino)

    @contextmanager
    def opened(self, below: str = "") -> Iterator[int]:
        """Open the directory, or one below it; yield the descriptor. Raises `ReadError` if it was replaced."""
        handle = os.open(self.path, FOLDER & ~os.O_NOFOLLOW)
        try:
            if self != Directory.of(self.path, os.fstat(handle)):
                raise ReadError(f"{self.path} was replaced by another directory meanwhile, so it is not read.")
            for part in Path(below).parts:
                inner = os.open(part, FOLDER, dir_fd=handle)
                os.close(handle)
                handle = inner
            yield handle
        finally:
            os.close(handle)


def read_small(
    path: Path,
    *,
    limit: int = LIMIT,
    owner: int | None = None,
    within: Directory | None = None,
) -> bytes:
    """Read a file as `open_ordinary` opens it. Also raises `ReadError` if it has more than `limit` bytes."""
    handle = open_ordinary(path, owner=owner, within=within)
    with os.fdopen(handle, "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ReadError(f"{path} has more than {limit} bytes, so it is not the expected file. Remove it.")
    return content


def open_ordinary(
    path: Path,
    flags: int = os.O_RDONLY,  # without truncation: the file may belong to somebody else
    *,
    mode: int = 0o600,  # of a new file
    # The user to whom it must belong: that of this process, or whom the file system maps it to, see `own_directory`.
    owner: int | None = None,
    within: Directory | None = None,  # contains the path: no link is followed below it, and it must be the same one
) -> int:
    # This never blocks, and never follows a link at the path. Raises `ReadError` if it is not an ordinary file, or has
    # another owner.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    name = path.relative_to(within.path) if within else path
    with within.opened(str(name.parent)) if within else nullcontext() as folder:
        name = Path(name.name) if within else name
        with suppress(FileNotFoundError):  # opening a device may have side effects; the check below is free of races
            _check(path, os.stat(name, dir_fd=folder, follow_symlinks=False), owner)
        handle = os.open(name, flags, mode, dir_fd=folder)
    try:
        _check(path, os.fstat(handle), owner)
    except BaseException:
        os.close(handle)
        raise
    return handle


def write_small(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Write a file atomically, in place of an existing file or link; `mode` is reduced by the process's umask."""
    unfinished = path.with_name(f".{path.name[:64]}.{secrets.token_hex(8)}")  # a name that nobody can predict
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(handle)
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


def time_limit(seconds: float) -> Callable[[], None]:
    # Counts the processor time of this thread. Limits in bytes do not suffice for a file whose parts cost more than its
    # bytes, such as a log of line breaks.
    end = time.thread_time() + seconds

    def check() -> None:
        if time.thread_time() > end:
            raise ReadError(f"takes more than {seconds:.0f} s of processor time, so it is not read to its end.")

    return check


def own_directory(path: Path) -> int:
    """Remove other users' permissions of an existing directory; return the owner of this process's files in it.

    This is usually the process's user, but a file server may map root to nobody, and a mounted bucket may have one
    owner for all files. Raises `ReadError` if it is not a directory or has another owner, and `OSError`.
    """
    _check(path, path.lstat(), kind=stat.S_IFDIR)
    handle = os.open(path, FOLDER)
    try:
        found = os.fstat(handle)
        owner = os.getuid()
        if found.st_uid != owner:
            with suppress(OSError), tempfile.TemporaryFile(dir=path) as probe:
                owner = os.fstat(probe.fileno()).st_uid
        _check(path, found, owner, kind=stat.S_IFDIR)
        if stat.S_IMODE(found.st_mode) & 0o077:
            with suppress(OSError):  # not every file system has permissions
                os.fchmod(handle, 0o700)
    finally:
        os.close(handle)
    return owner


def parse_json(content: str | bytes) -> Any:
    """Parse JSON, as text or in UTF-8. Raises `ValueError` if it is malformed, or nested deeper than `DEPTH`."""
    with suppress(RecursionError):
        value = json.loads(content.decode("utf-8") if isinstance(content, bytes) else content)
        if not is_deeper(value):
            return value
    raise ValueError(f"lists and objects are nested deeper than {DEPTH}")


def is_deeper(value: Any) -> bool:
    """Return whether lists and dicts in a value are nested deeper than `DEPTH`."""
    level = [value]
    for _ in range(DEPTH + 1):
        level = [one for one in level if isinstance(one, (list, dict))]
        if not level:
            return False
        level = [one for each in level for one in (each.values() if isinstance(each, dict) else each)]
    return True


def _check(path: Path, found: os.stat_result, owner: int | None = None, *, kind: int = stat.S_IFREG) -> None:
    if stat.S_IFMT(found.st_mode) != kind:
        what, wanted = KINDS.get(stat.S_IFMT(found.st_mode), "of an unknown kind"), KINDS[kind].removeprefix("a ")
        raise ReadError(f"{path} is {what}, so it is not the expected {wanted}. Remove it.")
    if owner is not None and found.st_uid != owner:
        raise ReadError(
            f"{path} belongs to user {found.st_uid}, while this process runs as {os.getuid()}, so it is not trusted."
        )


KINDS = {  # by `stat.S_IFMT` of the mode
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
