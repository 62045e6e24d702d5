"""How a rank's run comes to be open: after its primary, with retries, and on disk alone where W&B cannot be reached."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import RendezvousError, UnavailableError
from dist_wandb.runs import axes, client_settings, null_run, requested, wandb_init, wandb_private, wandb_process
from dist_wandb.settings.plan import writers_of

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun
    from dist_wandb.settings.options import Options
    from dist_wandb.settings.plan import RunPlan, Unit
    from dist_wandb.store.job_store import JobStore
    from dist_wandb.topology.model import Topology

_log = logging.getLogger("dist_wandb")

_ATTEMPTS = 3  # of a secondary: the server may not have heard of the run yet (wandb issues 9871, 10497)
_PAUSE = 1.0  # seconds before the second attempt, doubled before the third
MOST_WRITERS = 300
"""How many writers one run may have, as W&B states."""


@dataclass(frozen=True)
class Opening:
    """One rank's way to its run.

    Args:
        options: The arguments of the door.
        topology: Who this rank is.
        plan: What this rank does with W&B.
        job_store: The job's store, where there is one.
        arguments: Keyword arguments of `wandb.init`.
        complete: Completes them with what is known only once the primary has opened its run: the config.
        create_new: Whether the run is made beside one that this process already has.
        is_alone: Whether no other run of this process is open.
        as_given: Whether wandb is to get no settings but the user's.
    """

    options: Options
    topology: Topology
    plan: RunPlan
    job_store: JobStore | None
    arguments: Mapping[str, Any]
    complete: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    create_new: bool
    is_alone: bool
    as_given: bool

    def run(self) -> AnyRun:
        """Open the run.

        Online, a secondary of a shared run waits until the primary has opened it: one that attaches before may lose
        rows (wandb issue 12269). If the primary's is on disk only, so are all others'.

        Raises:
            UnavailableError: W&B cannot be reached, and `strict` wants that to be an error; on all ranks of the unit.
            RendezvousError: The primary did not begin to open the run within `join_timeout`.
        """
        if not self.plan.opens_run:
            return null_run.NullRun()
        if self.plan.shared and self.plan.primary:
            self._warn_of_many()
        try:
            return self._open()
        except UnavailableError as error:
            if self.options.strict:
                self._tell({"error": str(error)})
                raise
            return self._open_on_disk(error)
        except Exception as error:
            self._tell(
                {"error": client_settings.without_values(error)}
            )  # arguments that wandb does not take: nobody is to wait for this run
            raise

    def attach(self) -> AnyRun:
        """Attach to the unit's run for the hardware of this node, where the plan says so. Training needs it not."""
        if not self.plan.attaches:
            return null_run.NullRun()
        try:
            return self._open()
        except (UnavailableError, RendezvousError) as error:
            _log.warning(
                "dist_wandb: rank %d does not record the hardware of its node: %s", self.topology.global_rank, error
            )
            self._clear_away()
            return null_run.NullRun()

    def on_disk(self) -> AnyRun:
        """Open the run on disk alone.

        Raises:
            UnavailableError: Not even that is possible.
        """
        return self._try(offline=True)

    def again(self, run_id: str, config: Mapping[str, Any], step_metric: str | None) -> AnyRun:
        """Open the same run again, on disk.

        Args:
            run_id: Its id, which W&B may have made.
            config: Its config.
            step_metric: Name of its x axis; `None` for none.

        Raises:
            UnavailableError: Not even that is possible.
        """
        kept = {name: value for name, value in self.arguments.items() if name not in ("fork_from", "resume_from")}
        arguments = {**kept, "config": config, "id": run_id}
        run = replace(self, arguments=arguments, complete=lambda given: given, create_new=True).on_disk()
        if step_metric is not None:
            axes.define_step_metric(run, step_metric)
        return run

    def tell(self, url: str | None, *, offline: bool, writer: int, first_row: int = 0) -> None:
        """Tell other ranks that this rank's run is open: those without one, and the other writers of a shared one.

        Args:
            url: Address of the run.
            offline: Whether it is anywhere but at the server.
            writer: Index of this rank in its unit.
            first_row: Where on the x axis rows without a step begin.
        """
        self._tell_of_opening()
        self._tell({"url": url, "offline": offline, "first_row": first_row})
        if self.plan.has_writers and self.job_store is not None:
            self.job_store.publish(_writer_key(self.plan, writer), 1)

    def _open(self) -> AnyRun:
        offline = self._follows_primary() and self._is_primary_offline()
        self._tell_of_opening()
        attempts = _ATTEMPTS if self.plan.has_writers and not self.plan.primary else 1
        pause = _PAUSE
        for _ in range(attempts - 1):
            try:
                return self._try(offline=offline)
            except UnavailableError as error:
                _log.debug("dist_wandb: rank %d tries again: %s", self.topology.global_rank, error)
            self._clear_away()
            time.sleep(pause)
            pause *= 2
        return self._try(offline=offline)

    def _try(self, *, offline: bool) -> AnyRun:
        is_exact = self.as_given and self.topology.world_size == 1 and not offline
        return wandb_init.open_run(
            self.plan,
            self.topology,
            self.complete(self.arguments),
            create_new=self.create_new,
            upload_timeout=None if is_exact else self.options.limits.upload_timeout,
            offline=offline,
        )

    def _open_on_disk(self, error: UnavailableError) -> AnyRun:
        rank = self.topology.global_rank
        _log.warning(
            "dist_wandb: rank %d could not open its run: %s. It goes on offline; upload the run later with "
            "dist-wandb sync. Pass strict=True to have an error instead.",
            rank,
            error,
        )
        self._clear_away()
        try:
            return self.on_disk()
        except UnavailableError as second:
            _log.warning("dist_wandb: rank %d cannot write its run to disk either: %s. It is not logged.", rank, second)
            return null_run.NullRun()

    def _clear_away(self) -> None:
        """Get rid of what holds the id of a run that could not be opened."""
        if self.is_alone:
            wandb_process.tear_down_service()
        else:
            wandb_private.detach_service()

    def _follows_primary(self) -> bool:
        if not self.plan.has_writers or self.plan.primary or self.job_store is None:
            return False
        wandb_process.drop_inherited_service()  # the mode is read with wandb's help
        return requested.wanted_mode(self.arguments) == "online"

    def _is_primary_offline(self) -> bool:
        assert self.job_store is not None, "asked by those who follow a primary only"  # noqa: S101
        self.job_store.wait_get(_opening_key(self.plan), "its primary")
        told = self.job_store.wait_get(run_key(self.plan), "its primary", requested.init_timeout(self.arguments))
        if "error" in told:
            raise UnavailableError(f"its primary could not open the run: {told['error']}")
        return bool(told["offline"])

    def _tell_of_opening(self) -> None:
        if self.plan.has_writers and self.plan.primary and self.job_store is not None:
            self.job_store.publish(_opening_key(self.plan), 1)

    def _tell(self, what: Mapping[str, Any]) -> None:
        if self.job_store is not None and self.plan.announces:
            self.job_store.publish(run_key(self.plan), what)

    def _warn_of_many(self) -> None:
        writers = writers_of(self.topology, self.plan)
        if writers is not None and writers > MOST_WRITERS:
            by_node = self.plan.rank_scope == "worker"
            instead = "" if by_node else "rank_scope='worker', which makes a run for each node, or "
            _log.warning(
                "dist_wandb: %d ranks write into the shared run %s, but W&B supports %d. Use %srun_mode='auto'.",
                writers,
                self.plan.run_id,
                MOST_WRITERS,
                instead,
            )


def run_key(plan: RunPlan) -> str:
    """Under which key a primary tells of its run."""
    return f"run/{plan.name_suffix}"


def writer_keys(plan: RunPlan, unit: Unit) -> list[str]:
    """Under which keys the writers of a shared run tell that they are attached."""
    return [_writer_key(plan, index) for index in range(unit.size)]


def _writer_key(plan: RunPlan, index: int) -> str:
    return f"{run_key(plan)}/writer/{index}"


def _opening_key(plan: RunPlan) -> str:
    return f"{run_key(plan)}/opening"
