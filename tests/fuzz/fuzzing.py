"""Fuzzing of parsers of untrusted bytes: definition of targets, creation of inputs, and checks of each input.

A target reads bytes. For any input, it must return a value or raise one of its accepted exceptions, within a second
of CPU time, and with memory of three times the input plus some slack. Targets that can crash the process natively
(torch does so for some bytes) run in a separate process.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import select
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import warm
from processes import clean_environment

HERE = Path(__file__).parent
FINDINGS = HERE / "findings"

SECONDS = 1.0  # of CPU time, for one input
MIB = 2**20
_TIMES = 3  # attempts before an input is reported as too slow or too large
_LARGEST = 64 * 1024  # bytes of a generated input
_AS_IT_IS, _ORDER, _RAW = 16, 8, 192  # of 256: inputs used unchanged; bytes of a change; of 256: payloads from tokens
_MOST_CHANGES = 6  # of an input
_ATTEMPTS = 200  # to make a finding smaller
_SILENT = 60.0  # seconds without output of a child after which it counts as hanging
_CHILDS_MEMORY = 2 * 2**30  # bytes of address space that a child may use in addition to its initial size
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


def inputs(target: Target) -> Callable[[bytes], bytes]:
    """Return a function that makes an input from any bytes: a valid input with some changes, or arbitrary bytes."""
    seeds, tokens = list(target.seeds()), (*_TOKENS, *target.tokens)

    def made(orders: bytes) -> bytes:
        first, how, *_ = orders
        if how < _AS_IT_IS:
            return orders[2:]
        data, other = seeds[first % len(seeds)], seeds[how % len(seeds)]
        for at in range(2, len(orders), _ORDER):
            kind, high, low, length, which, *raw = orders[at : at + _ORDER].ljust(_ORDER, b"\0")
            payload = tokens[which % len(tokens)] if which < _RAW else bytes(raw[: which % 4])
            place = (high << 8 | low) * (len(data) + 1) >> 16
            data = _CHANGES[kind % len(_CHANGES)](data, place, length % 64, payload, other)[:_LARGEST]
        return target.mend(data) if target.mend and how & 1 else data

    return made


def _flipped(data: bytes, place: int, length: int) -> bytes:
    return data[:place] + bytes(byte ^ 1 << length % 8 for byte in data[place : place + 1]) + data[place + 1 :]


# Each takes the data, a place in them, a length, a payload, and another seed.
_CHANGES: tuple[Callable[[bytes, int, int, bytes, bytes], bytes], ...] = (
    lambda data, place, _length, payload, _: data[:place] + payload + data[place + len(payload) :],
    lambda data, place, length, payload, _: data[:place] + payload + data[place + length :],
    lambda data, place, _length, payload, _: data[:place] + payload + data[place:],
    lambda data, place, length, _payload, _: data[:place] + data[place + length :],
    lambda data, place, length, _payload, _: _flipped(data, place, length),
    lambda data, place, length, payload, _: (
        data[:place] + (payload or data[place : place + 1]) * length**2 + data[place:]
    ),
    lambda data, place, length, _payload, _: data[: place + length] + data[place:],
    lambda data, place, _length, _payload, _: data[:place],
    lambda data, place, length, _payload, other: data[:place] + other[max(0, place - length) :],
)


# --- many inputs ------------------------------------------------------------------------------------------------------


def fuzz(target: Target, examples: int, *, number: int | None = None) -> None:
    """Read many inputs, made from a number or else always the same; raise the smallest finding that is found."""
    make, chance = inputs(target), random.Random(target.name if number is None else number)
    with judging(target) as one:
        for _ in range(examples):
            data = make(chance.randbytes(chance.randint(2 + _ORDER, 2 + _MOST_CHANGES * _ORDER)))
            try:
                one(data)
            except FindingError as found:
                if target.is_native:  # a crash costs a new child
                    raise
                raise _smallest(target, found) from None


def _smallest(target: Target, found: FindingError) -> FindingError:
    """Return a finding whose input lacks all parts that it does not need, as far as a number of attempts allows."""
    attempts, size = 0, len(found.data) // 2
    while size:
        at = 0
        while at < len(found.data) and attempts < _ATTEMPTS:
            attempts += 1
            try:
                judge(target, found.data[:at] + found.data[at + size :])
            except FindingError as smaller:
                found = smaller
            else:
                at += size
        size //= 2
    return found


def keep(error: FindingError, target: Target, findings: Path = FINDINGS) -> Path:
    """Store a finding, which CI tries again."""
    path = findings / target.name / f"{hashlib.sha256(error.data).hexdigest()[:16]}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(error.data)
    return path


@contextmanager
def judging(target: Target) -> Iterator[Callable[[bytes], None]]:
    """Return the function that checks one input: in this process, or in a child if the process could crash."""
    if target.is_native:
        child = Child(target.name)
        try:
            yield child.judge
        finally:
            child.end()
        return
    yield lambda data: judge(target, data)


class Child:
    """A process that reads the inputs of one target. It is replaced if it has crashed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None

    def judge(self, data: bytes) -> None:
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(struct.pack("<Q", len(data)) + data)
            process.stdin.flush()
        is_heard = bool(select.select([process.stdout], [], [], _SILENT)[0])
        answer = process.stdout.readline() if is_heard else b""
        if not answer:
            if not is_heard:
                process.kill()
            self.end()
            what = f"ended the process with {process.returncode}" if is_heard else f"was read for over {_SILENT:g} s"
            raise FindingError(f"{self._name}: {len(data)} bytes: {what}", data)
        found = json.loads(answer)
        if found is not None:
            raise FindingError(found, data)

    def end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def _start(self) -> subprocess.Popen[bytes]:
        paths = [str(HERE), str(HERE.parent / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = clean_environment(PYTHONPATH=os.pathsep.join(paths))
        command = [warm.interpreter(clean_environment()), str(HERE / "fuzz_child.py"), self._name]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", f"{self._name}: its process could not be started"
        return process


def serve(target: Target) -> None:
    """Run as the child: read inputs from standard input, and report the result of each, until there are no more."""
    answers, orders = os.fdopen(os.dup(1), "wb"), sys.stdin.buffer
    os.dup2(2, 1)  # output of a parser must not mix with answers
    for data in target.seeds():
        with suppress(*target.accepted):
            target.read(data)  # memory for imports at the first use does not count for an input
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + _CHILDS_MEMORY, resource.RLIM_INFINITY))
    answers.write(b"ready\n")
    answers.flush()
    while size := orders.read(8):
        data = orders.read(struct.unpack("<Q", size)[0])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = None
        try:
            judge(target, data)
        except FindingError as error:
            found = str(error)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        if found is None and grown > 3 * len(data) + 16 * target.slack:  # freed memory stays with the allocator
            found = f"{target.name}: {len(data)} bytes made the process {grown / MIB:.0f} MiB larger"
        answers.write(json.dumps(found).encode() + b"\n")
        answers.flush()
