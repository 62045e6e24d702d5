"""What `log` does on the training thread: check, count, copy and pass on. Never waits for a rank or a device.

`put` checks names and step. `_pass_on` moves the rank's `Position`, and adds timings and what `watch` has measured.
`_put_reduced`, or `_put_own` for a row of this rank alone, copies the values, answers reads of the summary with them,
and gives them to the exchange as a `Contribution`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from dist_wandb.errors import ConfigurationError, as_usage_error
from dist_wandb.exchange.collective import CollectiveExchange
from dist_wandb.exchange.direct import DirectExchange, WatchingExchange
from dist_wandb.exchange.interface import Exchange, Hooks
from dist_wandb.exchange.rows import Contribution, Rows
from dist_wandb.notices import Notices
from dist_wandb.payloads.devices import PLAIN
from dist_wandb.payloads.gathers import Gathered
from dist_wandb.payloads.scalars import Weight, check_row, checked_step, copied_row, copied_weight, flattened
from dist_wandb.runs import run_metadata, wandb_media, wandb_private
from dist_wandb.session import registry
from dist_wandb.session.job_link import MOVED, JobLink, why_no_run
from dist_wandb.session.own_run import OwnRun
from dist_wandb.session.sections import Sections
from dist_wandb.session.stalls.watcher import signs
from dist_wandb.settings.reduction import check_per_rank

_LONGEST_ROW = 2.0  # seconds that a row gets to be passed on: SIGTERM's handler holds up the thread that logs it


class Position(NamedTuple):
    """Where a rank's next row lies on the x axis."""

    last: int | None = None  # the last step that this rank has given
    ended: int = 0  # how many rows have ended since
    is_given: bool = False  # whether the open row was given its step


@dataclass(eq=False, repr=False)
class Intake:
    """Accepts the rows that this rank logs."""

    own: OwnRun
    exchange: Exchange
    _notices: Notices
    # Whether rows are accepted; not after `finish`, `release`, or once the user has finished this rank's run: `log`
    # raises. What was accepted is with the exchange, and the run may still be ending.
    is_open: bool = True
    # Whether the run was finished on the rank that has it, and this one has none: rows are dropped, with one warning.
    is_detached: bool = False
    # Held while a row is checked and passed on. Reentrant, so a signal handler that interrupts this may log and finish.
    accepting: threading.RLock = field(default_factory=threading.RLock)
    rows: int = 0  # accepted so far
    dropped: int = 0  # values of rows that were not accepted
    _position: Position = Position()  # noqa: RUF009  # immutable
    _names: set[str] = field(default_factory=set)  # that were checked
    _first_thread: int = 0  # the first to log
    _watched: dict[str, Any] = field(default_factory=dict)  # measured by `watch` for a row that is not passed on yet
    sections: Sections = field(default_factory=Sections)
    _successor: Intake | None = None  # of the session in which this one continues

    def __post_init__(self) -> None:
        self._link = self.own.link

    def continue_from(self, former: Intake) -> None:
        """Continue the rows of a session that moves to this one: they are passed on, and the next follows the last."""
        former.exchange.pass_on(self.exchange)  # most of them, while further rows are accepted
        with former.accepting:
            former.exchange.pass_on(self.exchange)
            self.rows, self._position, self._watched = former.rows, former._position, former._watched
            self._first_thread, self.sections = former._first_thread, former.sections
            former._successor = self  # for a call of `log` that is in progress on another thread

    @property
    def step(self) -> int:
        """The step of the next row, as wandb counts: the last one that was given while its row is open.

        On a framework's axis, the last one: there, ``log(..., step=run.step)`` is a row like one without a step.
        """
        last, ended, _ = self._position
        last = run_metadata.starting_step(self.own.run) if last is None else last
        return last + (ended if self._is_counted else 0)

    @property
    def _is_counted(self) -> bool:
        return self.own.has_our_axis or self.own.step_metric is None

    def put(
        self, metrics: Mapping[str, Any], step: int | None, weight: Weight, commit: bool | None, *, child: bool = False
    ) -> None:
        """Accept a row, as `Session.log` gets it. The step of a child process does not apply to rows without one."""
        if self.own.takes_all:
            self.own.take(metrics)
            return
        rank = self._link.topology.global_rank
        if type(metrics) is not dict or not self._names.issuperset(metrics):
            check_row(metrics, rank)
            self._names.update(metrics)
        paths = self.own.summary.paths
        row = metrics if PLAIN.issuperset(map(type, metrics.values())) else flattened(metrics, paths, rank)
        for value in () if row is metrics else row.values():
            if isinstance(value, Gathered):
                value.use(rank, wandb_media.image)  # which cannot be used again
        if paths and not paths.keys().isdisjoint(metrics):
            name = next(name for name in metrics if name in paths)
            self._notices.warn(
                "nested too",
                f"rank {rank} logged {name!r} both as this name and nested. W&B shows both as {name!r}, and here they "
                "are one metric. Rename one of them.",
            )
        if step is not None:
            step = checked_step(step, rank)
        with self.accepting:
            signs.last = monotonic()  # not before: torch.compile would warn of it
            if self._successor is not None:
                self._successor.put(metrics, step, weight, commit, child=child)
            elif self.is_open or not self._refuses(len(row)):
                self._pass_on(row, step, weight, commit, child=child)
                if not self.is_open:
                    self._refuses()  # a signal handler may have finished the session before the row was passed on

    def follow(self, step: int) -> None:
        """Let the next row lie at this step, if it has none."""
        with self.accepting:
            self._position = Position(step)

    def watch(self, values: Mapping[str, Any]) -> None:
        """Accept what W&B's `watch` has measured. As in wandb, it belongs to the open row, else to the next call."""
        with self.accepting:
            if self._refuses():
                return
            if self._link.reduces:
                self._watched.update(self._as_logged(values))
            elif self._link.unit.is_member:
                self._put_own(values, None, None, commit=False)

    def close(self) -> None:
        """Stop accepting rows, once those that other threads are logging are passed on."""
        has_turn = self.accepting.acquire(timeout=_LONGEST_ROW)
        try:
            self.is_open = False
        finally:
            if has_turn:
                self.accepting.release()

    def end_row(self, step: int | None = None) -> None:
        """Pass on what `watch` has measured for the last row, in a row at `step`; `None` for the last step."""
        with self.accepting:
            watched, self._watched = self._watched, {}
            if watched:
                self._put_reduced(watched, step, None, None)

    def _pass_on(
        self, metrics: Mapping[str, Any], step: int | None, weight: Weight, commit: bool | None, *, child: bool
    ) -> None:
        given: Any = step  # possibly as a value of the x axis
        if given is None and self.own.step_metric is not None:
            given = metrics.get(self.own.step_metric)
        if child or type(given) is not int or given < 0:
            given = None
        is_whole = commit or (commit is None and step is None)  # it ends its row
        if self._watched and not child:  # measured for its row, or for the row before
            if self.own.has_our_axis and step not in (None, self.step):  # a step of a framework's axis ends no row
                self.end_row(self.step)
            watched, self._watched = (self._watched, {}) if is_whole else ({}, self._watched)
            metrics = {**watched, **metrics}
        place = self._position
        if given is not None or (commit is False and place.last is not None and self._is_counted):
            # As in wandb, a row that is left open lies after the one that has ended.
            self._position = place._replace(last=self.step if given is None else given, ended=0)
        times = self.sections.due_timings(metrics, step) if commit is not False and not child else {}
        if times:
            metrics = {**metrics, **times}
        if self._link.reduces:
            self._put_reduced(metrics, step, weight, commit, times)
        elif self._link.unit.is_member:
            self._put_own(metrics, step, weight, commit)
        elif self._link.topology.is_unconnected:
            self._notices.warn(
                "too early",
                f"rank {self._link.topology.global_rank} logs in a session that was opened before Lightning had "
                "connected the ranks. Rank 0 opened its run without the others, and what they log there is not "
                "written. Log with DistWandbLogger, or start the script with torchrun.",
            )
        self.rows += commit is not False  # the next call continues a row that is not committed
        place = self._position
        ended = place.ended + bool(commit or (commit is None and given is None))
        is_given = not commit if step is not None else place.is_given and commit is False
        self._position = Position(place.last, ended, is_given)

    def _refuses(self, values: int = 0) -> bool:
        """Return whether rows are dropped, and with this one so many values; raise if the session was finished."""
        if not (self.is_open or self.is_detached or registry.process_end.has_begun):
            error = ConfigurationError(
                f"log was called on rank {self._link.topology.global_rank} after the session was finished. Log before "
                "finish(), or open another session."
            )
            raise as_usage_error(error)
        if self.is_detached:
            self.dropped += values
            self._notices.warn(
                "dropped",
                f"rank {self._link.topology.global_rank} called log after its run was finished on the rank that has "
                "it. This and later rows are not written. Call log on all ranks before the run is finished.",
            )
        return not self.is_open

    def _copied(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of a row, with what W&B stores of its media now: the script may change them."""
        if PLAIN.issuperset(map(type, metrics.values())):  # a hot path
            return dict(metrics)
        return copied_row(self._as_logged(metrics), self._link.topology.global_rank)

    def _as_logged(self, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a row with what W&B stores now of values that the script may change; see `RunWriter.as_logged`."""
        if not wandb_private.can_store(self.own.run):
            return metrics
        step = (self._position.last or 0) + self._position.ended
        return self.own.writer.as_logged(metrics, check_per_rank(self._link.options.per_rank), step)

    def _put_reduced(
        self,
        metrics: Mapping[str, Any],
        step: int | None,
        weight: Weight,
        commit: bool | None,
        times: Collection[str] = (),  # names of timings, which have equal weight on all ranks
    ) -> None:
        rank, axis = self._link.topology.global_rank, self.own.step_metric
        values = self._copied(metrics)
        if is_value := step is None and axis in values and type(values[axis]) is int:
            step, commit = checked_step(values.pop(axis), rank), commit is not False  # `step=` would leave its row open
        last = self._position.last if step is None else step
        x = -1 - self.rows if last is None else last
        own_weight = None if weight is None else copied_weight(weight, rank)
        if times and weight is not None and not isinstance(weight, Mapping):
            own_weight = {name: own_weight for name in values if name not in times}
        thread = threading.get_ident()  # rows of child processes come from other threads
        self._first_thread = self._first_thread or thread
        self._show(values, x if x >= 0 else self.own.first_row - 1 - x if self.own.has_our_axis else 0)
        in_order = thread == self._first_thread
        before = self.own.summary.count
        is_value = is_value and not self._position.is_given
        self.exchange.put(Contribution(values, step, commit, own_weight, x, in_order, before, is_value))

    def _put_own(self, metrics: Mapping[str, Any], step: int | None, weight: Weight, commit: bool | None) -> None:
        rank = self._link.topology.global_rank
        metrics = self._copied(metrics)
        copied_weight(weight, rank)  # checks it
        if self._link.unit.size > 1 and any(isinstance(value, Gathered) for value in metrics.values()):
            if self._link.plan.run_mode == "auto":
                raise ConfigurationError(
                    f"Rank {rank} logs a table or images of all ranks, but reduce=None disables gathering, so those of "
                    "the other ranks would be lost. Leave out reduce=None or the gathering."
                )
            if self._link.plan.announces:
                self._notices.warn(
                    "not gathered",
                    f"run_mode={self._link.plan.run_mode!r} without a reduction does not gather tables and images. "
                    "Each has the rows of one rank only, in the run or under the label of that rank. To gather them, "
                    "pass reduce='mean'.",
                )
        commit = step is None if commit is None else commit  # as in wandb, a row with a step stays open for more values
        place = self._position
        if step is None and self.own.has_our_axis and (place.is_given or self.own.step_metric not in metrics):
            step = self.own.first_row + self.rows if place.last is None else place.last
        if commit or self._link.topology.world_size > 1:  # alone, as wandb: its process does not show an open row
            self._show(metrics, step)
        self.exchange.put(Contribution(metrics, step, commit, writes_before=self.own.summary.count))

    def _show(self, values: Mapping[str, Any], x: int | None) -> None:
        """Answer reads of the summary with a row; on a rank without a run, with the framework's x axis of it, too."""
        if not self.own.run and not self.own.has_our_axis and self.own.step_metric is not None and x is not None:
            values = {**values, self.own.step_metric: x}
        self.own.summary.show(values, x)


def make_exchange(
    own: OwnRun, rows: Rows, between_rounds: Callable[[float], None], enclosing: Sequence[JobLink]
) -> Exchange:
    """Return an exchange that reduces this rank's rows with those of other ranks, or one for its own rows alone."""
    link, options = own.link, own.link.options
    hooks = Hooks(
        link.find_store,
        between_rounds,
        link.is_over,
        link.until_open(enclosing),
        partial(why_no_run, link),
        link.move_to if link.may_move else None,
        lambda: own.config_sync.connection.publications,
        names_unopened=MOVED not in link.name,
    )
    if link.reduces:
        exchange = CollectiveExchange(link.unit, hooks, rows, options.limits)
        exchange.rounds.side_data.paths = own.summary.paths
        return exchange
    if link.may_move and link.unit.index > 0 and link.store is not None:
        return WatchingExchange(link.unit, hooks, options.limits)
    awaits_writers = link.plan.shared and link.store is not None and run_metadata.is_online(own.run)
    return DirectExchange(
        rows,
        options.limits,
        link.topology.global_rank,
        at_once=link.topology.world_size == 1,
        has_all_writers=link.until_attached() if awaits_writers else None,
    )
