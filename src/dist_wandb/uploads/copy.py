"""The private copy of a run's directory from which it is uploaded.

W&B's uploader follows links, writes ``config.yaml`` and ``wandb-summary.json`` beside its input, and removes files.
A run's directory may come from anybody, and others may write to it meanwhile. So the uploader gets a copy of regular
files, in a directory that only this user can access. Large files on the same file system are hard links.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dist_wandb.errors import ReadError, UploadError
from dist_wandb.wandb_files.small_files import FOLDER, Directory

_IS_LARGE = 1 << 20  # bytes; files of this size are linked where possible
_DEEPEST = 32  # nested folders; W&B makes two or three
_SPARE = 64 << 20  # bytes left free on the disk
_PIECE = 1 << 20
# Files that W&B's uploader may rewrite in place: with a hard link that would change the run's own file.
_WRITTEN_BY_WANDB = frozenset(
    {
        *("config.yaml", "wandb-summary.json", "wandb-metadata.json", "output.log", "requirements.txt"),
        *("conda-environment.yaml", "diff.patch", "wandb-job.json", "wandb-history.jsonl", "wandb-events.jsonl"),
    }
)


@dataclass(frozen=True)
class Entry:
    """An entry below a run's ``files`` that is not a folder."""

    path: Path
    kind: int  # as `stat.S_IFMT` returns it
    folder: int  # a descriptor of its folder, open until the next entry is requested

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic link."""
        return self.kind == stat.S_IFLNK

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return self.kind == stat.S_IFREG


def entries_below(files: Path, within: Directory | None = None) -> Iterator[Entry]:
    """List the entries below a folder, at any depth; no link is followed, not even in place of the folder."""
    with (within or Directory.at(files.parent)).opened() as parent:
        yield from _entries(files, parent, 0)


def _entries(path: Path, parent: int, depth: int) -> Iterator[Entry]:
    """List what is at a path, of which only the last part is looked up, in the open folder `parent`."""
    try:
        kind = stat.S_IFMT(os.stat(path.name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:  # removed meanwhile
        return
    if kind != stat.S_IFDIR:
        yield Entry(path, kind, parent)
        return
    if depth > _DEEPEST:
        raise ReadError(f"{path}: more than {_DEEPEST} folders are nested. W&B makes two or three.")
    handle = os.open(path.name, FOLDER, dir_fd=parent)
    try:
        with os.scandir(handle) as found:
            names = sorted(entry.name for entry in found)
        for name in names:
            yield from _entries(path / name, handle, depth + 1)
    finally:
        os.close(handle)


def copy_files(
    files: Path,
    target: Path,  # is made, where others cannot write
    *,
    follow: bool,  # whether links to regular files are followed, because the user trusts the directory
    leave_out: frozenset[str] = frozenset(),  # paths below `files` that are not copied
    within: Directory | None = None,  # as for `entries_below`
) -> None:
    """Copy a run's regular files; raise `UploadError` for a link that is not followed, or without enough space."""
    target.mkdir(mode=0o700)
    for entry in entries_below(files, within):
        name = entry.path.relative_to(files)
        if str(name) in leave_out:
            continue
        if entry.is_link and not follow:
            raise UploadError(link_in_words(entry))
        source, folder = (entry.path.resolve(), None) if entry.is_link else (entry.path, entry.folder)
        if entry.is_file or (entry.is_link and source.is_file()):
            copy = target / name
            copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            may_link = name.name not in _WRITTEN_BY_WANDB and name.parts[0] != "logs"
            copy_file(source, copy, may_link=may_link, folder=folder)


def link_in_words(entry: Entry) -> str:
    """Return the reason to refuse a link below a run's files."""
    return f"{entry.path} is a symbolic link: its target is not uploaded unless you give --trust."


def copy_file(source: Path, target: Path, *, may_link: bool, folder: int | None = None) -> None:
    """Copy one regular file, or make a hard link of it if the copy is only read. No link in its place is followed.

    `folder` is a descriptor of its folder, needed where others may replace a folder of the path by a link. Raises
    `UploadError` if it is not a regular file or there is not enough space, and `OSError`.
    """
    name: str | Path = source if folder is None else source.name
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, dir_fd=folder)
    with os.fdopen(handle, "rb") as opened:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise UploadError(f"{source} is not a regular file anymore.")
        if may_link and found.st_size >= _IS_LARGE and _linked(name, folder, target, found):
            return
        if found.st_size > shutil.disk_usage(target.parent).free - _SPARE:
            raise UploadError(
                f"{source} has {found.st_size} bytes, and {target.parent} has not enough space for a copy. Set "
                "XDG_STATE_HOME to a directory of yours on the file system of the run, where no copy is needed."
            )
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(writing, "wb") as copy:
            shutil.copyfileobj(opened, copy, _PIECE)


def copy_below(top: Path, below: Path, target: Path, within: Directory | None = None) -> None:
    """Copy the file at a path `below` the folder `top` (`within`: as it was found); no link below is followed."""
    with (within or Directory.at(top)).opened(str(below.parent)) as folder:
        copy_file(top / below, target, may_link=True, folder=folder)


def _linked(source: str | Path, folder: int | None, target: Path, found: os.stat_result) -> bool:
    """Make `target` a hard link of the opened file; `False` if that is not possible."""
    try:
        os.link(source, target, src_dir_fd=folder, follow_symlinks=False)
    except OSError:  # another file system, somebody else's file, too many links
        return False
    if os.path.samestat(target.lstat(), found):
        return True
    target.unlink()  # the file was replaced meanwhile
    raise UploadError(f"{source} was replaced while it was copied. Run the command again.")
