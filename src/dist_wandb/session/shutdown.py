"""How a session ends: the exchange, the other writers, the run, the restart record; in that order, once.

`finish` goes through these steps, on the thread that called it first:

1. Report how this rank ends (`UnitEnd.report`); of several failures in a unit the first one's exit code holds for all.
2. Hand over: rows of child processes, the config, then the exchange. From here on no rows are taken.
3. End the run. Writers beside the primary of a shared run end theirs first and report it; the primary waits for them.
4. Delete the restart record, if the job ended well, and what this rank has set in the job's store.

After a failure nobody is waited for. SIGTERM waits for step 3 (`ProcessEnd.finishing`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dist_wandb.exchange.interface import WITHOUT_FINISH
from dist_wandb.session import registry
from dist_wandb.session.life_cycle import LifeCycle, Phase
from dist_wandb.store.timed_caller import briefly

if TYPE_CHECKING:
    from dist_wandb.exchange.interface import Exchange
    from dist_wandb.restart.store import RestartStore
    from dist_wandb.run_config.sync import ConfigSync
    from dist_wandb.session.children import Children
    from dist_wandb.session.job_link import JobLink
    from dist_wandb.session.own_run import OwnRun
    from dist_wandb.session.unit_end import UnitEnd

_log = logging.getLogger("dist_wandb")

_LEAST_TO_END = 2.0  # seconds that other ranks get to end with a run, however long its last rows were waited for


class Shutdown:
    """Ends one session.

    Args:
        life: Where the session is in its life.
        link: To the other ranks.
        own: This rank's run.
        config_sync: This rank's part in having one config on all ranks.
        exchange: Where rows go.
        children: Processes that this rank has started.
        restart_store: Keeps the restart record, on the coordinator.
        closed: Called once no rows are taken any more, with whether what was logged is handed over.

    Attributes:
        failure: Exit code of a failure that is to end the run, should `finish` be given none.
    """

    def __init__(
        self,
        life: LifeCycle,
        link: JobLink,
        own: OwnRun,
        config_sync: ConfigSync,
        exchange: Exchange,
        children: Children,
        restart_store: RestartStore | None,
        *,
        closed: Callable[[bool], None],
    ) -> None:
        self.failure: int | None = None
        self._life = life
        self._link = link
        self._own = own
        self._config_sync = config_sync
        self._exchange = exchange
        self._children = children
        self._restart_store = restart_store
        self._closed = closed

    def finish(self, exit_code: int | None, within: float | None = None, *, failed: bool | None = None) -> None:
        """Go through all steps, unless another thread does.

        Args:
            exit_code: As in `Session.finish`.
            within: How long other ranks are waited for, in seconds; `None` for `finish_timeout`.
            failed: Whether nobody is waited for; `None` if the exit code decides it, and there is time for the upload.
        """
        options = self._link.options
        within = options.limits.flush_timeout if within is None else within
        patience = within + (options.limits.upload_timeout if failed is None else 0.0)
        if self._children.is_here or not self._life.claim_finish(patience):
            return
        try:
            if self._life.phase is Phase.OPEN:
                self._end(exit_code, within, failed=failed)
                self._link.leave(self._exchange)
        finally:
            self._life.finished()
            self._own.restore()

    def end_with_process(self, exit_code: int, *, failed: bool) -> None:
        """Finish, because the process ends and nobody has; never raises, as other sessions must end as well.

        Args:
            exit_code: Of the process.
            failed: Whether it ends in the middle of its work.
        """
        try:
            self.finish(exit_code, min(self._link.options.limits.flush_timeout, WITHOUT_FINISH), failed=failed)
        except Exception:  # noqa: BLE001  # whatever it is
            _log.exception("dist_wandb: the run of rank %d could not be ended", self._link.topology.global_rank)

    def finish_with_run(self, exit_code: int | None = None) -> None:
        """Finish, because the user finishes the run itself. Tell ranks without a run, which do not notice."""
        within, began = self._link.options.limits.flush_timeout, time.monotonic()
        plan = self._link.plan
        if self._link.store is not None and self._own.run and plan.primary and not plan.shared:
            if not exit_code and self._link.is_accompanied():
                self._exchange.flush()  # with what other ranks have yet to log for the same rows
            briefly(self._config_sync.publish_end, None)
            within = max(within - (time.monotonic() - began), min(within, _LEAST_TO_END))
        self.finish(exit_code, within)

    def look(self, heard: float) -> None:
        """Bring the config up to date, and detach after the run was finished on the rank that has it.

        Args:
            heard: How often any rank has published something.
        """
        self._config_sync.look.in_background(heard)
        if self._config_sync.has_run_ended and self._life.detach():
            self._exchange.detach()
            self._close(handed_over=False)
            self._link.leave(self._exchange)

    def close_without_run(self) -> None:
        """Close after the user has finished this rank's run: nothing can be written any more."""
        if self._children.is_here:
            self._close(handed_over=False)
            return
        self._exchange.detach()
        self._config_sync.close()
        self._close(handed_over=False)
        self._own.restore()
        self._link.unit_end().report_written()
        self._delete_record()
        self._link.leave(self._exchange)
        registry.release_sigterm()

    def hand_over(self, *, failed: bool, within: float | None) -> None:
        """Hand over what was logged, and take no more.

        Args:
            failed: Whether to wait for no other rank.
            within: How long to wait, in seconds; `None` for `finish_timeout`.
        """
        deadline = time.monotonic() + (self._link.options.limits.flush_timeout if within is None else within)
        self._children.close(failed=failed)
        if not failed:
            self._config_sync.catch_up()
        self._exchange.close(max(0.0, deadline - time.monotonic()), failed=failed)
        self._config_sync.close()
        self._close(handed_over=True)

    def _close(self, *, handed_over: bool) -> None:
        self._children.close(failed=True)  # to no effect where they were closed in peace
        self._life.close()
        self._closed(handed_over)

    def _end(self, exit_code: int | None, within: float, *, failed: bool | None) -> None:
        failed = bool(self.failure) or (bool(exit_code) if failed is None else failed)  # then nobody is waited for
        exit_code = exit_code or self.failure or exit_code
        deadline = time.monotonic() + within
        unit_end = self._link.unit_end()
        exit_code = unit_end.report(exit_code)
        self.hand_over(failed=failed, within=within)
        with registry.process_end.finishing():
            if self._own.is_owned and self._link.plan.primary:
                exit_code = self._end_last(unit_end, exit_code, None if failed else deadline)
            elif self._own.is_owned:
                self._own.end(exit_code)
                unit_end.report_written()
            if not exit_code:
                self._delete_record()
        self._link.report_over()
        registry.release_sigterm()

    def _end_last(self, unit_end: UnitEnd, exit_code: int | None, deadline: float | None) -> int | None:
        """End the run as its primary: after its other writers, and with the exit code of the first that failed.

        Args:
            unit_end: What the ranks of the unit report to each other.
            exit_code: This rank's.
            deadline: Until when the other writers are waited for; `None` if they are not.

        Returns:
            The run's exit code.
        """
        if deadline is not None:
            plan, lost = self._link.plan, self._exchange.lost
            if plan.has_writers and not unit_end.await_writers(deadline, self._link.other_writers(deadline) - lost):
                _log.warning(
                    "dist_wandb: rank %d did not wait longer for the other ranks to end their part of the run %s. What "
                    "they write from now on may be missing. See finish_timeout.",
                    self._link.topology.global_rank,
                    plan.run_id,
                )
            exit_code = exit_code or unit_end.exit_code(lost) or exit_code
        self._own.end(exit_code)
        return exit_code

    def _delete_record(self) -> None:
        """No later start is to continue runs that have ended well."""
        if self._restart_store is not None:
            briefly(self._restart_store.delete, None)
