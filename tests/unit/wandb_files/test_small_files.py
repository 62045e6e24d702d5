"""Small files in untrusted directories: which are read or rejected, without blocking or following links."""

from __future__ import annotations

import json
import os
import secrets
import stat
import time
from pathlib import Path

import pytest
from strangers import become_another_user, give_away

from dist_wandb.errors import ReadError
from dist_wandb.wandb_files.small_files import open_ordinary, own_directory, parse_json, read_small, write_small


def test_a_written_file_can_be_read_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    write_small(path, b"one")
    write_small(path, b"two")
    assert read_small(path, owner=os.getuid()) == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["note.json"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "precious"
    victim.write_bytes(b"precious")
    (tmp_path / "note").symlink_to(victim)
    write_small(tmp_path / "note", b"note")
    assert victim.read_bytes() == b"precious"
    assert read_small(tmp_path / "note") == b"note"


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "note").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_small(tmp_path / "note", b"note")
    assert [entry.name for entry in tmp_path.iterdir()] == ["note"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.symlink_to("/dev/zero"), "a symbolic link"),
        (lambda path: path.symlink_to("nowhere"), "a symbolic link"),
        (Path.mkdir, "a directory"),
        (os.mkfifo, "a named pipe"),
    ],
)
def test_a_file_that_is_not_ordinary_is_refused_immediately(tmp_path: Path, make: object, message: str) -> None:
    path = tmp_path / "note"
    assert callable(make)
    make(path)
    begun = time.monotonic()
    with pytest.raises(ReadError, match=message):
        read_small(path)
    with pytest.raises(ReadError, match=message):
        open_ordinary(path, os.O_RDWR | os.O_CREAT)
    assert time.monotonic() - begun < 20


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "note"
    path.write_bytes(b"x" * 11)
    assert read_small(path, limit=11) == b"x" * 11
    with pytest.raises(ReadError, match="more than 10 bytes"):
        read_small(path, limit=10)


def test_a_file_of_another_user_is_refused_if_it_must_be_owned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "note"
    write_small(path, b"note")
    owner = become_another_user(monkeypatch)
    assert read_small(path) == b"note"
    with pytest.raises(ReadError, match=f"belongs to user {owner}"):
        read_small(path, owner=os.getuid())


def test_the_permissions_of_a_file_follow_mode_and_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_small(tmp_path / "note", b"note", mode=0o666)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "note").stat().st_mode) == 0o640


def test_a_link_at_the_temporary_name_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "precious"
    victim.write_bytes(b"precious")
    monkeypatch.setattr(secrets, "token_hex", lambda _: "known")
    (tmp_path / ".note.known").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_small(tmp_path / "note", b"note")
    assert victim.read_bytes() == b"precious"


def test_an_own_directory_becomes_private(tmp_path: Path) -> None:
    directory = tmp_path / "notes"
    directory.mkdir(mode=0o775)
    assert own_directory(directory) == os.getuid()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.symlink_to(path.parent), "is a symbolic link, so it is not the expected directory"),
        (Path.touch, "is a file, so it is not the expected directory"),
        (os.mkfifo, "is a named pipe, so it is not the expected directory"),
    ],
)
def test_a_file_that_is_not_a_directory_is_refused(tmp_path: Path, make: object, message: str) -> None:
    assert callable(make)
    make(tmp_path / "notes")
    with pytest.raises(ReadError, match=message):
        own_directory(tmp_path / "notes")


def test_a_directory_of_another_user_is_refused_and_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "notes"
    directory.mkdir()
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
    assert read_small(directory / "note", owner=there) == b"note"
    with pytest.raises(ReadError, match="is not trusted"):
        read_small(directory / "note", owner=there + 1)


def test_the_depth_of_json_is_limited() -> None:
    assert parse_json("[" * 64 + "]" * 64) == json.loads("[" * 64 + "]" * 64)
    assert parse_json(json.dumps({"text": '["' * 100})) == {"text": '["' * 100}
    assert parse_json(json.dumps([[]] * 100)) == [[]] * 100
    for deep in ("[" * 200_000, b'{"a":' * 200_000, "[" * 65 + "]" * 65):
        with pytest.raises(ValueError, match="deeper than 64"):
            parse_json(deep)
    with pytest.raises(ValueError, match="utf-8"):
        parse_json(b"\xff")
