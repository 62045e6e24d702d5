"""Where a rank has the config that it follows: in its own run's, or, without a run, for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any

from dist_wandb.config.messages import version_key
from dist_wandb.errors import RendezvousError
from dist_wandb.notices import Notices
from dist_wandb.runs.config_guard import update_unnoticed
from dist_wandb.settings.config_values import given_values, told
from dist_wandb.settings.config_withheld import MISSING, Known, withheld, without_notes
from dist_wandb.user_lines import Line, users_line, warn

if TYPE_CHECKING:
    from dist_wandb.config.connection import Connection
    from dist_wandb.config.follower import Follower
    from dist_wandb.config.look import Look
    from dist_wandb.runs.null_run import AnyRun


class RunConfig:
    """The config of this rank's own run. It is asked before and after the user reads and writes it.

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
        """Be the config of another run from now on."""
        self._config = getattr(run, "config", None)  # a stand-in for a run, in somebody's tests, may have none
        self._is_resumed = bool(getattr(run, "resumed", False))

    def apply(self, values: Mapping[str, Any], new: Mapping[str, Any]) -> None:  # noqa: ARG002  # see `Target`
        """Write what is new into the run's config."""
        here = given_values(self._config)
        due = {
            name: value
            for name, value in new.items()
            if value is not MISSING and (name not in here or told(here[name]) != told(value))
        }
        if due and self._config is not None:
            self._notice(due)
            self._followed |= due.keys()
            update_unnoticed(self._config, due)

    def names_of_earlier_starts(self, published: Mapping[str, Any]) -> set[str]:
        """Names that this run, which goes on, holds with another value than the primary's does."""
        mine = given_values(self._config) if self._is_resumed else {}
        return {
            name
            for name in mine.keys() & published.keys()
            if without_notes(told(withheld(name, mine[name]))) != without_notes(published[name])
        }

    def undisturbed(self) -> AbstractContextManager[None]:
        """Take over nothing meanwhile."""
        return self._look.undisturbed()

    def before_read(self, name: str | None = None) -> None:
        """Bring the config up to date, where another rank may have set it; at once for a name that is not there."""
        if self._follower.key is not None:
            self._look(at_once=name is not None)

    def before_write(self) -> None:
        """Take over what is older than what is about to be written."""
        if self._follower.key is not None:
            self._look(at_once=True)

    def after_write(self, names: Iterable[str]) -> None:
        """Remember whose values these are, and publish them."""
        self._follower.set_own(names)
        self._followed.difference_update(names)
        self.after_change(names)

    def after_change(self, names: Iterable[str]) -> None:
        """Publish values of these names, whoever has set them."""
        self._notice(names)
        self._look(at_once=True)

    def may_change(self, name: str) -> bool:
        """Whether a value may be changed without asking, because it is not this rank that set it."""
        return name in self._followed


class LocalConfig:
    """The config of the primary's run, as a rank without a run reads it.

    Args:
        look: Brings it up to date.
        follower: Follows the primary.
        given: What this rank was given: it is read as long as nothing is published.
        wait: Waits for the primary, once.
    """

    def __init__(self, look: Look, follower: Follower, given: Mapping[str, Any], wait: WaitForPrimary) -> None:
        self._look = look
        self._follower = follower
        self._given = given
        self._wait = wait
        self._shown = Known()
        self._written: set[str] = set()  # names that were written on this rank

    def apply(self, values: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        """Have values read here that are new; those of secrets that this rank cannot know are not there."""
        hidden = (self._shown.hidden - new.keys()) | {name for name, value in new.items() if value is MISSING}
        now = {name: value for name, value in self._shown.items() if name not in hidden or name in self._written}
        now.update({name: value for name, value in new.items() if value is not MISSING})
        order = [*values, *(name for name in now if name not in values)]
        self._shown = Known({name: now[name] for name in order if name in now}, frozenset(hidden))

    def names_of_earlier_starts(self, published: Mapping[str, Any]) -> set[str]:  # noqa: ARG002  # see `Target`
        """None: there is no run that goes on."""
        return set()

    def read(self, name: str | None = None) -> Mapping[str, Any]:
        """The config of the primary's run.

        Args:
            name: What is looked for: if it is not known yet, the primary is asked again.

        Returns:
            Values by name, a heartbeat old at most; what this rank was given, as long as none are published.
        """
        if name not in self._shown:
            self._wait(self._look)
        self._look()
        if self._follower.is_known and name is not None and name not in self._shown:
            self._look(at_once=True)
        return self._shown if self._follower.is_known else Known(self.known())

    def known(self) -> dict[str, Any]:
        """The config as far as it is known. Waits for nobody."""
        return dict(self._shown) if self._follower.is_known else {**self._given, **self._shown}

    def metadata(self) -> Mapping[str, Any]:
        """What is known of the primary's run besides its config, by the names that a `wandb.Run` has for it.

        Returns:
            Values by name, a heartbeat old at most. Waits for the primary as `read` does; nothing, if it never comes.
        """
        self._wait(self._look)
        self._look()
        return self._follower.metadata

    def write(self, values: Mapping[str, Any]) -> None:
        """Keep what was written, for this rank alone, until the primary publishes another value."""
        self._look(at_once=True)
        self._shown.update(values)
        self._written.update(values)


class WaitForPrimary:
    """Waits for a primary to publish its run, for the first who asks.

    Args:
        connection: To the other ranks.
        follower: Follows the primary.
        timeout: How long to wait, in seconds.
        opened_at: The user's line that opened the session, for warnings.
    """

    def __init__(self, connection: Connection, follower: Follower, timeout: float, opened_at: Line | None) -> None:
        self._connection = connection
        self._follower = follower
        self._timeout = timeout
        self._opened_at = opened_at
        self._gave_up = False
        self._notices = Notices()

    def __call__(self, look: Look) -> None:
        """Wait, unless the run is known or has been waited for; then look."""
        key, rank = self._follower.key, self._connection.rank
        if self._follower.is_known or self._gave_up or key is None or not self._connection.is_usable:
            return
        why = "there is no store of the job yet through which to ask its primary"
        with suppress(RendezvousError):
            job_store = self._connection.store()
            if job_store is not None:
                why = f"its primary did not open its run within {self._timeout:g} s"
                try:
                    job_store.wait_get(version_key(key), "its primary", 0.0 if self._connection.has_ended() else None)
                finally:
                    self._gave_up = True  # if it did not come; otherwise the config is known now
                look(at_once=True)
                return
        if self._notices.is_first("not there"):
            warn(
                f"The config of the run was read on rank {rank}, but {why}. Until it does, rank {rank} "
                "reads the values that it was given itself.",
                users_line() or self._opened_at,
            )
