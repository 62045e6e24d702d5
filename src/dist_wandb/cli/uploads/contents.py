"""What an upload takes of a run: a private copy of its files, and its records, after a check.

*Files.* W&B's uploader follows links, writes ``config.yaml`` and ``wandb-summary.json`` beside its input, and removes
files. A run's directory may come from anybody, and others, such as a group, may write to it meanwhile. So the uploader
gets a copy of regular files, in a directory that only this user can access. With Linux, large files on the same file
system are hard links.

*Records.* W&B's uploader follows them: it reads the files that an artifact names, uploads them to the named owner, and
removes the file of a manifest. So only the kinds of records that W&B writes into ``.wandb`` files are allowed, and only
files of the run, or files in W&B's staging directory for this user's artifacts. A stranger may know the name of a
staged file, but not its content, and the record must contain the digest of that.

Two things in records are changed: an owner that the user has named replaces all others, also of artifacts, whose owner
W&B's own ``--entity`` does not change; and files of artifacts are uploaded from private copies.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePosixPath

from dist_wandb.errors import ReadError, UploadError
from dist_wandb.wandb_files.record_file import ENVELOPE, Field, MalformedError, field_of, fields, records_of
from dist_wandb.wandb_files.small_files import FOLDER, Directory, open_ordinary

_IS_LARGE = 1 << 20  # bytes; files of this size are linked where possible
_DEEPEST = 32  # nested folders; W&B makes two or three
_SPARE = 64 << 20  # bytes left free on the disk
# Files that W&B's uploader may rewrite in place: with a hard link that would change the run's own file.
_WRITTEN_BY_WANDB = frozenset(
    {
        *("config.yaml", "wandb-summary.json", "wandb-metadata.json", "output.log", "requirements.txt"),
        *("conda-environment.yaml", "diff.patch", "wandb-job.json", "wandb-history.jsonl", "wandb-events.jsonl"),
    }
)
SUMMARY, _FILES, _ARTIFACT, _TENSORBOARD, _RUN, _REQUEST = 3, 6, 8, 9, 17, 100
_UPDATE, _KEYS = 1, (1, 2)  # of a summary: an item, and in it its name, which may be nested
# History, summary, output, config, files, statistics, artifact, alert, telemetry, metric, raw output, run, exit, final,
# header, footer, preempting, link to an artifact (empty), use of an artifact, environment, logger's output.
_KNOWN = frozenset({2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 17, 18, 20, 21, 22, 23, 24, 25, 26, 27})
_ENTITIES = {_RUN: 2, _ARTIFACT: 3}  # the field of an owner, by kind
_IN_ADDRESSES = {1: "id", 2: "owner", 3: "project"}  # fields of a run that become parts of URLs
_STEERING = frozenset("/\\?#%")  # characters that would change the URL
_LONGEST_NAME = 256
_MANIFEST, _MANIFEST_FILE, _CONTENTS = 12, 5, 4
_DIGEST, _LOCAL_PATH = 2, 6
_FILE, _PATH = 1, 1
_MOST_FILES = 200_000  # in one record; W&B writes the names of more than 100,000 into a file of their own
_MOST_REASONS = 5
_PIECE = 1 << 20


# --- files ------------------------------------------------------------------------------------------------------------


Entry = tuple[Path, int]
"""An entry below a run's ``files`` that is not a folder: its path, and its kind as `stat.S_IFMT` returns it."""


def entries_below(files: Path, within: Directory) -> Iterator[Entry]:
    """List the entries below a folder of a run, at any depth; no link is followed, not even in place of the folder."""
    with within.opened() as parent:
        yield from _entries(files, parent, 0)


def _entries(path: Path, parent: int, depth: int) -> Iterator[Entry]:
    """List what is at a path, of which only the last part is looked up, in the open folder `parent`."""
    try:
        kind = stat.S_IFMT(os.stat(path.name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:  # removed meanwhile
        return
    if kind != stat.S_IFDIR:
        yield path, kind
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
    within: Directory,  # of the run
    *,
    follow: bool,  # whether links to regular files are followed, because the user trusts the directory
    leave_out: frozenset[str] = frozenset(),  # paths below `files` that are not copied
) -> None:
    """Copy a run's regular files; raise `UploadError` for a link that is not followed, or without enough space."""
    target.mkdir(mode=0o700)
    for path, kind in entries_below(files, within):
        name, is_link = path.relative_to(files), kind == stat.S_IFLNK
        if str(name) in leave_out:
            continue
        if is_link and not follow:
            raise UploadError(link_in_words(path))
        source = path.resolve() if is_link else path
        if kind == stat.S_IFREG or (is_link and source.is_file()):
            copy = target / name
            copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            may_link = name.name not in _WRITTEN_BY_WANDB and name.parts[0] != "logs"
            copy_file(source, copy, None if is_link else within, may_link=may_link)


def link_in_words(path: Path) -> str:
    return f"{path} is a symbolic link: its target is not uploaded unless you give --trust."


def copy_file(source: Path, target: Path, within: Directory | None, *, may_link: bool = True) -> None:
    # Large files are linked, if the copy is only read. No link below `within` is followed. Raises as `open_ordinary`
    # does.
    with os.fdopen(open_ordinary(source, within=within), "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if may_link and size >= _IS_LARGE:
            with suppress(OSError):  # another file system, somebody else's file, too many links; macOS has no /proc
                # A link of the file that is open, whatever is at its path now. With a descriptor `link` is `linkat`.
                handle = opened.fileno()
                os.link(f"/proc/self/fd/{handle}", target, src_dir_fd=handle, follow_symlinks=True)
                return
        if size > shutil.disk_usage(target.parent).free - _SPARE:
            raise UploadError(
                f"{source} has {size} bytes, and {target.parent} has not enough space for a copy. Set XDG_STATE_HOME "
                "to a directory of yours with more space, or on the file system of the run, where Linux needs no copy."
            )
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(writing, "wb") as copy:
            shutil.copyfileobj(opened, copy, _PIECE)


# --- records ----------------------------------------------------------------------------------------------------------

Copier = Callable[[Path, Directory], Path | None]
"""Makes a private copy of a file below a directory; returns its path, or `None` to check records without any file."""


@dataclass(frozen=True)
class Terms:
    """The user's terms of uploads."""

    # The directories are the user's own: W&B's mark is accepted, links are followed, and records may name any file and
    # owner.
    trust: bool = False
    again: bool = False  # upload everything again, ignoring earlier uploads
    entity: str | None = None  # owner of the uploaded runs, also in records; `None` for the one that the files name
    server: str | None = field(default=None, repr=False)  # its address; `None` for the one in W&B's settings
    staging: Path | None = None  # W&B's directory for files of this user's artifacts
    owners: frozenset[str] = frozenset()  # the known owners of this user's runs
    default: str | None = None  # the owner in W&B's settings, for records without one


@cache
def _folders(run: Directory, staging: Path | None) -> dict[Path, Directory | None]:
    """The folders whose files may be uploaded; those of W&B, which are not the run's, have no `Directory`."""
    own: dict[Path, Directory | None] = {run.path.absolute(): run, run.path.resolve(): run}
    return own | ({staging.absolute(): None, staging.resolve(): None} if staging else {})


def violations(path: Path, run: Directory, terms: Terms) -> Iterator[str]:
    """Yield the first few reasons to refuse the upload of a ``.wandb`` file, as sentences."""
    reasons: set[str] = set()
    try:
        for record, parts in records_of(path, run):
            try:
                revised(record, parts, run, terms, lambda *_: None)
            except UploadError as error:
                if str(error) not in reasons:
                    reasons.add(str(error))
                    yield f"{path}: {error}"
            if len(reasons) == _MOST_REASONS:
                return
    except (ReadError, OSError) as error:
        yield str(error) if str(path) in str(error) else f"{path}: {error}"


def revised(record: bytes, parts: list[Field], run: Directory, terms: Terms, make_copy: Copier) -> bytes:
    # Named files are replaced by copies. Raises `UploadError` if the record names a prohibited file or owner, or is of
    # an unknown kind, and `ReadError` if it is not in W&B's format.
    kinds = {number for number, *_ in parts} - ENVELOPE
    if _REQUEST in kinds:
        raise UploadError("it contains a request, which W&B's uploader would execute. W&B writes none there.")
    if not terms.trust and _TENSORBOARD in kinds:
        raise UploadError(
            "it names a directory of tensorboard, whose files would be uploaded. If the run is your own, give --trust."
        )
    if not terms.trust and (unknown := kinds - _KNOWN):
        raise UploadError(
            f"it has a record of an unknown kind ({min(unknown)}). If the run is your own, written by a newer wandb, "
            "give --trust."
        )
    if kinds.isdisjoint((_FILES, _RUN, _ARTIFACT)):
        return record
    try:
        for name in _texts(record, _FILES, _FILE, _PATH):
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or "\0" in name:
                below = run.path / "files"
                raise UploadError(f"it names {name!r} as a file of the run, which is not below {below}.")
        for name in filter(None, () if terms.trust else _texts(record, _ARTIFACT, _MANIFEST, _MANIFEST_FILE)):
            raise UploadError(
                f"an artifact of it names {name!r} as the list of its files, which W&B's uploader reads, with all the "
                "files in it, and removes. If the run is your own, give --trust."
            )
        for number, what in _IN_ADDRESSES.items():  # with a name such as ``../../owner/project/id`` it is another run
            for name in _texts(record, _RUN, number):
                if _STEERING & set(name) or not name.isprintable() or name in (".", "..") or len(name) > _LONGEST_NAME:
                    raise UploadError(
                        f"the {what} of its run is {name[:_LONGEST_NAME]!r}, which would lead to another address of "
                        "the server. W&B does not allow such names."
                    )
        entries = (_ARTIFACT, _MANIFEST, _CONTENTS)
        record = _changed(record, entries, lambda entry: _copied(entry, run, terms, make_copy))
        owners = ((kind, number) for kind, number in _ENTITIES.items() if kind in kinds)
        return record + b"".join(_owner_of(record, kind, number, terms) for kind, number in owners)
    except MalformedError as error:
        raise UploadError(f"it has a record that is not in W&B's format: {error}.") from None


def _owner_of(record: bytes, kind: int, number: int, terms: Terms) -> bytes:
    """Check the owners in a record; return the field that replaces them by the one that the user named, if any."""
    named = list(_texts(record, kind, number))
    if terms.entity is not None:
        return field_of(kind, field_of(number, terms.entity.encode())) if kind == _RUN or any(named) else b""
    for owner in [name or terms.default for name in named or [""]]:
        if owner and not terms.trust and owner not in terms.owners:
            raise UploadError(
                f"its owner is {owner!r}, which is not known to be yours. To upload it there, give --entity {owner}, "
                "or set WANDB_ENTITY; to upload it to another owner, name that one."
            )
    return b""


def _copied(entry: bytes, run: Directory, terms: Terms, make_copy: Copier) -> bytes:
    """Check the file that an artifact's entry names; append the path of its copy, because the last one counts."""
    found = {number: entry[begin:end] for number, _, begin, end in fields(entry) if end > begin}
    name = _text(found.get(_LOCAL_PATH, b""))
    path = Path(name)
    is_allowed = path.is_absolute() and ".." not in path.parts and "\0" not in name
    folders = _folders(run, terms.staging)
    top = next((top for top in folders if is_allowed and top in path.parents), None)
    if top is None:
        if not name or terms.trust:
            return entry
        raise UploadError(
            f"an artifact of it names {name!r}, a file that is neither in the run's directory nor in W&B's staging "
            f"directory for artifacts ({terms.staging}). If the run is your own, give --trust."
        )
    within = folders[top]
    try:
        at = replace(within, path=top) if within else Directory.at(top)  # the path may be another one of it
        copy = make_copy(path, at)
        if copy is not None and within is None and not terms.trust and found.get(_DIGEST) != _digest(copy):
            raise UploadError(
                f"an artifact of it names {name!r} in W&B's staging directory for artifacts, but the content of that "
                "file differs from the artifact's. If the run is your own, give --trust."
            )
    except (OSError, ReadError) as error:
        if terms.trust:  # W&B's uploader reports it
            return entry
        raise UploadError(
            f"an artifact of it names {name!r}, which cannot be read ({error}). If the run is your own, "
            "--trust uploads it without that file."
        ) from None
    return entry if copy is None else entry + field_of(_LOCAL_PATH, str(copy).encode())


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise UploadError(f"it has text that is not UTF-8: {content[:80]!r}.") from None


def _texts(record: bytes, *path: int) -> Iterator[str]:  # at a path of numbers of fields
    places = [(0, len(record))]
    for wanted in path:
        found = (field for place in places for field in fields(record, *place, _MOST_FILES))
        places = [(begin, end) for number, _, begin, end in found if number == wanted]
    return (_text(record[begin:end]) for begin, end in places)


def _changed(message: bytes, path: Sequence[int], change: Callable[[bytes], bytes]) -> bytes:
    """Return a message with the contents, except empty ones, at a path of numbers of fields changed."""
    if not path:
        return change(message)
    written: list[bytes] = []
    position = 0
    for number, first, begin, end in fields(message, most=_MOST_FILES):
        if number == path[0] and end > begin:
            changed = _changed(message[begin:end], path[1:], change)
            if changed != message[begin:end]:
                written += [message[position:first], field_of(number, changed)]
                position = end
    return b"".join([*written, message[position:]])


def summary_of(files: Iterable[tuple[Path, Directory]]) -> bytes:
    """Return the last summary of a run's earlier files, which W&B's uploader would replace by that of the next file."""
    items: dict[bytes, bytes | None] = {}
    for path, within in files:
        for name, item in _summary_items(path, within).items():
            items.pop(name, None)  # the order is that of the last updates
            items[name] = item
    return b"".join(field_of(_UPDATE, item) for item in items.values() if item is not None)


@cache  # for a run of many files, each is read once
def _summary_items(path: Path, within: Directory) -> dict[bytes, bytes | None]:
    """Return the last update of each item of the summary in a file, by the item's name; `None` if it was removed."""
    items: dict[bytes, bytes | None] = {}
    with suppress(ReadError, OSError):  # what is readable counts
        for record, parts in records_of(path, within):
            for _, _, start, stop in [part for part in parts if part[0] == SUMMARY]:
                with suppress(ReadError, MalformedError):
                    for number, _, begin, end in fields(record, start, stop, _MOST_FILES):
                        item = record[begin:end]
                        keys = [(field, item[first:last]) for field, _, first, last in fields(item) if field in _KEYS]
                        name = b"".join(field_of(field, key) for field, key in keys)
                        items.pop(name, None)
                        items[name] = item if number == _UPDATE else None
    return items


def _digest(path: Path) -> bytes:  # MD5, in W&B's notation
    digest = hashlib.md5(usedforsecurity=False)
    with os.fdopen(open_ordinary(path), "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return base64.b64encode(digest.digest())
