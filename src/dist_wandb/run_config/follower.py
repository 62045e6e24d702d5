"""A follower's end of the config sync: it applies on this rank what a primary has published."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dist_wandb.run_config.messages import OF_DIGESTS, OF_VERSION, Digests, PublishedRun, Version, values_of
from dist_wandb.runs import run_metadata
from dist_wandb.settings.config_withheld import MISSING, filled

if TYPE_CHECKING:
    from dist_wandb.run_config.comparison import Comparison
    from dist_wandb.run_config.connection import Connection
    from dist_wandb.run_config.targets import LocalConfig, RunConfig


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
        """Follow the run under `key` from now on, or none.

        If it `completes`, the followed values complete those that this rank was given, rather than replace them.
        """
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
