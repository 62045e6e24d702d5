"""The history rows of one run on disk, with the queries of a reader of its charts, and expected numbers of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stored import ended_runs, read_history

from dist_wandb.wandb_files.reading import StoredRun

DEGRADED = "dist_wandb/degraded"
STEPS = 12  # rows of an ordinary scenario, in scripts and tests


@dataclass(frozen=True)
class History:
    """The rows of one run, in the order in which they were written."""

    rows: list[dict[str, Any]]  # the rows, including W&B's own values
    x: str = "global_step"  # name of the x axis

    @property
    def names(self) -> set[str]:
        """All names in the rows, except the x axis and W&B's own."""
        return {name for row in self.rows for name in row if not name.startswith("_")} - {self.x}

    def rows_with(self, name: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if name in row]

    def values(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows_with(name)]

    def last(self, name: str) -> dict[int, Any]:
        """Return the last value of a name by position on the x axis: a corrected row replaces the earlier row."""
        return {row[self.x]: row[name] for row in self.rows_with(name)}

    def final(self, name: str) -> list[Any]:
        """Return the values of `last`: on a busy machine a new name may be written before a late rank logs it."""
        return list(self.last(name).values())

    def flags(self, name: str) -> dict[int, int]:
        """Return by position how many ranks are missing in the last value of a name, according to the row."""
        return {row[self.x]: row.get(DEGRADED, 0) for row in self.rows_with(name)}

    def written(self, name: str) -> Counter[int]:
        """Return by position how often a value of a name was written."""
        return Counter(row[self.x] for row in self.rows_with(name))

    def unlike(self, calls: Iterable[dict[str, Any]]) -> list[str]:
        """Return what differs between the rows, as wholes, and those of calls; W&B's own values are left out."""
        waiting = list(calls)
        differing = []
        for written in self.rows:
            row = {name: value for name, value in written.items() if not name.startswith("_")}
            if row in waiting:
                waiting.remove(row)
            else:
                differing.append(f"no row of a call, or of more than one: {row}")
        return differing + [f"not in the run: {call}" for call in waiting]

    @property
    def is_flagged(self) -> bool:
        return DEGRADED in self.names


def history(directory: Path, x: str = "global_step") -> History:
    """Return the rows of the only run below `directory` after it has ended."""
    (run,) = ended_runs(directory, 1)
    return history_of(run, x)


def histories(directory: Path, number: int) -> dict[int, History]:
    """Return the rows of the `number` runs below `directory` by global rank, after all runs have ended."""
    return {rank_of(run): history_of(run) for run in ended_runs(directory, number)}


def history_of(run: StoredRun, x: str = "global_step") -> History:
    """Return the rows of a run, which must not be damaged."""
    assert run.problems == ()
    return History(read_history(run.path), x)


def rank_of(run: StoredRun) -> int:
    assert run.sidecar is not None, f"{run.path} has no sidecar"
    return run.sidecar.global_rank


def at(steps: Iterable[int], value: float) -> dict[int, float]:
    return dict.fromkeys(steps, value)
