"""Open the run of one rank: after its primary, with retries, and on disk if W&B cannot be reached.

Under `run_key` the primary of a unit publishes that its run is open, or why it is not. Before it calls W&B, it
publishes under `opening_key` how long that may take, so that the other ranks wait for it. The secondaries of a shared
run wait for both messages, open their runs, and add themselves to `attached_writers`. They retry, because the server
may not know the run yet.

If W&B cannot be reached, the run is opened offline with one warning. What its server answers about the arguments (no
such entity, no permission, a rewind that it refuses, a deleted id) is wandb's error, as an upload would fail, too. The
primary publishes whether its run is online or offline, so that no secondary waits for a dead server.
With ``strict=True`` it is an error instead, on all ranks of a shared run. This applies to failures of W&B only, not to
wrong arguments. wandb's process keeps the id of a run that could not be opened in use. It is torn down if no other run
is open; otherwise the other runs keep it, and the next run starts another process (`wandb_private.detach_service`).

With ``system_metrics="all-nodes"`` local rank 0 of each other node attaches to the run of `auto` as a writer without
rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from dist_wandb.errors import ConfigurationError, RendezvousError, UnavailableError
from dist_wandb.job.job_store import JobStore, SharedList
from dist_wandb.job.model import Topology
from dist_wandb.notices import warn
from dist_wandb.runs import client_settings, requested, wandb_init, wandb_private
from dist_wandb.runs.null_run import AnyRun, NullRun
from dist_wandb.runs.writer import define_step_metric
from dist_wandb.settings.options import Options
from dist_wandb.settings.plan import RunPlan

_log = logging.getLogger("dist_wandb")

_RETRIES = 2  # of a secondary: the server may not know the run yet (wandb issues 9871, 10497)
_PAUSE = 1.0  # seconds before the first retry, doubled before the second


class OpenedRun(TypedDict, total=False):
    """A primary's message about its run: that it is open, or could not be opened."""

    url: str | None  # `None` if the run is not on the server
    offline: bool  # whether it is not on the server
    first_row: int  # position on the x axis of the first row without a step
    error: str
    refused: bool  # by W&B's server, so that no rank goes offline


@dataclass(frozen=True)
class Opening:
    """Opens the run of one rank."""

    options: Options
    topology: Topology
    plan: RunPlan
    job_store: JobStore | None
    arguments: Mapping[str, Any]  # of `wandb.init`
    complete: Callable[[Mapping[str, Any]], Mapping[str, Any]]  # adds the config, known only after the primary's run
    create_new: bool  # whether this process may already have another run
    is_alone: bool  # whether no other run of this process is open
    as_given: bool  # whether wandb gets only the user's settings
    is_current: bool = True  # whether ``wandb.run`` may be the run

    def run(self) -> AnyRun:
        """Open the run.

        Online, a secondary of a shared run waits until the primary has opened it: if it attaches earlier, it may lose
        rows (wandb issue 12269). If the primary's run is on disk, so are the others.

        Raises `wandb.errors.CommError` if W&B's server refused the run because of the arguments, `ConfigurationError`
        if it refused that of this rank's primary, `UnavailableError` on all ranks of the unit if W&B cannot be reached
        and `strict` is set, and `RendezvousError` if the primary did not open the run in time.
        """
        if not self.plan.opens_run:
            return NullRun()
        try:
            return self._open()
        except UnavailableError as error:
            if self.options.strict:
                self._publish({"error": str(error)})
                raise
            rank = self.topology.global_rank
            # A writer beside the primary had right arguments.
            if self.plan.primary and wandb_init.is_answer(error.__cause__):
                self._publish({"error": str(error), "refused": True})
                self._drop_failed_run()
                _log.error(
                    "dist_wandb: W&B's server refused the run of rank %d: %s. This concerns what init was given: "
                    "entity, project, id, resume_from, fork_from or the API key. Correct it, or pass mode='offline' to "
                    "write the run to disk only.",
                    rank,
                    error,
                )
                raise error.__cause__ or error from None
            warn(
                f"rank {rank} could not open its run: {error}. Continuing offline; upload the run later with "
                "dist-wandb sync. Pass strict=True to make it an error."
            )
        except Exception as error:
            self._publish({"error": client_settings.without_values(error)})  # wrong arguments: no rank has to wait
            raise
        self._drop_failed_run()
        try:
            return self.attempt(offline=True)
        except UnavailableError as error:
            warn(f"rank {rank} cannot write its run to disk either: {error}. It is not logged.")
            return NullRun()

    def attach(self) -> AnyRun:
        """Attach to the unit's run for the hardware metrics of this node, if planned. A failure only warns."""
        if not self.plan.attaches:
            return NullRun()
        try:
            return self._open()
        except (UnavailableError, RendezvousError) as error:
            warn(f"rank {self.topology.global_rank} does not record the hardware of its node: {error}")
            self._drop_failed_run()
            return NullRun()

    def again(self, run_id: str, config: Mapping[str, Any], step_metric: str | None) -> AnyRun:
        """Open the same run again, on disk, by its id, which W&B may have generated; or raise `UnavailableError`."""
        kept = {name: value for name, value in self.arguments.items() if name not in ("fork_from", "resume_from")}
        arguments = {**kept, "config": config, "id": run_id}
        run = replace(self, arguments=arguments, complete=lambda given: given, create_new=True).attempt(offline=True)
        if step_metric is not None:
            define_step_metric(run, step_metric)
        return run

    def publish(self, url: str | None, *, offline: bool, writer: int, first_row: int = 0) -> None:
        """Publish that this rank's run is open, for ranks without a run and the other writers of a shared run.

        `writer` is the index of this rank in its unit; for the others see `OpenedRun`.
        """
        self._publish_start()
        self._publish({"url": url, "offline": offline, "first_row": first_row})
        if self.plan.has_writers and self.job_store is not None:
            attached_writers(self.job_store, self.plan).append_once(writer)

    def _open(self) -> AnyRun:
        offline = self._is_primary_offline()
        self._publish_start()
        for number in range(_RETRIES if self.plan.has_writers and not self.plan.primary else 0):
            try:
                return self.attempt(offline=offline)
            except UnavailableError as error:
                _log.debug("dist_wandb: rank %d tries again: %s", self.topology.global_rank, error)
            self._drop_failed_run()
            time.sleep(_PAUSE * 2**number)
        return self.attempt(offline=offline)

    def attempt(self, *, offline: bool) -> AnyRun:
        is_exact = self.as_given and self.topology.world_size == 1 and not offline
        return wandb_init.open_run(
            self.plan,
            self.topology,
            self.complete(self.arguments),
            create_new=self.create_new,
            upload_timeout=None if is_exact else self.options.limits.upload_timeout,
            offline=offline,
        )

    def _drop_failed_run(self) -> None:
        """Drop the wandb process that keeps the id of the failed run in use."""
        if self.is_alone:
            wandb_private.tear_down_service()
        else:
            wandb_private.detach_service()

    def _is_primary_offline(self) -> bool:
        """Whether this rank, which is to be online, follows a primary whose run is on disk. Waits for the primary."""
        if not self.plan.has_writers or self.plan.primary or self.job_store is None:
            return False
        wandb_private.drop_inherited_service()  # reading the mode uses wandb
        if requested.mode(self.arguments) != "online":
            return False
        within = self.job_store.wait_get(opening_key(self.plan), "its primary")
        published = self.job_store.wait_get(run_key(self.plan), "its primary", float(within))
        if published.get("refused"):
            raise ConfigurationError(
                f"Rank {self.topology.global_rank} opens no run, because W&B's server refused that of its primary: "
                f"{published['error']}. Correct the argument of init that this concerns."
            )
        if "error" in published:
            raise UnavailableError(f"its primary could not open the run: {published['error']}")
        return bool(published["offline"])

    def _publish_start(self) -> None:
        if self.job_store is not None and self.plan.announces and self.plan.opens_run:
            if self.plan.has_writers:
                wandb_private.drop_inherited_service()  # reading the limit uses wandb
            self.job_store.publish(opening_key(self.plan), requested.init_timeout(self.arguments))

    def _publish(self, message: OpenedRun) -> None:
        if self.job_store is not None and self.plan.announces:
            self.job_store.publish(run_key(self.plan), message)


def run_key(plan: RunPlan) -> str:
    """Return the key of a primary's `OpenedRun`."""
    return f"run/{plan.name_suffix}"


def attached_writers(job_store: JobStore, plan: RunPlan) -> SharedList:
    """Return the list of attached writers of a shared run: their indices in the unit, each once."""
    return SharedList(job_store, f"{run_key(plan)}/writers")


def opening_key(plan: RunPlan) -> str:
    """Return the key under which a primary publishes that it opens its run, and how long that may take, in seconds."""
    return f"{run_key(plan)}/opening"
