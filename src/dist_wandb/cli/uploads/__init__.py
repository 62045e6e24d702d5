"""``dist-wandb sync``: upload the W&B runs below directories."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from dist_wandb.cli.command import add_command, add_trust_argument, console, number_of
from dist_wandb.cli.uploads.contents import Terms
from dist_wandb.cli.uploads.execution import remember, upload
from dist_wandb.cli.uploads.plan import UploadFile, UploadRun, plan_uploads
from dist_wandb.cli.uploads.state import remove_left_copies
from dist_wandb.errors import UploadError, visible
from dist_wandb.runs.client_settings import artifact_staging, client_settings, destination, own_entities
from dist_wandb.wandb_files.runs import runs_below

_BY_LOG = "uploaded while it was written, according to W&B's log beside it"


def add_to(commands: Any) -> None:
    parser = add_command(
        commands,
        "sync",
        _run,
        summary="upload the W&B runs below directories",
        about="Upload the W&B runs below directories: offline ones, and online ones whose upload was "
        "interrupted. The ranks of a shared run become one shared run. Confirmed rows are not sent again, so the "
        "command can be repeated. Exit code 0 if everything is uploaded, else 1.",
        example="--dry-run wandb",
    )
    parser.add_argument(
        "directories", metavar="DIR", type=Path, nargs="+", help="directories to search, at any depth; or .wandb files"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan without uploading")
    parser.add_argument(
        "--force",
        action="store_true",
        help="upload refused runs as well: rows may be duplicated or missing, see the reasons",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="the directories are your own: accept W&B's marks of earlier uploads, and upload all files that links and "
        "records name, to any owner that they name",
    )
    parser.add_argument(
        "--entity",
        metavar="NAME",
        help="upload to this user or team (default: the owner in the files, if it is known to be yours)",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="upload everything again from the start, for example to another server",
    )
    add_trust_argument(parser)


def _run(arguments: argparse.Namespace) -> int:
    runs, errors = runs_below(arguments.directories, metrics=())
    server = destination(arguments.trust_server)
    terms = Terms(
        trust=arguments.trust,
        again=arguments.again,
        entity=arguments.entity,
        server=server.url,
        staging=artifact_staging(),
        owners=own_entities(),
        default=client_settings().entity,
    )
    plan = plan_uploads(runs, terms)
    refused = [run for run in plan if not run.is_uploaded and (run.dangers or (run.refusals and not arguments.force))]
    out = console()
    for run in plan:
        out.print(_planned_upload(run, is_refused=run in refused), soft_wrap=True)
    for _, error in errors:
        out.print(Text.assemble(("✗ not readable  ", "red"), str(error)), soft_wrap=True)
    wanted = [run for run in plan if not run.is_uploaded and run not in refused]
    if wanted:
        out.print(Text(f"to {visible(server.shown)} (from {visible(server.source)})", "dim"), soft_wrap=True)
    failed: list[UploadRun] = []
    if wanted and server.refusal:
        out.print(Text.assemble(("✗ ", "red"), visible(server.refusal)), soft_wrap=True)
        failed = wanted
    elif not arguments.dry_run:
        remove_left_copies()
        with _interrupted_by_signals():
            failed = _upload_all(wanted, out)
    if arguments.trust and not arguments.dry_run:
        for file in (file for run in plan for file in run.files if file.is_uploaded):
            with suppress(UploadError):  # then `--trust` is needed again
                remember(file)
    out.print(_summary(plan, wanted, refused, failed, arguments.dry_run), soft_wrap=True)
    return 1 if refused or failed or errors else 0


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like an interrupt; by default the upload would continue without this process."""

    def end(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number))

    with ExitStack() as until_end:
        with suppress(ValueError):  # not in the main thread, where handlers cannot be set
            for name in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(name) is signal.SIG_DFL:  # keep handlers of `nohup` and of callers
                    signal.signal(name, end)
                    until_end.callback(signal.signal, name, signal.SIG_DFL)
        yield


def _planned_upload(run: UploadRun, *, is_refused: bool) -> Text:
    last = run.files[-1].run  # it determines the run's name, config and tags
    kind = f"shared run of {number_of(len(run.files), 'file')}" if run.files[0].run.shared_as else "run"
    if run.is_uploaded:
        what, style = _BY_LOG if run.is_uploaded_by_log else "uploaded already", "dim"
    else:
        what, style = ("refused", "red") if is_refused else ("to upload", "green")
    facts = [kind, number_of(sum(file.run.rows for file in run.files), "row")]
    facts += [f"project {visible('/'.join(filter(None, (run.entity, run.project))))}"] if run.project else []
    title = Text.assemble(("● ", style), (visible(run.run_id), "bold"), "  ", visible(last.name or ""))
    title.rstrip()
    lines = [title, Text.assemble((what, style), *(f" · {fact}" for fact in facts))]
    for number, file in enumerate(run.files, start=1):
        done = _BY_LOG if file.by_log else "uploaded already"
        left = done if file.is_uploaded else number_of(file.rows_left, "row")
        role = file.run.shared_as
        writer = f"{visible(role.label or '')}{' (primary)' if role.primary else ''}: " if role else ""
        lines.append(Text.assemble(f"{number}. {writer}{left}", (f"  {visible(str(file.path.parent))}", "dim")))
    lines += [Text(f"! {visible(reason)}", "yellow") for reason in (*run.dangers, *run.refusals)]
    lines += [Text(visible(note), "dim") for note in run.notes]
    return Text("\n  ").join(lines)


def _upload_all(runs: Sequence[UploadRun], out: Console) -> list[UploadRun]:
    """Upload runs one after the other; return those that failed or were not tried."""
    failed: list[UploadRun] = []
    rows = sum(file.rows_left for run in runs for file in run.files)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn("rows"))
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
        bar = progress.add_task("", total=rows)
        for number, run in enumerate(runs):
            results = (_upload_file(file, progress, bar) for file in run.files if not file.is_uploaded)
            concerns_all = next((result for result in results if result is not None), None)
            if concerns_all is not None:
                failed.append(run)
            if concerns_all:
                failed += runs[number + 1 :]
                break
    return failed


def _upload_file(file: UploadFile, progress: Progress, bar: TaskID) -> bool | None:
    """Upload a file; return `None`, or whether uploads of other runs would fail alike."""
    label = file.run.shared_as.label if file.run.shared_as else None
    named = visible(f"{file.run.run_id} {label or ''}".rstrip())
    progress.update(bar, description=named)
    out, began = progress.console, progress.tasks[bar].completed
    try:
        outcome = upload(
            file,
            lambda rows: progress.update(bar, completed=began + rows),
            lambda text: out.print(f"  {named}: {visible(text)}", soft_wrap=True, markup=False),
        )
    except UploadError as error:
        out.print(Text.assemble(("✗ ", "red"), f"{named}: {error}"), soft_wrap=True)
        return False
    progress.update(bar, completed=began + file.rows_left)
    if outcome.problem is not None:
        confirmed = f"{outcome.sent.history} of {file.run.rows} rows are confirmed"
        text = f"{named} failed, {confirmed}: {visible(outcome.problem)}"
        out.print(Text.assemble(("✗ ", "red"), text), soft_wrap=True)
        return outcome.concerns_all
    address = f"  {visible(outcome.url)}" if outcome.url else ""
    text = f"{named}: {number_of(file.rows_left, 'row')} uploaded{address}"
    out.print(Text.assemble(("✓ ", "green"), text), soft_wrap=True)
    return None


def _summary(
    plan: Sequence[UploadRun],
    wanted: Sequence[UploadRun],
    refused: Sequence[UploadRun],
    failed: Sequence[UploadRun],
    dry_run: bool,
) -> Text:
    counts = {
        "to upload" if dry_run else "uploaded": len(wanted) - len(failed),
        "uploaded before": sum(run.is_uploaded and not run.is_uploaded_by_log for run in plan),
        f"{_BY_LOG} (--again uploads them anyway)": sum(run.is_uploaded_by_log for run in plan),
        "not uploaded": len(failed),
        "refused (--force uploads them anyway)": sum(not run.dangers for run in refused),
        "refused (see the reasons above)": sum(bool(run.dangers) for run in refused),
    }
    parts = [f"{count} {words}" for words, count in counts.items() if count]
    end = "\nNothing was uploaded: this was a dry run." if dry_run else ""
    return Text(f"\n{number_of(len(plan), 'run')}: {', '.join(parts) or 'nothing to do'}{end}")
