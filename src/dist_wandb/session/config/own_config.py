"""The config of this rank's own run, guarded: the user's writes are seen, and wandb does not raise over values.

wandb has no callback for changes of a run's config by the user, and raises over values that it cannot hold. Therefore,
while a session is open, the config object of its run has a class derived from its original one (by setting
`__class__`), which reports writes and does not raise. It remains the same object and a wandb.Config, relies on no
private name of wandb, and gets its original class back when the session ends. Values that wandb cannot hold are written
as their repr, also in a world of one. Writes that wandb refuses for other reasons (a changed value without
`allow_val_change`) still raise; names that came from the primary may be set once more without it.

A heartbeat without a write costs nothing that grows with the config. Changes *inside* a value are not reported: `flush`
and `finish` find them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dist_wandb.notices import users_line, warn
from dist_wandb.runs import run_metadata, wandb_private
from dist_wandb.runs.null_run import SETTABLE, AnyRun, NullRun, class_of
from dist_wandb.session.config.comparison import OF_VERSION, REFUSED, PublishedRun, Version, listed
from dist_wandb.settings.config_values import MISSING, encoded, given_values, publishable, shown, without_secrets

if TYPE_CHECKING:
    from dist_wandb.session.config.sync import ConfigSync

_GUARD = "_dist_wandb_guard"  # on wandb's config, in its instance's namespace, not among its values


@dataclass(eq=False, repr=False)
class OwnConfig:
    """The config of this rank's own run: what the user writes into it, `ConfigSync` applies, and other ranks follow."""

    sync: ConfigSync
    # Called if wandb's own process is lost; it must `attach` the replacement of the run.
    replace_run: Callable[[AnyRun, Exception], object] | None = None

    def __post_init__(self) -> None:
        self.is_due: bool = False  # whether values may have changed, which the next refresh publishes
        self._keys: tuple[str, ...] = ()  # under which it is published
        self._version = Version(number=0, is_over=False)
        self._followed: set[str] = set()  # names that were set by following: they need no `allow_val_change`
        self._refused: set[str] = set()  # names with a warning
        self._run: AnyRun = NullRun()
        self._config: Any = None

    def known(self) -> dict[str, Any]:
        return _read(self._config)

    def attach(self, run: AnyRun, keys: tuple[str, ...]) -> None:
        """Use, guard, and publish under some keys, the config of another run from now on."""
        self._run, self._keys = run, keys
        summary = wandb_private.summary_before(run) if keys else {}
        self._before: dict[str, Any] = {run_metadata.SUMMARY: summary} if summary else {}
        self._config = getattr(run, "config", None)  # a mock of a run may have none
        values = given_values(self._config) if getattr(run, "sweep_id", None) else {}
        self._imposed = [name for name in values if wandb_private.is_locked(self._config, name)]
        self.is_due = True
        self._published: PublishedRun | None = None
        if issubclass(type(self._config), class_of("Config") or ()):  # changes of any other config are detected later
            with suppress(TypeError):  # the same applies if wandb's config does not allow another class
                if not isinstance(self._config, _Guarded):
                    kind: Any = type(self._config)
                    guarded = type(kind.__name__, (_Guarded, kind), {"__module__": kind.__module__})
                    object.__setattr__(self._config, "__class__", guarded)
                object.__setattr__(self._config, _GUARD, self)

    def release(self) -> None:
        config = self._config
        if isinstance(config, _Guarded) and config.__dict__.get(_GUARD) is self:
            object.__setattr__(config, "__class__", type(config).__mro__[2])
            object.__delattr__(config, _GUARD)

    def publish(self) -> None:
        """Publish the config, if anything was written, and the run's metadata, if they are not published yet."""
        if not self._keys or self._config is None:
            return
        if self.is_due or not isinstance(self._config, _Guarded):
            self.is_due = False
            self._last = publishable(given_values(self._config), self.sync.comparison.given)
        metadata = {} if self._published is None else self._published["metadata"]
        if any(metadata.get(name, ...) != getattr(self._run, name, None) for name in SETTABLE):
            metadata = {**run_metadata.metadata_of(self._run), **self._before}
        values, withheld = self._last
        message = PublishedRun(values=values, withheld=withheld, imposed=self._imposed, metadata=metadata)
        job_store = None if message == self._published else self.sync.connection.store()
        if job_store is None:
            return
        self._version["number"] += 1  # also if the store does not answer: it may have the message nevertheless
        for key in self._keys:
            job_store.publish(key, message)
            job_store.publish(key + OF_VERSION, self._version)  # last, because it makes followers read the rest
        self._published = message
        self.sync.connection.publications += 1

    def publish_end(self) -> None:
        """Publish that the user finished this rank's run. This remains, even if values are published later."""
        job_store = self.sync.connection.store() if self._keys and self.sync.connection.is_usable else None
        if job_store is not None:
            for key in self._keys:
                job_store.publish(key + OF_VERSION, {**self._version, "is_over": True})
        self._version["is_over"] = True
        self.sync.connection.publications += 1

    def apply(self, _values: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        here = given_values(self._config)
        due = {
            name: value
            for name, value in new.items()
            if value is not MISSING and (name not in here or encoded(here[name]) != encoded(value))
        }
        if due and self._config is not None:
            self.is_due = True
            self._followed |= due.keys()
            _unguarded(self._config).update(due, allow_val_change=True)

    def names_of_earlier_starts(self, published: Mapping[str, Any]) -> set[str]:
        """Return the names that a resumed run has with another value than the primary's."""
        mine = given_values(self._config) if getattr(self._run, "resumed", False) else {}
        rest = without_secrets(mine)
        return {name for name in mine.keys() & published.keys() if encoded(rest.get(name)) != published[name]}

    def writable(self, init_arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return arguments of `wandb.init` with a plain `config`; what W&B cannot hold becomes text, with a warning."""
        values = given_values(init_arguments.get("config"))
        if not values:  # such as a file that wandb reads itself
            return init_arguments
        return {**init_arguments, "config": {**values, **self._holdable(run_metadata.chosen_config(init_arguments))}}

    def _holdable(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values with text in place of those that W&B cannot hold; warn once in the job of these names."""
        refused = [name for name, value in values.items() if not run_metadata.can_hold(value)]
        new = [name for name in refused if name not in self._refused]
        self._refused.update(new)
        listing = listed([repr(name) for name in new])
        if new and self.sync.connection.is_first(f"{REFUSED}/{listing}"):
            warn(
                f"W&B cannot hold these values of the config on rank {self.sync.connection.rank}, so their repr is "
                f"written: {listing}. Pass text, numbers, lists and dicts.",
                users_line() or self.sync.comparison.opened_at,
            )
        return {**values, **{name: shown(values[name]) for name in refused}}

    def write(self, config: Any, given: Any, allow_val_change: bool | None) -> None:
        """Write the user's values; those that came from the primary may be changed."""
        if self.sync.key is not None:
            self.sync.refresh(at_once=True)  # published values that are older
        values = self._holdable(self.sync.allowed(given))
        free = {name: value for name, value in values.items() if name in self._followed}
        rest = {name: value for name, value in values.items() if name not in free}
        try:
            if free:
                _unguarded(config).update(free, allow_val_change=True)
            if rest or not (free or given_values(given)):
                _unguarded(config).update(rest or given, allow_val_change=allow_val_change)
        except Exception as error:
            if self.replace_run is None or not wandb_private.has_lost_service(self._run, error):
                raise
            if self._config is config:  # otherwise the run has already been replaced
                self.replace_run(self._run, error)
            if self._config is not None:
                _unguarded(self._config).update(values, allow_val_change=True)
        if self.sync.own_names is not None:
            self.sync.own_names.update(values)
        self._followed.difference_update(values)
        self.after_change()

    def after_change(self) -> None:
        self.is_due = True
        self.sync.refresh(at_once=True)


class _Guarded:
    """Inserted before the class of wandb's config as a base class, so it cannot be a Python mapping."""

    @property
    def _guard(self) -> OwnConfig:
        guard: OwnConfig = self.__dict__[_GUARD]
        return guard

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        """Copy and pickle as a dict of the values, for checkpoints."""
        return dict, (_read(self),)

    def update(self, d: Any, allow_val_change: bool | None = None) -> None:
        self._guard.write(self, d, allow_val_change)

    def setdefaults(self, d: Any) -> None:
        with self._guard.sync.undisturbed():
            values, config = given_values(d), _unguarded(self)
            self.update({name: values[name] for name in values if not config.__contains__(name)} if values else d)

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    __setattr__ = __setitem__

    def update_locked(self, d: Any, *args: Any, **kwargs: Any) -> None:
        _unguarded(self).update_locked(d, *args, **kwargs)
        self._guard.after_change()

    def merge_locked(self, d: Any, *args: Any, **kwargs: Any) -> None:
        _unguarded(self).merge_locked(d, *args, **kwargs)
        self._guard.after_change()

    def __getitem__(self, name: str) -> Any:
        return self._fresh(name).__getitem__(name)

    def __contains__(self, name: object) -> bool:
        return bool(self._fresh(name).__contains__(name))

    def get(self, *args: Any) -> Any:
        return self._fresh(*args[:1]).get(*args)

    def keys(self) -> Any:
        return self._fresh().keys()

    def items(self) -> Any:
        return self._fresh().items()

    def __len__(self) -> int:
        return len(self.keys())  # wandb's config has no length, but a `ConfigView` does

    def __bool__(self) -> bool:
        return True  # as for wandb's config

    def _fresh(self, name: object = _GUARD) -> Any:
        """Refresh the config if another rank may have set it; at once if it lacks `name`, unless that is private."""
        guard, config = self._guard, _unguarded(self)
        if guard.sync.key is not None:
            guard.sync.refresh()
            if not config.__contains__(name) and not str(name).startswith("_"):
                guard.sync.refresh(at_once=True)
        return config


def _unguarded(config: Any) -> Any:
    """Return a config with the methods of wandb's class: neither reads nor writes are noticed."""
    return super(_Guarded, config) if isinstance(config, _Guarded) else config


def _read(config: Any) -> dict[str, Any]:
    if not isinstance(config, _Guarded):
        return given_values(config)
    above = _unguarded(config)
    return {str(name): above.__getitem__(name) for name in above.keys()}  # noqa: SIM118  # not a mapping
