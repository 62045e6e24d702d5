"""What `log` does on the thread that trains: check, count, copy, and hand over. Never waits for a rank or a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import ConfigurationError
from dist_wandb.exchange.collective import CollectiveExchange
from dist_wandb.exchange.direct import DirectExchange
from dist_wandb.exchange.posting import Contribution
from dist_wandb.exchange.rows import Rows
from dist_wandb.exchange.worker import Hooks
from dist_wandb.exchange.x_axis import calls_at
from dist_wandb.payloads.checks import check_row, checked_step
from dist_wandb.payloads.media.gathers import Gathered
from dist_wandb.payloads.scalars import Weight, are_plain, copied_row, copied_weight
from dist_wandb.runs import run_metadata, wandb_media
from dist_wandb.session.life_cycle import LifeCycle, Phase
from dist_wandb.session.sections import Sections
from dist_wandb.settings.reduction import TIMES, check_spread

if TYPE_CHECKING:
    from dist_wandb.exchange.interface import Exchange
    from dist_wandb.session.job_link import JobLink
    from dist_wandb.session.notices import SessionNotices
    from dist_wandb.session.own_run import OwnRun


class Intake:
    """Takes the rows that this rank logs.

    Args:
        link: To the other ranks.
        own: This rank's run.
        exchange: Where rows go.
        life: Whether rows are taken.
        notices: Says what is not as the user may expect.
        first_row: Position on the x axis of the first row without a step.

    Attributes:
        rows: How many rows were taken.
        first_row: Position on the x axis of the first row without a step.
        sections: What is timed, which rows take along.
    """

    def __init__(
        self,
        link: JobLink,
        own: OwnRun,
        exchange: Exchange,
        life: LifeCycle,
        notices: SessionNotices,
        *,
        first_row: int,
    ) -> None:
        self.rows: int = 0
        self._link = link
        self._own = own
        self._exchange = exchange
        self._life = life
        self._notices = notices
        self.first_row = first_row
        self._last_step: int | None = None  # that this rank gave
        self._first_thread = 0  # that logged here
        self.sections: Sections = Sections()
        self._counting = threading.RLock()  # several threads may log; one that is interrupted may log again

    def put(
        self,
        metrics: Mapping[str, Any],
        step: int | None,
        weight: Weight,
        commit: bool | None,
        *,
        leads: bool = True,
    ) -> None:
        """Take a row. The arguments are those of `Session.log`.

        Args:
            metrics: Values by name.
            step: Position on the x axis.
            weight: What a mean over ranks is weighted with.
            commit: As in `wandb.Run.log`.
            leads: Whether later rows without a step go on at the step of this one.
        """
        rank = self._link.topology.global_rank
        check_row(metrics, rank)
        if not are_plain(metrics):
            for value in metrics.values():
                if isinstance(value, Gathered):
                    value.use(rank, wandb_media.image)
        if step is not None:
            step = checked_step(step, rank)
        with self._counting:
            if leads:
                self._last_step = self._step_of(metrics, step)
                times = self.sections.taken_along(metrics, step) if commit is not False else {}
                if times:
                    metrics, weight = {**metrics, **times}, _without_times(metrics, weight)
            if self._link.reduces:
                self._put_reduced(metrics, step, weight)
            elif self._link.unit.is_member:
                self._put_own(metrics, step, weight, commit)
            if commit is not False:  # a row that is not committed goes on in the next call
                self.rows += 1

    def put_of_child(self, metrics: Mapping[str, Any], step: int | None, weight: Weight, commit: bool | None) -> None:
        """Take a row that a process logs which this rank has started."""
        self.put(metrics, step, weight, commit, leads=False)

    def _step_of(self, metrics: Mapping[str, Any], step: int | None) -> int | None:
        """The step that a row gives, also as a value of the x axis; else the last one."""
        if step is None and self._own.step_metric is not None:
            step = metrics.get(self._own.step_metric)
        return step if type(step) is int and step >= 0 else self._last_step

    def _put_reduced(self, metrics: Mapping[str, Any], step: int | None, weight: Weight) -> None:
        """Hand over what becomes a row together with other ranks'."""
        rank, axis = self._link.topology.global_rank, self._own.step_metric
        if self._life.phase is not Phase.OPEN:
            if self._life.phase is Phase.DETACHED:
                self._notices.row_dropped()
                return
            raise ConfigurationError(
                f"log was called on rank {rank} after the session was finished. Log before finish(), or open another "
                "session."
            )
        values = copied_row(metrics, rank)
        if step is None and axis in values and type(values[axis]) is int:
            step = checked_step(values.pop(axis), rank)
        calls = self.rows if self._last_step is None else calls_at(self._last_step)
        own_weight = None if weight is None else copied_weight(weight, rank)
        thread = threading.get_ident()  # what children log comes by threads of its own
        self._first_thread = self._first_thread or thread
        in_order = thread == self._first_thread
        self._exchange.put(Contribution(values, step, None, own_weight, calls, in_order))

    def _put_own(self, metrics: Mapping[str, Any], step: int | None, weight: Weight, commit: bool | None) -> None:
        """Hand over a row that is this rank's own."""
        rank = self._link.topology.global_rank
        metrics = copied_row(metrics, rank, flat=self._link.plan.label is not None)
        if weight is not None:
            copied_weight(weight, rank)
        if self._link.unit.size > 1 and any(isinstance(value, Gathered) for value in metrics.values()):
            self._notices.not_gathered()
        if step is None and self._own.has_our_axis and self._own.step_metric not in metrics:
            step = self.first_row + self.rows if self._last_step is None else self._last_step
        self._exchange.put(Contribution(metrics, step, commit))


def _without_times(metrics: Mapping[str, Any], weight: Weight) -> Weight:
    """The weight of a row for what the user logged alone: timings of all ranks count the same."""
    return weight if weight is None or isinstance(weight, Mapping) else dict.fromkeys(metrics, weight)


def exchange_of(
    link: JobLink, own: OwnRun, rows: Rows, look: Callable[[float], None], news: Callable[[], int]
) -> Exchange:
    """Where this rank's rows go: together with other ranks' or by themselves.

    Args:
        link: To the other ranks.
        own: This rank's run.
        rows: Makes rows of what is logged.
        look: Called now and then on the thread of the exchange, with how often any rank has published something.
        news: How often this rank has.
    """
    options = link.options
    if link.reduces:
        spread = (*check_spread(options.spread), f"{TIMES}*")
        hooks = Hooks(link.find_store, look, link.is_over, news)
        return CollectiveExchange(link.unit, hooks, rows, options.limits, spread)
    awaits_writers = link.plan.shared and link.store is not None and run_metadata.is_online(own.run)
    return DirectExchange(
        rows,
        options.limits,
        link.topology.global_rank,
        at_once=link.topology.world_size == 1,
        has_all_writers=link.has_all_writers if awaits_writers else None,
    )
