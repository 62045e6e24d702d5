"""Opening the run of one rank: after its primary, with retries, and on disk if W&B cannot be reached.

Under `run_key` the primary of a unit publishes that its run is open, or why it is not. The secondaries of a shared run
wait for it, open theirs and publish by `attached_writers` that they are attached. They try several times, because the
server may not know the run yet.

If W&B cannot be reached, the run is opened offline with one warning; the primary publishes which of the two it is, so
that no secondary waits for a dead server. With ``strict=True`` it is an error instead, on all ranks of a shared run.
Only failures of W&B are treated so, not wrong arguments. A run that could not be opened holds its id in wandb's
process: that is torn down if no other run is open, else left to those, and the next run starts another one
(`wandb_private.detach_service`).

With ``system_metrics="all-nodes"`` local rank 0 of each other node attaches to the run of `auto` as a writer without
rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

from dist_wandb.errors import RendezvousError, UnavailableError
from dist_wandb.runs import axes, client_settings, requested, wandb_init, wandb_private, wandb_process
from dist_wandb.runs.null_run import NullRun
from dist_wandb.store.shared_list import SharedList

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun
    from dist_wandb.settings.options import Options
    from dist_wandb.settings.plan import RunPlan
    from dist_wandb.store.job_store import JobStore
    from dist_wandb.topology.model import Topology

_log = logging.getLogger("dist_wandb")

_ATTEMPTS = 3  # of a secondary: the server may not know the run yet (wandb issues 9871, 10497)
_PAUSE = 1.0  # seconds before the second attempt, doubled before the third


class OpenedRun(TypedDict):
    """A primary's message about its open run.

    Attributes:
        url: Its address; `None` if it is not at the server.
        offline: Whether it is anywhere but at the server.
        first_row: Position on the x axis of the first row without a step.
    """

    url: str | None
    offline: bool
    first_row: int


class FailedRun(TypedDict):
    """A primary's message about a run that could not be opened."""

    error: str


@dataclass(frozen=True)
class Opening:
    """Opens the run of one rank.

    Args:
        options: The options of the integration.
        topology: This rank's place in the job.
        plan: What this rank does with W&B.
        job_store: The job's store, if there is one.
        arguments: Keyword arguments of `wandb.init`.
        complete: Adds the config, which is known only after the primary has opened its run.
        create_new: Whether this process may already have another run.
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

        Online, a secondary of a shared run waits until the primary has opened it: if it attaches earlier, it may lose
        rows (wandb issue 12269). If the primary's run is on disk, the others' are, too.

        Raises:
            UnavailableError: W&B cannot be reached and `strict` makes it an error, on all ranks of the unit.
            RendezvousError: The primary did not begin to open the run within `join_timeout`.
        """
        if not self.plan.opens_run:
            return NullRun()
        try:
            return self._open()
        except UnavailableError as error:
            if self.options.strict:
                self._publish({"error": str(error)})
                raise
            return self._open_on_disk(error)
        except Exception as error:
            self._publish({"error": client_settings.without_values(error)})  # of the arguments: nobody is to wait
            raise

    def attach(self) -> AnyRun:
        """Attach to the unit's run for the hardware metrics of this node, if planned. A failure only warns."""
        if not self.plan.attaches:
            return NullRun()
        try:
            return self._open()
        except (UnavailableError, RendezvousError) as error:
            _log.warning(
                "dist_wandb: rank %d does not record the hardware of its node: %s", self.topology.global_rank, error
            )
            self._drop_failed_run()
            return NullRun()

    def on_disk(self) -> AnyRun:
        """Open the run on disk.

        Raises:
            UnavailableError: Not even that is possible.
        """
        return self._try(offline=True)

    def again(self, run_id: str, config: Mapping[str, Any], step_metric: str | None) -> AnyRun:
        """Open the same run again, on disk.

        Args:
            run_id: Its id, which may be W&B's choice.
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

    def publish(self, url: str | None, *, offline: bool, writer: int, first_row: int = 0) -> None:
        """Publish that this rank's run is open, for ranks without one and the other writers of a shared one.

        Args:
            url: Address of the run.
            offline: Whether it is anywhere but at the server.
            writer: Index of this rank in its unit.
            first_row: Position on the x axis of the first row without a step.
        """
        self._publish_start()
        self._publish({"url": url, "offline": offline, "first_row": first_row})
        if self.plan.has_writers and self.job_store is not None:
            attached_writers(self.job_store, self.plan).append_once(writer)

    def _open(self) -> AnyRun:
        offline = self._follows_primary() and self._is_primary_offline()
        self._publish_start()
        attempts = _ATTEMPTS if self.plan.has_writers and not self.plan.primary else 1
        pause = _PAUSE
        for _ in range(attempts - 1):
            try:
                return self._try(offline=offline)
            except UnavailableError as error:
                _log.debug("dist_wandb: rank %d tries again: %s", self.topology.global_rank, error)
            self._drop_failed_run()
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
            "dist_wandb: rank %d could not open its run: %s. Continuing offline; upload the run later with "
            "dist-wandb sync. Pass strict=True to make it an error.",
            rank,
            error,
        )
        self._drop_failed_run()
        try:
            return self.on_disk()
        except UnavailableError as second:
            _log.warning("dist_wandb: rank %d cannot write its run to disk either: %s. It is not logged.", rank, second)
            return NullRun()

    def _drop_failed_run(self) -> None:
        """Drop the wandb process that keeps the id of a run that could not be opened in use."""
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
        assert self.job_store is not None, "only ranks that follow a primary ask"  # noqa: S101
        self.job_store.wait_get(_opening_key(self.plan), "its primary")
        published = self.job_store.wait_get(run_key(self.plan), "its primary", requested.init_timeout(self.arguments))
        if "error" in published:
            raise UnavailableError(f"its primary could not open the run: {published['error']}")
        return bool(published["offline"])

    def _publish_start(self) -> None:
        if self.plan.has_writers and self.plan.primary and self.job_store is not None:
            self.job_store.publish(_opening_key(self.plan), 1)

    def _publish(self, message: OpenedRun | FailedRun) -> None:
        if self.job_store is not None and self.plan.announces:
            self.job_store.publish(run_key(self.plan), message)


def run_key(plan: RunPlan) -> str:
    """The key of a primary's `OpenedRun` or `FailedRun`."""
    return f"run/{plan.name_suffix}"


def attached_writers(job_store: JobStore, plan: RunPlan) -> SharedList:
    """The writers of a shared run that are attached: their indices in the unit, each of them once."""
    return SharedList(job_store, f"{run_key(plan)}/writers")


def _opening_key(plan: RunPlan) -> str:
    return f"{run_key(plan)}/opening"
