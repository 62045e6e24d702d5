"""A primary's end of the config sync: it publishes its run's config and metadata whenever they have changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dist_wandb.run_config.messages import OF_DIGESTS, OF_VERSION, PublishedRun, Version
from dist_wandb.run_config.text import ConfigText
from dist_wandb.runs import config_guard, run_metadata
from dist_wandb.settings.config_values import given_values

if TYPE_CHECKING:
    from dist_wandb.run_config.comparison import Comparison
    from dist_wandb.run_config.connection import Connection
    from dist_wandb.runs.null_run import AnyRun


class Publisher:
    """Publishes the config of this rank's run, if other ranks follow it."""

    def __init__(self, connection: Connection, comparison: Comparison) -> None:
        self._connection = connection
        self._comparison = comparison
        self._keys: tuple[str, ...] = ()
        self._noticed: deque[str] = deque()  # names that were written since the text was updated
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

    def notice(self, names: Iterable[str]) -> None:
        """Publish the values of these names at the next refresh, because they were written."""
        self._noticed.extend(names)

    def publish(self, *, whole: bool) -> None:
        """Publish what has changed.

        Only values that were written are checked, and a few of those that may have changed inside; all if `whole`.
        """
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
        while self._noticed:
            names.add(self._noticed.popleft())
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
