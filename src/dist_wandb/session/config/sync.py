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

Secrets are never written to the store (`settings.config_values`).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dist_wandb.job.timed_caller import briefly, interval
from dist_wandb.runs import run_metadata, wandb_private
from dist_wandb.runs.null_run import NullRun
from dist_wandb.session.config.comparison import Comparison
from dist_wandb.session.config.connection import (
    OF_VERSION,
    Connection,
    PublishedRun,
    Refresh,
    Version,
    run_key,
    values_of,
)
from dist_wandb.session.config.own_config import OwnConfig, is_guarded
from dist_wandb.session.config.targets import ConfigView, LocalConfig
from dist_wandb.settings.config_values import MISSING, encoded, filled, given_values, state, without_secrets
from dist_wandb.settings.plan import unit_run_id

if TYPE_CHECKING:
    from dist_wandb.job.job_store import JobStore
    from dist_wandb.job.model import Topology
    from dist_wandb.runs.null_run import AnyRun
    from dist_wandb.settings.options import Options
    from dist_wandb.settings.plan import RunPlan

_CATCH_UP = 1.0  # seconds that `flush` and `finish` wait for the store


class ConfigText:
    """Names and values of a config as JSON, without secrets; `given` are the values that this rank was given."""

    def __init__(self, given: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._given = given
        self.withheld: dict[str, str] = {}  # see `PublishedRun`
        self._pieces: dict[str, str] = {}

    def renew(self, values: Mapping[str, Any]) -> bool:
        """Set values by name. Return whether any of them has changed."""
        is_new = False
        for name, value in values.items():
            rest = without_secrets({name: value})
            before = self._pieces.get(name), self.withheld.pop(name, None)
            if rest.get(name, MISSING) is not value:
                self.withheld[name] = state(value, self._given.get(name, MISSING))
            self._pieces[name] = f"{json.dumps(name)}: {json.dumps(encoded(rest.get(name)))}"
            is_new = is_new or before != (self._pieces[name], self.withheld.get(name))
        return is_new

    def __str__(self) -> str:
        return f"{{{', '.join(self._pieces.values())}}}"


class Publisher:
    """Publishes the config of this rank's run, if other ranks follow it."""

    def __init__(self, connection: Connection, comparison: Comparison) -> None:
        self._connection = connection
        self._comparison = comparison
        self._keys: tuple[str, ...] = ()
        self.noticed: deque[str] = deque()  # names that were written, to publish their values at the next refresh
        self._version = Version(number=0, is_over=False)
        self._config: Any = None

    def attach(self, run: AnyRun, keys: tuple[str, ...]) -> None:
        """Publish the config of a run from now on, under these keys; none if no rank follows it."""
        self._run, self._keys = run, keys
        self._config = getattr(run, "config", None)  # a mock of a run may have none
        values = given_values(self._config) if getattr(run, "sweep_id", None) else {}
        locked = {name: wandb_private.is_locked(self._config, name) for name in values}
        is_known = None not in locked.values()
        self._imposed = [*filter(locked.get, locked)] if is_known else self._comparison.changed_names(values)
        self._text = ConfigText(given=self._comparison.given)
        self._published: PublishedRun | None = None

    def publish(self, *, whole: bool) -> None:
        """Publish what was written, or if `whole`, what has changed, also inside values."""
        if not self._keys or self._config is None:
            return
        metadata = run_metadata.metadata_of(self._run)
        has_changed = self._renew_text(whole=whole)
        if not has_changed and self._published is not None and self._published["metadata"] == metadata:
            return
        self._published = None
        job_store = self._connection.store()
        if job_store is None:
            return
        message = PublishedRun(
            values=str(self._text),
            withheld=self._text.withheld,
            given=self._comparison.digests,
            imposed=self._imposed,
            metadata=metadata,
        )
        for key in self._keys:
            job_store.publish(key, message)
            version = {**self._version, "number": self._version["number"] + 1}
            job_store.publish(key + OF_VERSION, version)  # last, because it makes followers read the rest
        self._version["number"] += 1
        self._published = message

    def _renew_text(self, *, whole: bool) -> bool:
        """Update the text of the config. Return whether it has changed."""
        config, names = self._config, set[str]()
        while self.noticed:
            names.add(self.noticed.popleft())
        if whole or not is_guarded(config) or any(name not in config for name in names):
            return self._text.renew(given_values(config))
        return self._text.renew({name: config[name] for name in names if not name.startswith("_")})

    @property
    def publications(self) -> int:
        """How often something was published."""
        return self._version["number"] + self._version["is_over"]

    def publish_end(self) -> None:
        """Publish that the user finished this rank's run. This remains, even if values are published later."""
        job_store = self._connection.store() if self._keys and self._connection.is_usable else None
        if job_store is not None:
            for key in self._keys:
                job_store.publish(key + OF_VERSION, {**self._version, "is_over": True})
        self._version["is_over"] = True


class Follower:
    """Follows the run of a primary, once `key` is set."""

    def __init__(self, connection: Connection, comparison: Comparison) -> None:
        self.key: str | None = None  # under which that run is published; `None` on a rank that follows no run
        self.has_ended: bool = False  # whether that run was found to be finished by its user
        self.metadata: Mapping[str, Any] = {}  # of that run, as far as it is known
        self._connection = connection
        self._comparison = comparison
        # Names whose values are this rank's own. `None`: the followed values replace all of this rank's.
        self._own: set[str] | None = None
        self._seen: dict[str, tuple[Any, str | None]] = {}  # what was published last: see `PublishedRun`
        self._imposed: frozenset[str] = frozenset()  # see `PublishedRun`
        self._version = 0

    @property
    def is_known(self) -> bool:
        """Whether the primary has published its run."""
        return self._version > 0

    def begin(self, key: str | None, *, completes: bool) -> None:
        """Follow the run under `key`, if any. If it `completes`, values that this rank was given stay."""
        self.key = key
        self._own = set(self._comparison.given) if completes else None

    def follow(self, target: OwnConfig | LocalConfig) -> None:
        """Apply newly published values."""
        if self.key is None:
            return
        version = self._connection.try_get(self.key + OF_VERSION, Version)
        if version is None:
            return
        self.has_ended = self.has_ended or version["is_over"]
        if version["number"] == self._version:
            return
        run = self._connection.try_get(self.key, PublishedRun)
        if run is None:
            return
        values, withheld = values_of(run), run["withheld"]
        if not self.is_known and self._own is not None:
            self._own -= self._comparison.equal_names(run["given"])
            self._own |= target.names_of_earlier_starts(values)
        self._imposed = frozenset(run["imposed"])
        kept = (self._own or set()) - self._imposed
        seen, self._seen = self._seen, {name: (value, withheld.get(name)) for name, value in values.items()}
        changed = {name: values[name] for name in values if name not in kept and seen.get(name) != self._seen[name]}
        new = filled(changed, withheld, self._comparison.given)
        self._version = version["number"]
        self.metadata = run_metadata.from_json(run["metadata"])
        target.apply(values, new)

    def allowed(self, given: object) -> dict[str, Any]:
        """Return the values that the script may set: as with wandb, none of a sweep's."""
        return {name: value for name, value in given_values(given).items() if name not in self._imposed}

    def set_own(self, names: Iterable[str]) -> None:
        """Keep the values of these names, which were set on this rank."""
        if self._own is not None:
            self._own.update(names)


def published_values(connection: Connection, key: str, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config of a primary's run, with secrets as given to this rank; `None` if it is not published yet."""
    run = connection.try_get(key, PublishedRun)
    if run is None:
        return None
    found = filled(values_of(run), run["withheld"], given)
    return {name: value for name, value in found.items() if value is not MISSING}


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

    def on_lost(self, replace_run: Callable[[AnyRun, Exception], object]) -> None:
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
