"""Small files in untrusted directories: which are read or rejected, without blocking or following links.

Only `small_files` opens files in directories that others can write to; each exception has a reason.
"""

from __future__ import annotations

import ast
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from strangers import become_another_user, give_away

import dist_wandb
from dist_wandb.errors import ReadError
from dist_wandb.wandb_files.small_files import (
    Directory,
    open_ordinary,
    own_directory,
    parse_json,
    read_small,
    write_small,
)


def test_a_written_file_can_be_read_and_is_private_unless_mode_and_umask_allow_more(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    write_small(path, b"one")
    write_small(path, b"two")
    assert read_small(path, owner=os.getuid(), limit=3) == b"two"
    with pytest.raises(ReadError, match="more than 2 bytes"):
        read_small(path, limit=2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = os.umask(0o027)
    try:
        write_small(path, b"note", mode=0o666)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["note.json"]


def test_a_write_follows_no_link_and_leaves_no_file_if_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, here = tmp_path / "precious", tmp_path / "here"
    victim.write_bytes(b"precious")
    here.mkdir()
    (here / "note").symlink_to(victim)
    write_small(here / "note", b"note")
    assert read_small(here / "note") == b"note"
    (here / "directory").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_small(here / "directory", b"note")
    assert {entry.name for entry in here.iterdir()} == {"note", "directory"}
    monkeypatch.setattr(secrets, "token_hex", lambda _: "known")
    (here / ".note.known").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_small(here / "note", b"note")
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.symlink_to("/dev/zero"), "a symbolic link"),
        (lambda path: path.symlink_to("nowhere"), "a symbolic link"),
        (Path.mkdir, "a directory"),
        (os.mkfifo, "a named pipe"),
    ],
)
def test_what_is_not_ordinary_is_refused_immediately(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / "note"
    make(path)
    begun = time.monotonic()
    if make is not Path.mkdir:
        with pytest.raises(ReadError, match=f"is {message}, so it is not the expected directory"):
            own_directory(path)
    with pytest.raises(ReadError, match=message):
        read_small(path)
    with pytest.raises(ReadError, match=message):
        open_ordinary(path, os.O_RDWR | os.O_CREAT)
    assert time.monotonic() - begun < 20


def test_an_own_directory_becomes_private_and_that_of_another_user_is_refused_and_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "notes"
    directory.mkdir(mode=0o775)
    assert own_directory(directory) == os.getuid()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    directory.chmod(0o777)
    give_away(directory, monkeypatch)
    with pytest.raises(ReadError, match=f"{directory} belongs to user 65534, while this process runs as"):
        own_directory(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o777
    assert list(directory.iterdir()) == []


def test_on_a_file_server_that_maps_users_the_mapped_user_is_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example root on NFS with root_squash: its files there belong to nobody."""
    directory = tmp_path / "notes"
    directory.mkdir()
    there = become_another_user(monkeypatch)
    assert own_directory(directory) == there
    write_small(directory / "note", b"note")
    assert read_small(directory / "note") == read_small(directory / "note", owner=there) == b"note"
    with pytest.raises(ReadError, match=rf"belongs to user {there}.* is not trusted"):
        read_small(directory / "note", owner=os.getuid())


@pytest.mark.parametrize("part", ["files", "media", "file"])
def test_no_part_of_a_path_below_a_run_is_a_link(tmp_path: Path, part: str) -> None:
    private, run = tmp_path / "private", tmp_path / "run"
    for top in (private, run):
        (top / "files" / "media").mkdir(parents=True)
        (top / "files" / "media" / "file").write_text(top.name)
    within, path = Directory.at(run), run / "files" / "media" / "file"
    assert read_small(path, within=within) == b"run"
    inner = next(parent for parent in (path, *path.parents) if parent.name == part)
    inner.rename(tmp_path / "moved")
    inner.symlink_to(private / inner.relative_to(run))
    with pytest.raises((OSError, ReadError)):
        read_small(path, within=within)


def test_the_depth_of_json_is_limited() -> None:
    assert parse_json("[" * 64 + "]" * 64) == json.loads("[" * 64 + "]" * 64)
    assert parse_json(json.dumps({"text": '["' * 100})) == {"text": '["' * 100}
    assert parse_json(json.dumps([[]] * 100)) == [[]] * 100
    for deep in ("[" * 200_000, b'{"a":' * 200_000, "[" * 65 + "]" * 65):
        with pytest.raises(ValueError, match="deeper than 64"):
            parse_json(deep)
    with pytest.raises(ValueError, match="utf-8"):
        parse_json(b"\xff")


# --- the only room that opens such files ------------------------------------------------------------------------------

SOURCES = Path(dist_wandb.__file__).parent
LEFT_OUT = {"wandb_files/small_files.py"}
MODULES = sorted(
    path.relative_to(SOURCES).as_posix()
    for pattern in (
        "wandb_files/*.py",
        "cli/report/*.py",
        "cli/uploads/*.py",
        "session/restart.py",
        "runs/client_settings.py",
        "lightning/launching.py",
    )
    for path in SOURCES.glob(pattern)
    if path.relative_to(SOURCES).as_posix() not in LEFT_OUT
)
# Functions that open, read, write, follow or parse without a limit, by their last name.
OPENS = frozenset(
    {
        *("open", "read_text", "read_bytes", "write_text", "write_bytes", "touch", "symlink_to", "hardlink_to"),
        *("load", "loads", "raw_decode", "copy", "copy2", "copyfile", "copytree", "move", "mkstemp"),
        *("NamedTemporaryFile", "TemporaryFile", "ZipFile", "mkfifo", "truncate"),
    }
)
# By sub-package and function: the called functions, and why each is safe.
ALLOWED = {
    ("wandb_files", "search"): {"open": "what the user gives, or no link, in a directory that is open"},
    ("report", "check_target"): {"open": "a descriptor that small_files has opened"},
    ("report", "json_of"): {"loads": "what was made of a report just before"},
    ("report", "_asset"): {"read_text": "a file of this package"},
    ("report", "_run"): {"open": "the browser"},
    ("uploads", "_entries"): {"open": "a directory that is no link, in a directory that is open"},
    ("uploads", "copy_file"): {"open": "a new file in the user's own state directory"},
    ("uploads", "_copy"): {"open": "a new file in the user's own state directory"},
    ("uploads", "_run_wandb_sync"): {
        "open": "a new file in the user's own state directory",
        "read_text": "the same file, which wandb's own process has written",
    },
}


def opened_in(source: str) -> Iterator[tuple[str, str]]:
    """Yield the innermost function around each call that opens a file, and the name of the called function."""

    def within(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                called = child.func
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                if name in OPENS:
                    yield function, name
            is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from within(child, child.name if is_function else function)  # type: ignore[attr-defined]

    yield from within(ast.parse(source), "")


def test_no_other_module_opens_files_that_others_may_have_written() -> None:
    found = {
        ((SOURCES / module).parent.name, function, name)
        for module in MODULES
        for function, name in opened_in((SOURCES / module).read_text())
    }
    allowed = {(room, function, name) for (room, function), names in ALLOWED.items() for name in names}
    assert found - allowed == set(), "use dist_wandb.wandb_files.small_files, or add an exception with its reason"
    assert allowed - found == set(), "these exceptions are not needed"
