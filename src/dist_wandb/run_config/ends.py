"""The ends of the config sync: a primary publishes its run's config and metadata, the others apply them here."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dist_wandb.run_config.messages import OF_DIGESTS, OF_VERSION, Digests, PublishedRun, Version, values_of
from dist_wandb.runs import config_guard, run_metadata
from dist_wandb.settings.config_values import encoded, given_values
from dist_wandb.settings.config_withheld import MISSING, filled, withheld

if TYPE_CHECKING:
    from dist_wandb.run_config.comparison import Comparison
    from dist_wandb.run_config.messages import Connection
    from dist_wandb.run_config.targets import LocalConfig, RunConfig
    from dist_wandb.runs.null_run import AnyRun

_ENOUGH = 0.001  # seconds of checking values, after which no further value is checked
_SHARE = 0.01  # of the time that may be spent on these checks
_FIXED = (bool, int, float, str, type(None))  # types of values that cannot change inside


class ConfigText:
    """Names and values of a config as JSON, without secrets; `given` are the values that this rank was given."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, given: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self._clock = clock  # in seconds
        self._given = given
        self._pieces: dict[str, str] = {}
        self._changeable: dict[str, None] = {}  # names of values that can change inside, the last checked at the end
        self._next_check = 0.0

    def renew(self, values: Mapping[str, Any]) -> bool:
        """Set values by name. Return whether any of them has changed."""
        is_new = False
        for name, value in values.items():
            self._changeable.pop(name, None)
            if not isinstance(value, _FIXED):
                self._changeable[name] = None
            piece = f"{json.dumps(name)}: {json.dumps(encoded(withheld(name, value, self._given.get(name, MISSING))))}"
            is_new = is_new or self._pieces.get(name) != piece
            self._pieces[name] = piece
        return is_new

    def renew_some(self, read: Callable[[str], Any]) -> bool:
        """Check again some values that can change inside: for a short time, not too often. Return as `renew` does."""
        began = self._clock()
        if began < self._next_check:
            return False
        is_new = False
        for name in list(self._changeable):  # in the order of the last checks
            is_new = self.renew({name: read(name)}) or is_new
            if self._clock() - began > _ENOUGH:
                break
        now = self._clock()
        self._next_check = now + (now - began) / _SHARE
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
        is_of_sweep = bool(getattr(run, "sweep_id", None))
        self._imposed = self._comparison.changed_names(given_values(self._config)) if is_of_sweep else []
        self._text = ConfigText(given=self._comparison.given)
        self._published: PublishedRun | None = None

    def publish(self, *, whole: bool) -> None:
        """Publish what has changed: of values that may change inside, a few are checked, or all if `whole`."""
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
        message = PublishedRun(values=str(self._text), imposed=self._imposed, metadata=metadata)
        for key in self._keys:
            if not self._version["number"]:
                job_store.publish(key + OF_DIGESTS, self._comparison.digests())
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
        if whole or not config_guard.is_guarded(config) or any(name not in config for name in names):
            return self._text.renew(given_values(config))
        is_new = self._text.renew({name: config[name] for name in names if not name.startswith("_")})
        return self._text.renew_some(config.__getitem__) or is_new

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
        self._seen: dict[str, Any] = {}  # the values published last
        self._version = 0

    @property
    def is_known(self) -> bool:
        """Whether the primary has published its run."""
        return self._version > 0

    def begin(self, key: str | None, *, completes: bool) -> None:
        """Follow the run under `key`, if any. If it `completes`, values that this rank was given stay."""
        self.key = key
        self._own = set(self._comparison.given) if completes else None

    def follow(self, target: RunConfig | LocalConfig) -> None:
        """Apply newly published values."""
        if self.key is None:
            return
        version = self._connection.try_get(self.key + OF_VERSION, Version)
        if version is None:
            return
        self.has_ended = self.has_ended or version["is_over"]
        if version["number"] == self._version:
            return
        theirs = None if self.is_known else self._connection.try_get(self.key + OF_DIGESTS, Digests)
        run = self._connection.try_get(self.key, PublishedRun)
        if run is None or (theirs is None and not self.is_known):
            return
        values = values_of(run)
        if theirs is not None and self._own is not None:
            self._own -= self._comparison.equal_names(theirs)
            self._own |= target.names_of_earlier_starts(values)
        kept = (self._own or set()).difference(run["imposed"])
        changed = [name for name in values if name not in self._seen or self._seen[name] != values[name]]
        own = self._comparison.given
        new = {name: filled(values[name], own.get(name, MISSING)) for name in changed if name not in kept}
        self._seen, self._version = values, version["number"]
        self.metadata = run_metadata.from_json(run["metadata"])
        target.apply(values, new)

    def set_own(self, names: Iterable[str]) -> None:
        """Keep the values of these names, which were set on this rank."""
        if self._own is not None:
            self._own.update(names)


def published_values(connection: Connection, key: str, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config of a primary's run, with secrets as given to this rank; `None` if it is not published yet."""
    run = connection.try_get(key, PublishedRun)
    if run is None:
        return None
    found = {name: filled(value, given.get(name, MISSING)) for name, value in values_of(run).items()}
    return {name: value for name, value in found.items() if value is not MISSING}
