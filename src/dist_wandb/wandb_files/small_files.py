"""Small files in places where others may write: read without trust in what lies there, written in one step.

A run directory may come from a stranger, a scratch directory belongs to a group, the directory for temporary files to
everybody. What stands under an expected name there may be a link to a file of the user's, a named pipe that nobody
writes to, a device without an end, or JSON as deep as the parser's stack. Nothing else in the package opens notes,
sidecars, marks or logs.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dist_wandb.errors import ReadError

LIMIT = 64 * 1024
"""Bytes that a small file has at most, unless the caller knows better."""

DEPTH = 64
"""How deep lists and objects in JSON lie in each other at most."""


def read_small(path: Path, *, limit: int = LIMIT, owned: bool = False, owner: int | None = None) -> bytes:
    """Read a file that should be small and ordinary. It never blocks and never follows a link in place of the file.

    Args:
        path: The file.
        limit: Bytes that it may have at most.
        owned: Whether it must belong to this process's user.
        owner: The user whom it must belong to, where the file system knows this process's as another: `own_directory`.

    Returns:
        The whole content.

    Raises:
        FileNotFoundError: Nothing is there.
        ReadError: It is a link, a directory, a pipe, a socket or a device, too large, or somebody else's.
        OSError: It cannot be read.
    """
    handle = open_ordinary(path, owned=owned, owner=owner)
    with os.fdopen(handle, "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ReadError(f"{path} has more than {limit} bytes, so it is not the file that belongs there. Remove it.")
    return content


def open_ordinary(
    path: Path, flags: int = os.O_RDONLY, *, mode: int = 0o600, owned: bool = False, owner: int | None = None
) -> int:
    """Open an ordinary file; no link in its place is followed, and no pipe is waited for.

    Args:
        path: The file.
        flags: As for `os.open`. What truncates has no place here: the file may turn out to be another one's.
        mode: Permissions if it is made.
        owned: Whether it must belong to this process's user.
        owner: As of `read_small`.

    Returns:
        The file descriptor, closed by the caller.

    Raises:
        FileNotFoundError: Nothing is there.
        ReadError: It is no ordinary file, or somebody else's.
        OSError: It cannot be opened.
    """
    owner = os.getuid() if owned else owner
    with suppress(FileNotFoundError):  # opening a device may already do something; the check below holds against a race
        _check(path, path.lstat(), owner)
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, mode)
    try:
        _check(path, os.fstat(handle), owner)
    except BaseException:
        os.close(handle)
        raise
    return handle


def write_small(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Write a file in one step, so that nobody ever reads half of it.

    Args:
        path: The file. Whatever has this name, if anything, is replaced; a link is replaced, not followed.
        content: The whole content.
        mode: Its permissions, of which the process's umask takes away: without more, the user's alone.

    Raises:
        OSError: It cannot be written. Nothing is left behind.
    """
    unfinished = path.with_name(f".{path.name[:64]}.{secrets.token_hex(8)}")  # a name that nobody can take beforehand
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


def own_directory(path: Path) -> int:
    """Make sure that nobody but this process's user may enter a directory.

    Args:
        path: The directory, which is there already. Permissions of others are taken away.

    Returns:
        The user to whom this process's files in it belong. That is usually the process's, but a file server may know
        root as nobody, and a mounted bucket gives all files to one user.

    Raises:
        ReadError: It is a link or no directory, or somebody else's.
        OSError: It cannot be opened.
    """
    _check(path, path.lstat(), kind=stat.S_IFDIR)
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
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


@contextmanager
def private_directory() -> Iterator[Path]:
    """An empty directory that only this process's user may enter, removed with all that is in it at the end.

    Yields:
        Its absolute path.

    Raises:
        OSError: It cannot be made; the message says where, why, and what to do.
    """
    try:
        directory = tempfile.TemporaryDirectory(prefix="dist-wandb-", ignore_cleanup_errors=True)  # mkdtemp: mode 0700
    except OSError as error:
        raise OSError(
            error.errno,
            f"A temporary directory cannot be made: {error.strerror or error}"
            f"{f' ({error.filename})' if error.filename else ''}. Free some space there, or set TMPDIR to a directory "
            "that can be written to",
        ) from None
    with directory as name:
        yield Path(name).absolute()


def parse_json(content: str | bytes, *, depth: int = DEPTH) -> Any:
    """Parse JSON whose depth is bounded.

    Args:
        content: The text, or its UTF-8.
        depth: How deep lists and objects may lie in each other.

    Returns:
        The value.

    Raises:
        ValueError: It is not JSON, or deeper than that.
    """
    if is_deeper(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"), depth):
        raise ValueError(f"lists and objects lie in each other deeper than {depth}")
    return json.loads(content.decode("utf-8") if isinstance(content, bytes) else content)


def is_deeper(content: bytes, depth: int = DEPTH) -> bool:
    """Say whether lists and objects in JSON lie deeper in each other than that.

    Args:
        content: The JSON. If it is none, either may be said.
        depth: How deep they may lie.
    """
    if content.count(b"[") + content.count(b"{") <= depth:
        return False
    # Passes in C, of which each is linear, instead of recursion.
    marks = content.replace(rb"\\", b"").replace(rb"\"", b"").translate(_AS_ONE_KIND, _NO_MARKS)
    outside_strings = marks.replace(b'""', b"").split(b'"')[::2]  # two strings side by side are as good as one
    brackets = b"".join(outside_strings)
    for _ in range(depth):
        before, brackets = len(brackets), brackets.replace(b"[]", b"")
        if len(brackets) == before:  # nothing is left, or nothing that would ever be closed
            break
    return bool(brackets)


def _check(path: Path, found: os.stat_result, owner: int | None = None, *, kind: int = stat.S_IFREG) -> None:
    if stat.S_IFMT(found.st_mode) != kind:
        what, wanted = KINDS.get(stat.S_IFMT(found.st_mode), "of no known kind"), KINDS[kind].removeprefix("a ")
        raise ReadError(f"{path} is {what}, so it is not the {wanted} that belongs there. Remove it.")
    if owner is not None and found.st_uid != owner:
        raise ReadError(
            f"{path} belongs to user {found.st_uid}, while this process runs as {os.getuid()}; it is not believed."
        )


KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""What kinds of files are called, by `stat.S_IFMT` of their mode."""


_AS_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_MARKS = bytes(set(range(256)) - set(b'[]{}"'))
