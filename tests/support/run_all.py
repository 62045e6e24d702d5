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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import warm
from processes import clean_environment

Outcome = tuple[str, bool, float]  # the name of a part, whether it passed, and its seconds

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
    command: Sequence[str]
    is_beside: bool = False  # whether it runs concurrently with the following parts, up to the first that does not
    niceness: int = 0  # reduction of its priority, as for `nice`


def checks(workers: int, python: str = sys.executable) -> Mapping[str, tuple[Part, ...]]:
    """Return the parts of all checks; `python` runs their tests, those of whole jobs `workers` at a time."""
    pytest = (python, "-m", "pytest", "--durations=10")
    core, waiting = (("-n", number, "--dist", "loadfile") for number in ("2", "3"))  # many of the oldest's tests wait
    first = ("-n", "4", "--dist", "loadfile", "--no-loadscope-reorder")  # otherwise the few jobs come last
    jobs = ("-n", str(workers), "--dist", "loadgroup")
    lint = (
        Part("ruff check", (str(_BIN / "ruff"), "check")),
        Part("ruff format", (str(_BIN / "ruff"), "format", "--check")),
        Part("import-linter", (str(_BIN / "lint-imports"),)),
        Part("sizes", (sys.executable, "scripts/sizes.py")),
        Part("house", (sys.executable, "scripts/house.py", "--log"), is_beside=True),
        Part("mypy", (str(_BIN / "mypy"),)),
        Part("site", ("env", "NO_MKDOCS_2_WARNING=1", str(_BIN / "mkdocs"), "build", "--strict")),
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
            Part("whole jobs", (*pytest, *jobs, "-m", "not alone", *_WHOLE_JOBS), niceness=5),
        ),
        "test-oldest": (
            Part("oldest: core", (*pytest, *waiting, "-m", "not newest", "tests/unit"), is_beside=True, niceness=5),
            Part("oldest: whole jobs", (*pytest, *jobs, "-m", "not newest", "tests/contract", *_WITH_OLDEST)),
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
        beside: list[Callable[[], Outcome]] = []
        for part in parts:
            outcome = _started(part, stack)
            if part.is_beside:
                beside.append(outcome)
            else:
                outcomes += [outcome(), *(one() for one in beside)]
                beside.clear()
        outcomes += [one() for one in beside]
    return outcomes


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
    for name, has_passed, seconds in outcomes:
        sys.stdout.write(f"{'passed' if has_passed else 'FAILED'} {seconds:6.0f} s  {name}\n")
    failed = [name for name, has_passed, _ in outcomes if not has_passed]
    sys.stdout.write(f"{len(outcomes) - len(failed)} passed, {len(failed)} failed\n")
    return 1 if failed else 0


def _started(part: Part, stack: ExitStack) -> Callable[[], Outcome]:
    """Start a part, and return a function that waits for its end. What runs beside others is printed then."""
    began, announced = time.monotonic(), f"\n--- {part.name}: {' '.join(part.command)}\n"
    output = stack.enter_context(tempfile.TemporaryFile()) if part.is_beside else None  # noqa: SIM115  # the stack's
    if output is None:
        sys.stdout.write(announced)
        sys.stdout.flush()
    try:
        command = [*(("nice", "-n", str(part.niceness)) if part.niceness else ()), *part.command]
        process = subprocess.Popen(command, cwd=ROOT, env=_environment(), stdout=output)
    except OSError as error:  # its environment does not exist
        sys.stdout.write(f"{error}\n")
        return lambda: (part.name, False, 0.0)
    stack.callback(_end, process)

    def outcome() -> Outcome:
        code, seconds = process.wait(), time.monotonic() - began
        if output is not None:
            output.seek(0)
            sys.stdout.write(announced + output.read().decode(errors="replace"))
        return part.name, not code, seconds

    return outcome


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


if __name__ == "__main__":
    sys.exit(main())
