"""The config of a run that another rank has opened: what users read and write without a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import RendezvousError
from dist_wandb.notices import Notices, users_line, warn
from dist_wandb.runs import run_metadata, sweeps
from dist_wandb.runs.null_run import AnyRun, NullRun, class_of
from dist_wandb.session.config.comparison import OF_VERSION, differs_by_rank
from dist_wandb.settings.config_values import MISSING, ConfigCopy, KnownConfig, decoded, encoded, given_values, shown

if TYPE_CHECKING:
    from dist_wandb.session.config.sync import ConfigSync


class LocalConfig:
    """The config of the primary's run on a rank without a run. The first read waits for the primary."""

    def __init__(self, sync: ConfigSync) -> None:
        self._sync = sync
        self._shown = KnownConfig()
        self._written: set[str] = set()  # names that were written on this rank
        self._has_waited = False
        # Returns the run that answers instead, if the session has continued with another primary.
        self.following: Callable[[], AnyRun] | None = None
        self._used: dict[str, Any] = {}  # what this rank has read before the session was open
        self._notices = Notices()

    def apply(self, values: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        """Show new values in the order of all published ones; `MISSING` is a secret that this rank cannot know."""
        hidden = (self._shown.hidden - new.keys()) | {name for name, value in new.items() if value is MISSING}
        now = {name: value for name, value in self._shown.items() if name not in hidden or name in self._written}
        now.update({name: value for name, value in new.items() if value is not MISSING})
        order = [*values, *(name for name in now if name not in values)]
        self._shown = KnownConfig({name: now[name] for name in order if name in now}, frozenset(hidden))
        self._compare_used()

    def expect(self, values: Mapping[str, Any]) -> None:
        """Compare values that this rank has used with those of the primary, now or once they are published."""
        self._used.update(values)
        if self._sync.is_known:
            self._compare_used()

    def _compare_used(self) -> None:
        used, self._used = self._used, {}
        known = [name for name in used if name in self._shown and not differs_by_rank(name)]
        differing = [name for name in known if encoded(used[name]) != encoded(self._shown[name])]
        if differing:
            texts = ", ".join(f"{name!r} ({shown(used[name])}, {shown(self._shown[name])} there)" for name in differing)
            warn(
                f"Rank {self._sync.connection.rank} read the config before the processes of the job were started, and "
                f"the run has other values now: {texts}. The ranks may train differently. Give all ranks the same "
                "config.",
                self._sync.comparison.opened_at,
                may_raise=False,
            )

    def read(self, name: str | None = None) -> Mapping[str, Any]:
        """Return the primary's config, at most a heartbeat old; it is polled at once for a `name` that is missing."""
        if name not in self._shown or sweeps.is_trial():  # whose values replace those that are written here
            self._wait()
        if self.following is not None:
            return {**given_values(self.following().config), **self.written()}
        self._sync.refresh(at_once=self._sync.is_known and name is not None and name not in self._shown)
        return self._shown if self._sync.is_known else KnownConfig(self.known())

    def written(self) -> dict[str, Any]:
        return {name: self._shown[name] for name in self._written if name in self._shown}

    def known(self) -> dict[str, Any]:
        return dict(self._shown) if self._sync.is_known else {**self._sync.comparison.given, **self._shown}

    def metadata(self) -> Mapping[str, Any]:
        """Return the metadata of the primary's run, by attribute of `wandb.Run`; none if it is not known in time."""
        self._wait()
        if self.following is not None:
            run = self.following()
            return run.metadata() if isinstance(run, NullRun) else run_metadata.metadata_of(run)
        self._sync.refresh()
        return self._sync.metadata

    def write(self, values: Mapping[str, Any]) -> None:
        """Keep written values, as wandb shows them, on this rank only, until the primary publishes other ones."""
        self._sync.refresh(at_once=True)
        values = {name.strip("-"): value for name, value in values.items()}  # as wandb: `--lr` of docopt is `lr`
        kept = {name: decoded(encoded(value)) for name, value in self._sync.allowed(values).items()}
        self._shown.update(kept)
        self._written.update(kept)

    def _wait(self) -> None:
        """Wait for the primary to publish its run, once only; warn if it does not."""
        key, connection = self._sync.key, self._sync.connection
        is_over = self._has_waited or self.following is not None
        if self._sync.is_known or is_over or key is None or not connection.is_usable:
            return
        why = "the job has no store yet through which its primary can be reached"
        with suppress(RendezvousError):
            job_store = connection.store()
            if job_store is not None:
                why = f"its primary did not open its run (reads wait up to {connection.join_timeout:g} s)"
                try:
                    connection.await_primary(lambda: job_store.has([key + OF_VERSION]))
                finally:
                    self._has_waited = True
                self._sync.refresh(at_once=True)
                if self._sync.is_known or self.following is not None:
                    return
        if self._notices.is_first("unknown"):
            warn(
                f"The config of the run was read on rank {connection.rank}, but {why}. Until it does, rank "
                f"{connection.rank} reads the values that it was given.",
                users_line() or self._sync.comparison.opened_at,
            )


class EarlyConfig:
    """The config that a script reads and writes before its session is open, and with the same object later."""

    def __init__(self, session: Callable[[], Any], early: Callable[[], dict[str, Any]]) -> None:
        self._session = session  # `None` before it is open
        self._early = early

    def read(self, name: str | None = None) -> Mapping[str, Any]:
        """Return all values; the `name` is the one that is wanted."""
        if (session := self._session()) is None:
            return self._early()
        if name is not None:
            session.config.get(name)  # the primary may just have set it
        return given_values(session.config)

    def write(self, values: Mapping[str, Any]) -> None:
        if (session := self._session()) is None:
            self._early().update(values)
        else:
            session.config.update(values)


class ConfigView(Mapping[str, Any]):
    """The config of a run that another rank has opened.

    It is read like wandb's own `Config`, by attribute and by item, and counts as one in `isinstance`. Values of the
    primary, including those that it sets later, are visible here within one heartbeat; an unknown name is polled for at
    once. The first read waits up to `join_timeout` for the primary to open its run. Values written here do not reach
    the run: they are visible on this rank only, until the primary sets another value for the name.
    """

    # It is not a `MutableMapping`: as in wandb's own, nothing can be deleted, so `clear` would never end.

    __slots__ = ("_source",)
    __class__ = property(lambda view: class_of("Config") or type(view))
    _source: LocalConfig | EarlyConfig

    def __init__(self, source: LocalConfig | EarlyConfig) -> None:
        object.__setattr__(self, "_source", source)

    def __getitem__(self, name: str) -> Any:
        return self._source.read(name)[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy, pickle and so on check for such names
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:  # which has the name, or why the value is missing
            why = error.args[0]
        raise AttributeError(f"the config of the run has no {name!r}" if why == name else why)

    def __setattr__(self, name: str, value: Any) -> None:
        self.update({name: value})

    __setitem__ = __setattr__

    def __iter__(self) -> Iterator[str]:
        return iter(self.as_dict())

    def __len__(self) -> int:
        return len(self._source.read())

    def __bool__(self) -> bool:
        return True  # as wandb's own

    def __repr__(self) -> str:
        return str(self.as_dict())

    def __reduce__(self) -> tuple[Any, ...]:
        return ConfigCopy, (self.as_dict(),)

    def keys(self) -> list[str]:  # type: ignore[override]  # a list, without private names: as wandb's own
        """The current names."""
        return [name for name in self.as_dict() if not name.startswith("_")]

    def items(self) -> list[tuple[str, Any]]:  # type: ignore[override]  # likewise
        """The current names and values."""
        return [(name, value) for name, value in self.as_dict().items() if not name.startswith("_")]

    def as_dict(self) -> dict[str, Any]:
        """Values by name."""
        return dict(self._source.read())

    _as_dict = as_dict  # scripts read these, too
    _items = property(as_dict)
    __dict__ = property(lambda view: {"_items": view.as_dict(), "_locked": {}})

    def update(self, d: Any = None, *_args: Any, **_kwargs: Any) -> None:
        """Set values on this rank."""
        self._source.write(given_values(d))

    update_locked = update
    merge_locked = update

    def setdefaults(self, d: Any = None) -> None:
        """Set values of missing names on this rank."""
        known = self._source.read()
        self.update({name: value for name, value in given_values(d).items() if name not in known})

    def persist(self, *_: object) -> None:
        """Do nothing: this rank sends no config, and nothing can be deleted."""

    __delitem__ = persist
