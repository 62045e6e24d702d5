"""Readers that print without end, hang, or start processes that outlive them: each is killed within its limits."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dist_wandb.errors import ReadError
from dist_wandb.wandb_files.inspection import Limits, lines_of

pytestmark = pytest.mark.slow

PLENTY = Limits(seconds=120)


def read(directory: Path, code: str, limits: Limits = PLENTY, stopped: threading.Event | None = None) -> list[bytes]:
    """Return the lines that Python code prints, and its exit code as the last item."""
    with (directory / "stderr").open("w+b") as errors:
        command = [sys.executable, "-c", f"import os, sys, time, subprocess\n{code}"]
        with lines_of(
            command,
            directory=directory,
            environment={**os.environ, "MARK": str(directory)},
            errors=errors,
            limits=limits,
            stopped=stopped or threading.Event(),
        ) as lines:
            return [*lines, str(lines.wait()).encode()]


def processes_of(directory: Path) -> list[int]:
    """Return the processes that `read` started there and that are still running."""
    mark = f"MARK={directory}".encode()
    return [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if mark in content_of(process / "environ").split(b"\0")
    ]


def content_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended, or belongs to another user
        return b""


def test_lines_of_any_length_are_complete(tmp_path: Path) -> None:
    code = "for size in (0, 1, 70_000, 1_000_000, 3): print('x' * size)\nsys.stdout.write('no end')"
    assert read(tmp_path, code) == [*(b"x" * size for size in (0, 1, 70_000, 1_000_000, 3)), b"no end", b"0"]


def test_the_exit_code_is_returned(tmp_path: Path) -> None:
    assert read(tmp_path, "sys.exit(3)") == [b"3"]


def test_lines_that_are_too_long_are_skipped_and_counted(tmp_path: Path) -> None:
    code = "for size in (10, 11, 500_000, 10, 300_000): print('x' * size)\nsys.stdout.write('x' * 11)"
    with (
        (tmp_path / "stderr").open("w+b") as errors,
        lines_of(
            [sys.executable, "-c", f"import sys\n{code}"],
            directory=tmp_path,
            environment=os.environ,
            errors=errors,
            limits=replace(PLENTY, line=10),
            stopped=threading.Event(),
        ) as lines,
    ):
        assert list(lines) == [b"x" * 10] * 2
        assert lines.too_long == 4


ENDLESS: dict[str, tuple[str, Limits, str]] = {
    "without end": ("while True: print('x' * 1000)", replace(PLENTY, output=10**6), "printed more than 1000000 bytes"),
    "a line without end": (
        "while True: sys.stdout.write('x' * 1000)",
        replace(PLENTY, output=10**6),
        "printed more than 1000000 bytes",
    ),
    "silent": ("time.sleep(600)", replace(PLENTY, silence=1), "printed nothing for 1 s"),
    "slow": ("while True: time.sleep(0.1); print('x', flush=True)", replace(PLENTY, seconds=2), "more than 2 s"),
    "silent, its output closed": ("os.close(1); time.sleep(600)", replace(PLENTY, seconds=2), "more than 2 s"),
    "with a child": (
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])",
        replace(PLENTY, silence=2),
        "printed nothing for 2 s",
    ),
}


@pytest.mark.parametrize(("code", "limits", "reason"), ENDLESS.values(), ids=ENDLESS.keys())
def test_an_endless_reader_is_killed_with_its_children(tmp_path: Path, code: str, limits: Limits, reason: str) -> None:
    with pytest.raises(ReadError, match=reason):
        read(tmp_path, code, limits)
    deadline = time.monotonic() + 30
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(tmp_path) == []


def test_a_reader_is_killed_when_reading_is_stopped(tmp_path: Path) -> None:
    stopped = threading.Event()
    timer = threading.Timer(1, stopped.set)
    timer.start()
    with pytest.raises(ReadError, match="interrupted"):
        read(tmp_path, "time.sleep(600)", stopped=stopped)
    timer.join()


@pytest.mark.parametrize(
    ("code", "limits"),
    [
        ("time.sleep(1); x = bytearray(2**29)", replace(PLENTY, memory=2**28)),
        (
            "time.sleep(1); f = open('big', 'wb', 0); [f.write(bytes(2**20)) for _ in range(9)]",
            replace(PLENTY, file=2**22),
        ),
    ],
    ids=["memory", "a file"],
)
def test_the_resources_of_a_reader_are_limited(tmp_path: Path, code: str, limits: Limits) -> None:
    assert read(tmp_path, code, limits) != [b"0"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2**22 + 2**16


def test_limits_grow_with_the_size_of_the_file() -> None:
    of_size: Callable[[int], Limits] = Limits.for_file
    assert of_size(0).seconds == 120
    assert of_size(2**30).seconds > 4000
    assert of_size(2**30).output > 2**36
