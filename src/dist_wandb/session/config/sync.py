"""The config of a run, on all ranks: compared at the start, published by the primary, read everywhere.

Only the job's store is used, through a separate connection. So no rank waits for one that may never come, with two
exceptions: a rank that reads the config of a run which another rank opens, and ranks with ``config_sync="check"``.

Parts: `Comparison` (the given configs), `OwnConfig` (which a primary publishes, and which detects what users write), or
`LocalConfig`; `ConfigSync`, which applies to either what it follows.

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

A refresh publishes what is new on this rank, once per heartbeat or at once, never twice at the same time. It may also
poll the other ranks, a request to the job's store. A session's thread polls when the exchange reports that some rank
has published something. Otherwise it polls, for messages from ranks of other units, when this rank has not polled for
`_SELDOM`. A read refreshes and polls once per heartbeat, or at once for a missing name. `flush` and `finish` do so at
once, for a second at most. `log` never does. If a unit has one rank, or with ``reduce=None``, there is no thread: then
only reads, writes, `flush` and `finish` refresh.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from dist_wandb.errors import ConfigurationError, RendezvousError
from dist_wandb.job.timed_caller import call_or_default, interval
from dist_wandb.job.topology import Topology
from dist_wandb.notices import Notices
from dist_wandb.runs import run_metadata
from dist_wandb.runs.null_run import AnyRun, NullRun
from dist_wandb.session.config.comparison import OF_VERSION, Comparison, Connection, PublishedRun, Version, run_key
from dist_wandb.session.config.own_config import OwnConfig
from dist_wandb.session.config.targets import ConfigView, LocalConfig
from dist_wandb.settings.config_values import MISSING, filled, given_values
from dist_wandb.settings.options import Options
from dist_wandb.settings.plan import RunPlan, unit_run_id

_log = logging.getLogger("dist_wandb")

_PATIENCE = 1.0  # seconds that a write waits for a refresh by another thread
_SELDOM = 10.0  # seconds after a poll until the session's thread polls, unless the exchange reports something new
_CATCH_UP = 1.0  # seconds that `flush` and `finish` wait for the store


class ConfigSync:
    """One rank's end of the config: compares, publishes, follows and shows it. Arguments as for `Comparison`."""

    def __init__(self, options: Options, topology: Topology, config: object, run: Mapping[str, Any]) -> None:
        self._checks_all = options.config_sync == "check" and topology.world_size > 1
        self.connection: Connection = Connection(options.limits, topology)
        self.comparison: Comparison = Comparison(options, self.connection, config, run)
        self.own: OwnConfig = OwnConfig(self)
        self.local: LocalConfig | None = None  # on a rank without a run
        self._heartbeat = interval(options.limits.heartbeat, topology.world_size)
        self._lock = threading.RLock()
        self._is_busy = False  # reads and writes of the config by this thread do not start another refresh
        self._polled = -math.inf  # when this rank polled last, by the monotonic clock
        self._next_refresh = -math.inf  # of the session's thread
        self.published: float = 0.0  # how often all ranks had published something when the session's thread polled last
        self._notices = Notices()
        self.key: str | None = None  # under which the run that this rank follows is published, if it follows one
        self.metadata: Mapping[str, Any] = {}  # of that run, as far as it is known
        self._has_ended = False  # whether that run was found to be finished by its user
        # Names whose values are this rank's own, as those that it was given. `None`: the followed values replace all.
        self.own_names: set[str] | None = None
        self._seen: dict[str, tuple[Any, bool | None]] = {}  # what was published last: see `PublishedRun`
        self._imposed: frozenset[str] = frozenset()  # see `PublishedRun`
        self._version = 0

    def compare(self) -> None:
        """Publish the given config. With ``config_sync="check"``, raise on all ranks if it is not the same."""
        if self._checks_all:
            self.comparison.check()
        else:
            self.refresh(at_once=True)

    def completed(self, init_arguments: Mapping[str, Any], plan: RunPlan, unit: str) -> Mapping[str, Any]:
        if plan.has_writers and not plan.primary:  # these get the config that the primary has published
            run = self.connection.try_get(run_key(unit), PublishedRun)
            if run is not None:
                known = filled(run["values"], run["withheld"], self.comparison.given)
                config = {name: value for name, value in known.items() if value is not MISSING}
                init_arguments = {**init_arguments, "config": config}
        return self.own.writable(init_arguments)

    def attach(self, run: AnyRun, plan: RunPlan, unit: str) -> None:
        """Publish, follow or show the config of a run, depending on this rank's part; or continue with another run."""
        is_coordinator = self.connection.topology.is_coordinator
        self.key = None if is_coordinator else run_key("" if plan.announces else unit)
        if plan.announces or plan.run_mode == "new":
            self.own_names = self.own_names or set()
        if isinstance(run, NullRun):
            self.local = LocalConfig(self)
            run.show(config=ConfigView(self.local))
            planned = plan if plan.base_id is not None else replace(plan, base_id=self.comparison.run.get("id"))
            run.show_metadata(self.local.metadata, unit_run_id(planned))
        else:
            units = [unit] if plan.announces else []
            units += [""] if is_coordinator and unit else []  # for the primaries of other units
            self.local = None
            self.own.attach(run, tuple(map(run_key, units)))
        self.refresh(at_once=True)

    def refresh(self, *, at_once: bool = False) -> None:
        """Refresh and poll, if it is time to: once per heartbeat, or `at_once`. Waits for no rank; raises nothing."""
        if at_once or time.monotonic() >= self._polled + self._heartbeat:
            self._refresh(_PATIENCE if at_once else 0.0, polls=True)

    def in_background(self, published: float) -> None:
        """Refresh, if it is time to, on a thread whose rounds other ranks wait for.

        `published` is how often all ranks have published something, as far as the exchange reports it.
        """
        now, is_news = time.monotonic(), published != self.published
        if not is_news and now < self._next_refresh:
            return
        polls = is_news or now >= self._polled + max(self._heartbeat, _SELDOM)
        if not self._refresh(0.0, polls=polls):
            return
        self._next_refresh = now + self._heartbeat
        if polls:
            self.published = published

    def _refresh(self, patience: float, *, polls: bool) -> bool:
        """Refresh, unless another thread does so for longer than `patience` seconds. Return whether this one could."""
        if not self.connection.is_usable or not self._lock.acquire(timeout=patience):
            return False
        was_busy, self._is_busy = self._is_busy, True
        try:
            if not was_busy:
                if polls:
                    self._polled = time.monotonic()
                self.update(polls)
        except RendezvousError as error:  # the store is gone, usually because the job has ended
            _log.debug("dist_wandb: rank %d can neither publish nor read its config: %s", self.connection.rank, error)
        except ConfigurationError as error:  # another rank's message cannot be read
            self._notices.warn("malformed", f"rank {self.connection.rank} cannot follow the config: {error}")
        except Exception:  # noqa: BLE001  # must not affect the training
            if self._notices.is_first("failed"):
                _log.exception("dist_wandb: rank %d could not bring its config up to date", self.connection.rank)
        finally:
            self._is_busy = was_busy
            self._lock.release()
        return True

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Refresh before and after the block, but not inside it, because what is written depends on what was read."""
        self.refresh(at_once=True)
        if self._lock.acquire(timeout=_PATIENCE):
            was_busy, self._is_busy = self._is_busy, True
            try:
                yield
            finally:
                self._is_busy = was_busy
                self._lock.release()
            self.refresh(at_once=True)
        else:  # another thread waits for a stalled store
            yield

    def update(self, polls: bool) -> None:
        """Publish what is new here; if it `polls`, apply what other ranks have published."""
        self.comparison.publish_given()
        if polls:
            self.comparison.compare()
            if self.key is not None:
                self._follow(self.key)
        self.own.publish()

    def _follow(self, key: str) -> None:
        version = self.connection.try_get(key + OF_VERSION, Version)
        if version is None:
            return
        self._has_ended = self._has_ended or version["is_over"]
        run = None if version["number"] == self._version else self.connection.try_get(key, PublishedRun)
        if run is None:
            return
        values, withheld = run["values"], run["withheld"]
        if not self.is_known and self.own_names is not None:
            self.own_names |= self.comparison.own_names() | self.own.names_of_earlier_starts(values)
        self._imposed = frozenset(run["imposed"])
        kept = (self.own_names or set()) - self._imposed
        seen, self._seen = self._seen, {name: (value, withheld.get(name)) for name, value in values.items()}
        changed = {name: values[name] for name in values if name not in kept and seen.get(name) != self._seen[name]}
        new = filled(changed, withheld, self.comparison.given)
        self._version = version["number"]
        self.metadata = run_metadata.from_json(run["metadata"])
        (self.local or self.own).apply(values, new)

    @property
    def is_known(self) -> bool:
        """Whether the run that this rank follows is known."""
        return self._version > 0

    def allowed(self, given: object) -> dict[str, Any]:
        """Return the values that the script may set: as with wandb, none of a sweep's."""
        return {name: value for name, value in given_values(given).items() if name not in self._imposed}

    def continue_in(self, run: Callable[[], AnyRun]) -> dict[str, Any]:
        """Answer, on a rank without a run, from the run of another session; return what was written on this rank."""
        if self.local is None:
            return {}
        self.local.following = run
        return self.local.written()

    def catch_up(self) -> None:
        """Refresh at once, but do not wait long for a store whose host has stalled."""
        if self.connection.is_usable:
            self.own.is_due = True  # values may have changed inside
            call_or_default(lambda: self.refresh(at_once=True), None, _CATCH_UP)

    def known(self) -> dict[str, Any]:
        return (self.local or self.own).known()

    def expect(self, values: Mapping[str, Any]) -> None:
        """Warn if a rank without a run, which has used these values already, gets other ones from the primary."""
        if self.local is not None:
            self.local.expect(values)

    @property
    def has_run_ended(self) -> bool:
        """Whether this rank has no run, and the user was found to have finished the run that it logs to."""
        return self.local is not None and self._has_ended

    def close(self) -> None:
        self.connection.close()
        self.own.release()
