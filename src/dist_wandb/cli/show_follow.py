"""Show runs while their files grow: ``dist-wandb show --follow``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dist_wandb.cli.command import number, number_of
from dist_wandb.cli.show_cards import STATES, card, matching
from dist_wandb.errors import DistWandbError, in_words, visible
from dist_wandb.reading.runs import LocalRun, brought_together
from dist_wandb.wandb_files.finding import files_below
from dist_wandb.wandb_files.reading import Contents, StoredRun
from dist_wandb.wandb_files.records import PAUSE, read_records
from dist_wandb.wandb_files.small_files import Directory

_INTERVAL = 1.0  # seconds between two updates
_SEARCH = 5.0  # seconds between two searches for files of ranks that start later
_LATE_ENDS = 20.0  # seconds to wait for the ends of writers after the end of their run
_IDLE_TIMEOUT = 6 * 3600.0  # seconds without new records of a run, which was abandoned
_MOST_FILES = 256
_EMPTY = 7  # bytes of a file without records
_METRICS_IN_LINE = 4


class FollowedFile:
    """One file, which is read while it grows."""

    def __init__(self, path: Path, directory: Directory, metrics: Iterable[str]) -> None:
        self.path = path
        self.error: Exception | None = None  # why the file was not read to its end
        self.is_read: bool = False  # whether the run has ended, or cannot be read, or nothing was added for hours
        self._directory = directory
        self._contents = Contents(metrics)
        self._records = read_records(path, follow=True, within=directory)
        self._changed = time.monotonic()

    def read(self) -> bool:
        """Read the records that were added; return whether there were any."""
        has_records = False
        try:
            while not self.is_read and (record := next(self._records)) is not PAUSE:
                self._contents.add(record)
                has_records = True
                self.is_read = self._contents.exit_code is not None
        except Exception as error:  # noqa: BLE001  # printed at the end
            self.error, self.is_read = error, True
        self._changed = time.monotonic() if has_records else self._changed
        self.is_read |= time.monotonic() - self._changed > _IDLE_TIMEOUT
        return has_records

    def stored(self) -> StoredRun | None:
        """Return the current state of the run; `None` before its first record."""
        if not self._contents.run:
            return None
        return self._contents.as_run(self.path, [], self._directory)


class Followed:
    """The files of the followed runs, including files of ranks that start later. Arguments as in `follow`."""

    def __init__(self, directories: Sequence[Path], ids: Iterable[str], metrics: Sequence[str]) -> None:
        self.files: dict[Path, FollowedFile] = {}
        self._names = {f"run-{run_id}.wandb" for run_id in ids}
        self._directories = directories
        self._metrics = metrics

    def search(self) -> None:
        """Follow new files, and try files again from which nothing could be read."""
        found, _ = files_below(self._directories)
        for path, directory in found.items():
            known = self.files.get(path)
            is_dead = known is not None and known.is_read and known.stored() is None
            if path.name in self._names and (known is None or is_dead) and len(self.files) < _MOST_FILES:
                self.files[path] = FollowedFile(path, directory, self._metrics)

    def read(self) -> bool:
        """Read what was added to the files; return whether there was anything."""
        return sum(file.read() for file in self.files.values()) > 0

    def runs(self) -> list[LocalRun]:
        """Return the current state of the runs."""
        return brought_together(run for file in self.files.values() if (run := file.stored()))


def just_begun(unreadable: Iterable[Path], runs: Sequence[LocalRun]) -> list[str]:
    """Return the id of the newest run, if its file, of those not readable, is newer than `runs` and has no record."""
    times = {path: path.stat().st_mtime for path in unreadable if _is_empty(path)}
    before = max((path.stat().st_mtime for run in runs for path in run.files), default=0.0)
    newest = max(times, key=lambda path: times[path], default=None)
    return [] if newest is None or times[newest] < before else [newest.stem.removeprefix("run-")]


def _is_empty(path: Path) -> bool:
    return path.suffix == ".wandb" and path.is_file() and path.stat().st_size <= _EMPTY


def follow(directories: Sequence[Path], ids: Sequence[str], patterns: Sequence[str], out: Console) -> list[LocalRun]:
    """Show runs until they end, as cards on a terminal, else with a line for each change; return their last state."""
    followed = Followed(directories, ids, patterns)
    if not out.is_terminal:
        return _until_end(followed, lambda runs: _print_lines(out, runs, patterns))
    with Live(console=out, auto_refresh=False, transient=True) as live:
        return _until_end(
            followed,
            lambda runs: live.update(
                Group(*(part for run in runs for part in card(run, patterns, out.width))), refresh=True
            ),
        )


def _until_end(followed: Followed, show: Callable[[list[LocalRun]], None]) -> list[LocalRun]:
    searched = changed = -_SEARCH
    while True:
        now = time.monotonic()
        if now - searched >= _SEARCH:
            followed.search()
            searched = now
        has_news = followed.read()
        runs = followed.runs()
        if has_news:
            changed = now
            show(runs)
        has_ended = bool(runs) and all(run.state != "unfinished" for run in runs)
        writers = [writer for run in runs for writer in run.writers]
        if has_ended and (all(writer.state != "unfinished" for writer in writers) or now - changed > _LATE_ENDS):
            return runs
        is_over = all(file.is_read and not _is_empty(file.path) for file in followed.files.values())
        if is_over and followed.files and not followed.read():
            errors = [in_words(file.error, file.path) for file in followed.files.values() if file.error]
            if errors:
                raise DistWandbError("; ".join(errors))
            return runs
        time.sleep(_INTERVAL)


def _print_lines(out: Console, runs: Iterable[LocalRun], patterns: Sequence[str]) -> None:
    for run in runs:
        metrics = islice(matching(run.metrics, patterns).items(), _METRICS_IN_LINE)
        values = "".join(f" · {visible(name)} {number(metric.last)}" for name, metric in metrics)
        state = STATES[run.state][1] if run.state != "unfinished" else "goes on"
        line = f"{time.strftime('%H:%M:%S')}  {visible(run.id)}  {state} · {number_of(run.rows, 'row')}{values}"
        out.print(Text(line), soft_wrap=True)
    out.file.flush()
