"""The config of a run, on all ranks: compared at the start, published by the primary, read everywhere.

Only the job's store is used, through a separate connection. So no rank waits for one that may never come, with two
exceptions: a rank that reads the config of a run which another rank opens, and ranks with ``config_sync="check"``.

Parts: `Comparison` (the given configs), `Publisher` (a primary's end), `Follower` (the end of the others), with an
`OwnConfig`, which also detects what users write, or a `LocalConfig` as its target, and `Refresh`, which updates all.

A primary publishes its run's config and metadata as JSON whenever they have changed (including values of a sweep), with
a version number, which is all that followers poll. Values are published at once rather than on request: the first
reader would have to wait until the primary's thread polls, and forever once that is gone. Followers:

- A rank without a run follows its unit's primary. `ConfigView`, which replaces `NullRun.config`, polls once per
  heartbeat, and at once for a name that it does not have.
- A secondary of a shared run follows its unit's primary. It opens with the published values and then writes new ones
  into its own run's config, because W&B keeps what any writer sent last.
- A rank with its own run (`new`) and the primary of another node follow rank 0 in the same way, except that names that
  they were given with another value, or set themselves, keep their own values. A run of `new` that is continued (after
  a restart, or in a later stage of ddp_spawn) gets its config from W&B: names whose values differ from those that rank
  0 publishes first keep their own values. A sweep's values take precedence over given ones, and none can be changed.

A value written on a rank without a run applies there until the primary publishes a new value of that name. So a script
that writes the same value on all ranks can read it immediately.

Secrets are never written to the store (`settings.config_secrets`, `settings.config_values`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dist_wandb.run_config.comparison import Comparison
from dist_wandb.run_config.ends import Follower, Publisher, published_values
from dist_wandb.run_config.messages import Connection, run_key
from dist_wandb.run_config.own_config import OwnConfig
from dist_wandb.run_config.refresh import Refresh
from dist_wandb.run_config.targets import ConfigView, LocalConfig
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
    """One rank's end of the config sync. Arguments as for `Comparison`."""

    def __init__(
        self, options: Options, topology: Topology, config: object, run: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self._checks_all = options.config_sync == "check" and topology.world_size > 1
        self._connection = Connection(options.limits, topology)
        self._comparison = Comparison(options, self._connection, config, run)
        heartbeat = interval(options.limits.heartbeat, topology.world_size)
        self.refresh: Refresh = Refresh(self._connection, heartbeat, self._update)
        self._follower = Follower(self._connection, self._comparison)
        self._publisher = Publisher(self._connection, self._comparison)
        self._own = OwnConfig(
            self._connection, self._comparison, self.refresh, self._follower, self._publisher.noticed.extend
        )
        self._target: OwnConfig | LocalConfig | None = None

    def reach_by(
        self,
        find: Callable[[], JobStore | None],
        await_primary: Callable[[Callable[[], bool]], None] = lambda _: None,
    ) -> None:
        """Set how to reach the other ranks: see the attributes of `Connection`."""
        self._connection.find, self._connection.await_primary = find, await_primary

    def on_lost(self, replace_run: Callable[[AnyRun, Exception], None]) -> None:
        """Set what to call if wandb's own process is found dead. It must `attach` the replacement of the run."""
        self._own.replace_run = replace_run

    def compare(self) -> None:
        """Publish the given config. With ``config_sync="check"``, raise on all ranks if it is not the same."""
        if self._checks_all:
            self._comparison.check()
        else:
            self.refresh(at_once=True)

    def completed(self, init_arguments: Mapping[str, Any], plan: RunPlan, unit: str) -> Mapping[str, Any]:
        """Return the arguments of `wandb.init`, with a `config` that W&B can store."""
        if plan.has_writers and not plan.primary:  # these get the config that the primary has published
            config = published_values(self._connection, run_key(unit), self._comparison.given)
            init_arguments = init_arguments if config is None else {**init_arguments, "config": config}
        return self._own.writable(init_arguments)

    def attach(self, run: AnyRun, plan: RunPlan, unit: str) -> None:
        """Publish, follow or show the config of a run, depending on this rank's part; or continue with another run."""
        is_coordinator = self._connection.topology.is_coordinator
        if self._target is None:
            key = None if is_coordinator else run_key("" if plan.announces else unit)
            self._follower.begin(key, completes=plan.announces or plan.run_mode == "new")
        if isinstance(run, NullRun):
            self._target = LocalConfig(self.refresh, self._follower, self._comparison, self._connection)
            run.show_config(ConfigView(self._target))
            planned = plan if plan.base_id is not None else replace(plan, base_id=self._comparison.run.get("id"))
            run.show_metadata(self._target.metadata, unit_run_id(planned))
        else:
            units = [unit] if plan.announces else []
            units += [""] if is_coordinator and unit else []  # for the primaries of other units
            self._publisher.attach(run, tuple(map(run_key, units)))
            self._target = self._own
            self._own.attach(run)
        self.refresh(at_once=True, whole=True)

    def _update(self, whole: bool, polls: bool) -> None:
        self._comparison.publish_given()
        if polls:
            self._comparison.compare()
            if self._target is not None:
                self._follower.follow(self._target)
        self._publisher.publish(whole=whole)

    def continue_in(self, run: Callable[[], AnyRun]) -> dict[str, Any]:
        """Answer, on a rank without a run, from the run of another session; return what was written on this rank."""
        if not isinstance(self._target, LocalConfig):
            return {}
        self._target.following = run
        return self._target.written()

    def catch_up(self) -> None:
        """Refresh at once, but do not wait long for a store whose host has stalled."""
        if self._connection.is_usable:
            briefly(lambda: self.refresh(at_once=True, whole=True), None, _CATCH_UP)

    def known(self) -> dict[str, Any]:
        """The config as known so far. Does not wait, and asks nobody."""
        return dict(self._comparison.given) if self._target is None else self._target.known()

    def expect(self, values: Mapping[str, Any]) -> None:
        """Warn if a rank without a run, which has used these values already, gets other ones from the primary."""
        if isinstance(self._target, LocalConfig):
            self._target.expect(values)

    @property
    def has_run_ended(self) -> bool:
        """Whether this rank has no run, and the user was found to have finished the run that it logs to."""
        return isinstance(self._target, LocalConfig) and self._follower.has_ended

    @property
    def publications(self) -> int:
        """How often this rank has published something for its followers."""
        return self._publisher.publications + self._comparison.publications

    def publish_end(self) -> None:
        """Publish that the user finished this rank's run, for the ranks without one."""
        self._publisher.publish_end()

    def close(self) -> None:
        """Stop publishing and following, and restore the class of the run's config."""
        self._connection.close()
        self._own.release()
