"""A follower's end of the config sync: what a primary has published, taken over by this rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from dist_wandb.config.messages import Digests, PublishedRun, digests_key, end_key, version_key
from dist_wandb.runs import run_metadata
from dist_wandb.settings.config_withheld import MISSING, filled

if TYPE_CHECKING:
    from dist_wandb.config.comparison import Comparison
    from dist_wandb.config.connection import Connection


class Target(Protocol):
    """What follows: the config of this rank's run, or what stands in for it."""

    def apply(self, values: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        """Take over values.

        Args:
            values: All that the primary has, as it published them.
            new: Those that are new, as they are here; `MISSING` for secrets that this rank was not given.
        """

    def names_of_earlier_starts(self, published: Mapping[str, Any]) -> set[str]:
        """Names that a run which goes on holds with another value than the primary's does."""


class Follower:
    """Follows the run of a primary.

    Args:
        connection: To the other ranks.
        comparison: What this rank was given.
        key: Under which that run is published; `None` on a rank that follows nobody.
        completes: Whether what is followed adds to what this rank has. Otherwise it replaces it.

    Attributes:
        key: As given.
        is_known: Whether the primary has published its run.
        has_ended: Whether its user was seen to have finished that run.
        metadata: What is known of that run besides its config.
    """

    def __init__(self, connection: Connection, comparison: Comparison, key: str | None, *, completes: bool) -> None:
        self.key = key
        self.is_known = self.has_ended = False
        self.metadata: Mapping[str, Any] = {}
        self._connection = connection
        self._comparison = comparison
        # Names that this rank set itself, other than all do; none are its own where what is followed replaces all.
        self._own = set(comparison.given) if completes else None
        self._seen: dict[str, Any] = {}  # what was published last
        self._version = 0

    def follow(self, target: Target) -> None:
        """Take over what is new."""
        if self.key is None:
            return
        version = self._connection.try_get(version_key(self.key))
        if version is None or (self.is_known and version == self._version):
            return
        theirs: Digests | None = None if self.is_known else self._connection.try_get(digests_key(self.key))
        run: PublishedRun | None = self._connection.try_get(self.key)
        if run is not None and (self.is_known or theirs is not None):
            self._take_over(run, theirs, target)
            self._version = version

    def _take_over(self, run: PublishedRun, theirs: Digests | None, target: Target) -> None:
        values: dict[str, Any] = json.loads(run["values"])
        if theirs is not None and self._own is not None:
            self._own -= self._comparison.equal_names(theirs)
            self._own |= target.names_of_earlier_starts(values)
        kept = (self._own or set()).difference(run["imposed"])
        changed = [name for name in values if name not in self._seen or self._seen[name] != values[name]]
        own = self._comparison.given
        new = {name: filled(values[name], own.get(name, MISSING)) for name in changed if name not in kept}
        self._seen, self.is_known = values, True
        self.metadata = run_metadata.from_json(run["metadata"])
        target.apply(values, new)

    def set_own(self, names: Iterable[str]) -> None:
        """Values of these names were set on this rank."""
        if self._own is not None:
            self._own.update(names)

    def look_for_end(self) -> None:
        """See whether the user has finished the run that is followed."""
        if self.key is not None and not self.has_ended:
            job_store = self._connection.store()
            self.has_ended = job_store is not None and job_store.has([end_key(self.key)])


def published_values(connection: Connection, key: str, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config of a primary's run, with secrets as this rank was given them; `None` if it is not published yet."""
    run: PublishedRun | None = connection.try_get(key)
    if run is None:
        return None
    found = {name: filled(value, given.get(name, MISSING)) for name, value in json.loads(run["values"]).items()}
    return {name: value for name, value in found.items() if value is not MISSING}
