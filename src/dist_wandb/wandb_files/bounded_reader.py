"""Read the output of another process line by line, with limits on time, size and memory.

A process that reads an untrusted file may print without end, or never exit. It is then killed with all its children,
and only this file fails.
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
_POLL = 200  # milliseconds between checks whether reading was stopped


@dataclass(frozen=True)
class Limits:
    """Limits of a process."""

    seconds: float  # total run time
    silence: float = 120.0  # seconds between two lines
    output: int = 2**40  # bytes of output
    line: int = 8 * _MIB  # bytes of one line; longer ones are skipped
    memory: int = 512 * _MIB  # bytes of memory of each of its processes
    file: int = 64 * _MIB  # bytes of each file that it writes

    @classmethod
    def for_file(cls, size: int) -> Limits:
        """Return ample limits for a file of `size` bytes, even if wandb is installed on a slow network disk."""
        return cls(seconds=120 + 4 * size / _MIB, output=64 * _MIB + 64 * size)


class OutputLines:
    """The lines of a process's output, which is a pipe. Setting `stopped` ends the iteration with a `ReadError`."""

    def __init__(self, process: subprocess.Popen[bytes], limits: Limits, stopped: threading.Event) -> None:
        self.too_long: int = 0
        """Number of lines that were skipped because they were too long."""
        self._process = process
        self._limits = limits
        self._stopped = stopped
        self._deadline = time.monotonic() + limits.seconds

    def __iter__(self) -> Iterator[bytes]:
        pieces: list[bytes] = []  # of the incomplete line
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
        """Wait until the process ends; return its exit code."""
        try:
            return self._process.wait(max(0.1, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise self._timeout() from None

    def _chunks(self) -> Iterator[bytes]:
        output = self._process.stdout
        if output is None:
            raise ValueError("the output of the process is not a pipe")
        readable = select.poll()
        readable.register(output)
        printed, last_output = 0, time.monotonic()
        while True:
            now = time.monotonic()
            if self._stopped.is_set():
                raise ReadError("was not read to its end because reading was interrupted.")
            if now > self._deadline:
                raise self._timeout()
            if not readable.poll(_POLL):
                if time.monotonic() - last_output > self._limits.silence:
                    raise ReadError(
                        f"its reader was killed because it printed nothing for {self._limits.silence:.0f} s."
                    )
                continue
            chunk = os.read(output.fileno(), _CHUNK)
            if not chunk:
                return
            printed += len(chunk)
            if printed > self._limits.output:
                raise ReadError(f"its reader was killed because it printed more than {self._limits.output} bytes.")
            yield chunk
            last_output = time.monotonic()  # taken now because the consumer of the lines may be slow

    def _timeout(self) -> ReadError:
        return ReadError(f"its reader was killed because it took more than {self._limits.seconds:.0f} s.")


@contextmanager
def lines_of(
    command: Sequence[str],
    *,
    directory: Path,
    environment: Mapping[str, str],
    errors: IO[bytes],  # gets its standard error
    limits: Limits,
    stopped: threading.Event,
    inherited: Sequence[int] = (),  # descriptors
) -> Iterator[OutputLines]:
    """Start a process and read its output. The process is killed at the end of the block if it is still running.

    Raises `OSError` if it cannot be started, and `ReadError` if it exceeds a limit or `stopped` is set.
    """
    with subprocess.Popen(  # noqa: S603  # no shell
        command,
        cwd=directory,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        pass_fds=inherited,
        start_new_session=True,  # a separate process group, which is killed as a whole
    ) as process:
        try:
            _limit(process.pid, limits)
            yield OutputLines(process, limits, stopped)
        finally:
            if process.returncode is None:  # not yet waited for, so the group still has this id
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _limit(pid: int, limits: Limits) -> None:
    """Limit memory and file sizes of a process and its children, on Linux."""
    if not hasattr(resource, "prlimit"):
        return
    for kind, most in ((resource.RLIMIT_DATA, limits.memory), (resource.RLIMIT_FSIZE, limits.file)):
        with suppress(OSError, ValueError):  # the process has ended, or has a lower limit
            _, hard = resource.prlimit(pid, kind)
            within = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.prlimit(pid, kind, (within, within))
