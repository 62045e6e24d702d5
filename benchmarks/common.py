"""Common code of the benchmarks: jobs of several processes, alternating repeats, tables, targets and JSON records."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple
from unittest.mock import patch

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dist_wandb.session.session import Session

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_name("results")
NOT_MEASURED = "not measured"

STYLE: dict[str, Any] = {"title_justify": "left", "title_style": "bold"}  # of all tables
_WIDTH = 110  # of tables, if the output goes to a file

_PACKAGES = ("torch", "wandb", "lightning", "accelerate", "torchmetrics")
_FOREIGN = ("WANDB_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "ACCELERATE_", "DIST_WANDB_", "PET_")
_RANKS = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
)


# Options and results of a benchmark


@dataclass(frozen=True)
class Options:
    """The amount of measurements.

    Args:
        repeats: Number of repeats of each measurement; compared subjects alternate.
        quick: Whether this run only checks that everything works: each repeat is short.
        memory_rows: Number of rows for the memory measurements in `delay`.
    """

    repeats: int = 5
    quick: bool = False
    memory_rows: int = 100_000

    def of(self, number: int, quick: int) -> int:
        """Return `number`, or `quick` in a quick run."""
        return quick if self.quick else number


@dataclass(frozen=True)
class Target:
    """A target of a benchmark.

    Args:
        what: Description of the value.
        limit: Largest allowed value; smallest allowed value if `at_least`.
        value: The measured value; `None` if it could not be measured.
        at_least: Whether larger values are better.
    """

    what: str
    limit: float
    value: float | None
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the value was measured and is within the limit."""
        if self.value is None:
            return False
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass
class Result:
    """The results of a benchmark.

    Args:
        name: Name of the benchmark, and of its record.
        series: One number per repeat, by measurement and by subject of the comparison.
        tables: The same numbers as tables to print.
        targets: The targets.
        notes: Further remarks, for example about failed measurements.
    """

    name: str
    series: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, title: str, series: Mapping[str, Sequence[float]], against: str | None = None) -> None:
        """Add a series with its table.

        Args:
            title: The measured quantity, with its unit.
            series: One number per repeat, by subject: a peer, or ``"THING: PEER"`` for several things.
            against: The peer by whose median the other medians are divided, for each thing, in a last column.
        """
        self.series[title] = {peer: list(numbers) for peer, numbers in series.items()}
        columns = ["", "median", "min", "max", "repeats", *([f"x {against}"] if against else [])]
        table = Table(*columns, title=title, **STYLE)
        for peer, numbers in series.items():
            thing, colon, _ = peer.rpartition(": ")
            ratio = self.ratio(title, peer, f"{thing}{colon}{against}")
            table.add_row(peer, *_summary(numbers), *([] if ratio is None else [f"{ratio:.3g}"]))
        self.tables.append(table)

    def ratio(self, title: str, peer: str, baseline: str) -> float | None:
        """Return the ratio of the medians of two peers; `None` if one of them could not be measured."""
        series = self.series.get(title, {})
        if not series.get(peer) or not series.get(baseline):
            return None
        return statistics.median(series[peer]) / statistics.median(series[baseline])


def _summary(numbers: Sequence[float]) -> list[str]:
    """Return median, minimum, maximum and count as text."""
    if not numbers:
        return [NOT_MEASURED, "", "", "0"]
    return [_shown(statistics.median(numbers)), _shown(min(numbers)), _shown(max(numbers)), str(len(numbers))]


def _shown(number: float) -> str:
    return f"{number:.4g}" if abs(number) < 10_000 else f"{number:,.0f}"


def alternating(things: Sequence[str], repeats: int) -> Iterator[str]:
    """Yield each item `repeats` times, forwards and backwards, so that drift of the machine affects all equally."""
    for repeat in range(repeats):
        yield from things if repeat % 2 == 0 else reversed(things)


# The command line of a benchmark


def main(
    measure: Callable[[Options], Result], job: Callable[[dict[str, Any]], None], description: str | None = None
) -> None:
    """Run the file of a benchmark: measure, or run one rank of a job that a measurement started.

    Args:
        measure: Measures; it starts jobs with `run_ranks`.
        job: Runs on each rank of such a job.
        description: Text of ``--help``.
    """
    if sys.argv[1:2] == ["job"]:
        job(json.loads(sys.argv[2]))
    else:
        show(run(measure, given(description)))


def run(measure: Callable[[Options], Result], options: Options) -> Result:
    """Measure, and add a note if the numbers are not meaningful."""
    result = measure(options)
    if options.quick:
        result.notes.append("this was a quick run: it shows that the benchmark works, its numbers mean nothing")
    return result


def given(description: str | None) -> Options:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, help=f"repeats of each measurement (default: {Options.repeats})")
    parser.add_argument("--quick", action="store_true", help="only check that it works: one short repeat")
    parser.add_argument("--memory-rows", type=int, help=f"rows written by delay (default: {Options.memory_rows:,})")
    told = parser.parse_args()
    repeats = told.repeats or (1 if told.quick else Options.repeats)
    rows = told.memory_rows or (2_000 if told.quick else Options.memory_rows)
    return Options(repeats, told.quick, rows)


def show(result: Result) -> None:
    """Print the tables of a benchmark and whether it met its targets; write its record."""
    console = _console()
    for table in result.tables:
        console.print(table)
    for note in result.notes:
        console.print(f"[yellow]{result.name}: {escape(note)}[/yellow]")
    show_targets([result])
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{result.name}.json").write_text(json.dumps(_record(result), indent=2) + "\n", encoding="utf-8")


def show_targets(results: Iterable[Result]) -> None:
    """Print the targets of the benchmarks, and whether they are met."""
    table = Table("benchmark", "target", "limit", "measured", "met", title="targets", **STYLE)
    for result in results:
        for target in result.targets:
            limit = f"{'>=' if target.at_least else '<='} {_shown(target.limit)}"
            measured = NOT_MEASURED if target.value is None else _shown(target.value)
            met = "[green]yes[/green]" if target.is_met else "[red]no[/red]"
            table.add_row(result.name, target.what, limit, measured, met)
    if table.rows:
        _console().print(table)


def _console() -> Console:
    return Console(width=max(_WIDTH, Console().width))


def _record(result: Result) -> dict[str, Any]:
    return {
        "benchmark": result.name,
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": {package: _version(package) for package in (*_PACKAGES, "dist-wandb")},
        "series": result.series,
        "targets": [{**asdict(target), "met": target.is_met} for target in result.targets],
        "notes": result.notes,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except ModuleNotFoundError:  # as importlib.metadata's own error is
        return None


# Jobs of several processes


class JobError(Exception):
    """A job failed."""


def run_ranks(
    file: str, arguments: Mapping[str, Any], *, processes: int = 2, by_torchrun: bool = True, timeout: float = 600
) -> list[dict[str, Any]]:
    """Run the `job` of a benchmark in several processes, in a clean environment and a directory that is then removed.

    Args:
        file: The ``__file__`` of the benchmark.
        arguments: Arguments of `job`; ``directory`` is added.
        processes: Number of ranks.
        by_torchrun: Whether torchrun starts them; otherwise only the first is started, which must start the others.
        timeout: Seconds after which the job is killed.

    Returns:
        The value that each rank passed to `report`, in the order of ranks.

    Raises:
        JobError: The job failed or timed out, or a rank reported nothing.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    with tempfile.TemporaryDirectory(prefix="dist_wandb-bench-", ignore_cleanup_errors=True) as directory:
        told = json.dumps({**arguments, "directory": directory})
        command = [sys.executable, *(launcher if by_torchrun else []), "-m", f"benchmarks.{Path(file).stem}"]
        output = _run([*command, "job", told], timeout)
        reports = [_report_of(directory, rank) for rank in range(processes)]
        missing = [rank for rank, path in enumerate(reports) if not path.exists()]
        if missing:
            raise JobError(f"rank {missing} of {Path(file).name} reported nothing:\n{output}")
        return [json.loads(path.read_text(encoding="utf-8")) for path in reports]


def report(directory: str, rank: int, result: Mapping[str, Any]) -> None:
    """Send the result of a rank to the process that started the job. Each rank must call this once."""
    _report_of(directory, rank).write_text(json.dumps(result), encoding="utf-8")


def _report_of(directory: str, rank: int) -> Path:
    return Path(directory) / f"rank-{rank}.json"


def _run(command: Sequence[str], timeout: float) -> str:
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=_clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise JobError(f"not finished after {timeout:g} s: {command}\n{output[-10_000:]}") from None
    finally:
        with contextlib.suppress(ProcessLookupError):  # ranks that outlive their launcher
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise JobError(f"exit code {process.returncode}: {command}\n{output[-10_000:]}")
    return output


def _clean_environment() -> dict[str, str]:
    """Return this process's environment without variables of launchers and wandb; offline, and quiet.

    Each rank has one torch thread, as under torchrun: otherwise two ranks compete for the cores.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN) and name not in _RANKS}
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "WANDB_ERROR_REPORTING": "false"}
    return {**kept, **quiet, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


# Inside a job


class Handed(NamedTuple):
    """A row that was passed to wandb.

    Args:
        row: The row.
        began: Time of the call in seconds, by `time.time`, which is the same for all ranks of a machine.
        ended: Time at which the call returned.
    """

    row: dict[str, Any]
    began: float
    ended: float


@contextlib.contextmanager
def watching(session: Session) -> Iterator[SimpleQueue[Handed]]:
    """Record the rows that `session` passes to its W&B run from now on; none on a rank without a run."""
    handed: SimpleQueue[Handed] = SimpleQueue()
    if not session.run:
        yield handed
        return
    log = session.run.log
    begun: dict[str, Any] = {}  # values of a row that W&B still holds open

    def watched(row: dict[str, Any], *, commit: bool | None = None, **options: Any) -> None:
        began = time.time()
        log(row, commit=commit, **options)
        begun.update(row)
        if commit is not False:
            handed.put(Handed(dict(begun), began, time.time()))
            begun.clear()

    with patch.object(session.run, "log", watched):
        yield handed


def collectives_of(session: Session) -> int:
    """Return the number of collectives of the exchange of `session` since its group was formed."""
    group = session._exchange.group  # type: ignore[attr-defined]  # noqa: SLF001  # nothing public tells
    return 0 if group is None else int(group.collectives)


def numbers(count: int, seed: float = 0.0) -> dict[str, float]:
    """Return a row of `count` plain numbers."""
    return {f"metric_{index}": seed + index for index in range(count)}


class Intervals:
    """Times between ticks: the steps of a training loop, if each step starts with a tick."""

    def __init__(self) -> None:
        self._ticks: list[float] = []
        self._processor: list[float] = []

    def tick(self) -> None:
        """Record the start of a step."""
        self._ticks.append(time.perf_counter())
        self._processor.append(time.process_time())

    def processor_milliseconds(self, skipped: int) -> float:
        """Return the processor time of all threads for each step, from the first step that counts until now."""
        return 1000 * (time.process_time() - self._processor[skipped]) / (len(self._processor) - skipped)

    def milliseconds(self, skipped: int) -> list[float]:
        """Return the durations of the steps, without the first `skipped`."""
        ticks = self._ticks[skipped:]
        return [1000 * (after - before) for before, after in itertools.pairwise(ticks)]
