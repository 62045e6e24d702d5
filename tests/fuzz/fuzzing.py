"""Fuzzing of parsers of untrusted bytes: definition of targets, creation of inputs, and checks of each input.

A target reads bytes. For any input, it must return a value or raise one of its accepted exceptions, within a second
of CPU time, and with memory of three times the input plus some slack. Targets that can crash the process natively
(torch does so for some bytes) run in a separate process.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import resource
import struct
import subprocess
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import warm
from processes import clean_environment

HERE = Path(__file__).parent
FINDINGS = HERE / "findings"

SECONDS = 1.0  # of CPU time, for one input
MIB = 2**20
_TIMES = 3  # attempts before an input is reported as too slow or too large
_LARGEST = 64 * 1024  # bytes of a generated input
_MOST_CHANGES = 6  # of an input
_HANGS = 600.0  # seconds for all inputs that a process of its own reads
_MEMORY_APART = 2 * 2**30  # bytes of address space that it may use in addition to its initial size
_TOKENS = (
    *(b"1e400", b"-1", b"-0.5", b"NaN", b"null", b"true", b'""', b"[", b"{", b"]", b"}", b",", b":", b"9" * 30, b"2.0"),
    *(b'"\\ud800"', b"\x1b[31m", b"\0", b"\x80", b"\xff" * 8, b"\n", b"../", b"\\", b'"', b"[[[[", b'{"":'),
    *(struct.pack("<Q", number) for number in (0, 1, 2**31, 2**40, 2**63)),
)


class FindingError(AssertionError):
    def __init__(self, message: str, data: bytes) -> None:
        super().__init__(message)
        self.data = data


@dataclass(frozen=True)
class Target:
    name: str  # also of the directory with its findings
    read: Callable[[bytes], object]  # the parser; it also uses the value like its callers
    seeds: Callable[[], Sequence[bytes]]  # valid inputs, which are read without an exception
    accepted: tuple[type[Exception], ...] = ()  # that other inputs may raise
    tokens: tuple[bytes, ...] = ()  # typical parts of inputs, which are inserted at random
    mend: Callable[[bytes], bytes] | None = None  # makes half of the inputs pass early checks, such as checksums
    examples: int = 1000  # inputs in CI
    is_native: bool = False  # whether reading may crash the process
    slack: int = 4 * MIB  # memory that reading may use in addition to three times the input


def judge(target: Target, data: bytes) -> None:
    """Read one input in this process; raise FindingError if it violates the rules.

    An input that takes too long or too much is read again: garbage collection for other tests, or another of their
    threads, is counted as well, but not each time.
    """
    for _ in range(_TIMES):
        excess = _excess(target, data)
        if excess is None:
            return
    raise FindingError(f"{target.name}: {len(data)} bytes took {excess}", data)


def _excess(target: Target, data: bytes) -> str | None:
    """Return the time or memory that reading an input has taken, if it exceeds the limit."""
    tracemalloc.start()  # only for the parser: making inputs would take ten times as long
    began = time.thread_time()
    try:
        target.read(data)
    except target.accepted:
        pass
    except Exception as error:
        raise FindingError(f"{target.name}: {type(error).__name__}: {str(error)[:300]}", data) from error
    finally:
        seconds, peak = time.thread_time() - began, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    if seconds > SECONDS:
        return f"{seconds:.1f} s"
    return f"{peak / MIB:.1f} MiB of memory" if peak > 3 * len(data) + target.slack else None


# --- inputs -----------------------------------------------------------------------------------------------------------


def inputs(target: Target, chance: random.Random) -> Iterator[bytes]:
    """Make inputs without end: valid inputs with some changes, and some arbitrary bytes."""
    seeds, tokens = list(target.seeds()), (*_TOKENS, *target.tokens)
    while True:
        changes = chance.randint(0, _MOST_CHANGES)
        data = chance.choice(seeds) if changes else chance.randbytes(chance.randrange(48))
        for _ in range(changes):
            other = chance.choice(seeds)
            token = chance.choice(tokens) if chance.random() < 0.75 else chance.randbytes(chance.randrange(4))
            begin, length = chance.randint(0, len(data)), chance.randrange(64)
            end = chance.choice((begin, begin + len(token), begin + length, len(data)))
            flipped = bytes(byte ^ 1 << length % 8 for byte in data[begin : begin + 1]) + data[begin + 1 : end]
            repeated = (token or data[begin : begin + 1]) * length**2
            added = chance.choice((token, token, b"", data[begin:end] * 2, flipped, repeated, other[begin:]))
            data = (data[:begin] + added + data[end:])[:_LARGEST]
        yield target.mend(data) if target.mend and chance.random() < 0.5 else data


# --- many inputs ------------------------------------------------------------------------------------------------------


def fuzz(target: Target, examples: int, *, number: int | None = None, findings: Path | None = None) -> None:
    """Read many inputs, made from a number or else always the same; raise the first finding, and store it if wanted."""
    chance = random.Random(target.name if number is None else number)
    try:
        check(target, itertools.islice(inputs(target, chance), examples))
    except FindingError as error:
        if findings is not None:
            path = findings / target.name / f"{hashlib.sha256(error.data).hexdigest()[:16]}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(error.data)
        raise


def check(target: Target, many: Iterable[bytes]) -> None:
    """Read inputs, in a process of its own if they could crash it; raise the first finding."""
    if not target.is_native:
        for data in many:
            judge(target, data)
        return
    with TemporaryDirectory() as folder:
        for number, data in enumerate(many):
            Path(folder, f"{number:06}").write_bytes(data)
        paths = [str(HERE), str(HERE.parent / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [warm.interpreter(clean_environment()), str(HERE / "targets.py"), target.name, folder]
        environment = clean_environment(PYTHONPATH=os.pathsep.join(paths))
        done = subprocess.run(command, capture_output=True, text=True, timeout=_HANGS, env=environment, check=False)
        left = sorted(Path(folder).iterdir())
        if done.returncode or left:
            what = f"{target.name}: the process ended with {done.returncode}: {done.stderr[-1000:]}"
            raise FindingError(what, left[0].read_bytes() if left else b"")


def read_all(target: Target, folder: Path) -> None:
    """Read the inputs in a folder, and remove each file once it has been read without a finding."""
    for data in target.seeds():
        with suppress(*target.accepted):
            target.read(data)  # memory for imports at the first use does not count for an input
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + _MEMORY_APART, resource.RLIM_INFINITY))
    for path in sorted(folder.iterdir()):
        data, before = path.read_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        judge(target, data)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        if grown > 3 * len(data) + 16 * target.slack:  # freed memory stays with the allocator
            raise FindingError(f"{target.name}: {len(data)} bytes made the process {grown / MIB:.0f} MiB larger", data)
        path.unlink()
