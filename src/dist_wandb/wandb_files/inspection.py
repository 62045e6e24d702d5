"""Read the records of a ``.wandb`` file with ``wandb leet inspect --json``: W&B has no Python reader.

The file may come from an untrusted source, so the reader's resources are limited, and it starts in an empty private
directory. It may print without end, or never exit: its output is read line by line, with limits on time, size and
memory; beyond them it is killed with all its children, and only this file fails.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
import resource
import select
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeAlias

from dist_wandb.errors import ReadError, UnsupportedVersionError, in_words
from dist_wandb.wandb_files.environment import reader_environment
from dist_wandb.wandb_files.history import LARGE, Rows, split
from dist_wandb.wandb_files.record_file import check_number
from dist_wandb.wandb_files.small_files import Directory, is_deeper, open_ordinary, private_directory

_MIB = 2**20
_CHUNK = 256 * 1024
_POLL = 200  # milliseconds between checks whether reading was stopped
OnRecord: TypeAlias = "Callable[[dict[str, Any]], None]"
BINARY_KNOWN = frozenset({"0.31"})  # versions of wandb, without the last number, whose binary is started directly
_READER_SINCE = "0.31"  # first version whose `wandb leet inspect` has --json
_LONGEST_STDERR = 1024 * 1024  # bytes
_MOST_PROBLEMS, _LONGEST_PROBLEM = 20, 1000  # of one file; characters of each
_IDLE_TIMEOUT = "6h"  # without new records of a followed run; an abandoned reader ends after it
_LARGE_LINE = 256 * 1024
_LONGEST_INTEGER = 22  # characters; W&B's reader prints larger numbers with an exponent
_one_large_line = threading.Lock()
UNUSED = frozenset({"summary", "stats", "output", "output_raw", "telemetry"})
"""Kinds of records that most callers do not need; most records of a file are of these kinds."""
_STREAMS = UNUSED | {"output_logger"}


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
            yielded = time.monotonic()
            yield chunk
            last_output = time.monotonic()  # taken now because the consumer of the lines may be slow
            self._deadline += last_output - yielded

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
    """Start a process and read its output in the block; raise `ReadError` beyond a limit, or once `stopped`."""
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


def inspect(path: Path, on_record: OnRecord, stopped: threading.Event | None = None, **options: Any) -> list[str]:
    """Pass the records of a file to a function; return the damaged parts that were skipped. See `records_of`."""
    problems: list[str] = []
    try:
        with closing(records_of(path, problems, stopped, **options)) as records:  # ends the reader, also after an error
            for record in records:
                on_record(record)
    except ReadError as error:
        raise ReadError(in_words(error, path)) from None
    return problems


def records_of(
    path: Path,
    problems: list[str],  # to which the damaged parts that were skipped are added, as sentence fragments
    stopped: threading.Event | None = None,  # set to stop reading
    *,
    skipped: Collection[str] = UNUSED,  # kinds that are left out, of those in `UNUSED`, and ``"history"``
    in_order: bool = True,
    follow: bool = False,  # whether to continue until the run ends, or nothing is written for 6 hours
    within: Directory | None = None,  # as for `open_ordinary`
) -> Generator[dict[str, Any], None, None]:
    """Yield the records of a file.

    If they need not be `in_order`, history rows may follow all other records, with NaN and infinities as floats, and a
    large file is read five times as fast. Raises `ReadError` if the reader rejects the file or exceeds its limits, or
    it is no ordinary file, and `UnsupportedVersionError` if the installed wandb has no such reader.
    """
    stopped = stopped or threading.Event()
    try:
        # Python and wandb search the working directory for modules and settings, so it is an empty private one.
        with (
            _opened(path, within) as handle,
            private_directory() as private,
            (private / "stderr").open("w+b") as errors,
        ):
            size = os.fstat(handle).st_size
            limits = Limits(math.inf, silence=math.inf) if follow else Limits.for_file(size)
            records = Records(path, skipped)
            others = private / "files" / "run" / "others.wandb"
            count = None if in_order or follow or size < LARGE else split(path, others, skipped, stopped, within)
            read = others
            if count is None:  # the opened file: W&B's reader would follow a link that has taken its place
                by_handle = Path(f"/proc/self/fd/{handle}")
                read = by_handle if by_handle.exists() else path.absolute()
            with lines_of(
                reader_command(read, follow=follow),
                directory=private,
                environment=reader_environment(private),
                errors=errors,
                limits=limits,
                stopped=stopped,
                inherited=[handle],
            ) as lines:
                yield from records.parsed(lines)
                returncode = lines.wait()
                records.too_long += lines.too_long
            errors.seek(0)
            stderr = errors.read(_LONGEST_STDERR).decode("utf-8", errors="replace").strip()
            if returncode:
                raise _reader_failed(path, returncode, stderr.replace(str(read), str(path)))
            rows = Rows(path, 0 if "history" in skipped else count or 0, stopped, within)
            for row in rows:
                yield {"type": "history", "history": {"item": row}}
    except OSError as error:
        where = "" if error.filename in (None, str(path)) else f" ({error.filename})"  # of temporary files
        raise ReadError(f"{path}: cannot be read with W&B's reader: {error.strerror or error}{where}.") from None
    except ReadError as error:
        raise ReadError(in_words(error, path)) from None
    prefix = "wandb leet inspect: "  # other lines are general warnings of Python or wandb
    found = [line.removeprefix(prefix) for line in stderr.splitlines() if line.startswith(prefix)]
    more = [f"and {len(found) - _MOST_PROBLEMS} more problems"] if len(found) > _MOST_PROBLEMS else []
    problems += [problem[:_LONGEST_PROBLEM] for problem in found[:_MOST_PROBLEMS]]
    problems += [*more, *records.problems(limits), *rows.problems]


@contextmanager
def _opened(path: Path, within: Directory | None) -> Iterator[int]:
    """Open an ordinary file; yield its descriptor."""
    try:
        handle = open_ordinary(path, within=within)
    except FileNotFoundError:
        raise ReadError(f"{path}: is not a file. Give a .wandb file.") from None
    try:
        yield handle
    finally:
        os.close(handle)


def reader_command(path: Path, *, follow: bool = False) -> list[str]:
    """Return the command that prints the records of a file, whose path is absolute.

    ``wandb leet inspect`` starts this binary (`launch_inspect` in wandb/cli/leet.py). Starting it directly takes 0.04 s
    of processor time for each file, instead of 0.8 s with the import of wandb. Its arguments are not a public
    interface, so this is done only for the versions in `BINARY_KNOWN`, for which a test compares both ways.
    """
    following = ["--follow", f"--idle-timeout={_IDLE_TIMEOUT}"] if follow else []
    installed = sysconfig.get_path("platlib")  # not `sys.path`, which may contain an untrusted directory
    binary = Path(installed, "wandb", "bin", "wandb-core")
    if _version_in(installed).rpartition(".")[0] not in BINARY_KNOWN or not binary.is_file():
        return [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *following, str(path)]
    options = ["--no-observability", "--json", *following, "--run-file", str(path)]
    return [str(binary), "leet", "inspect", *options, str(path.parent.parent)]


@cache
def _version_in(directory: str) -> str:
    """Return the version of the wandb that is installed in a directory; an empty string if there is none."""
    return next((found.version for found in importlib.metadata.distributions(name="wandb", path=[directory])), "")


class Records:
    """Parses the lines that the reader prints for one file, except those of kinds that are skipped."""

    def __init__(self, path: Path, skipped: Collection[str] = UNUSED) -> None:
        self._path = path
        self._is_skipped = re.compile(rb'\{"num":\d+,"type":"(?:%s)"' % "|".join(sorted(skipped)).encode()).match
        self._deep = 0
        self._others = 0  # records that are no part of the file's streams, or are empty rows
        self.too_long = 0

    def parsed(self, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
        """Yield the records in lines. Raises `ReadError` if a line is not a record."""
        for line in lines:
            if self._is_skipped(line):
                continue
            # Parsed JSON takes up to 25 times as much memory, so only one thread at a time parses a large line.
            with _one_large_line if len(line) > _LARGE_LINE else nullcontext():
                record = self._parsed(line)
                if record is not None:
                    self._others += not record.get("history") and record["type"] not in _STREAMS
                    check_number(self._others)
                    yield record

    def problems(self, limits: Limits) -> list[str]:
        """The records that were skipped, as sentence fragments."""
        found = []
        if self.too_long:
            found.append(f"{self.too_long} of its records, of more than {limits.line} bytes, are skipped")
        if self._deep:
            found.append(f"{self._deep} of its records, with too deeply nested values, are skipped")
        return found

    def _parsed(self, line: bytes) -> dict[str, Any] | None:
        if is_deeper(line):
            self._deep += 1
            return None
        try:
            record = json.loads(line, parse_int=_integer)
            contents = record[record["type"]]  # every record has its contents under the name of its type
        except (ValueError, KeyError, TypeError):
            contents = None
        if not isinstance(contents, dict):
            raise ReadError(f"{self._path}: `wandb leet inspect` printed a line that is not a record: {line[:80]!r}")
        parsed: dict[str, Any] = record
        return parsed


def _integer(text: str) -> float:
    """Parse an integer; a large one becomes a float, so that no arithmetic on it raises `OverflowError`."""
    return int(text) if len(text) <= _LONGEST_INTEGER else float(text)


def _reader_failed(path: Path, returncode: int, stderr: str) -> ReadError | UnsupportedVersionError:
    # Exit code 2 is click's for bad usage, but also that of a crashed Go program, which affects only this file.
    if re.search(r"No such (?:command|option)|No module named '?wandb", stderr.replace(str(path), "")):
        try:
            installed = f"wandb {importlib.metadata.version('wandb')}"
        except importlib.metadata.PackageNotFoundError:
            installed = f"the Python at {sys.executable}"
        return UnsupportedVersionError(
            f"The .wandb files cannot be read: {installed} does not have `wandb leet inspect --json`, "
            f"which wandb {_READER_SINCE} introduced. Install it: pip install 'wandb>={_READER_SINCE}'"
        )
    reason = _essence(stderr)[:_LONGEST_PROBLEM] or f"exit code {returncode}"
    return ReadError(f"{path}: `wandb leet inspect` cannot read it: {reason}")


def _essence(stderr: str) -> str:
    """Return the error message of a failed command in one line, without the frames of a traceback."""
    lines = stderr.splitlines()
    for line in lines:  # of a Go program, which prints all stacks after it
        if line.startswith(("fatal error: ", "panic: ")):
            limit = f" (its limit is {Limits.memory // 2**20} MiB)" if "out of memory" in line else ""
            return f"{line}{limit}"
    starts = [number for number, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return " ".join(line.strip() for line in lines[starts[-1] if starts else 0 :]).removeprefix("Error: ")
