"""Show runs while their files grow: ``dist-wandb show --follow``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dist_wandb.cli.command import number, number_of
from dist_wandb.cli.show_cards import STATES, card, matching
from dist_wandb.errors import DistWandbError, in_words, visible
from dist_wandb.reading.files import files_below
from dist_wandb.reading.runs import LocalRun, brought_together
from dist_wandb.wandb_files.inspection import inspect
from dist_wandb.wandb_files.reading import Contents, StoredRun, size_of
from dist_wandb.wandb_files.small_files import Directory

_INTERVAL = 1.0  # seconds between two updates
_SEARCH = 5.0  # seconds between two searches for files of ranks that start later
_LATE_ENDS = 20.0  # seconds to wait for the ends of writers after the end of their run
_MOST_WAITING = 500_000  # values of one file
_DRAINED_AT_ONCE = 20_000  # records; the reader may be faster
_TIME_TO_STOP = 5.0  # seconds
_MOST_FILES = 256
_EMPTY = 7  # bytes of a file without records
_METRICS_IN_LINE = 4


class FollowedFile:
    """One file, read on a thread of its own while it grows, until `stopped` is set."""

    def __init__(self, path: Path, directory: Directory, metrics: Iterable[str], stopped: threading.Event) -> None:
        self.path = path
        self._directory = directory
        self.contents: Contents = Contents(metrics)  # of the records that were taken with `drain`
        self.error: Exception | None = None  # why the file was not read to its end
        self.is_read: bool = False  # whether the reader has ended
        self._records: SimpleQueue[tuple[int, dict[str, Any]]] = SimpleQueue()  # an interrupt leaves no lock held
        self._put_values = self._drained_values = 0  # only one thread writes each
        self._stopped = stopped
        self._problems: list[str] = []
        threading.Thread(target=self._read, name="dist_wandb-follow", daemon=True).start()

    def drain(self) -> bool:
        """Process the records that were read; return whether there were any."""
        has_records = False
        with suppress(Empty):
            for _ in range(_DRAINED_AT_ONCE):
                size, record = self._records.get_nowait()
                self.contents.add(record)
                self._drained_values += size
                has_records = True
        return has_records

    def stored(self) -> StoredRun | None:
        """Return the current state of the run; `None` before its first record."""
        if not self.contents.run:
            return None
        return self.contents.as_run(self.path, self._problems, self._directory)

    def _read(self) -> None:
        try:
            self._problems = inspect(self.path, self._put, self._stopped, follow=True, within=self._directory)
        except Exception as error:  # noqa: BLE001  # reported on the main thread
            self.error = error
        finally:
            self.is_read = True

    def _put(self, record: dict[str, Any]) -> None:
        size = size_of(record)
        while self._put_values - self._drained_values > _MOST_WAITING and not self._stopped.is_set():
            time.sleep(0.01)
        self._put_values += size
        self._records.put((size, record))


class Followed:
    """The files of the followed runs, including files of ranks that start later. Arguments as in `follow`."""

    def __init__(self, directories: Sequence[Path], ids: Iterable[str], metrics: Sequence[str]) -> None:
        self.files: dict[Path, FollowedFile] = {}
        self._names = {f"run-{run_id}.wandb" for run_id in ids}
        self._directories = directories
        self._metrics = metrics
        self._stopped = threading.Event()

    def search(self) -> None:
        """Follow new files, and try files again from which nothing could be read."""
        found, _ = files_below(self._directories)
        for path, directory in found.items():
            known = self.files.get(path)
            is_dead = known is not None and known.is_read and not known.contents.run
            if path.name in self._names and (known is None or is_dead) and len(self.files) < _MOST_FILES:
                self.files[path] = FollowedFile(path, directory, self._metrics, self._stopped)

    def drain(self) -> bool:
        """Process the records that were read of all files; return whether there were any."""
        return sum(file.drain() for file in self.files.values()) > 0

    def runs(self) -> list[LocalRun]:
        """Return the current state of the runs."""
        return brought_together(run for file in self.files.values() if (run := file.stored()))

    def stop(self) -> None:
        """Stop all readers."""
        self._stopped.set()
        deadline = time.monotonic() + _TIME_TO_STOP
        while time.monotonic() < deadline and not all(file.is_read for file in self.files.values()):
            time.sleep(0.02)


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
    try:
        if not out.is_terminal:
            return _until_end(followed, lambda runs: _print_lines(out, runs, patterns))
        with Live(console=out, auto_refresh=False, transient=True) as live:
            return _until_end(
                followed,
                lambda runs: live.update(
                    Group(*(part for run in runs for part in card(run, patterns, out.width))), refresh=True
                ),
            )
    finally:
        followed.stop()


def _until_end(followed: Followed, show: Callable[[list[LocalRun]], None]) -> list[LocalRun]:
    searched = changed = -_SEARCH
    while True:
        now = time.monotonic()
        if now - searched >= _SEARCH:
            followed.search()
            searched = now
        if followed.drain():
            changed = now
            show(followed.runs())
        runs = followed.runs()
        has_ended = bool(runs) and all(run.state != "unfinished" for run in runs)
        writers = [writer for run in runs for writer in run.writers]
        if has_ended and (all(writer.state != "unfinished" for writer in writers) or now - changed > _LATE_ENDS):
            return runs
        is_over = all(file.is_read and not _is_empty(file.path) for file in followed.files.values())
        if is_over and followed.files and not followed.drain():
            errors = [in_words(file.error, file.path) for file in followed.files.values() if file.error]
            if errors:
                raise DistWandbError("; ".join(errors))
            return followed.runs()
        time.sleep(_INTERVAL)


def _print_lines(out: Console, runs: Iterable[LocalRun], patterns: Sequence[str]) -> None:
    for run in runs:
        metrics = islice(matching(run.metrics, patterns).items(), _METRICS_IN_LINE)
        values = "".join(f" · {visible(name)} {number(metric.last)}" for name, metric in metrics)
        state = STATES[run.state][1] if run.state != "unfinished" else "goes on"
        line = f"{time.strftime('%H:%M:%S')}  {visible(run.id)}  {state} · {number_of(run.rows, 'row')}{values}"
        out.print(Text(line), soft_wrap=True)
    out.file.flush()
