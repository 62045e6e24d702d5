"""The history rows of one run on disk, asked for what a reader of its charts would see; and how many to expect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stored import ended_runs

from dist_wandb.wandb_files.reading import StoredRun, read_history

DEGRADED = "dist_wandb/degraded"
STEPS = 12  # rows of an ordinary scenario, in scripts and tests
MANY = 10_000
LARGEST_EXACT = 2**53
FLUSHED, BREAK, AFTER_BREAK, REJOINED = 10, 15, 40, 60  # steps at which a rank breaks off, and where it is back


@dataclass(frozen=True)
class History:
    """The rows of one run, in the order in which they were written.

    Args:
        rows: The rows, W&B's own values included.
        x: Name of the x axis.
    """

    rows: list[dict[str, Any]]
    x: str = "global_step"

    @property
    def names(self) -> set[str]:
        """All names in the rows, but for the x axis and W&B's own."""
        return {name for row in self.rows for name in row if not name.startswith("_")} - {self.x}

    def rows_with(self, name: str) -> list[dict[str, Any]]:
        """The rows that have a value of `name`."""
        return [row for row in self.rows if name in row]

    def values(self, name: str) -> list[Any]:
        """All values of a name, in the order in which they were written."""
        return [row[name] for row in self.rows_with(name)]

    def last(self, name: str) -> dict[int, Any]:
        """By place on the x axis the value of a name that was written there last: a corrected row replaces its row."""
        return {row[self.x]: row[name] for row in self.rows_with(name)}

    def final(self, name: str) -> list[Any]:
        """The values of `last`: on a busy machine a new name may be written before a late rank logged it."""
        return list(self.last(name).values())

    def flags(self, name: str) -> dict[int, int]:
        """By place on the x axis how many ranks the last value of a name lacks, as the row says."""
        return {row[self.x]: row.get(DEGRADED, 0) for row in self.rows_with(name)}

    def written(self, name: str) -> Counter[int]:
        """By place on the x axis how often a value of a name was written."""
        return Counter(row[self.x] for row in self.rows_with(name))

    @property
    def is_flagged(self) -> bool:
        """Whether any row says that it lacks a rank."""
        return DEGRADED in self.names


def history(directory: Path, x: str = "global_step") -> History:
    """The rows of the only run below `directory`, once it has ended."""
    (run,) = ended_runs(directory, 1)
    return history_of(run, x)


def histories(directory: Path, number: int, x: str = "global_step") -> dict[int, History]:
    """By global rank the rows of the runs below `directory`, once there are `number` and all have ended."""
    return {rank_of(run): history_of(run, x) for run in ended_runs(directory, number)}


def history_of(run: StoredRun, x: str = "global_step") -> History:
    """The rows of a run; damaged files do not count as read."""
    assert run.problems == ()
    return History(read_history(run.path), x)


def rank_of(run: StoredRun) -> int:
    """Index in the job of the rank that wrote a run."""
    assert run.sidecar is not None, f"{run.path} has no sidecar"
    return run.sidecar.global_rank


def at(steps: Iterable[int], value: float) -> dict[int, float]:
    """The same value at all steps."""
    return dict.fromkeys(steps, value)
