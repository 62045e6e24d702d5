"""A run's rows on their way into W&B, also when wandb's own process dies: then they go on into a record on disk."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dist_wandb.errors import DistWandbError
from dist_wandb.runs import finishing, wandb_private, wandb_process
from dist_wandb.runs.interception import original
from dist_wandb.runs.null_run import NullRun
from dist_wandb.wandb_files.reading import last_rows

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun

_log = logging.getLogger("dist_wandb")

_UNSAFE = 4.0  # seconds that a row may take to be on disk; wandb's process flushes every second
_MOST_UNSAFE = 20_000  # rows kept for that time


class Record:
    """What rows are logged into.

    Args:
        run: The run, or a `NullRun`.
        rank: Index of this rank in the job, for messages.
        reopen: Opens another run on disk, given the id and the config of the one that is lost.
    """

    def __init__(self, run: AnyRun, rank: int, reopen: Callable[[str, Mapping[str, Any]], AnyRun]) -> None:
        self.run = run
        self._rank = rank
        self._reopen = reopen
        self._service = _Service.current
        self._unsafe: deque[_LoggedRow] = deque(maxlen=_MOST_UNSAFE)
        self._lock = threading.RLock()  # a signal handler may log in the middle of the replacement
        self._is_replacing = False
        self._late: deque[_LoggedRow] = deque()  # rows that it logged then

    def __bool__(self) -> bool:
        """Whether there is a run."""
        return bool(self.run)

    def log(self, row: dict[str, Any], **kwargs: Any) -> None:
        """Log a row, as `wandb.Run.log` does; if wandb's own process is gone, into a record on disk.

        Raises:
            Exception: What wandb raised over this row: a value that it cannot write, or a file of the row's for which
                there is no space. The run is well, and the row is not written.
        """
        logged = _LoggedRow(time.monotonic(), row, kwargs)
        run = self.run
        try:
            _log_once_more_for_media(run, logged)
        except Exception as error:
            if not wandb_process.has_lost_service(run, error):
                raise
            if not self._switch(run, error):
                self._late.append(logged)
                return
            _log_once_more_for_media(self.run, logged)
        self._unsafe.append(logged)
        while self._unsafe and self._unsafe[0].time < logged.time - _UNSAFE:
            with suppress(IndexError):  # another thread, or a signal handler, was faster
                self._unsafe.popleft()

    def finish(self, exit_code: int | None) -> str | None:
        """End the run; what went wrong, as `dist_wandb.runs.finishing.finish` says it. Never raises."""
        run = self.run
        try:
            return finishing.finish(run, exit_code)
        except Exception as error:  # noqa: BLE001  # training has ended well all the same
            if not wandb_process.is_loss_of_service(error):
                return f"the run {run.id} could not be ended: {error!r}"
            self._switch(run, error)
        try:
            return finishing.finish(self.run, exit_code)
        except Exception as error:  # noqa: BLE001  # likewise
            return f"the run {run.id} could not be ended: {error!r}"

    def replace(self, run: AnyRun, error: Exception) -> None:
        """Go on in a record on disk, because somebody else has found `run` without wandb's own process.

        Nothing is done if `run` has been replaced already.
        """
        self._switch(run, error)

    def _switch(self, lost: AnyRun, error: Exception) -> bool:
        """Go on in another run of the same id, on disk, beginning with what the lost one had not written there yet.

        Returns:
            Whether there is another run. It is not there yet where the thread that opens it is asked again, by a signal
            handler that interrupts it.
        """
        with self._lock:
            if self._is_replacing:
                return False
            if self.run is not lost:
                return True  # another thread was faster
            self._is_replacing = True
            try:
                self._go_on_on_disk(lost, error)
            finally:
                self._is_replacing = False
            return True

    def _go_on_on_disk(self, lost: AnyRun, error: Exception) -> None:
        directory = Path(str(lost.dir)).parent
        _log.warning(
            "dist_wandb: wandb's own process is gone on rank %d (%s). The run %s goes on in a record on disk, "
            "beside %s. Upload both with: dist-wandb sync %s",
            self._rank,
            error,
            lost.id,
            directory,
            directory.parent,
        )
        if wandb_private.uses_current_service(lost):  # otherwise new runs have another process, which is well
            self._service = _Service.replace(self._service)
        try:
            self.run = self._reopen(str(lost.id), dict(lost.config))
        except DistWandbError as second:
            self.run = NullRun()
            _log.warning("dist_wandb: rank %d cannot write it there: %s. It logs no more.", self._rank, second)
        self._replay(self._not_in(directory))

    def _replay(self, rows: list[_LoggedRow]) -> None:
        """Log rows once more; of those with files that are gone, the numbers."""
        shortened = 0
        while rows or self._late:
            logged = rows.pop(0) if rows else self._late.popleft()
            try:
                original(self.run, "log")(logged.row, **logged.arguments)
            except Exception:  # noqa: BLE001  # one row's problem must not cost the others
                shortened += 1
                with suppress(Exception):
                    original(self.run, "log")(_numbers_of(logged.row), **logged.arguments)
        if shortened:
            _log.warning(
                "dist_wandb: rank %d could write only the numbers of %d of the rows that wandb's process took with it.",
                self._rank,
                shortened,
            )

    def _not_in(self, directory: Path) -> list[_LoggedRow]:
        """The last rows that are not in the file of the lost run."""
        unsafe = list(self._unsafe)
        written: set[Any] = set()
        with suppress(DistWandbError):
            for path in directory.glob("*.wandb"):
                written.update(map(_fingerprint, last_rows(path, 2 * len(unsafe))))
        return [logged for logged in unsafe if _fingerprint(logged.row) not in written]


class _LoggedRow(NamedTuple):
    """A row as it was logged."""

    time: float
    row: dict[str, Any]
    arguments: dict[str, Any]


def _log_once_more_for_media(run: AnyRun, logged: _LoggedRow) -> None:
    """Log a row; again, if the directory is missing that wandb writes the files of tables and the like to.

    Forked processes remove it at their end, and so do programs that clean up the temporary directory.
    """
    try:
        original(run, "log")(logged.row, **logged.arguments)
    except FileNotFoundError as error:
        if not wandb_process.restore_media_directory(error):
            raise
        original(run, "log")(logged.row, **logged.arguments)


class _Service:
    """wandb's own process, which all runs of this process write through: how often it was replaced."""

    current = 0
    _lock = threading.Lock()

    @classmethod
    def replace(cls, seen: int) -> int:
        """Have a new one, unless somebody has replaced the one that was seen to be gone."""
        with cls._lock:
            if seen == cls.current:
                wandb_process.tear_down_service()
                cls.current += 1
            return cls.current


def _fingerprint(row: Mapping[str, Any]) -> frozenset[tuple[str, float | str]]:
    """What tells a row from others, as it is logged and as it is read back: its numbers."""
    numbers = {name: _number(value) for name, value in row.items() if not name.startswith("_")}
    return frozenset(
        (name, "NaN" if math.isnan(number) else number) for name, number in numbers.items() if number is not None
    )


def _numbers_of(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if _number(value) is not None}


def _number(value: Any) -> float | None:
    """Numbers of Python and numpy, and tensors of one element; `None` for what is no number."""
    with suppress(Exception):  # values have code of their own
        plain = value.item() if hasattr(value, "item") else value
        return float(plain) if isinstance(plain, (int, float)) else None
    return None
