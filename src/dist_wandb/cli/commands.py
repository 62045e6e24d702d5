"""The command line: ``dist-wandb plan`` and ``doctor`` before a job starts, ``show`` and ``sync`` after it has run.

Each command is one function that adds its arguments and one that runs it; `_COMMANDS` lists them.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from dist_wandb._version import __version__
from dist_wandb.cli.doctor import GENERATED, Diagnosis, examine
from dist_wandb.errors import ConfigurationError, DistWandbError, ReadError, UploadError, visible
from dist_wandb.runs.argument_checks import check_id, check_sweep
from dist_wandb.runs.current_server import destination
from dist_wandb.runs.destination import TRUST_OPTION, is_address
from dist_wandb.settings.plan import RANK_SCOPES, RUN_MODES, RunPlan, plan_run
from dist_wandb.topology.detected import DetectedLauncher
from dist_wandb.topology.model import Topology
from dist_wandb.uploads.state import remove_left_copies
from dist_wandb.uploads.upload import Terms, UploadFile, UploadRun, is_uploaded, plan_uploads, remember, upload
from dist_wandb.wandb_files.offline import MetricHistory, Sidecar, StoredRun, find_runs, read_runs

SPARKLINE_WIDTH = 32
"""Longest sparkline, in characters; a narrow terminal gets shorter ones."""

_INTERRUPTED = 130  # the exit code that shells know for it
_GOES_ON = "An upload goes on where it got to when it is started again."
_SHORTEST_SPARKLINE = 8
_COLUMN_GAP = 2
_MOST_METRICS_SHOWN = 1000  # of one file
_INDENT = 2
_BLOCKS = "▁▂▃▄▅▆▇█"
_GAP = "·"
_BY_LOG = "uploaded when it was written, says W&B's log beside it"
_STATE_STYLES = {"finished": "green", "failed": "red", "unfinished": "yellow"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``dist-wandb`` command.

    Args:
        argv: The arguments after the command's name; those of the process when `None`.

    Returns:
        The exit code: 0 on success, 1 where not everything could be read or was uploaded, 2 for arguments that
        cannot be honoured, 130 after an interrupt, 143 and 129 after SIGTERM and SIGHUP during an upload.

    Raises:
        SystemExit: After ``--help`` and ``--version`` (code 0), and for arguments argparse refuses (code 2).
    """
    if sys.stdout is None:  # it was closed by whoever started this: nobody reads along
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # until the process ends
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has seen enough, as `head` does
        _drop_output()
        return 1
    except OSError:
        problem = _problem_of_output()
        if problem is None:
            raise
        _drop_output()
        print(f"dist-wandb: the output could not be written: {problem.strerror}.", file=sys.stderr)
        return 1
    except _EndedError as error:
        print(f"dist-wandb: ended by {error.by.name}. {_GOES_ON}", file=sys.stderr)
        return 128 + error.by
    except KeyboardInterrupt:
        print(f"dist-wandb: interrupted. {_GOES_ON}", file=sys.stderr)
        return _INTERRUPTED
    except DistWandbError as error:
        print(f"dist-wandb: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1
    return code


def _problem_of_output() -> OSError | None:
    """Why stdout takes nothing; `None` if it does."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except io.UnsupportedOperation:  # no file, but what somebody has put in its place
        return None
    except OSError as error:
        return error
    return None


def _drop_output() -> None:
    """Send what is left of the output nowhere, so that Python does not fail over it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dist-wandb",
        description="Weights & Biases runs of distributed training: what will be opened, and what has been written.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        subparser = subparsers.add_parser(
            command.name,
            help=command.summary,
            description=command.description,
            epilog=f"Example: dist-wandb {command.name} {command.example}",
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


# --- plan -------------------------------------------------------------------------------------------------------------


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=_positive, metavar="N", help="number of nodes (default: 1)")
    parser.add_argument("--procs-per-node", type=_positive, metavar="M", help="processes on every node (default: 1)")
    parser.add_argument(
        "--layout",
        type=_layout,
        metavar="M0,M1,...",
        help="processes on each node, for nodes that are not alike; instead of --nodes and --procs-per-node",
    )
    parser.add_argument(
        "--run-mode", default="auto", metavar="MODE", help=f"{', '.join(RUN_MODES)} (default: %(default)s)"
    )
    parser.add_argument(
        "--rank-scope", default="global", metavar="SCOPE", help=f"{', '.join(RANK_SCOPES)} (default: %(default)s)"
    )
    parser.add_argument("--id", default="exp", help="base id that run ids are made from (default: %(default)s)")
    parser.add_argument("--group", help="group of the runs, as given to wandb.init")
    parser.add_argument("--name", help="display name of the run, as given to wandb.init")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _plan(arguments: argparse.Namespace) -> int:
    layout = _layout_of(arguments)
    base_id = check_id(arguments.id, f"--id {arguments.id!r}")
    check_sweep(arguments.run_mode, arguments.rank_scope, _topologies(layout)[0])
    ranks = [
        _PlannedRank(
            topology, plan_run(topology, arguments.run_mode, arguments.rank_scope, base_id, group=arguments.group)
        )
        for topology in _topologies(layout)
    ]
    if arguments.json:
        _print_json(_plan_as_json(ranks, layout, arguments.name))
    else:
        console = _console()
        console.print(_plan_table(ranks, arguments.name))
        console.print(_plan_summary(ranks, layout), soft_wrap=True)
    return 0


def _layout_of(arguments: argparse.Namespace) -> list[int]:
    """Number of processes on each node."""
    if arguments.layout is None:
        return [arguments.procs_per_node or 1] * (arguments.nodes or 1)
    if arguments.nodes is not None or arguments.procs_per_node is not None:
        raise ConfigurationError(
            "--layout tells the processes of every node, so --nodes and --procs-per-node have nothing left to tell. "
            "Give either --layout or those two."
        )
    layout: list[int] = arguments.layout
    return layout


def _topologies(layout: Sequence[int]) -> list[Topology]:
    """Every rank of a job, numbered node after node as torchrun does."""
    places = [(node, local_rank) for node, processes in enumerate(layout) for local_rank in range(processes)]
    return [
        Topology(rank, local_rank, node, len(places), layout[node], len(layout))
        for rank, (node, local_rank) in enumerate(places)
    ]


@dataclass(frozen=True)
class _PlannedRank:
    topology: Topology
    plan: RunPlan

    @property
    def ends_node(self) -> bool:
        return self.topology.local_rank == (self.topology.local_world_size or 1) - 1

    def display_name(self, name: str | None) -> str | None:
        if not (name and self.plan.opens_run):
            return None
        return f"{name}-{self.plan.name_suffix}" if self.plan.name_suffix else name

    def as_json(self, name: str | None) -> dict[str, Any]:
        return {
            "global_rank": self.topology.global_rank,
            "local_rank": self.topology.local_rank,
            "node_rank": self.topology.node_rank,
            "opens_run": self.plan.opens_run,
            "run_id": self.plan.run_id,
            "name": self.display_name(name),
            "group": self.plan.group,
            "shared": self.plan.shared,
            "label": self.plan.label,
            "primary": self.plan.primary,
        }

    def what_it_writes(self) -> str:
        if not self.plan.opens_run:
            return "nothing"
        if not self.plan.shared:
            return "own run"
        return "shared run, primary" if self.plan.primary else "shared run"


def _plan_as_json(ranks: Sequence[_PlannedRank], layout: Sequence[int], name: str | None) -> dict[str, Any]:
    return {
        "run_mode": ranks[0].plan.run_mode,
        "rank_scope": ranks[0].plan.rank_scope,
        "layout": list(layout),
        **_counts(ranks),
        "ranks": [rank.as_json(name) for rank in ranks],
    }


def _counts(ranks: Iterable[_PlannedRank]) -> dict[str, int]:
    """Number of runs, of groups of runs, and of ranks that write."""
    plans = [rank.plan for rank in ranks if rank.plan.opens_run]
    return {
        "runs": len({plan.run_id for plan in plans}),
        "groups": len({plan.group for plan in plans} - {None}),
        "writers": len(plans),
    }


def _plan_table(ranks: Sequence[_PlannedRank], name: str | None) -> Table:
    """One line per rank; name, group and label have a column only where a rank has one."""
    columns: dict[str, list[str | None]] = {
        "run id": [rank.plan.run_id for rank in ranks],
        "name": [rank.display_name(name) for rank in ranks],
        "group": [rank.plan.group for rank in ranks],
        "label": [rank.plan.label for rank in ranks],
    }
    columns = {heading: cells for heading, cells in columns.items() if any(cells)}
    table = _table()
    for heading in ("rank", "node", "local rank"):
        table.add_column(heading, justify="right")
    for heading in (*columns, "writes"):
        table.add_column(heading, overflow="fold")
    for rank, *cells in zip(ranks, *columns.values(), strict=True):
        place = (rank.topology.global_rank, rank.topology.node_rank, rank.topology.local_rank)
        table.add_row(
            *(Text(str(index)) for index in place),
            *(Text(visible(cell or "-")) for cell in cells),
            Text(rank.what_it_writes()),
            style="" if rank.plan.opens_run else "dim",
            end_section=rank.ends_node,
        )
    return table


def _plan_summary(ranks: Sequence[_PlannedRank], layout: Sequence[int]) -> Text:
    counts = (_number_of(count, what.removesuffix("s")) for what, count in _counts(ranks).items())
    where = f"{_number_of(len(ranks), 'rank')} on {_number_of(len(layout), 'node')}"
    return Text(f"\n{where}: {', '.join(counts)}")


def _positive(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _layout(text: str) -> list[int]:
    try:
        return [_positive(part) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"{error}, in {text!r}. Give the processes of each node, separated by commas: 3,5"
        ) from None


# --- doctor -----------------------------------------------------------------------------------------------------------


def _add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run-mode", metavar="MODE", help=f"{', '.join(RUN_MODES)} (default: as dist_wandb.init)")
    parser.add_argument("--rank-scope", metavar="SCOPE", help=f"{', '.join(RANK_SCOPES)} (default: as dist_wandb.init)")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=5.0,
        metavar="S",
        help="seconds that W&B's server may take to answer; 0 not to ask it (default: 5)",
    )
    _add_trust_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_trust_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        TRUST_OPTION,
        type=_address,
        metavar="URL",
        help="send the API key to this server, though only the settings file of the current directory names it, or "
        "over plain http",
    )


def _doctor(arguments: argparse.Namespace) -> int:
    found = examine(
        arguments.run_mode,
        arguments.rank_scope,
        patience=arguments.timeout or None,
        trusted_server=arguments.trust_server,
    )
    if arguments.json:
        _print_json(found.as_json())
    else:
        console = _console()
        console.print(_findings(found), soft_wrap=True)
        for style, mark, sentences in (("red", "✗", found.errors), ("yellow", "!", found.warnings)):
            for sentence in sentences:
                console.print(Text.assemble((f"{mark} ", style), visible(sentence)), soft_wrap=True)
    return 1 if found.errors else 0


def _findings(found: Diagnosis) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, _COLUMN_GAP, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, lines in (
        ("this process", _who(found)),
        ("would open", [_what_it_opens(found)]),
        ("launchers", [_launcher_in_words(launcher) for launcher in found.launchers] or ["none"]),
        ("wandb", _wandb_in_words(found)),
        ("versions", [", ".join(f"{name} {known}" for name, known in found.versions.items() if known)]),
    ):
        table.add_row(name, Text(visible(lines[0])))
        for line in lines[1:]:
            table.add_row("", Text(visible(line), style="dim"))
    table.add_row()
    return table


def _who(found: Diagnosis) -> list[str]:
    topology = found.topology
    if topology is None:
        return ["not known: see below"]
    if topology.world_size == 1:
        return ["the only process of its job"]
    known = {"local rank": topology.local_rank, "node": topology.node_rank}
    places = [f"{name} {value}" for name, value in known.items() if value is not None]
    of_nodes = f" of {topology.num_nodes}" if topology.node_rank is not None and topology.num_nodes else ""
    who = f"rank {topology.global_rank} of {topology.world_size}"
    sources = (f"{name}={getattr(topology, name)} from {source}" for name, source in topology.sources.items())
    return [", ".join([who, *places]) + of_nodes, *sources]


def _what_it_opens(found: Diagnosis) -> str:
    plan = found.plan
    if plan is None:
        return "not known" if found.errors else "what the ranks find out together: their layout over nodes is not told"
    how = f"run_mode={plan.run_mode}, rank_scope={plan.rank_scope}"
    if not plan.opens_run:
        return f"nothing: its numbers go to another rank's run ({how})"
    which = f"the run {plan.run_id}" if plan.run_id else "a run whose id W&B makes"
    if plan.base_id == GENERATED:
        how += f"; {GENERATED} is made when runs are opened"
    role = (f", as {plan.label}" + (", the primary" if plan.primary else "")) if plan.shared else ""
    return f"{which}{role}{f', in the group {plan.group}' if plan.group else ''} ({how})"


def _launcher_in_words(launcher: DetectedLauncher) -> str:
    reason = f", because {launcher.reason}" if launcher.reason else ""
    return f"{launcher.name}: {launcher.status}{reason} ({launcher.assignments})"


def _wandb_in_words(found: Diagnosis) -> list[str]:
    setup, server = found.setup, found.server
    if setup.server is None:
        return ["would raise: see below"]
    key = f"API key from {setup.key_from}" if setup.key_from else "no API key"
    facts = [setup.mode, f"{setup.server.shown} (from {setup.server.source})", key]
    if server is not None:
        facts.append(
            (f"it knows you as {server.user}" if server.user else "it answers") if server.answers else "silent"
        )
    of_runs = {"entity": setup.entity, "project": setup.project}
    return [", ".join(filter(None, facts)), *(f"{name} {value}" for name, value in of_runs.items() if value)]


def _address(text: str) -> str:
    if not is_address(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the address of a server, such as https://wandb.example")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of at least 0")
    return seconds


# --- show -------------------------------------------------------------------------------------------------------------


def _add_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path, help="where to look, at any depth; or one .wandb file")
    parser.add_argument(
        "--metric",
        action="append",
        metavar="GLOB",
        help="show only metrics whose name matches, such as 'val/*'; may be given several times",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; NaN and infinities are strings in it")


def _show(arguments: argparse.Namespace) -> int:
    unseen: list[ReadError] = []
    paths = find_runs(arguments.directory, report=unseen.append)
    if not paths and not unseen:
        raise _nothing_below(arguments.directory)
    patterns = arguments.metric or ["*"]
    runs, unreadable = read_runs(paths, metrics=patterns)
    errors = [*unreadable.items(), *((arguments.directory, error) for error in unseen)]
    if arguments.json:
        _print_json(_shown_as_json(arguments.directory, runs, errors, patterns))
    else:
        _print_runs(_console(), arguments.directory, runs, errors, patterns)
    if not runs:
        raise ReadError(f"None of the runs below {str(arguments.directory)!r} could be read: the reasons are above.")
    return 1 if errors else 0


def _nothing_below(*directories: Path) -> ReadError:
    places = " or ".join(repr(str(directory)) for directory in directories)
    return ReadError(
        f"No W&B run lies below {places}: there is no run-*.wandb file in a run-* or offline-run-* directory. Give the "
        "directory that W&B wrote to (`dir=`, by default ./wandb)."
    )


def _print_runs(
    console: Console,
    directory: Path,
    runs: Sequence[StoredRun],
    errors: Sequence[tuple[Path, ReadError]],
    patterns: list[str],
) -> None:
    for run in runs:
        console.print(_heading(run), soft_wrap=True)
        metrics = _metrics_table(run, patterns, console.width - _INDENT)
        console.print(Padding(metrics, (0, 0, 0, _INDENT), expand=False))
        console.print()
    for _, error in errors:
        console.print(Text.assemble(("✗ not readable  ", "red"), str(error), "\n"), soft_wrap=True)
    console.print(_show_summary(directory, runs, errors), soft_wrap=True)


def _heading(run: StoredRun) -> Text:
    style = _STATE_STYLES[run.state]
    facts = [_state_in_words(run), _number_of(run.rows, "row"), *(["uploaded"] if is_uploaded(run) else [])]
    facts += [f"{what} {visible(value)}" for what, value in (("project", run.project), ("group", run.group)) if value]
    facts += _origin(run.sidecar) if run.sidecar else []
    heading = Text.assemble(("● ", style), (visible(run.run_id), "bold"), "  ", visible(run.name or ""))
    heading.rstrip()
    heading.append("\n  ").append(facts[0], style).append("".join(f" · {fact}" for fact in facts[1:]))
    heading.append("\n  ").append(visible(str(run.path.parent)), "dim")
    for problem in run.problems:
        heading.append("\n  ").append(f"! {visible(problem)}", "yellow")
    return heading


def _state_in_words(run: StoredRun) -> str:
    if run.state == "failed":
        return f"failed (exit code {run.exit_code})"
    return "finished" if run.state == "finished" else "no end recorded (running, or killed)"


def _origin(sidecar: Sidecar) -> list[str]:
    """Which rank of which kind of job wrote the file."""
    origin = [f"{sidecar.run_mode}/{sidecar.rank_scope}", f"rank {sidecar.global_rank} of {sidecar.world_size}"]
    if sidecar.label is not None:
        origin.append(f"label {visible(sidecar.label)}{' (primary)' if sidecar.primary else ''}")
    return origin


def _metrics_table(run: StoredRun, patterns: Sequence[str], width: int) -> RenderableType:
    """One line per metric; the sparkline takes what room is left of `width` characters."""
    metrics = _matching(run, patterns)
    if not metrics:
        was_any_logged = run.metrics or list(patterns) != ["*"]
        return Text("no metric matches" if was_any_logged else "no metric was logged", "dim")
    shown = dict(islice(metrics.items(), _MOST_METRICS_SHOWN))
    left_out = len(metrics) - len(shown)
    metrics = shown
    columns = {
        "metric": [visible(name) for name in metrics],
        "last": [_number(metric.last) for metric in metrics.values()],
        "min": [_number(metric.smallest) for metric in metrics.values()],
        "max": [_number(metric.largest) for metric in metrics.values()],
        "values": [str(metric.count) for metric in metrics.values()],
        "NaN/inf": [str(metric.not_finite or "") for metric in metrics.values()],
    }
    columns = {heading: cells for heading, cells in columns.items() if any(cells)}
    table = _table()
    for heading in columns:
        table.add_column(heading, justify="left" if heading == "metric" else "right", overflow="fold")
    table.add_column("trend", style="cyan", no_wrap=True)
    taken = sum(max(map(cell_len, (heading, *cells))) + _COLUMN_GAP for heading, cells in columns.items())
    room = min(SPARKLINE_WIDTH, max(_SHORTEST_SPARKLINE, width - taken))
    for metric, *cells in zip(metrics.values(), *columns.values(), strict=True):
        table.add_row(*map(Text, cells), Text(sparkline(metric.trend, room)))
    if left_out or run.has_more_metrics:
        many = f"more than {left_out}" if run.has_more_metrics else str(left_out)
        more = Text(f"and {many} beyond these: --metric GLOB picks", "dim")
        return Group(table, more)
    return table


def _matching(run: StoredRun, patterns: Iterable[str]) -> dict[str, MetricHistory]:
    patterns = list(patterns)
    return {
        name: metric for name, metric in run.metrics.items() if any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def _show_summary(directory: Path, runs: Sequence[StoredRun], errors: Sequence[tuple[Path, ReadError]]) -> Text:
    counts = {"finished": "finished", "failed": "failed", "unfinished": "without a recorded end"}
    states = [run.state for run in runs]
    parts = [f"{states.count(state)} {words}" for state, words in counts.items() if state in states]
    parts += [f"{_number_of(len(errors), 'file')} not readable"] if errors else []
    return Text(f"{_how_many(runs)} below {visible(str(directory))}: {', '.join(parts)}")


def _how_many(runs: Sequence[StoredRun]) -> str:
    """The number of runs: files of one id, from the writers of a shared run or from a resumed one, are one run."""
    distinct = {(run.project, run.run_id) for run in runs}
    files = "" if len(distinct) == len(runs) else f" in {len(runs)} files"
    return f"{_number_of(len(distinct), 'run')}{files}"


def _shown_as_json(
    directory: Path, runs: Iterable[StoredRun], errors: Sequence[tuple[Path, ReadError]], patterns: list[str]
) -> dict[str, Any]:
    return {
        "directory": str(directory),
        "runs": [_run_as_json(run, patterns) for run in runs],
        "unreadable": [{"path": str(path), "reason": str(error)} for path, error in errors],
    }


def _run_as_json(run: StoredRun, patterns: Iterable[str]) -> dict[str, Any]:
    metrics = {
        name: {**asdict(metric), "trend": shortened(metric.trend, SPARKLINE_WIDTH)}
        for name, metric in _matching(run, patterns).items()
    }
    own = {"path": str(run.path), "state": run.state, "label": run.label, "uploaded": is_uploaded(run)}
    return {**asdict(run), **own, "metrics": metrics}


# --- sync -------------------------------------------------------------------------------------------------------------


def _add_sync_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directories", metavar="DIR", type=Path, nargs="+", help="where to look, at any depth; or one .wandb file"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be uploaded, and stop there")
    parser.add_argument(
        "--force",
        action="store_true",
        help="upload also what is refused, for reasons that are told: rows may be there twice, or be missing",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="the directories are your own: believe what they say of earlier uploads, and upload whatever files their "
        "links and records name, to whomever they name",
    )
    parser.add_argument(
        "--entity",
        metavar="NAME",
        help="upload to this user or team (default: as in the files, if it is known as yours)",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="upload everything from its start, as if nothing had been uploaded yet: to another server, for example",
    )
    _add_trust_argument(parser)


def _sync(arguments: argparse.Namespace) -> int:
    unseen: list[ReadError] = []
    places = {
        path.parent.resolve() / path.name: path
        for directory in arguments.directories
        for path in find_runs(directory, report=unseen.append)
    }
    if not places and not unseen:
        raise _nothing_below(*arguments.directories)
    runs, errors = read_runs(places.values())
    server = destination(trusted=arguments.trust_server)
    terms = Terms(trust=arguments.trust, again=arguments.again, entity=arguments.entity, server=server.url)
    plan = plan_uploads(runs, terms=terms)
    console = _console()
    for run in plan:
        console.print(_planned_upload(run, forced=arguments.force), soft_wrap=True)
    for error in (*errors.values(), *unseen):
        console.print(Text.assemble(("✗ not readable  ", "red"), str(error)), soft_wrap=True)
    refused = [run for run in plan if _is_refused(run, forced=arguments.force)]
    wanted = [run for run in plan if not run.is_uploaded and run not in refused]
    if wanted:
        console.print(Text(f"to {visible(server.shown)} (from {visible(server.source)})", "dim"), soft_wrap=True)
    failed: list[UploadRun] = []
    if wanted and not server.takes_key:
        console.print(Text.assemble(("✗ ", "red"), visible(server.refusal)), soft_wrap=True)
        failed = wanted
    elif not arguments.dry_run:
        remove_left_copies()
        with _ended_in_order():
            failed = _upload_all(wanted, console)
    if arguments.trust and not arguments.dry_run:
        _remember_all(plan)
    console.print(_sync_summary(plan, wanted, refused, failed, arguments.dry_run), soft_wrap=True)
    return 1 if refused or failed or errors or unseen else 0


class _EndedError(KeyboardInterrupt):
    """A signal asks this process to end: all that handles an interrupt handles this."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__()
        self.by = by


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end an upload as an interrupt does; by default it would go on without this process."""

    def end(number: int, _frame: object) -> None:
        raise _EndedError(signal.Signals(number))

    before: dict[signal.Signals, Any] = {}
    try:
        for name in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(name) is signal.SIG_DFL:  # `nohup`, and programs that call this, have something in mind
                before[name] = signal.signal(name, end)
    except ValueError:  # not in the main thread, where nobody can say what a signal does
        pass
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _remember_all(runs: Iterable[UploadRun]) -> None:
    """Remember what trusted directories say of earlier uploads. Where that fails, it takes ``--trust`` again."""
    for file in (file for run in runs for file in run.files if file.is_uploaded):
        with suppress(UploadError):
            remember(file)


def _is_refused(run: UploadRun, *, forced: bool) -> bool:
    return not run.is_uploaded and bool(run.dangers or (run.refusals and not forced))


def _planned_upload(run: UploadRun, *, forced: bool) -> Text:
    """What is to be done with one run, a line for each of its files."""
    kind = f"shared run of {_number_of(len(run.files), 'file')}" if run.is_shared else "run"
    if run.is_uploaded:
        what, style = _BY_LOG if run.is_uploaded_by_log else "uploaded already", "dim"
    else:
        what, style = ("refused", "red") if _is_refused(run, forced=forced) else ("to upload", "green")
    facts = [kind, _number_of(sum(file.run.rows for file in run.files), "row")]
    facts += [f"project {visible('/'.join(filter(None, (run.entity, run.project))))}"] if run.project else []
    text = Text.assemble(("● ", style), (visible(run.run_id), "bold"), "  ", visible(run.describing.name or ""))
    text.rstrip()
    text.append(f"\n  {what}", style).append("".join(f" · {fact}" for fact in facts))
    for number, file in enumerate(run.files, start=1):
        text.append(f"\n  {number}. {_planned_file(file)}").append(f"  {visible(str(file.path.parent))}", "dim")
    for reason in (*run.dangers, *run.refusals):
        text.append("\n  ").append(f"! {visible(reason)}", "yellow")
    for note in run.notes:
        text.append(f"\n  {visible(note)}", "dim")
    return text


def _planned_file(file: UploadFile) -> str:
    done = _BY_LOG if file.by_log else "uploaded already"
    left = done if file.is_uploaded else _number_of(file.rows_left, "row")
    role = file.shared_as
    return f"{visible(role.label or '')}{' (primary)' if role.primary else ''}: {left}" if role else left


def _upload_all(runs: Sequence[UploadRun], console: Console) -> list[UploadRun]:
    """Upload runs one after the other; those that failed, or were not tried because all would."""
    failed: list[UploadRun] = []
    rows = sum(file.rows_left for run in runs for file in run.files)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn("rows"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=rows)
        for number, run in enumerate(runs):
            concerns_all = _upload_run(run, progress, bar)
            if concerns_all is not None:
                failed.append(run)
            if concerns_all:
                failed += runs[number + 1 :]
                break
    return failed


def _upload_run(run: UploadRun, progress: Progress, bar: TaskID) -> bool | None:
    """Upload the files of one run in their order, up to the first that fails.

    Returns:
        `None` if all went well; else whether other runs would fail for the same reason.
    """
    console = progress.console
    for file in run.files:
        if file.is_uploaded:
            continue
        label = file.shared_as.label if file.shared_as else None
        named = visible(f"{run.run_id} {label or ''}".rstrip())
        progress.update(bar, description=named)
        began = progress.tasks[bar].completed
        try:
            outcome = upload(file, _moving(progress, bar, began - file.sent.lines.history))
        except UploadError as error:
            console.print(Text.assemble(("✗ ", "red"), f"{named}: {error}"), soft_wrap=True)
            return False
        progress.update(bar, completed=began + file.rows_left)
        if outcome.problem is not None:
            confirmed = f"{outcome.sent.lines.history} of {file.run.rows} rows are confirmed"
            text = f"{named} failed, {confirmed}: {visible(outcome.problem)}"
            console.print(Text.assemble(("✗ ", "red"), text), soft_wrap=True)
            return outcome.concerns_all
        place = f"  {visible(outcome.url)}" if outcome.url else ""
        text = f"{named}: {_number_of(file.rows_left, 'row')} uploaded{place}"
        console.print(Text.assemble(("✓ ", "green"), text), soft_wrap=True)
    return None


def _moving(progress: Progress, bar: TaskID, offset: float) -> Callable[[int], None]:
    return lambda rows: progress.update(bar, completed=offset + rows)


def _sync_summary(
    plan: Sequence[UploadRun],
    wanted: Sequence[UploadRun],
    refused: Sequence[UploadRun],
    failed: Sequence[UploadRun],
    dry_run: bool,
) -> Text:
    counts = {
        "to upload" if dry_run else "uploaded": len(wanted) - len(failed),
        "uploaded before": sum(run.is_uploaded and not run.is_uploaded_by_log for run in plan),
        f"{_BY_LOG} (--again uploads them all the same)": sum(run.is_uploaded_by_log for run in plan),
        "not uploaded": len(failed),
        "refused (--force uploads them all the same)": sum(not run.dangers for run in refused),
        "refused (see what each line says to give)": sum(bool(run.dangers) for run in refused),
    }
    parts = [f"{count} {words}" for words, count in counts.items() if count]
    end = "\nNothing was uploaded: this was a dry run." if dry_run else ""
    return Text(f"\n{_number_of(len(plan), 'run')}: {', '.join(parts) or 'nothing to do'}{end}")


# --- words, numbers and pictures --------------------------------------------------------------------------------------


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw a series as a line of block characters, scaled between its smallest and its largest value.

    Args:
        values: The series, oldest first. NaN is drawn as a gap, ``·``.
        width: The number of characters, at most; a longer series is shortened by the mean of equal stretches.

    Returns:
        For example ``"▁▃▅▇█"``; a constant series is a line at half height.
    """
    series = shortened(values, width)
    finite = [value for value in series if math.isfinite(value)]
    if not finite:
        return _GAP * len(series)
    low, high = min(finite), max(finite)
    return "".join(_block(value, low, high) for value in series)


def shortened(values: Sequence[float], length: int) -> list[float]:
    """Shorten a series to at most `length` means over equal stretches; NaN where a stretch has no finite value."""
    if len(values) <= length:
        return list(values)
    bounds = [round(index * len(values) / length) for index in range(length + 1)]
    return [_mean(values[start:end]) for start, end in pairwise(bounds)]


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(value / len(finite) for value in finite) if finite else math.nan


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return _GAP
    half_range = high / 2 - low / 2  # halved, because the difference of two floats may overflow
    if half_range == 0:
        return _BLOCKS[len(_BLOCKS) // 2 - 1]
    height = (value / 2 - low / 2) / half_range
    return _BLOCKS[min(int(height * len(_BLOCKS)), len(_BLOCKS) - 1)]


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:  # noqa: PLR2004  # digits a float holds
        return str(int(value))
    return f"{value:.5g}"


def _number_of(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def _console() -> Console:
    """The terminal at its width; anything else so wide that nothing is cut or folded."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every stream can show the blocks of a sparkline
    console = Console()
    if not console.is_terminal:
        console.width = 10_000
    return console


def _table() -> Table:
    return Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        header_style="dim",
        border_style="dim",
    )


def _print_json(value: Any) -> None:
    print(json.dumps(_json_value(value), indent=2, allow_nan=False))


def _json_value(value: Any) -> Any:
    """`value` with NaN and infinities as strings, for which JSON has no numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _json_value(item) for name, item in value.items()}
    return [_json_value(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class _Command:
    """One command of the command line; `run` returns the exit code."""

    name: str
    summary: str
    description: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


_COMMANDS = (
    _Command(
        name="plan",
        summary="print which W&B run every rank would open",
        description="Print, for every rank of a job, which W&B run it would open. Nothing is started or written.",
        example="--nodes 2 --procs-per-node 4 --run-mode shared --rank-scope worker",
        add_arguments=_add_plan_arguments,
        run=_plan,
    ),
    _Command(
        name="doctor",
        summary="say what this process would be taken for, and whether wandb is set up",
        description="Say what this process would be taken for if it called dist_wandb.init now, from which source, "
        "what run it would open, whether wandb is configured and its server answers, and what to look out for. Start "
        "it as you start your script. Nothing is opened or written. Exit code 1 if it would be an error, or if the "
        "server was not asked as the API key may not go there.",
        example="--run-mode shared",
        add_arguments=_add_doctor_arguments,
        run=_doctor,
    ),
    _Command(
        name="show",
        summary="print the W&B runs that lie below a directory",
        description="Print the W&B runs that lie below a directory: who wrote them, how they ended, and the last, "
        "smallest and largest value of each metric. Nothing is uploaded or changed. Exit code 1 if one cannot be read.",
        example="wandb --metric 'val/*'",
        add_arguments=_add_show_arguments,
        run=_show,
    ),
    _Command(
        name="sync",
        summary="upload the W&B runs that lie below directories",
        description="Upload the W&B runs that lie below directories: offline ones, and online ones whose upload was "
        "cut off. The ranks of a shared run become one shared run. What W&B has confirmed is not sent again, so the "
        "command can be repeated. Exit code 0 if everything is uploaded, else 1.",
        example="--dry-run wandb",
        add_arguments=_add_sync_arguments,
        run=_sync,
    ),
)
