"""Run all parts of a check, even if one fails, with one summary at the end.

``make lint``, ``make test``, ``make test-fast`` and ``make test-oldest`` call it, each for its own check. Each pytest
part ends with its ten slowest tests.

Whole jobs spend a fifth of their time waiting for each other. The parts that mostly compute run concurrently with them,
at a lower priority, and are printed after them. So do tests with short limits, which wait most of the time, at a higher
priority. All parts of a check, and the workers of pytest-xdist, start from one warm interpreter: see `warm`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree as ET

import warm
from processes import clean_environment

ROOT = Path(__file__).parents[2]
_BIN = Path(sys.executable).parent
_OLDEST = str(ROOT / ".venv-oldest" / "bin" / "python")
_WITH_OLDEST = ("tests/e2e/test_accelerate.py", "tests/e2e/test_transformers.py")
_WHOLE_JOBS = ("tests/contract", "tests/e2e", "tests/gpu", "tests/chaos")
_ONE_OF_EACH = "tests/contract/test_contract.py::test_one_run_has_the_means_of_all_ranks"
_TIME_TO_END = 20.0  # seconds


@dataclass(frozen=True)
class Part:
    """One command of a check."""

    name: str  # name in the summary
    command: Sequence[str]  # the command; pytest gets an option for its results in addition
    # whether the command is pytest: then its tests are counted, else the command counts as one test
    is_pytest: bool = True
    is_beside: bool = False  # whether it runs concurrently with the following parts, up to the first that does not
    niceness: int = 0  # reduction of its priority, as for `nice`


@dataclass(frozen=True)
class Outcome:
    part: Part
    passed: int
    failed: int
    seconds: float


def checks(workers: int, python: str = sys.executable) -> Mapping[str, tuple[Part, ...]]:
    """Return the parts of all checks; `python` runs their tests, those of whole jobs `workers` at a time."""
    pytest = (python, "-m", "pytest")
    core, waiting = (("-n", number, "--dist", "loadfile") for number in ("2", "3"))  # many of the oldest's tests wait
    first = ("-n", "4", "--dist", "loadfile", "--no-loadscope-reorder")  # otherwise the few jobs come last
    jobs = ("-n", str(workers), "--dist", "loadgroup")
    lint = (
        Part("ruff check", (str(_BIN / "ruff"), "check"), is_pytest=False),
        Part("ruff format", (str(_BIN / "ruff"), "format", "--check"), is_pytest=False),
        Part("import-linter", (str(_BIN / "lint-imports"),), is_pytest=False),
        Part("sizes", (sys.executable, "scripts/sizes.py"), is_pytest=False),
        Part("house", (sys.executable, "scripts/house.py", "--log"), is_pytest=False, is_beside=True),
        Part("mypy", (str(_BIN / "mypy"),), is_pytest=False),
        Part("site", ("env", "NO_MKDOCS_2_WARNING=1", str(_BIN / "mkdocs"), "build", "--strict"), is_pytest=False),
    )
    return {
        "lint": lint,
        "test-fast": (
            *(replace(part, is_beside=True) for part in lint),
            Part(
                "unit, and a job of each integration", (*pytest, *first, "-m", "not slow", _ONE_OF_EACH, "tests/unit")
            ),
        ),
        "test": (
            Part("short limits", (*pytest, "-m", "alone", *files_with_short_limits()), is_beside=True),
            # In a process of its own: in that of a worker which had run unit tests, it crashed twice in C code.
            Part("distributed", (*pytest, "tests/distributed"), is_beside=True, niceness=10),
            Part("core", (*pytest, *core, "tests/unit", "tests/fuzz"), is_beside=True, niceness=10),
            Part(
                "whole jobs",
                (*pytest, *jobs, "-m", "not alone", *_WHOLE_JOBS),
                niceness=5,
            ),
        ),
        "test-oldest": (
            Part("oldest: core", (*pytest, *waiting, "-m", "not newest", "tests/unit"), is_beside=True, niceness=5),
            Part(
                "oldest: whole jobs",
                (*pytest, *jobs, "-m", "not newest", "tests/contract", *_WITH_OLDEST),
            ),
        ),
    }


def files_with_short_limits() -> tuple[str, ...]:
    """Return the files of whole jobs that use the mark `alone`: collecting only these takes less time."""
    files = (path for directory in _WHOLE_JOBS for path in sorted((ROOT / directory).rglob("test_*.py")))
    return tuple(str(path.relative_to(ROOT)) for path in files if "mark.alone" in path.read_text(encoding="utf-8"))


def run(parts: Iterable[Part]) -> list[Outcome]:
    """Run all parts, one after the other, with the concurrent ones alongside."""
    outcomes: list[Outcome] = []
    with ExitStack() as stack:
        beside: list[Started] = []
        for part in parts:
            started = Started(part, stack)
            if part.is_beside:
                beside.append(started)
                continue
            outcomes.append(started.outcome())
            outcomes += [one.outcome() for one in beside]
            beside.clear()
        outcomes += [one.outcome() for one in beside]
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return a line for each part, and a last line with the totals."""
    width = max(len(outcome.part.name) for outcome in outcomes)
    lines = [
        f"{outcome.part.name:{width}}  {'FAILED' if outcome.failed else 'passed'}"
        f"  {outcome.passed:5} passed  {outcome.failed:3} failed  {outcome.seconds:6.0f} s"
        for outcome in outcomes
    ]
    passed, failed = (sum(getattr(outcome, kind) for outcome in outcomes) for kind in ("passed", "failed"))
    return "\n".join([*lines, f"{passed} passed, {failed} failed"])


def outcomes_of(check: str, workers: int) -> list[Outcome]:
    """Run a check. Its warm interpreter has this process's priority: those of the parts are lower."""
    python = _OLDEST if check == "test-oldest" else sys.executable
    with warm.served():
        if check != "lint":
            python = warm.interpreter(clean_environment(), python)
        return run(checks(workers, python)[check])


def main() -> int:
    """Run the named checks; return 1 if any part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", nargs="+", choices=list(checks(1)))
    parser.add_argument("--workers", type=int, default=3, help="how many tests of whole jobs run at the same time")
    arguments = parser.parse_args()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a background job: stand-ins would not pass it on
        signal.signal(signal.SIGINT, signal.default_int_handler)
    outcomes = [outcome for check in arguments.check for outcome in outcomes_of(check, arguments.workers)]
    sys.stdout.write(f"\n{summary(outcomes)}\n")
    return 1 if any(outcome.failed for outcome in outcomes) else 0


class Started:
    """A running part."""

    def __init__(self, part: Part, stack: ExitStack) -> None:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dist_wandb-tests-")))
        self._part = part
        self._results = directory / "results.xml"
        self._began = time.monotonic()
        self._output = stack.enter_context((directory / "output").open("w+b")) if part.is_beside else None
        options = (f"--junitxml={self._results}", "--durations=10") if part.is_pytest else ()
        command = [*(("nice", "-n", str(part.niceness)) if part.niceness else ()), *part.command, *options]
        if not part.is_beside:
            self._announce()
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(command, cwd=ROOT, env=_environment(), stdout=self._output)
        except OSError as error:  # its environment does not exist
            sys.stdout.write(f"{error}\n")
        else:
            stack.callback(_end, self._process)

    def outcome(self) -> Outcome:
        code = 1 if self._process is None else self._process.wait()
        seconds = time.monotonic() - self._began
        if self._output is not None:
            self._announce()
            self._output.seek(0)
            sys.stdout.write(self._output.read().decode(errors="replace"))
        passed, failed = _counts(self._results)
        part = self._part
        shows_nothing = part.is_pytest and not passed  # it was aborted, or found no test
        if (code or shows_nothing) and not failed:
            failed = 1
        return Outcome(part, passed if part.is_pytest else int(not failed), failed, seconds)

    def _announce(self) -> None:
        sys.stdout.write(f"\n--- {self._part.name}: {' '.join(self._part.command)}\n")
        sys.stdout.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part that still runs because the check was aborted; pytest ends the processes that its tests started."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_TIME_TO_END)
        except subprocess.TimeoutExpired:  # a background job of a shell ignores SIGINT
            process.kill()
            process.wait()


def _environment() -> dict[str, str]:
    """Return this process's environment, with compiled modules kept: otherwise each worker compiles all tests.

    The number of threads is the warm interpreter's.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "OMP_NUM_THREADS": "1"}


def _counts(results: Path) -> tuple[int, int]:
    """Return how many tests passed and failed; skipped tests count as failed, because they show nothing."""
    try:
        suites = list(ET.parse(results).getroot().iter("testsuite"))  # noqa: S314  # written by pytest
    except (OSError, ET.ParseError):
        return 0, 0
    failed = sum(int(suite.get(kind, 0)) for suite in suites for kind in ("failures", "errors", "skipped"))
    return sum(int(suite.get("tests", 0)) for suite in suites) - failed, failed


if __name__ == "__main__":
    sys.exit(main())
