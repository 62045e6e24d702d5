"""Which of W&B's records an upload takes, and what becomes of the files and owners that they name.

W&B's uploader does what the records say: it reads the files that an artifact names, uploads them to the owner that is
named, and removes the file of a manifest. A ``.wandb`` file may come from anybody. So only kinds of records are taken
that W&B writes into such files, and only files of the run, or files that W&B has put aside for artifacts of this user.
Of the latter a stranger may know the name, but not the content, which the record describes by a digest: whoever wrote
the record knows what is uploaded. All of them are uploaded from the private copy.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from dist_wandb.errors import ReadError, UploadError
from dist_wandb.wandb_files.record_file import Field, MalformedError, field_of, fields, parts_of, records_of
from dist_wandb.wandb_files.small_files import open_ordinary

_ENVELOPE = frozenset({1, 16, 19, 200})  # number, control, id, and a note of the run: of any record
_FILES, _ARTIFACT, _TENSORBOARD, _RUN, _REQUEST = 6, 8, 9, 17, 100
# History, summary, output, config, files, statistics, artifact, alert, telemetry, metric, raw output, run, exit, final,
# header, footer, preempting, a link to an artifact that says nothing, use of an artifact, environment, logger's output.
_KNOWN = frozenset({2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 17, 18, 20, 21, 22, 23, 24, 25, 26, 27})
_ENTITY_OF_RUN, _ENTITY_OF_ARTIFACT = 2, 3
_IN_ADDRESSES = {1: "id", _ENTITY_OF_RUN: "owner", 3: "project"}  # fields of a run that are parts of the server's paths
_STEERING = frozenset("/\\?#%")  # characters of a name that would make it another address
_LONGEST_NAME = 256
_MANIFEST, _MANIFEST_FILE, _CONTENTS = 12, 5, 4
_DIGEST, _LOCAL_PATH = 2, 6
_FILE, _PATH = 1, 1
_MOST_FILES = 200_000  # in one record; W&B writes the names of more than 100,000 into a file of their own
_MOST_REASONS = 5
_PIECE = 1 << 20

Take = Callable[[Path, Path], Path | None]
"""Makes a private copy of a file, given by a folder and its path within it, and says where the copy is.

It is `None` while it is only asked what stands against an upload: then no file is read.
"""


@dataclass(frozen=True)
class Rules:
    """What the records of one file may name.

    Args:
        directory: The run's directory.
        staging: Where W&B puts files of this user's artifacts aside until they are uploaded.
        owners: The owners to whom the user uploads, as far as is known.
        default: The owner that W&B goes by where records name none, if its settings have one.
        owner: To whom everything goes, whatever the records say; `None` to go by them.
        trust: Whether files and owners may be any, as the run is the user's own.
    """

    directory: Path
    staging: Path
    owners: frozenset[str] = frozenset()
    default: str | None = None
    owner: str | None = None
    trust: bool = False

    @cached_property
    def places(self) -> tuple[tuple[Path, bool], ...]:
        """The folders whose files may be uploaded, and whether only those whose content the record describes."""
        both = ((self.directory, False), (self.staging, True))
        return tuple((place, known) for top, known in both for place in dict.fromkeys((top.absolute(), top.resolve())))


def against(path: Path, rules: Rules) -> Iterator[str]:
    """What stands against uploading a file: the first few reasons, as sentences.

    Args:
        path: A ``.wandb`` file.
        rules: What its records may name.
    """
    told: set[str] = set()
    try:
        for record, parts in records_of(path):
            try:
                revised(record, parts, rules, _check_only)
            except UploadError as error:
                if str(error) not in told:
                    told.add(str(error))
                    yield f"{path}: {error}"
            if len(told) == _MOST_REASONS:
                return
    except (ReadError, OSError) as error:
        yield str(error) if str(path) in str(error) else f"{path}: {error}"


def revised(record: bytes, parts: list[Field], rules: Rules, take: Take) -> bytes:
    """A record as it is uploaded.

    Args:
        record: A record of W&B's.
        parts: Its fields.
        rules: What it may name.
        take: Copies the files that it names, which are then named in their place.

    Returns:
        The record, or another one in its place.

    Raises:
        UploadError: It names something that it may not, or is of a kind that is not known.
        ReadError: It is not as W&B writes them.
    """
    kinds = [number for number, _, _ in parts if number not in _ENVELOPE]
    for kind in kinds:
        if kind == _REQUEST:
            raise UploadError("it has a request in it, which W&B's uploader would carry out. W&B writes none there.")
        if not rules.trust and kind == _TENSORBOARD:
            raise UploadError(
                "it names a directory of tensorboard's, whose files would be uploaded. If the run is your own, give "
                "--trust."
            )
        if not rules.trust and kind not in _KNOWN:
            raise UploadError(
                f"it has a record of a kind that is not known here ({kind}). If the run is your own, written by a "
                "newer wandb, give --trust."
            )
    if not {_FILES, _RUN, _ARTIFACT} & set(kinds):
        return record
    changes: dict[int, _Change] = {
        _FILES: lambda start, stop: _files(record, start, stop, rules),
        _RUN: lambda start, stop: _run(record, start, stop, rules),
        _ARTIFACT: lambda start, stop: _artifact(record, start, stop, rules, take),
    }
    try:
        return _mapped(record, 0, len(record), changes)
    except MalformedError as error:
        raise UploadError(f"it has a record that is not as W&B writes them: {error}.") from None


_Change = Callable[[int, int], bytes]


def _mapped(message: bytes, start: int, stop: int, changes: dict[int, _Change]) -> bytes:
    """A message in which the contents of some fields are others."""
    written: list[bytes] = []
    place = start
    for number, first, begin, end in parts_of(message, start, stop, _MOST_FILES):
        if number in changes and end > begin:
            changed = changes[number](begin, end)
            if changed != message[begin:end]:
                written += [message[place:first], field_of(number, changed)]
                place = end
    return b"".join([*written, message[place:stop]])


def _files(record: bytes, start: int, stop: int, rules: Rules) -> bytes:
    """The names of files that are uploaded: they must be below the run's ``files``."""
    for number, _, begin, end in parts_of(record, start, stop, _MOST_FILES):
        if number != _FILE:
            continue
        for field, first, last in fields(record, begin, end):
            if field == _PATH:
                _check_name(_text(record, first, last), rules)
    return record[start:stop]


def _check_name(name: str, rules: Rules) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise UploadError(f"it names {name!r} as a file of the run, which is not below {rules.directory / 'files'}.")


def _run(record: bytes, start: int, stop: int, rules: Rules) -> bytes:
    """Where a run goes. A name such as ``../../owner/project/id`` would lead to somebody else's."""
    for number, begin, end in fields(record, start, stop):
        if number in _IN_ADDRESSES and end > begin:
            name = _text(record, begin, end)
            if _STEERING & set(name) or not name.isprintable() or name in (".", "..") or len(name) > _LONGEST_NAME:
                raise UploadError(
                    f"the {_IN_ADDRESSES[number]} of its run is {name[:_LONGEST_NAME]!r}, which would lead to another "
                    "place on the server. W&B takes no such name."
                )
    return _owned(record, start, stop, _ENTITY_OF_RUN, rules)


def _owned(record: bytes, start: int, stop: int, field: int, rules: Rules) -> bytes:
    """Who owns what is uploaded."""
    named = [_text(record, begin, end) for number, begin, end in fields(record, start, stop) if number == field]
    if rules.owner is not None:
        return record[start:stop] + field_of(field, rules.owner.encode())  # the last one counts
    for owner in [name or rules.default for name in named or [""]]:
        if owner and not rules.trust and owner not in rules.owners:
            raise UploadError(
                f"it is to be uploaded to {owner!r}, which is not known to be yours. To upload it there, give "
                f"--entity {owner}, or set WANDB_ENTITY; to upload it to another one, name that."
            )
    return record[start:stop]


def _artifact(record: bytes, start: int, stop: int, rules: Rules, take: Take) -> bytes:
    _owned(record, start, stop, _ENTITY_OF_ARTIFACT, rules)
    artifact = _mapped(record, start, stop, {_MANIFEST: lambda a, b: _manifest(record, a, b, rules, take)})
    names_owner = any(n == _ENTITY_OF_ARTIFACT and e > b for n, b, e in fields(record, start, stop))
    if rules.owner is not None and names_owner:
        return artifact + field_of(_ENTITY_OF_ARTIFACT, rules.owner.encode())
    return artifact


def _manifest(record: bytes, start: int, stop: int, rules: Rules, take: Take) -> bytes:
    for number, _, begin, end in parts_of(record, start, stop, _MOST_FILES):
        if number == _MANIFEST_FILE and end > begin and not rules.trust:
            raise UploadError(
                f"an artifact of it names {_text(record, begin, end)!r} as the list of its files, which W&B's uploader "
                "reads, with all the files in it, and removes. If the run is your own, give --trust."
            )
    return _mapped(record, start, stop, {_CONTENTS: lambda a, b: _entry(record, a, b, rules, take)})


def _entry(record: bytes, start: int, stop: int, rules: Rules, take: Take) -> bytes:
    digests = [record[begin:end] for number, begin, end in fields(record, start, stop) if number == _DIGEST]

    def taken(begin: int, end: int) -> bytes:
        return _local_path(_text(record, begin, end), digests, rules, take).encode()

    return _mapped(record, start, stop, {_LOCAL_PATH: taken})


def _local_path(name: str, digests: list[bytes], rules: Rules, take: Take) -> str:
    """Where a file of an artifact is uploaded from."""
    for top, needs_digest in rules.places:
        below = _below(Path(name), top)
        if below is None:
            continue
        try:
            copy = take(top, below)
            if copy is not None and needs_digest and not rules.trust and not _has_digest(copy, digests):
                raise UploadError(
                    f"an artifact of it names {name!r}, where W&B puts files aside for artifacts, but that file has "
                    "another content than the artifact. If the run is your own, give --trust."
                )
        except (OSError, ReadError) as error:
            if rules.trust:  # W&B's uploader says what it makes of that
                return name
            raise UploadError(
                f"an artifact of it names {name!r}, which cannot be read ({error}). If the run is your own, --trust "
                "uploads it without that file."
            ) from None
        return name if copy is None else str(copy)
    if rules.trust:
        return name
    raise UploadError(
        f"an artifact of it names {name!r}, a file that is neither in the run's directory nor where W&B puts files "
        f"aside for artifacts ({rules.staging}). If the run is your own, give --trust."
    )


def _below(path: Path, top: Path) -> Path | None:
    """A path relative to a folder that it is in; `None` if it is not, or is not written plainly."""
    if not path.is_absolute() or ".." in path.parts or "\0" in str(path):
        return None
    return path.relative_to(top) if top in path.parents else None


def _has_digest(path: Path, digests: list[bytes]) -> bool:
    """Whether a file has the content that an artifact's record describes by its MD5, as W&B writes it."""
    digest = hashlib.md5(usedforsecurity=False)
    with os.fdopen(open_ordinary(path), "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    found = base64.b64encode(digest.digest())
    return bool(digests) and all(hmac.compare_digest(found, named) for named in digests)


def _check_only(_top: Path, _below: Path) -> None:
    """Stands for copying while it is only asked what stands against an upload."""


def _text(record: bytes, begin: int, end: int) -> str:
    try:
        return record[begin:end].decode()
    except UnicodeDecodeError:
        raise UploadError(f"it has a text that is none: {record[begin:end][:80]!r}.") from None
