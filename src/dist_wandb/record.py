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
from typing import TYPE_CHECKING, Any

from dist_wandb import run as runs
from dist_wandb.errors import DistWandbError
from dist_wandb.offline import last_rows
from dist_wandb.run import NullRun

if TYPE_CHECKING:
    from dist_wandb.run import AnyRun

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
        self._unsafe: deque[tuple[float, dict[str, Any]]] = deque(maxlen=_MOST_UNSAFE)
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        """Whether there is a run."""
        return bool(self.run)

    def log(self, row: dict[str, Any], **kwargs: Any) -> None:
        """Log a row, as `wandb.Run.log` does; if wandb's own process is gone, into a record on disk."""
        run = self.run
        try:
            run.log(row, **kwargs)
        except OSError as error:
            self._switch(run, error)
            self.run.log(row, **kwargs)
        now = time.monotonic()
        with self._lock:
            self._unsafe.append((now, row))
            while self._unsafe and self._unsafe[0][0] < now - _UNSAFE:
                self._unsafe.popleft()

    def finish(self, exit_code: int | None) -> str | None:
        """End the run; what went wrong, as `dist_wandb.run.finish` says it. Never raises."""
        run = self.run
        try:
            return runs.finish(run, exit_code)
        except Exception as error:  # noqa: BLE001  # OSError or one of wandb's own: its process is gone
            self._switch(run, error)
        try:
            return runs.finish(self.run, exit_code)
        except Exception as error:  # noqa: BLE001  # training has ended well all the same
            return f"the run {run.id} could not be ended: {error!r}"

    def replace(self, error: Exception) -> None:
        """Go on in a record on disk, because somebody else has found wandb's own process gone."""
        self._switch(self.run, error)

    def _switch(self, lost: AnyRun, error: Exception) -> None:
        """Go on in another run of the same id, on disk, beginning with what the lost one had not written there yet."""
        with self._lock:
            if self.run is not lost:
                return  # another thread was faster
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
            self._service = _Service.replace(self._service)
            try:
                self.run = self._reopen(str(lost.id), dict(lost.config))
            except DistWandbError as second:
                self.run = NullRun()
                _log.warning("dist_wandb: rank %d cannot write it there: %s. It logs no more.", self._rank, second)
            for row in self._not_in(directory):
                self.run.log(row)

    def _not_in(self, directory: Path) -> list[dict[str, Any]]:
        """The last rows that are not in the file of the lost run."""
        written: set[Any] = set()
        with suppress(DistWandbError):
            for path in directory.glob("*.wandb"):
                written.update(map(_fingerprint, last_rows(path, 2 * len(self._unsafe))))
        return [row for _, row in self._unsafe if _fingerprint(row) not in written]


class _Service:
    """wandb's own process, which all runs of this process write through: how often it was replaced."""

    current = 0
    _lock = threading.Lock()

    @classmethod
    def replace(cls, seen: int) -> int:
        """Have a new one, unless somebody has replaced the one that was seen to be gone."""
        with cls._lock:
            if seen == cls.current:
                runs.clear_away()
                cls.current += 1
            return cls.current


def _fingerprint(row: Mapping[str, Any]) -> frozenset[tuple[str, float | str]]:
    """What tells a row from others, as it is logged and as it is read back: its numbers."""
    numbers = {name: _number(value) for name, value in row.items() if not name.startswith("_")}
    return frozenset(
        (name, "NaN" if math.isnan(number) else number) for name, number in numbers.items() if number is not None
    )


def _number(value: Any) -> float | None:
    """Numbers of Python and numpy, and tensors of one element; `None` for what is no number."""
    with suppress(Exception):  # values have code of their own
        plain = value.item() if hasattr(value, "item") else value
        return float(plain) if isinstance(plain, (int, float)) else None
    return None
