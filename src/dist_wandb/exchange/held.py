"""Values that wait on a rank for their row, and the reductions of the row's numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from dist_wandb.exchange.attachments.attachment import Attachments
from dist_wandb.exchange.attachments.spreads import Spreads
from dist_wandb.settings.reduction import TIMES, Reduction, reduction_of

_MOST_FORMS = 4096  # tuples of names whose reductions are kept


class RowWriter(Protocol):
    """Writes rows into the run of one rank."""

    label: str | None  # this rank's label in a shared run; `None` in any other
    is_primary: bool  # whether this rank writes the plain names
    has_own_run: bool  # whether each rank has a run of its own
    step_metric: str | None  # name of the x axis in every row; `None` for none
    lost: Counter[str]  # how many values were accepted and are not in the run, by the cause in words

    @property
    def has_run(self) -> bool:
        """Whether there is a run to write to."""

    def write(self, metrics: Mapping[str, Any], step: int | None, *, commit: bool | None = None) -> None:
        """Write a row at `step` on the x axis, or add to the open row; `commit` as in `wandb.Run.log`."""


class Own(NamedTuple):
    """What this rank alone keeps for the row of one of its calls."""

    values: Mapping[str, Any]  # those that are not combined with other ranks, by final name
    commit: bool | None  # as in `wandb.Run.log`
    follows: int = 0  # as in `Contribution`


class Reductions:
    """The reduction of each name, by patterns as in `Rows`."""

    def __init__(self, reduce: Mapping[str, Reduction] | None) -> None:
        self.unused: dict[str, Any | None] = dict.fromkeys(reduce or ())  # patterns that no name has matched yet
        self.reduce = reduce or {}
        self.known: dict[str, Reduction] = {}  # of the names that were logged
        self.weighted: set[str] = set()  # names that this rank has given weights, but not in their row
        self.of_all = lru_cache(_MOST_FORMS)(self._of_all)

    def of(self, name: str) -> Reduction:
        """Return the reduction of a name: that of the first matching pattern, or the mean."""
        if name not in self.known:
            is_time = name.startswith(TIMES)  # general patterns do not apply to times
            reduce = {one: kind for one, kind in self.reduce.items() if not is_time or one.startswith(TIMES)}
            pattern, self.known[name] = reduction_of(name, reduce)
            self.unused.pop(pattern, None)
        return self.known[name]

    def _of_all(self, names: tuple[str, ...]) -> tuple[Reduction, ...]:
        return tuple([self.of(name) for name in names])


@dataclass(frozen=True)
class Held:
    """The state with which rows are made."""

    writer: RowWriter
    rank: int  # in the job, for messages
    reductions: Reductions
    attachments: Attachments
    spreads: Spreads
    own_axes: Callable[[], Collection[str]]  # the names that are x axes of the user in this rank's run
    keep_summary: Callable[..., None]  # after each row: keeps what the user has written there since
    act: Callable[..., None]  # before each row: does what the user did with the run before its call
    counts: bool  # whether rows without a step lie at the number of calls on the x axis
    first: int  # position of the first of these rows
    marked: Counter[str] = field(default_factory=Counter)  # rows that lack a rank, under the name that marks them

    def axes(self) -> list[str]:
        """Return the x axes of the user, whose values are those of one call; not those whose reduction was chosen."""
        chosen = {one: kind for one, kind in self.reductions.reduce.items() if one != "*"}
        return [name for name in self.own_axes() if not reduction_of(name, chosen)[0]]

    def x(self, x: int) -> int | None:
        """Return the position of a row on the x axis of this rank's run; `x` as in `protocol.calls.Call`."""
        if x >= 0:
            return x
        return self.first - 1 - x if self.counts else 0
