"""The config of a run, on all ranks: compared at the start, published by the primary, read everywhere.

Only the job's store is used, on a connection of its own, so nobody waits for a rank that may never come, but for those
who ask for it: a rank that reads the config of a run which another rank opens, and ranks with ``config_sync="check"``.

Parts: `Comparison` (what the ranks were given), `Publisher` (a primary's end), `Follower` (the others'), with a
`RunConfig` or a `LocalConfig` as its target, and `Look`, which brings all of them up to date once in a heartbeat.
`runs.config_guard` notices what users write into the config of a run, and keeps wandb from raising over it.

A primary publishes its run's config and metadata as JSON whenever they have changed (so a sweep's values, too), with a
number of how often: that is all that a heartbeat asks for. Values are published at once, not when somebody asks:
whoever asks first would wait until the primary's thread looks, and for ever once it is gone. Who follows whom:

- A rank without a run its unit's primary: `ConfigView` in place of `NullRun.config` looks once in a heartbeat, and at
  once for a name that it does not have.
- A secondary of a shared run its unit's primary: it opens with what is published, then writes what is new into its own
  run's config, because W&B keeps what any writer sent last.
- A rank with a run of its own (`new`), and the primary of another node, rank 0: likewise, but names that it was given
  with another value, or set itself, are its own; a sweep's values take precedence over given ones. A run of `new` that
  goes on (a restart, a later stage of ddp_spawn) has its config from W&B: names with another value than rank 0
  publishes at first are its own.

What is written on a rank without a run holds there until the primary publishes a new value of that name: a script that
writes the same on all ranks reads at once what it wrote.

Secrets never get into the store (`settings.config_secrets`, `settings.config_withheld`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from dist_wandb.config.comparison import Comparison
from dist_wandb.config.connection import Connection
from dist_wandb.config.follower import Follower, published_values
from dist_wandb.config.look import Look
from dist_wandb.config.messages import REFUSED, run_key
from dist_wandb.config.publisher import Publisher
from dist_wandb.config.targets import LocalConfig, RunConfig, WaitForPrimary
from dist_wandb.config.view import ConfigView
from dist_wandb.runs.config_guard import ConfigGuard
from dist_wandb.runs.null_run import NullRun
from dist_wandb.settings.plan import tells_job, unit_run_id
from dist_wandb.store.timed_caller import briefly
from dist_wandb.user_lines import users_line

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun
    from dist_wandb.settings.options import Options
    from dist_wandb.settings.plan import RunPlan
    from dist_wandb.store.job_store import JobStore
    from dist_wandb.topology.model import Topology

_CATCH_UP = 1.0  # seconds that `flush` and `finish` wait for the store


class ConfigSync:
    """One rank's part in having one config on all ranks.

    Args:
        options: The checked arguments of the integration.
        topology: Who this rank is, among several.
        config: What this rank was given as `config`, without what W&B is to leave out.
    """

    def __init__(self, options: Options, topology: Topology, config: object) -> None:
        opened_at = users_line()
        self._options = options
        self._connection = Connection(options, topology)
        self._comparison = Comparison(options, self._connection, config, opened_at)
        self._guard = ConfigGuard(
            topology.global_rank, opened_at, lambda names: self._connection.is_first(f"{REFUSED}/{names}")
        )
        self._opened_at = opened_at
        self._look = Look(self._connection, options.limits.heartbeat, self._update)
        self._follower = Follower(self._connection, self._comparison, None, completes=False)
        self._publisher: Publisher | None = None
        self._target: RunConfig | LocalConfig | None = None

    def reach_by(self, find: Callable[[], JobStore | None]) -> None:
        """Set how the job's store is found, which may be there later than this rank's session."""
        self._connection.find = find

    def ended_by(self, has_ended: Callable[[], bool]) -> None:
        """Set how to find out whether the coordinator has ended this session, so that nobody waits for its config."""
        self._connection.has_ended = has_ended

    def on_lost(self, replace_run: Callable[[AnyRun, Exception], None]) -> None:
        """Set what is done if wandb's own process is found gone: it has to `attach` the run's replacement."""
        self._guard.replace_run = replace_run

    def compare(self) -> None:
        """Publish what this rank was given; with ``config_sync="check"``, agree with all ranks whether it is the same.

        Raises:
            ConfigurationError: It is not, and it has to be: on all ranks.
            RendezvousError: It has to be the same, but there is no way to find out.
        """
        if self._options.config_sync == "check" and self._connection.topology.world_size > 1:
            self._comparison.check()
        else:
            self.look(at_once=True)

    def completed(self, init_arguments: Mapping[str, Any], plan: RunPlan, unit: str) -> Mapping[str, Any]:
        """The arguments of `wandb.init` for another writer of a shared run: with what its primary has published."""
        if not plan.has_writers or plan.primary:
            return init_arguments
        config = published_values(self._connection, run_key(unit), self._comparison.given)
        return init_arguments if config is None else {**init_arguments, "config": config}

    def takeable(self, init_arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments of `wandb.init`, without values of `config` that it would raise over."""
        return self._guard.takeable(init_arguments)

    def attach(self, run: AnyRun, plan: RunPlan, unit: str) -> None:
        """Begin to publish, to follow or to show the config, depending on this rank's part; or go on with another run.

        Args:
            run: This rank's run, or a `NullRun`, which gets a config that can be read.
            plan: What this rank does with W&B.
            unit: Name of its unit.
        """
        if self._target is None:
            self._follower = self._make_follower(plan, unit)
        if isinstance(run, NullRun):
            wait = WaitForPrimary(self._connection, self._follower, self._options.limits.join_timeout, self._opened_at)
            self._target = LocalConfig(self._look, self._follower, self._comparison.given, wait)
            run.show_config(ConfigView(self._target))
            run.show_metadata(self._target.metadata, unit_run_id(plan) if plan.base_id is not None else None)
        else:
            if self._publisher is None:
                self._publisher = Publisher(self._connection, self._comparison, self._published_keys(plan, unit), run)
            else:
                self._publisher.attach(run)
            if not isinstance(self._target, RunConfig):
                self._target = RunConfig(self._look, self._follower, self._publisher.notice)
            self._target.attach(run)
            self._guard.guard(run, self._target)
        self.look(at_once=True, whole=True)

    def _published_keys(self, plan: RunPlan, unit: str) -> tuple[str, ...]:
        keys = (run_key(unit),) if plan.announces else ()
        # Beside those of all nodes there is that of the whole job.
        return (*keys, run_key("")) if tells_job(self._connection.topology) and unit else keys

    def _make_follower(self, plan: RunPlan, unit: str) -> Follower:
        key = None
        if not tells_job(self._connection.topology):
            key = run_key("" if plan.announces else unit)
        completes = plan.announces or plan.run_mode == "new"
        return Follower(self._connection, self._comparison, key, completes=completes)

    def look(self, *, at_once: bool = False, whole: bool = False) -> None:
        """Publish what is new here, and take over what is new elsewhere; see `Look`."""
        self._look(at_once=at_once, whole=whole)

    def _update(self, whole: bool) -> None:
        self._comparison.publish_given()
        self._comparison.compare()
        if self._target is not None:
            self._follower.follow(self._target)
        if isinstance(self._target, LocalConfig):
            self._follower.look_for_end()
        if self._publisher is not None:
            self._publisher.publish(whole=whole)

    def undisturbed(self) -> AbstractContextManager[None]:
        """Look now, and take over nothing meanwhile: what is written depends on what is there."""
        return self._look.undisturbed()

    def catch_up(self) -> None:
        """Look now, but do not wait long for a store whose host has stalled."""
        if self._connection.is_usable:
            briefly(lambda: self.look(at_once=True, whole=True), None, _CATCH_UP)

    def known(self) -> dict[str, Any]:
        """The config as far as it is known on a rank without a run. Waits for nobody."""
        return self._target.known() if isinstance(self._target, LocalConfig) else dict(self._comparison.given)

    @property
    def has_run_ended(self) -> bool:
        """Whether this rank has no run, and has seen that the user finished the one that it logs to."""
        return self._follower.has_ended

    def publish_end(self) -> None:
        """Tell the ranks without a run that the user finished this rank's."""
        if self._publisher is not None:
            self._publisher.publish_end()

    def close(self) -> None:
        """Publish and take over nothing any more, and leave the run's config as it was found."""
        self._connection.close()
        self._guard.release()
