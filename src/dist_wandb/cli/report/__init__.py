"""``dist-wandb report``: write the W&B runs below a directory into one HTML file.

A run of a report is a shared run, or a job that has a run for each rank.
"""

from __future__ import annotations

import argparse
import webbrowser
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dist_wandb import __version__
from dist_wandb.cli import command
from dist_wandb.cli.report import page
from dist_wandb.cli.report.charts import Drawing, axes_of, charts_of, heat_maps_of
from dist_wandb.cli.report.files import MOST_NAMES, FileForReport
from dist_wandb.cli.report.media import MediaReader, cell_text
from dist_wandb.cli.report.thinning import Budget
from dist_wandb.cli.uploads.plan import is_uploaded
from dist_wandb.errors import ConfigurationError, ReadError, visible
from dist_wandb.wandb_files.finding import files_below, natural_order
from dist_wandb.wandb_files.reading import State, StoredRun, read_each
from dist_wandb.wandb_files.runs import LocalRun, brought_together, parts_of, runs_below
from dist_wandb.wandb_files.selection import flattened, timings_of
from dist_wandb.wandb_files.sidecar import stalls_of
from dist_wandb.wandb_files.small_files import Directory
from dist_wandb.wandb_files.stragglers import findings

_STRETCHES = 120_000  # of all curves together: about 6 MB of the page
_ROOM_FOR_MEDIA = 4 * 2**20  # bytes
_MOST_CONFIG, _LONGEST_NAME = 2000, 200
_SHOWN_VALUES = 8  # of one name of the config, if writers differ
_LINES_OF_CONSOLE, _LEAST_LINES = 20_000, 20  # of all processes together; of each one


def add_to(commands: Any) -> None:
    parser = command.add_command(
        commands,
        "report",
        _run,
        summary="write W&B runs into one HTML file that compares them",
        about="Write the W&B runs below directories into one HTML file that needs no network: a table that compares "
        "the runs, curves with the ranks' spread, who is slow and when, system metrics, config, media and console. "
        "Needs plotly: pip install 'dist-wandb[report]'. Nothing is uploaded or changed. Exit code 1 if a run cannot "
        "be read.",
        example="wandb --where 'lr>=0.1' --open",
    )
    command.add_selection_arguments(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, default="report.html", help="the file to write (%(default)s)"
    )
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    parser.add_argument(
        "--metric",
        action="append",
        metavar="GLOB",
        help="only metrics whose name matches, such as 'val/*'; may be given several times",
    )
    command.add_secrets_argument(parser)


def _run(arguments: argparse.Namespace) -> int:
    output: Path = arguments.output
    directories, names = command.directories_and_names(arguments.what)
    page.plotly_script()  # fails before the runs are read, which may take long
    try:
        page.check_target(output)
        with command.working("reading the runs"):
            files = None
            if names or arguments.last or arguments.state or arguments.where:
                stored, errors = runs_below(directories, ("*",) if arguments.where else None)  # its values are compared
                chosen = command.selected(brought_together(stored), names, arguments)
                files = {part.path: part.directory for run in chosen for part in parts_of(run)}, errors
            report = build(directories, arguments.metric or ("*",), files, secrets=arguments.secrets)
            size = page.write_page(report, output)
    except OSError as error:
        raise ReadError(f"{output} cannot be written: {error.strerror or error}. Give another -o FILE.") from None
    for reason in report["unreadable"]:
        print(f"not readable: {visible(reason)}")
    print(f"{command.number_of(len(report['runs']), 'run')} in {visible(str(output))} ({size / 1e6:.1f} MB)")
    if arguments.open and not webbrowser.open(output.resolve().as_uri()):
        print("No browser could be started. Open the file in a browser.")
    return 1 if report["unreadable"] else 0


@np.errstate(all="ignore")  # sums of huge values are infinite
def build(
    directories: Sequence[Path],
    metrics: Sequence[str] = ("*",),
    files: tuple[dict[Path, Directory], list[tuple[Path, ReadError]]] | None = None,
    *,
    secrets: bool = False,
) -> page.Part:
    """Read the `files` below directories, all if `None`, beside which the errors stand; raise `ReadError` if none."""
    chosen, errors = files or files_below(directories)
    budget = Budget(_STRETCHES)

    def read(path: Path, within: Directory) -> FileForReport:
        file = FileForReport(path, within, budget, metrics)
        file.read(skipped=("summary",))
        file.end(secrets=secrets)
        return file

    found, unreadable = read_each(chosen, read)
    problems = [str(error) for _, error in unreadable + errors]
    below = " or ".join(repr(str(directory)) for directory in directories)
    if not found and problems:
        raise ReadError(f"None of the runs below {below} can be read. {' '.join(problems[:5])}")
    if not found:
        raise ConfigurationError(f"No run below {below} is selected. Give other names, --where or --state.")
    return {
        "directories": [str(directory) for directory in directories],
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "version": __version__,
        "runs": sections(found, MediaReader(_ROOM_FOR_MEDIA)),
        "unreadable": problems[:100],
    }


def sections(files: Iterable[FileForReport], media: MediaReader) -> list[page.Part]:
    """Return the runs, by project and group, the newest first within each group."""
    by_path = {file.path: file for file in files}
    together: dict[tuple[str, ...], list[LocalRun]] = defaultdict(list)
    for run in brought_together(by_path.values()):
        together[run.writers[0].parts[0].job or ("run", run.project or "", run.id)].append(run)
    lines = max(_LEAST_LINES, _LINES_OF_CONSOLE // max(1, len(by_path)))
    runs = [_section(group, by_path, media, lines) for group in together.values()]
    runs.sort(key=lambda run: natural_order(run["name"]))
    runs.sort(key=lambda run: run["started"] or "", reverse=True)
    runs.sort(key=lambda run: (run["project"] or "", run["group"] or ""))
    return runs


def _section(
    of: Sequence[LocalRun], by_path: Mapping[Path, FileForReport], media: MediaReader, lines: int
) -> page.Part:
    files = [by_path[path] for run in sorted(of, key=lambda run: run.writers[0].rank or 0) for path in run.files]
    names = [_writer_name(file) for file in files]
    named = list(zip(names, files, strict=True))
    first = dict(named)[names[0]]  # the last file of the primary
    job = first.job
    world = first.sidecar.world_size if first.sidecar else None
    drawing = Drawing(named, job is not None, world)
    timings = timings_of(of[0].metrics)
    images: list[page.Part] = []
    tables: list[page.Part] = []
    missed: list[str] = []
    for name, file in named:
        found, more, notes = media.read(file.media, file.media_left_out, file)
        images += found
        tables += more
        missed += [f"{note} ({name})" if len(files) > 1 else note for note in notes]
    del missed[50:]
    degraded = [file.degraded for file in files]
    if left_out := max(file.left_out for file in files):
        missed.insert(
            0, f"at least {left_out} metrics beyond the first {MOST_NAMES}, or with long names (--metric GLOB picks)"
        )
    facts, differing = _together([file.facts for file in files], names)
    config, more_differing = _together([_flat(file.config) for file in files], names)
    started = _text(min(filter(None, (run.started for run in of)), default=None))
    run_id = page.plain((job[2] or job[3]) if job else first.run_id)[:_LONGEST_NAME]
    states = {file.state for file in dict(named).values()}  # of the last file of each writer
    state: State = "failed" if "failed" in states else "unfinished" if "unfinished" in states else "finished"
    return {
        "name": run_id if job else _text(first.name) or run_id,
        "run_id": run_id,  # or the name of the job's group
        "project": _text(first.project),
        "group": _text(first.group),
        "started": started,
        "state": state,
        "mode": f"{first.sidecar.run_mode}/{first.sidecar.rank_scope}" if first.sidecar else "",
        "world": world,
        "rows": sum(file.rows for file in files),
        "writers": [_writer(name, file) for name, file in named],
        "degraded": {  # rows to which some ranks did not contribute, and how many ranks
            "rows": sum(one["rows"] for one in degraded),
            "most": max(one["most"] for one in degraded),
            "spans": sorted(span for one in degraded for span in one["spans"])[:100],
        },
        "facts": facts,
        "config": config,
        "differing": [*differing, *more_differing],
        "axes": axes_of(drawing, started),
        "charts": charts_of(drawing.metrics),
        "system": charts_of(drawing.system),
        "heat": heat_maps_of(drawing),
        "slowest": drawing.slowest(timings),
        "findings": findings(timings, world or 0),
        "images": images,
        "tables": tables,
        "console": [
            {"writer": name, "lines": shown, "dropped": file.console.count - len(shown)}
            for name, file in named
            if (shown := list(file.console.lines)[-lines:])
        ],
        "notes": missed,
    }


def _writer_name(stored: StoredRun) -> str:
    sidecar = stored.sidecar
    if sidecar is None or sidecar.world_size == 1:
        return "the run"
    if sidecar.run_mode == "auto" and sidecar.shared and not sidecar.primary:
        return page.plain(sidecar.label or f"node {sidecar.node_rank}")
    return f"rank {sidecar.global_rank}"


def _writer(name: str, file: FileForReport) -> page.Part:
    sidecar = file.sidecar
    stalls, count = stalls_of([file.directory])
    more = [f"stood still {count - len(stalls)} times before"] if count > len(stalls) else []
    problems = (*more, *(f"stood still {stall}" for stall in stalls), *file.problems)
    return {
        "name": name,
        "label": sidecar.label if sidecar else None,
        "node": sidecar.node_rank if sidecar else None,
        "primary": sidecar.primary if sidecar else True,
        "state": file.state,
        "exit_code": file.exit_code,
        "rows": file.rows,
        "last": file.last,
        "uploaded": is_uploaded(file),
        "problems": list(map(page.plain, problems)),
    }


def _together(configs: Sequence[dict[str, str]], names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the config of the first file, with all values of names that differ between files; and these names."""
    shown: dict[str, str] = {}
    differing = []
    for name in dict.fromkeys(name for config in configs for name in config):
        if len(shown) == _MOST_CONFIG:
            break
        values = [config.get(name, "(not set)") for config in configs]
        shown[name] = values[0]
        if len(set(values)) > 1:
            differing.append(name)
            texts = [f"{writer}: {value}" for writer, value in zip(names, values, strict=True)]
            more = [f"and {len(texts) - _SHOWN_VALUES} more"] if len(texts) > _SHOWN_VALUES else []
            shown[name] = " · ".join([*texts[:_SHOWN_VALUES], *more])
    return shown, differing


def _flat(config: Mapping[str, Any]) -> dict[str, str]:
    return {
        page.plain(name)[:_LONGEST_NAME]: cell_text(value) for name, value in islice(flattened(config), _MOST_CONFIG)
    }


def _text(value: str | None) -> str | None:
    return None if value is None else page.plain(value)[:_LONGEST_NAME]
