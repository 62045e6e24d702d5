"""The config of a run, on all ranks: compared at the start, published by the primary, read everywhere.

Only the job's store is used, on a connection of its own, so nobody waits for a rank that may never come, except where
it is asked for: a rank that reads the config of a run which another rank opens, and ranks with ``config_sync="check"``.

Parts: `Comparison` (what the ranks were given), `Publisher` (a primary's end), `Follower` (the others'), with a
`RunConfig` or a `LocalConfig` as its target, and `Look`, which brings all of them up to date.
`runs.config_guard` notices what users write into the config of a run, and keeps wandb from raising over it.

A primary publishes its run's config and metadata as JSON whenever they have changed (so a sweep's values, too), with a
number of how often: that is all that a look asks for. Values are published at once, not when somebody asks:
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
from typing import TYPE_CHECKING, Any

from dist_wandb.run_config.comparison import Comparison
from dist_wandb.run_config.connection import Connection
from dist_wandb.run_config.follower import Follower, published_values
from dist_wandb.run_config.look import Look
from dist_wandb.run_config.messages import REFUSED, run_key
from dist_wandb.run_config.publisher import Publisher
from dist_wandb.run_config.targets import LocalConfig, RunConfig
from dist_wandb.run_config.view import ConfigView
from dist_wandb.runs.config_guard import ConfigGuard
from dist_wandb.runs.null_run import NullRun
from dist_wandb.settings.plan import unit_run_id
from dist_wandb.store.polling import interval
from dist_wandb.store.timed_caller import briefly

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

    Attributes:
        look: Publishes what is new here, and applies what is new elsewhere.
    """

    def __init__(self, options: Options, topology: Topology, config: object) -> None:
        self._checks_all = options.config_sync == "check" and topology.world_size > 1
        self._connection = Connection(options.limits, topology)
        self._comparison = Comparison(options, self._connection, config)
        self._guard = ConfigGuard(
            topology.global_rank,
            self._comparison.opened_at,
            lambda names: self._connection.is_first(f"{REFUSED}/{names}"),
        )
        self.look: Look = Look(self._connection, interval(options.limits.heartbeat, topology.world_size), self._update)
        self._follower = Follower(self._connection, self._comparison)
        self._publisher = Publisher(self._connection, self._comparison)
        self._run_config = RunConfig(self.look, self._follower, self._publisher.notice)
        self._target: RunConfig | LocalConfig | None = None

    def reach_by(self, find: Callable[[], JobStore | None], has_ended: Callable[[], bool] = lambda: False) -> None:
        """Set how to reach the other ranks.

        Args:
            find: Finds the job's store, which may exist only after this rank's session has begun.
            has_ended: Whether the coordinator has ended this session, so that nobody waits for its config.
        """
        self._connection.find, self._connection.has_ended = find, has_ended

    def on_lost(self, replace_run: Callable[[AnyRun, Exception], None]) -> None:
        """Set what is done if wandb's own process is found gone: it has to `attach` the run's replacement."""
        self._guard.replace_run = replace_run

    def compare(self) -> None:
        """Publish what this rank was given; with ``config_sync="check"``, agree with all ranks whether it is the same.

        Raises:
            ConfigurationError: It is not, and it has to be: on all ranks.
            RendezvousError: It has to be the same, but there is no way to find out.
        """
        if self._checks_all:
            self._comparison.check()
        else:
            self.look(at_once=True)

    def completed(self, init_arguments: Mapping[str, Any], plan: RunPlan, unit: str) -> Mapping[str, Any]:
        """The arguments of `wandb.init`, with a `config` that it can hold.

        Another writer of a shared run gets the config that its primary has published.
        """
        if plan.has_writers and not plan.primary:
            config = published_values(self._connection, run_key(unit), self._comparison.given)
            init_arguments = init_arguments if config is None else {**init_arguments, "config": config}
        return self._guard.writable(init_arguments)

    def attach(self, run: AnyRun, plan: RunPlan, unit: str) -> None:
        """Begin to publish, to follow or to show the config, depending on this rank's part; or go on with another run.

        Args:
            run: This rank's run, or a `NullRun`, which gets a config that can be read.
            plan: What this rank does with W&B.
            unit: Name of its unit.
        """
        is_coordinator = self._connection.topology.is_coordinator
        if self._target is None:
            key = None if is_coordinator else run_key("" if plan.announces else unit)
            self._follower.begin(key, completes=plan.announces or plan.run_mode == "new")
        if isinstance(run, NullRun):
            self._target = LocalConfig(self.look, self._follower, self._comparison, self._connection)
            run.show_config(ConfigView(self._target))
            run.show_metadata(self._target.metadata, unit_run_id(plan) if plan.base_id is not None else None)
        else:
            units = [unit] if plan.announces else []
            units += [""] if is_coordinator and unit else []  # besides the nodes' runs, that of the whole job
            self._publisher.attach(run, tuple(map(run_key, units)))
            self._target = self._run_config
            self._target.attach(run)
            self._guard.guard(run, self._target)
        self.look(at_once=True, whole=True)

    def _update(self, whole: bool, elsewhere: bool) -> None:
        self._comparison.publish_given()
        if elsewhere:
            self._comparison.compare()
            if self._target is not None:
                self._follower.follow(self._target)
        self._publisher.publish(whole=whole)

    def catch_up(self) -> None:
        """Look now, but do not wait long for a store whose host has stalled."""
        if self._connection.is_usable:
            briefly(lambda: self.look(at_once=True, whole=True), None, _CATCH_UP)

    def known(self) -> dict[str, Any]:
        """The config as far as it is known on a rank without a run. Waits for nobody."""
        return self._target.known() if isinstance(self._target, LocalConfig) else dict(self._comparison.given)

    @property
    def has_run_ended(self) -> bool:
        """Whether this rank has no run, and the user was found to have finished the run that it logs to."""
        return isinstance(self._target, LocalConfig) and self._follower.has_ended

    @property
    def news(self) -> int:
        """How often this rank has published something for those that follow it."""
        return self._publisher.news + self._comparison.news

    def publish_end(self) -> None:
        """Publish that the user finished this rank's run, for the ranks without one."""
        self._publisher.publish_end()

    def close(self) -> None:
        """Stop publishing and following, and restore the class of the run's config."""
        self._connection.close()
        self._guard.release()
