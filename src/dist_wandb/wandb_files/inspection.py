"""The records of a ``.wandb`` file, read through ``wandb leet inspect --json``: W&B ships no Python reader.

The file may come from a stranger, so the reader is bounded, and started where nothing of the stranger's is found.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from dist_wandb.errors import ReadError, UnsupportedVersionError, in_words
from dist_wandb.wandb_files.bounded_reader import Limits, lines_of
from dist_wandb.wandb_files.environment import reader_environment
from dist_wandb.wandb_files.small_files import is_deeper, open_ordinary, private_directory

BINARY_KNOWN = frozenset({"0.31"})  # versions of wandb, without the last number, whose binary is started directly
_READER_SINCE = "0.31"  # `wandb leet inspect` is older, its --json is not
_COMPLAINTS = 1024 * 1024  # bytes of what the reader says of damage that are looked at
_MOST_PROBLEMS, _LONGEST_PROBLEM = 20, 1000  # that are told of one file; characters of each
_LARGE_LINE = 256 * 1024
_one_large_line = threading.Lock()
# Most of a file is these records, which nothing here needs: they are told by the head of the line, without parsing it.
_UNUSED_RECORD = re.compile(rb'\{"num":\d+,"type":"(?:summary|stats|output|output_raw|telemetry)"')


def inspect(path: Path, take: Callable[[dict[str, Any]], None], stopped: threading.Event | None = None) -> list[str]:
    """Hand the records of a file, but for `_UNUSED_RECORD`, to `take`, one after the other.

    Args:
        path: The file.
        take: Called with each record.
        stopped: Set when nobody wants to know any more.

    Returns:
        What the reader complained about: damaged parts that it skipped.

    Raises:
        ReadError: The reader refused the file, did not come to an end, or the file is no file.
        UnsupportedVersionError: There is no such reader in the installed wandb.
    """
    try:
        limits = Limits.for_file(_size_of(path))
        records = Records(path)
        returncode, said = _records_of(path, records, take, limits, stopped or threading.Event())
    except OSError as error:
        place = "" if error.filename in (None, str(path)) else f" ({error.filename})"  # of temporary files
        raise ReadError(f"{path}: cannot be read: {error.strerror or error}{place}.") from None
    if returncode:
        raise _reader_failed(path, returncode, said)
    complaint = "wandb leet inspect: "  # other lines are warnings of Python's or wandb's about themselves
    found = [line.removeprefix(complaint) for line in said.splitlines() if line.startswith(complaint)]
    more = [f"and {len(found) - _MOST_PROBLEMS} problems more"] if len(found) > _MOST_PROBLEMS else []
    return [*(problem[:_LONGEST_PROBLEM] for problem in found[:_MOST_PROBLEMS]), *more, *records.problems(limits)]


def _size_of(path: Path) -> int:
    """The size of a file that is an ordinary one; what is a pipe or a device is refused, not waited for."""
    try:
        handle = open_ordinary(path)
    except FileNotFoundError:
        raise ReadError(f"{path}: is not a file. Give a .wandb file, as find_runs() finds them.") from None
    try:
        return os.fstat(handle).st_size
    finally:
        os.close(handle)


def _records_of(
    path: Path,
    records: Records,
    take: Callable[[dict[str, Any]], None],
    limits: Limits,
    stopped: threading.Event,
) -> tuple[int, str]:
    """Run the reader to its end; its exit code, and what it complained about.

    The file may come from a stranger, and so may all that lies beside it. So nothing is started there, where Python and
    wandb would look for modules and settings, but in an empty directory of this user's alone.
    """
    with private_directory() as private, (private / "complaints").open("w+b") as complaints:
        try:
            with lines_of(
                reader_command(path.absolute()),
                directory=private,
                environment=reader_environment(private),
                complaints=complaints,
                limits=limits,
                stopped=stopped,
            ) as lines:
                records.take_from(lines, take)
                returncode = lines.wait()
                records.too_long += lines.too_long
        except ReadError as error:
            raise ReadError(in_words(error, path)) from None
        complaints.seek(0)
        return returncode, complaints.read(_COMPLAINTS).decode("utf-8", errors="replace").strip()


def reader_command(path: Path) -> list[str]:
    """The command that prints the records of a file.

    It is what ``wandb leet inspect`` starts (`launch_inspect` in wandb/cli/leet.py), without a Python that imports
    wandb first: 0.04 s of processor time instead of 0.8 s for each file. The arguments of wandb's binary are not a
    public interface, and other versions may take them for something else. So only the versions in `BINARY_KNOWN`, for
    which a test compares both ways, are read like this, others by the public command.

    Args:
        path: The file, absolute.
    """
    binary = _binary_of_wandb()
    if binary is None:
        return [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    options = ["--no-observability", "--json", "--run-file", str(path)]
    return [str(binary), "leet", "inspect", *options, str(path.parent.parent)]


def _binary_of_wandb() -> Path | None:
    """The binary of the installed wandb. `sys.path` is not searched: it may name a stranger's directory."""
    installed = sysconfig.get_path("platlib")
    found = next(iter(importlib.metadata.distributions(name="wandb", path=[installed])), None)
    binary = Path(installed, "wandb", "bin", "wandb-core")
    is_known = found is not None and found.version.rpartition(".")[0] in BINARY_KNOWN
    return binary if is_known and binary.is_file() else None


class Records:
    """The records among the lines that the reader prints of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._deep = 0
        self.too_long = 0

    def take_from(self, lines: Iterable[bytes], take: Callable[[dict[str, Any]], None]) -> None:
        """Hand those that may be needed to `take`, one after the other.

        Raises:
            ReadError: A line is no record.
        """
        for line in lines:
            if _UNUSED_RECORD.match(line):
                continue
            # What JSON becomes in memory is up to 25 times as large: of large lines there is one at a time.
            with _one_large_line if len(line) > _LARGE_LINE else nullcontext():
                record = self._parsed(line)
                if record is not None:
                    take(record)

    def problems(self, limits: Limits) -> list[str]:
        """What was passed over."""
        found = []
        if self.too_long:
            found.append(f"{self.too_long} of its records, of more than {limits.line} bytes, are passed over")
        if self._deep:
            found.append(f"{self._deep} of its records, with values too deep or too long for JSON, are passed over")
        return found

    def _parsed(self, line: bytes) -> dict[str, Any] | None:
        if is_deeper(line):
            self._deep += 1
            return None
        try:
            record = json.loads(line)
            contents = record[record["type"]]  # every record holds its contents under the name of its type
        except (ValueError, KeyError, TypeError):
            contents = None
        if not isinstance(contents, dict):
            raise ReadError(f"{self._path}: `wandb leet inspect` printed what is no record: {line[:80]!r}")
        parsed: dict[str, Any] = record
        return parsed


def _reader_failed(path: Path, returncode: int, said: str) -> ReadError | UnsupportedVersionError:
    # Exit code 2 is click's for bad usage, but also that of a Go program that crashed: over this file alone.
    if re.search(r"No such (?:command|option)|No module named '?wandb", said.replace(str(path), "")):
        return UnsupportedVersionError(
            f"The .wandb files cannot be read: {_installed_wandb()} has no `wandb leet inspect --json`, "
            f"which came with {_READER_SINCE}. Install it: pip install 'wandb>={_READER_SINCE}'"
        )
    return ReadError(
        f"{path}: `wandb leet inspect` cannot read it: {_essence(said)[:_LONGEST_PROBLEM] or f'exit code {returncode}'}"
    )


def _installed_wandb() -> str:
    try:
        return f"wandb {importlib.metadata.version('wandb')}"
    except importlib.metadata.PackageNotFoundError:
        return f"the Python at {sys.executable}"


def _essence(said: str) -> str:
    """The message within what a failing command said: without a traceback's frames, in one line."""
    lines = said.splitlines()
    for line in lines:  # of a program in Go, which then prints all its stacks
        if line.startswith(("fatal error: ", "panic: ")):
            limit = f" (it is given {Limits.memory // 2**20} MiB)" if "out of memory" in line else ""
            return f"{line}{limit}"
    starts = [number for number, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return " ".join(line.strip() for line in lines[starts[-1] if starts else 0 :]).removeprefix("Error: ")
