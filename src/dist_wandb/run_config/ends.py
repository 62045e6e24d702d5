"""The ends of the config sync: a primary publishes its run's config and metadata, the others apply them here."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dist_wandb.run_config.messages import OF_VERSION, PublishedRun, Version, values_of
from dist_wandb.run_config.own_config import is_guarded
from dist_wandb.runs import run_metadata, wandb_private
from dist_wandb.settings.config_values import MISSING, encoded, filled, given_values, state, without_secrets

if TYPE_CHECKING:
    from dist_wandb.run_config.comparison import Comparison
    from dist_wandb.run_config.messages import Connection
    from dist_wandb.run_config.own_config import OwnConfig
    from dist_wandb.run_config.targets import LocalConfig
    from dist_wandb.runs.null_run import AnyRun


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
