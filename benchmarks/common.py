"""What the benchmarks share: jobs of several processes, alternating repeats, tables, targets and JSON records."""

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
_WIDTH = 110  # of tables, where the output goes to a file

_PACKAGES = ("torch", "wandb", "lightning", "accelerate", "torchmetrics")
_FOREIGN = ("WANDB_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "ACCELERATE_", "DIST_WANDB_", "PET_")
_RANKS = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
)


# What a benchmark is asked, and what it answers


@dataclass(frozen=True)
class Options:
    """How much is measured.

    Args:
        repeats: How often each thing is measured; what is compared takes turns.
        quick: Whether this is only to see that all of it works: little is done per repeat.
        memory_rows: How many rows are written where memory is looked at, in `delay`.
    """

    repeats: int = 5
    quick: bool = False
    memory_rows: int = 100_000

    def of(self, number: int, quick: int) -> int:
        """`number`, or `quick` in a quick run."""
        return quick if self.quick else number


@dataclass(frozen=True)
class Target:
    """What a benchmark must show.

    Args:
        what: The number that is looked at, in words.
        limit: What it must not exceed; what it must reach, if `at_least`.
        value: What it is; `None` where it could not be measured.
        at_least: Whether more is better.
    """

    what: str
    limit: float
    value: float | None
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        """Whether it was measured and is within the limit."""
        if self.value is None:
            return False
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass
class Result:
    """What a benchmark found out.

    Args:
        name: Name of the benchmark, and of its record.
        series: By what was measured, and by what was compared: one number per repeat.
        tables: The same, to be looked at.
        targets: What it must show.
        notes: What there is to say besides: things that could not be measured, for example.
    """

    name: str
    series: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, title: str, series: Mapping[str, Sequence[float]], against: str | None = None) -> None:
        """Add a series with its table.

        Args:
            title: What was measured, with its unit.
            series: One number per repeat, by what was compared: peers, or ``"THING: PEER"`` for several things.
            against: The peer whose median the others' medians are divided by, thing by thing, for a last column.
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
        """Median of one peer over that of another; `None` if one of them could not be measured."""
        series = self.series.get(title, {})
        if not series.get(peer) or not series.get(baseline):
            return None
        return statistics.median(series[peer]) / statistics.median(series[baseline])


def _summary(numbers: Sequence[float]) -> list[str]:
    """Median, minimum, maximum and count, to be shown."""
    if not numbers:
        return [NOT_MEASURED, "", "", "0"]
    return [_shown(statistics.median(numbers)), _shown(min(numbers)), _shown(max(numbers)), str(len(numbers))]


def _shown(number: float) -> str:
    return f"{number:.4g}" if abs(number) < 10_000 else f"{number:,.0f}"


def alternating(things: Sequence[str], repeats: int) -> Iterator[str]:
    """Every thing `repeats` times, there and back again, so that a drift of the machine meets all of them alike."""
    for repeat in range(repeats):
        yield from things if repeat % 2 == 0 else reversed(things)


# The command line of a benchmark


def main(
    measure: Callable[[Options], Result], job: Callable[[dict[str, Any]], None], description: str | None = None
) -> None:
    """What a benchmark's file does when it is run: measure; or be a rank of a job that a measurement started.

    Args:
        measure: Measures, starting jobs by `run_ranks`.
        job: What each rank of such a job does.
        description: Shown by ``--help``.
    """
    if sys.argv[1:2] == ["job"]:
        job(json.loads(sys.argv[2]))
    else:
        show(run(measure, given(description)))


def run(measure: Callable[[Options], Result], options: Options) -> Result:
    """Measure, and note where the numbers are not to be taken for any."""
    result = measure(options)
    if options.quick:
        result.notes.append("this was a quick run: it shows that the benchmark works, its numbers mean nothing")
    return result


def given(description: str | None) -> Options:
    """The options that were given on the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, help=f"how often each thing is measured (default: {Options.repeats})")
    parser.add_argument("--quick", action="store_true", help="only see that it works: one repeat, and little in it")
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
    """Print what the benchmarks must show, and whether they did."""
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
    except ModuleNotFoundError:  # importlib.metadata's own error is one
        return None


# Jobs of several processes


class JobError(Exception):
    """A job did not end as it should."""


def run_ranks(
    file: str, arguments: Mapping[str, Any], *, processes: int = 2, by_torchrun: bool = True, timeout: float = 600
) -> list[dict[str, Any]]:
    """Run the `job` of a benchmark in several processes, in a clean environment and a directory that is then removed.

    Args:
        file: The benchmark's ``__file__``.
        arguments: What `job` is given; ``directory`` is added.
        processes: Number of ranks.
        by_torchrun: Whether torchrun starts them; otherwise the first is started, and is to start the others.
        timeout: How long the job may take, in seconds; then all of it is killed.

    Returns:
        What each rank handed to `report`, in the order of ranks.

    Raises:
        JobError: The job failed, took too long, or a rank reported nothing.
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


def report(directory: str, rank: int, said: Mapping[str, Any]) -> None:
    """Hand what a rank found out to the process that started the job. To be called once on each rank."""
    _report_of(directory, rank).write_text(json.dumps(said), encoding="utf-8")


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
    """This process's environment without anything that tells ranks or configures wandb; offline, and quiet.

    One thread of torch per rank, as torchrun has it: otherwise two ranks fight for the cores, whatever is measured.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN) and name not in _RANKS}
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "WANDB_ERROR_REPORTING": "false"}
    return {**kept, **quiet, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


# Inside a job


class Handed(NamedTuple):
    """A row that was handed to wandb.

    Args:
        row: The row.
        began: When it was, in seconds as `time.time` has them, which the ranks of one machine share.
        ended: When wandb had taken it.
    """

    row: dict[str, Any]
    began: float
    ended: float


@contextlib.contextmanager
def watching(session: Session) -> Iterator[SimpleQueue[Handed]]:
    """The rows that `session` hands to its W&B run from now on; none on a rank without a run."""
    handed: SimpleQueue[Handed] = SimpleQueue()
    if not session.run:
        yield handed
        return
    log = session.run.log

    def watched(row: dict[str, Any]) -> None:
        began = time.time()
        log(row)
        handed.put(Handed(row, began, time.time()))

    with patch.object(session.run, "log", watched):
        yield handed


def collectives_of(session: Session) -> int:
    """How many collectives the exchange of `session` has used since its group was formed."""
    group = session._exchange.group  # type: ignore[attr-defined]  # noqa: SLF001  # nothing public tells
    return 0 if group is None else int(group.collectives)


def numbers(count: int, seed: float = 0.0) -> dict[str, float]:
    """A row of `count` plain numbers."""
    return {f"metric_{index}": seed + index for index in range(count)}


class Intervals:
    """Times between ticks: steps of a training loop, when it ticks at the beginning of each."""

    def __init__(self) -> None:
        self._ticks: list[float] = []

    def tick(self) -> None:
        """A step begins."""
        self._ticks.append(time.perf_counter())

    def milliseconds(self, skipped: int) -> list[float]:
        """How long the steps took, without the first `skipped`."""
        ticks = self._ticks[skipped:]
        return [1000 * (after - before) for before, after in itertools.pairwise(ticks)]
