"""Where a rank has the config that it follows: in its own run, or, without a run, in this process alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import RendezvousError
from dist_wandb.notices import Notices
from dist_wandb.run_config.messages import OF_VERSION
from dist_wandb.runs.config_guard import update_unnoticed
from dist_wandb.settings.config_values import encoded, given_values
from dist_wandb.settings.config_withheld import MISSING, Known, withheld, without_notes
from dist_wandb.user_lines import users_line, warn

if TYPE_CHECKING:
    from dist_wandb.run_config.comparison import Comparison
    from dist_wandb.run_config.connection import Connection
    from dist_wandb.run_config.follower import Follower
    from dist_wandb.run_config.look import Look
    from dist_wandb.runs.null_run import AnyRun


class RunConfig:
    """The config of this rank's own run; a `runs.config_guard.Listener` of what the user reads and writes.

    Args:
        look: Brings it up to date.
        follower: Knows which values are this rank's own.
        notice: Has values of names published.
    """

    def __init__(self, look: Look, follower: Follower, notice: Callable[[Iterable[str]], None]) -> None:
        self._look = look
        self._follower = follower
        self._notice = notice
        self._followed: set[str] = set()  # names that were set by following
        self._config: Any = None
        self._is_resumed = False

    def attach(self, run: AnyRun) -> None:
        """Use the config of another run from now on."""
        self._config = getattr(run, "config", None)  # a mock of a run may have none
        self._is_resumed = bool(getattr(run, "resumed", False))

    def apply(self, _values: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        """Write what is new into the run's config; see `LocalConfig.apply`."""
        here = given_values(self._config)
        due = {
            name: value
            for name, value in new.items()
            if value is not MISSING and (name not in here or encoded(here[name]) != encoded(value))
        }
        if due and self._config is not None:
            self._notice(due)
            self._followed |= due.keys()
            update_unnoticed(self._config, due)

    def names_of_earlier_starts(self, published: Mapping[str, Any]) -> set[str]:
        """Names that this run, if it goes on, holds with another value than the primary's does."""
        mine = given_values(self._config) if self._is_resumed else {}
        return {
            name
            for name in mine.keys() & published.keys()
            if without_notes(encoded(withheld(name, mine[name]))) != without_notes(published[name])
        }

    def undisturbed(self) -> AbstractContextManager[None]:
        """Apply nothing meanwhile."""
        return self._look.undisturbed()

    def before_read(self, name: str | None = None) -> None:
        """Bring the config up to date if another rank may have set it; at once if it lacks `name`."""
        if self._follower.key is not None:
            self._look(at_once=name is not None)

    def before_write(self) -> None:
        """Apply what is older than what is about to be written."""
        if self._follower.key is not None:
            self._look(at_once=True)

    def after_write(self, names: Iterable[str]) -> None:
        """Record that values of these names are this rank's own, and publish them."""
        self._follower.set_own(names)
        self._followed.difference_update(names)
        self.after_change(names)

    def after_change(self, names: Iterable[str]) -> None:
        """Publish values of these names, whoever has set them."""
        self._notice(names)
        self._look(at_once=True)

    def may_change(self, name: str) -> bool:
        """Whether a value may be changed without `allow_val_change`, because this rank did not set it."""
        return name in self._followed


class LocalConfig:
    """The config of the primary's run, as a rank without a run reads it. The first read waits for the primary.

    Args:
        look: Brings it up to date.
        follower: Follows the primary.
        comparison: Has what this rank was given: it is read as long as nothing is published.
        connection: To the other ranks.
    """

    def __init__(self, look: Look, follower: Follower, comparison: Comparison, connection: Connection) -> None:
        self._look = look
        self._follower = follower
        self._comparison = comparison
        self._connection = connection
        self._shown = Known()
        self._written: set[str] = set()  # names that were written on this rank
        self._has_waited = False
        self._notices = Notices()

    def apply(self, values: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        """Show new values; those of secrets that this rank cannot know are hidden.

        Args:
            values: All that the primary has, as it published them.
            new: Those that are new, as they are here; `MISSING` for secrets that this rank was not given.
        """
        hidden = (self._shown.hidden - new.keys()) | {name for name, value in new.items() if value is MISSING}
        now = {name: value for name, value in self._shown.items() if name not in hidden or name in self._written}
        now.update({name: value for name, value in new.items() if value is not MISSING})
        order = [*values, *(name for name in now if name not in values)]
        self._shown = Known({name: now[name] for name in order if name in now}, frozenset(hidden))

    def names_of_earlier_starts(self, _published: Mapping[str, Any]) -> set[str]:
        """None, because this rank has no run."""
        return set()

    def read(self, name: str | None = None) -> Mapping[str, Any]:
        """The config of the primary's run.

        Args:
            name: The name that is looked up: if it is not known yet, the primary is asked again.

        Returns:
            Values by name, a heartbeat old at most; what this rank was given, as long as none are published.
        """
        if name not in self._shown:
            self._wait()
        self._look()
        if self._follower.is_known and name is not None and name not in self._shown:
            self._look(at_once=True)
        return self._shown if self._follower.is_known else Known(self.known())

    def known(self) -> dict[str, Any]:
        """The config as far as it is known. Waits for nobody."""
        return dict(self._shown) if self._follower.is_known else {**self._comparison.given, **self._shown}

    def metadata(self) -> Mapping[str, Any]:
        """The known metadata of the primary's run, by attribute of `wandb.Run`.

        Returns:
            Values by name, a heartbeat old at most; none if the primary does not publish its run in time.
        """
        self._wait()
        self._look()
        return self._follower.metadata

    def write(self, values: Mapping[str, Any]) -> None:
        """Keep what was written, for this rank alone, until the primary publishes another value."""
        self._look(at_once=True)
        self._shown.update(values)
        self._written.update(values)

    def _wait(self) -> None:
        """Wait for the primary to publish its run, once; warn once if it does not."""
        key, connection = self._follower.key, self._connection
        if self._follower.is_known or self._has_waited or key is None or not connection.is_usable:
            return
        why = "there is no store of the job yet through which to ask its primary"
        with suppress(RendezvousError):
            job_store = connection.store()
            if job_store is not None:
                why = f"its primary did not open its run within {connection.join_timeout:g} s"
                try:
                    job_store.wait_get(key + OF_VERSION, "its primary", 0.0 if connection.has_ended() else None)
                finally:
                    self._has_waited = True
                self._look(at_once=True)
                return
        if self._notices.is_first("unknown"):
            warn(
                f"The config of the run was read on rank {connection.rank}, but {why}. Until it does, rank "
                f"{connection.rank} reads the values that it was given itself.",
                users_line() or self._comparison.opened_at,
            )
