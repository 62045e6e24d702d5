"""The private copy of a run's directory from which it is uploaded.

W&B's uploader follows links, writes ``config.yaml`` and ``wandb-summary.json`` beside what it reads, and removes files.
A run's directory may come from anybody, and others may write to it meanwhile. So it gets a copy of regular files, in a
directory of this user's alone. Large files cost nothing where they lie on the same file system: they are hard links.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dist_wandb.errors import ReadError, UploadError
from dist_wandb.wandb_files.small_files import KINDS

_IS_LARGE = 1 << 20  # bytes from which a file is not copied if it can be linked
_DEEPEST = 32  # folders within each other; W&B's own are two or three
_SPARE = 64 << 20  # bytes that a copy leaves free on the disk
_PIECE = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# What W&B's uploader may write anew, in place: a hard link would hand that on to the run's own file.
_WRITTEN_BY_WANDB = frozenset(
    {
        *("config.yaml", "wandb-summary.json", "wandb-metadata.json", "output.log", "requirements.txt"),
        *("conda-environment.yaml", "diff.patch", "wandb-job.json", "wandb-history.jsonl", "wandb-events.jsonl"),
    }
)


@dataclass(frozen=True)
class Entry:
    """Something below a run's ``files`` that is no folder.

    Args:
        path: Its path.
        kind: Its type, as `stat.S_IFMT` gives it.
        folder: A descriptor of the folder that it is in, open until the next entry is asked for.
    """

    path: Path
    kind: int
    folder: int | None = None

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic link."""
        return self.kind == stat.S_IFLNK

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return self.kind == stat.S_IFREG

    @property
    def in_words(self) -> str:
        """What it is, where it is no file."""
        return KINDS.get(self.kind, "no file")


def entries_below(files: Path) -> Iterator[Entry]:
    """What lies below a folder, at any depth. No link is followed, not even in place of the folder itself.

    Raises:
        ReadError: Folders lie in each other too deep.
        OSError: A folder cannot be read.
    """
    with suppress(FileNotFoundError):
        kind = stat.S_IFMT(files.lstat().st_mode)
        if kind == stat.S_IFDIR:
            yield from _below(files, os.open(files, _FOLDER), 1)
        else:
            yield Entry(files, kind)


def copy_files(files: Path, target: Path, *, follow: bool, leave_out: frozenset[str] = frozenset()) -> None:
    """Copy what lies below a run's ``files``.

    Args:
        files: The folder.
        target: The folder that becomes its copy. It is made; others must not be able to write there.
        follow: Whether links are followed, to regular files, because the user trusts the directory.
        leave_out: Paths below `files` that are not copied. Nor are pipes, sockets and devices, ever.

    Raises:
        UploadError: There is a link, or not enough room.
        ReadError: Folders lie in each other too deep.
        OSError: Something cannot be read or written.
    """
    target.mkdir(mode=0o700)
    for entry in entries_below(files):
        name = entry.path.relative_to(files)
        if str(name) in leave_out:
            continue
        copy = target / name
        if entry.is_link and follow:
            source = entry.path.resolve()
            if source.is_file():
                copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                copy_file(source, copy, may_link=_may_link(name))
        elif entry.is_link:
            raise UploadError(link_in_words(entry))
        elif entry.is_file:
            copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            copy_file(entry.path, copy, may_link=_may_link(name), folder=entry.folder)


def link_in_words(entry: Entry) -> str:
    """What is said of a link below a run's files."""
    return f"{entry.path} is a symbolic link, and what it leads to is not uploaded unless you give --trust."


def copy_file(source: Path, target: Path, *, may_link: bool, folder: int | None = None) -> None:
    """Copy one regular file, or link it where that is the same for whoever reads it.

    Args:
        source: The file. No link in its place is followed.
        target: The copy, in a directory to which others cannot write.
        may_link: Whether nobody writes to the copy, so that it may be a hard link.
        folder: A descriptor of its folder, if somebody may replace that, or one above it, by a link meanwhile.

    Raises:
        UploadError: It is no regular file, or there is not enough room.
        OSError: It cannot be read, or the copy not be written.
    """
    name: str | Path = source if folder is None else source.name
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, dir_fd=folder)
    with os.fdopen(handle, "rb") as opened:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise UploadError(f"{source} is no regular file any more.")
        if may_link and found.st_size >= _IS_LARGE and _linked(name, folder, target, found):
            return
        if found.st_size > shutil.disk_usage(target.parent).free - _SPARE:
            raise UploadError(
                f"{source} has {found.st_size} bytes, and {target.parent} has no room for a copy of it. Set "
                "XDG_STATE_HOME to a directory of yours on the file system of the run, where no copy is needed."
            )
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(writing, "wb") as copy:
            shutil.copyfileobj(opened, copy, _PIECE)


def copy_below(top: Path, below: Path, target: Path) -> None:
    """Copy a file that lies in a folder, at any depth. No link below the folder is followed.

    Args:
        top: The folder.
        below: The file's path within it.
        target: The copy, in a directory to which others cannot write.

    Raises:
        UploadError: It is no regular file, or there is not enough room.
        OSError: It cannot be read, or the copy not be written.
    """
    folder = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in below.parts[:-1]:
            inner = os.open(name, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        copy_file(top / below, target, may_link=True, folder=folder)
    finally:
        os.close(folder)


def _linked(source: str | Path, folder: int | None, target: Path, found: os.stat_result) -> bool:
    """Make `target` a hard link of the file that was looked at; `False` where that is not possible."""
    try:
        os.link(source, target, src_dir_fd=folder, follow_symlinks=False)
    except OSError:  # another file system, somebody else's file, too many links
        return False
    if os.path.samestat(target.lstat(), found):
        return True
    target.unlink()  # somebody has put another file in its place meanwhile
    raise UploadError(f"{source} was replaced while it was copied. Start again.")


def _may_link(name: Path) -> bool:
    return name.name not in _WRITTEN_BY_WANDB and name.parts[0] != "logs"


def _below(folder: Path, handle: int, depth: int) -> Iterator[Entry]:
    """What lies below an open folder, which is closed in the end. Nothing is looked up by its whole path."""
    try:
        if depth > _DEEPEST:
            raise ReadError(f"{folder}: more than {_DEEPEST} folders lie in each other. W&B makes two or three.")
        with os.scandir(handle) as found:
            kinds = sorted((entry.name, _kind(entry)) for entry in found)
        for name, kind in kinds:
            if kind == stat.S_IFDIR:
                yield from _below(folder / name, os.open(name, _FOLDER, dir_fd=handle), depth + 1)
            else:
                yield Entry(folder / name, kind, handle)
    finally:
        os.close(handle)


def _kind(entry: os.DirEntry[str]) -> int:
    for kind, is_it in (
        (stat.S_IFLNK, entry.is_symlink()),
        (stat.S_IFDIR, entry.is_dir(follow_symlinks=False)),
        (stat.S_IFREG, entry.is_file(follow_symlinks=False)),
    ):
        if is_it:
            return kind
    return stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode)
