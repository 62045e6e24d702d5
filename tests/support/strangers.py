"""Obstacles that another user of a shared directory may create in place of a small file."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

_STRANGER = 65_534


def _link_to_a_pipe(path: Path) -> None:
    os.mkfifo(f"{path}.pipe")
    path.symlink_to(f"{path.name}.pipe")


def listening(path: Path) -> None:
    """Make a socket in the file system. Its address may have at most 108 bytes, so it is a path below /proc."""
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


OBSTACLES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link to a pipe": _link_to_a_pipe,
    "broken link": lambda path: path.symlink_to("nowhere"),
    "directory": Path.mkdir,
    "socket": listening,
    "deep JSON": lambda path: path.write_text("[" * 60_000),
    "large file": lambda path: path.write_bytes(b" " * 10_000_000),
}
"""By name, functions that create an obstacle to be rejected immediately: endless, blocking, a link, or too costly."""


def become_another_user(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let this process belong to another user, as far as it asks; return the one who really runs it."""
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    return user


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the owner of a file or directory: really as root, otherwise only as this process sees it."""
    if os.geteuid() == 0:
        os.chown(path, _STRANGER, _STRANGER)
        return
    number, true_stat = path.stat().st_ino, os.fstat

    def stat_of(handle: int) -> os.stat_result:
        found = true_stat(handle)
        return os.stat_result((*found[:4], _STRANGER, *found[5:])) if found.st_ino == number else found

    monkeypatch.setattr(os, "fstat", stat_of)
