"""What another process prints about a file, line by line: bounded in time, amount and memory.

The reader of a file that may come from a stranger may print without end, or never end. Then it is ended, with all
that it has started, and that is the failure of this one file.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dist_wandb.errors import ReadError

_MIB = 2**20
_CHUNK = 256 * 1024
_LOOKS_UP = 200  # milliseconds until it is looked whether nobody wants to know any more


@dataclass(frozen=True)
class Limits:
    """What a reader may take.

    Args:
        seconds: Until it has ended.
        silence: Seconds between two lines.
        output: Bytes that it prints.
        line: Bytes of one line; longer ones are passed over.
        memory: Bytes that each of its processes has.
        file: Bytes of each file that it writes.
    """

    seconds: float
    silence: float = 120.0
    output: int = 2**40
    line: int = 8 * _MIB
    memory: int = 512 * _MIB
    file: int = 64 * _MIB

    @classmethod
    def for_file(cls, size: int) -> Limits:
        """What is more than enough for a file of so many bytes, also where wandb lies on a cold network disk."""
        return cls(seconds=120 + 4 * size / _MIB, output=64 * _MIB + 64 * size)


class Lines:
    """The lines that a process prints.

    Args:
        process: The process; its output is a pipe.
        limits: What it may take.
        stopped: Set when nobody wants to know any more.
    """

    def __init__(self, process: subprocess.Popen[bytes], limits: Limits, stopped: threading.Event) -> None:
        self.too_long = 0
        """How many lines were longer than the limit, and passed over."""
        self._process = process
        self._limits = limits
        self._stopped = stopped
        self._deadline = time.monotonic() + limits.seconds

    def __iter__(self) -> Iterator[bytes]:
        pieces: list[bytes] = []  # of the line that has no end yet
        size = 0
        for chunk in self._chunks():
            *ended, rest = chunk.split(b"\n")
            for piece in ended:
                size += len(piece)
                if size <= self._limits.line:
                    yield b"".join([*pieces, piece]) if pieces else piece
                else:
                    self.too_long += 1
                pieces, size = [], 0
            size += len(rest)
            if size > self._limits.line:
                pieces = []
            elif rest:
                pieces.append(rest)
        if 0 < size <= self._limits.line:
            yield b"".join(pieces)
        elif size:
            self.too_long += 1

    def wait(self) -> int:
        """Wait for the process to end; its exit code."""
        try:
            return self._process.wait(max(0.1, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise self._too_late() from None

    def _chunks(self) -> Iterator[bytes]:
        output = self._process.stdout
        if output is None:
            raise ValueError("the output of the process is no pipe")
        readable = select.poll()
        readable.register(output)
        printed, heard = 0, time.monotonic()
        while True:
            now = time.monotonic()
            if self._stopped.is_set():
                raise ReadError("was not read to its end, as reading was broken off.")
            if now > self._deadline:
                raise self._too_late()
            if not readable.poll(_LOOKS_UP):
                if time.monotonic() - heard > self._limits.silence:
                    raise ReadError(f"its reader was ended, as it said nothing for {self._limits.silence:.0f} s.")
                continue
            chunk = os.read(output.fileno(), _CHUNK)
            if not chunk:
                return
            printed += len(chunk)
            if printed > self._limits.output:
                raise ReadError(f"its reader was ended, as it had printed more than {self._limits.output} bytes.")
            yield chunk
            heard = time.monotonic()  # now: whoever takes the lines may be slow

    def _too_late(self) -> ReadError:
        return ReadError(f"its reader was ended, as it took more than {self._limits.seconds:.0f} s.")


@contextmanager
def lines_of(
    command: Sequence[str],
    *,
    directory: Path,
    environment: Mapping[str, str],
    complaints: IO[bytes],
    limits: Limits,
    stopped: threading.Event,
) -> Iterator[Lines]:
    """Start a process and read the lines that it prints. At the end of the block it has ended, come what may.

    Args:
        command: What to start.
        directory: Where.
        environment: Its environment.
        complaints: The file that takes what it complains of.
        limits: What it may take.
        stopped: Set when nobody wants to know any more.

    Raises:
        ReadError: It took more than that, or was stopped.
        OSError: It cannot be started.
    """
    with subprocess.Popen(  # noqa: S603  # no shell
        command,
        cwd=directory,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=complaints,
        start_new_session=True,  # a group of its own, which is ended as a whole
    ) as process:
        try:
            _limit(process.pid, limits)
            yield Lines(process, limits, stopped)
        finally:
            if process.returncode is None:  # nobody has waited for it, so its group still has this number
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _limit(pid: int, limits: Limits) -> None:
    """Bound the memory and the files of a process, and of those that it starts, where the system can."""
    if not hasattr(resource, "prlimit"):  # not Linux
        return
    for kind, most in ((resource.RLIMIT_DATA, limits.memory), (resource.RLIMIT_FSIZE, limits.file)):
        with suppress(OSError, ValueError):  # it has ended already, or had a lower limit
            _, hard = resource.prlimit(pid, kind)
            within = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.prlimit(pid, kind, (within, within))
