"""How a session ends: the exchange, the other writers, the run, the restart record; in that order, once.

`finish` runs these steps, on the thread that called it first:

1. Publish this rank's exit code (`UnitEnd.report`). If several ranks of a unit fail, the first exit code counts.
2. Pass on rows of child processes and the config. From here on no rows are accepted. End the exchange, which writes
   what was accepted.
3. End the run. The other writers of a shared run end theirs first and report it; the primary waits for them.
4. Delete the restart record, if the job ended successfully, and this rank's keys in the job's store.

After a failure, other ranks are waited for no longer than a heartbeat once all have met. After Ctrl-C in step 2 too,
and `finish` raises it, or what a signal handler has raised, at the end. If rows are given up there, the run ends as
failed. SIGTERM waits for step 3.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from dist_wandb.exchange.interface import WITHOUT_FINISH
from dist_wandb.job.job_store import LONGEST_PAUSE
from dist_wandb.job.timed_caller import call_or_default, poll
from dist_wandb.notices import warn
from dist_wandb.session import job_description, registry
from dist_wandb.session.intake import Intake
from dist_wandb.session.job_link import UnitEnd, have_same_run
from dist_wandb.session.own_run import OwnRun
from dist_wandb.session.relay import Relay
from dist_wandb.session.restart import RestartStore

_T = TypeVar("_T")
_log = logging.getLogger("dist_wandb")

_LATE = 1.0  # seconds that other ranks get to open a session whose run the user finishes
LEAST_TO_END = 2.0  # seconds that other ranks get to end with a run, even if waiting for its last rows took long


@dataclass(eq=False, repr=False)
class Shutdown:
    """Ends one session."""

    _intake: Intake
    relay: Relay
    _restart_store: RestartStore | None  # on the coordinator
    _closed: Callable[[bool], None]  # called after that, with whether the logged rows were passed on
    failure: int | None = None  # exit code of the run if `finish` is not called with one
    successor: Shutdown | None = None  # of the session in which this one continues: see `job_link.move`
    _finishing: dict[str, tuple[int]] = field(default_factory=dict)  # the thread that finishes
    _finished: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._own: OwnRun = self._intake.own
        self._link, self._config_sync, self._exchange = self._own.link, self._own.config_sync, self._intake.exchange

    def finish(self, exit_code: int | None, within: float | None = None, *, failed: bool | None = None) -> None:
        """Run all steps, unless another thread does. Other ranks get `within` seconds (`None`: `finish_timeout`).

        If `failed`, they are not waited for; `None`: the exit code decides, and uploads may take time.
        """
        options = self._link.options
        within = options.limits.flush_timeout if within is None else within
        patience = within + (options.limits.upload_timeout if failed is None else 0.0)
        if self.relay.is_fork:
            return
        mine = (threading.get_ident(),)
        first = self._finishing.setdefault("thread", mine)  # atomic, also in signal handlers
        if first is not mine:
            if first != mine:  # else a signal handler has interrupted it
                self._finished.wait(patience)
            return
        try:
            if self._intake.is_open:
                if not failed:
                    self._link.report_end(is_over=False)
                self._end(exit_code, within, failed=failed)
                self._link.leave(self._exchange)
        finally:
            self._finished.set()
            self._own.restore()
        if self.successor is not None:
            self.successor.finish(exit_code, within, failed=failed)

    def end_with_process(self, exit_code: int, *, failed: bool) -> None:
        """Finish because the process ends, in the middle of its work if `failed`. Never raises, for other sessions."""
        try:
            with suppress(KeyboardInterrupt):
                self.finish(exit_code, min(self._link.options.limits.flush_timeout, WITHOUT_FINISH), failed=failed)
        except Exception:  # noqa: BLE001  # other sessions must end as well
            _log.exception("dist_wandb: the run of rank %d could not be ended", self._link.topology.global_rank)

    def finish_with_run(self, exit_code: int | None = None, others_get: float = 0.0) -> None:
        """Finish because the user finishes the run. Publish it to ranks without a run, which do not notice.

        Once they have logged their part of this rank's rows, they have some seconds to finish as well.
        """
        within, began = self._link.options.limits.flush_timeout, time.monotonic()
        self._link.report_end(is_over=False)
        plan = self._link.plan
        if self._link.store is not None and self._own.run and plan.primary and not plan.shared:
            if not exit_code and poll(lambda: self._link.has_peers() or None, _LATE, LONGEST_PAUSE):
                self._exchange.flush()  # also waits for what other ranks still log for the same rows
                if others_get:
                    self._exchange.flush(others_get, together=True)
            call_or_default(self._config_sync.own.publish_end, None)
            within = max(within - (time.monotonic() - began), min(within, LEAST_TO_END))
        self.finish(exit_code, within)

    def finish_all_with_run(self, exit_code: int | None = None) -> None:
        """Finish as `finish_with_run`, then the other sessions of this process whose numbers go to the same run.

        On a rank without a run they would not notice, and ``wandb.run`` would be the stand-in of one of them.
        """
        self.finish_with_run(exit_code)
        run, topology = self._own.run, self._link.topology
        for other in registry.open_sessions():
            shutdown = registry.shutdowns.get(other)  # another thread may have ended it
            if shutdown is None or other.topology != topology:
                continue
            link = shutdown._link  # noqa: SLF001  # of this class
            if other.run is run if run else not other.run and have_same_run(self._link, link):
                other.finish(exit_code, others_go_on=True)

    def refresh(self, published: float) -> None:
        """Refresh the config, and detach after the run was finished on the rank that has it."""
        self._config_sync.in_background(published)
        self._own.alerts.deliver(published)
        if self._config_sync.has_run_ended and self._intake.is_open:
            self._intake.is_detached, self._intake.is_open = True, False  # in this order: `log` may be called meanwhile
            self._exchange.detach()
            self._close(handed_over=False)
            self._link.leave(self._exchange)

    def close_without_run(self) -> None:
        """Close after the user has finished this rank's run, so that nothing more can be written."""
        if self.relay.is_fork:
            self._close(handed_over=False)
            return
        self._intake.close()
        self._link.report_end(is_over=False)
        self._exchange.detach()
        self._config_sync.close()
        self._close(handed_over=False)
        self._own.restore()
        self._link.unit_end().report_written()
        self._delete_record()
        self._link.leave(self._exchange)
        registry.release_sigterm()

    def hand_over(self, *, failed: bool, within: float, passed_on: Callable[[], object] = lambda: None) -> None:
        """Pass on what was logged, and accept no more. `failed` and `within` are as for `finish`."""
        deadline = time.monotonic() + within
        self.relay.close(failed=failed)
        if not failed:
            self._config_sync.catch_up()
        self._intake.end_row()
        self._intake.close()
        try:
            self._exchange.close(max(0.0, deadline - time.monotonic()), failed=failed)
        finally:
            self._own.summary.act(math.inf)
            self._own.alerts.deliver()
            self._config_sync.close()
            passed_on()
            self._close(handed_over=True)

    def _close(self, *, handed_over: bool) -> None:
        self.relay.close(failed=True)  # no effect if they are closed already
        self._intake.close()
        self._closed(handed_over)

    def _end(self, exit_code: int | None, within: float, *, failed: bool | None) -> None:
        is_asked = failed is None  # rather than at the end of the process
        failed = bool(self.failure) or (bool(exit_code) if failed is None else failed)  # then do not wait
        exit_code = exit_code or self.failure or exit_code
        deadline = time.monotonic() + within
        unit_end = self._link.unit_end()
        raised: list[BaseException] = []  # by Ctrl-C, or another signal handler: raised again once the run has ended

        def do(step: Callable[[], _T], otherwise: _T) -> _T:
            try:
                return step()
            except BaseException as error:  # noqa: BLE001
                raised.append(error)
                return otherwise

        if error := job_description.late_trial(self._link.store, self._link.topology):
            warn(str(error))
        exit_code = do(partial(unit_end.report, exit_code), exit_code)
        with ExitStack() as until_ended:
            # once the session is closed, SIGTERM does not find it any more
            delay_sigterm = partial(until_ended.enter_context, registry.process_end.finishing())
            failed = failed or bool(raised)
            do(partial(self.hand_over, failed=failed, within=within, passed_on=delay_sigterm), None)
            if raised and not self._exchange.lifecycle.is_closing:
                do(partial(self._exchange.close, failed=True), None)
            code = next(filter(None, map(registry.exit_code_of, raised)), None)
            if not exit_code and (code or self._exchange.lifecycle.unwritten):
                exit_code = unit_end.report(code or registry.FAILED)
            if self._own.is_owned and self._link.plan.primary:
                if not (failed or raised):
                    exit_code = do(partial(self._exit_code_of_unit, unit_end, exit_code, deadline), exit_code)
                self._own.end(exit_code)
            elif self._own.is_owned:
                if self._own.end(exit_code):
                    unit_end.report(registry.FAILED)
                unit_end.report_written()
            if not exit_code:
                self._delete_record()
        self._link.report_end(is_over=True)
        registry.release_sigterm()
        if raised and is_asked:
            raise raised[0]
        for one in raised:
            rank = self._link.topology.global_rank
            _log.warning("dist_wandb: the end of the run of rank %d was interrupted: %r", rank, one)

    def _exit_code_of_unit(self, unit_end: UnitEnd, exit_code: int | None, deadline: float) -> int | None:
        """Return the exit code of the primary's run, once the other writers have ended, until the deadline."""
        plan, lost = self._link.plan, self._exchange.lifecycle.lost
        writers = self._link.other_writers(deadline) if plan.has_writers else None
        if writers and not unit_end.await_writers(deadline, writers - lost):
            warn(
                f"rank {self._link.topology.global_rank} stopped waiting for the other writers of the run "
                f"{plan.run_id} to end. Rows that they write from now on may be missing. If they need longer, "
                "increase finish_timeout."
            )
        if plan.shared and writers is not None:  # those that never took part may still be opening their runs
            lost -= self._exchange.lifecycle.unmet - writers
        return exit_code or unit_end.exit_code(lost) or exit_code

    def _delete_record(self) -> None:
        if self._restart_store is not None:
            call_or_default(self._restart_store.delete, None)
