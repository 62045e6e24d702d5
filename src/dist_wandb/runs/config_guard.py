"""A guard around the config of a W&B run: it detects the user's writes, and keeps wandb from raising over values.

wandb has no callback for changes of a run's config by the user, and raises over values that it cannot hold. Therefore,
while a session is open, the config object of its run has a class derived from its original one (by setting
`__class__`), which reports writes and does not raise. It remains the same object and a wandb.Config, relies on no
private name of wandb, and gets its original class back when the session ends. Values that wandb cannot hold are written
as their repr, also in a world of one. Writes that wandb refuses for other reasons (a changed value without
`allow_val_change`) still raise; names that came from the primary may be set once more without it.

A change costs the JSON of the changed values; a heartbeat without a change costs nothing that grows with the config.
Changes *inside* a value are not reported: `flush` and `finish` find them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from dist_wandb.runs import run_metadata, wandb_process
from dist_wandb.runs.null_run import NullRun
from dist_wandb.settings.config_values import given_values, is_plain, listed, shown
from dist_wandb.user_lines import Line, users_line, warn

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun

_GUARD = "_dist_wandb_guard"  # on wandb's config, in its instance's namespace, not among its values


class Listener(Protocol):
    """Called before and after a config is read and written."""

    def undisturbed(self) -> AbstractContextManager[None]:
        """Return a context in which the listener leaves the config unchanged."""

    def before_read(self, name: str | None = None) -> None:
        """Handle a coming read of the config; `name` is a requested name that is missing."""

    def before_write(self) -> None:
        """Handle a coming write."""

    def after_write(self, names: Iterable[str]) -> None:
        """Handle values of these names, written by the user."""

    def after_change(self, names: Iterable[str]) -> None:
        """Handle values of these names, written by W&B."""

    def may_change(self, name: str) -> bool:
        """Return whether a value may be changed without `allow_val_change`."""


class ConfigGuard:
    """Keeps wandb from raising over values of this rank's config."""

    def __init__(self, rank: int, opened_at: Line | None, is_first: Callable[[str], bool]) -> None:
        # Called if wandb's own process is lost; it must `guard` the replacement of the run.
        self.replace_run: Callable[[AnyRun, Exception], None] | None = None
        self.listener: Listener
        self._rank = rank
        self._opened_at = opened_at  # the user's line that opened the session, for warnings
        self._is_first = is_first
        self._refused: set[str] = set()  # names with a warning
        self._run: AnyRun = NullRun()
        self._config: Any = None

    def guard(self, run: AnyRun, listener: Listener) -> None:
        """Guard the config of a run."""
        self.listener = listener
        self._run = run
        self._config = getattr(run, "config", None)  # a mock of a run may have none
        if is_wandb_config(self._config):  # changes of any other config are detected later
            with suppress(TypeError):  # the same applies if wandb's config does not allow another class
                if not isinstance(self._config, _Guarded):
                    kind: Any = type(self._config)
                    object.__setattr__(self._config, "__class__", _guarded_kind(kind))
                object.__setattr__(self._config, _GUARD, self)

    def release(self) -> None:
        """Restore the class of the config."""
        config = self._config
        if isinstance(config, _Guarded) and config.__dict__.get(_GUARD) is self:
            object.__setattr__(config, "__class__", type(config).__mro__[2])
            object.__delattr__(config, _GUARD)

    def writable(self, init_arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return arguments of `wandb.init` with a plain `config`; what W&B cannot hold becomes text, with a warning."""
        config = init_arguments.get("config")
        values = given_values(config)
        chosen = run_metadata.chosen_config(init_arguments)
        refused = [name for name, value in chosen.items() if not (is_plain(value) or can_hold(value))]
        is_wandbs_kind = not isinstance(config, Mapping) or isinstance(config, dict)
        given = config if isinstance(config, dict) else getattr(config, "__dict__", {})
        is_exact = all(isinstance(name, str) and values.get(name, value) is value for name, value in given.items())
        if not refused and is_wandbs_kind and is_exact and values.keys() <= given.keys():
            return init_arguments
        self.warn_of_refused(refused)
        writable = {name: shown(value) if name in refused else value for name, value in values.items()}
        return {**init_arguments, "config": writable}

    def warn_of_refused(self, names: Iterable[str]) -> None:
        """Warn once in the job that values of these names are written as text."""
        new = [name for name in names if name not in self._refused]
        self._refused.update(new)
        listing = listed([repr(name) for name in new])
        if new and self._is_first(listing):
            warn(
                f"W&B cannot hold these values of the config on rank {self._rank}, so their repr is written: "
                f"{listing}. Pass text, numbers, lists and dicts.",
                users_line() or self._opened_at,
            )

    def write(self, config: Any, given: Any, write: Callable[[Any, bool], None]) -> None:
        """Write values by `write(values, allow)`; those that this rank did not set itself may always be changed."""
        self.listener.before_write()
        values = given_values(given)
        free = {name: value for name, value in values.items() if self.listener.may_change(name)}
        rest = {name: value for name, value in values.items() if name not in free}
        if free:
            self._write_part(config, free, lambda part: write(part, True))
        if rest or not free:
            self._write_part(config, rest or given, lambda part: write(part, False))
        self.listener.after_write(values)

    def _write_part(self, config: Any, values: Any, write: Callable[[Any], None]) -> None:
        if not self._is_written(config, values, write):
            several = len(values) > 1
            refused = [
                name for name in values if not (several and self._is_written(config, {name: values[name]}, write))
            ]
            update_unnoticed(config, {name: shown(values[name]) for name in refused})
            self.warn_of_refused(refused)

    def _is_written(self, config: Any, values: Any, write: Callable[[Any], None]) -> bool:
        """Write values; return whether wandb can hold all of them. Raise if wandb refuses them for another reason."""
        import wandb

        try:
            write(values)
        except Exception as error:
            is_lost = wandb_process.has_lost_service(self._run, error)
            if not is_lost and not isinstance(error, wandb.Error) and isinstance(values, dict):
                return False
            if not is_lost or self.replace_run is None:
                raise
            if self._config is config:  # otherwise the run has already been replaced
                self.replace_run(self._run, error)
            if self._config is not None:
                update_unnoticed(self._config, given_values(values))
        return True


def is_guarded(config: object) -> bool:
    """Return whether writes into a config are reported."""
    return isinstance(config, _Guarded)


def update_unnoticed(config: Any, values: Mapping[str, Any]) -> None:
    """Write values without reporting them to the listener."""
    above: Any = super(_Guarded, config) if isinstance(config, _Guarded) else config
    above.update(dict(values), allow_val_change=True)


def read_unnoticed(config: Any) -> dict[str, Any]:
    """Return the values without reporting a read, which may ask other ranks."""
    if not isinstance(config, _Guarded):
        return given_values(config)
    above: Any = super(_Guarded, config)
    return {str(name): above.__getitem__(name) for name in above.keys()}  # noqa: SIM118  # not a mapping


class _Guarded:
    """Inserted before the class of wandb's config as a base class, so it cannot be a Python mapping."""

    @property
    def _base(self) -> Any:
        """The config with the methods of its original class."""
        return super()

    @property
    def _guard(self) -> ConfigGuard:
        guard: ConfigGuard = self.__dict__[_GUARD]
        return guard

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        """Copy and pickle as a dict of the values, for checkpoints."""
        return dict, (dict(read_unnoticed(self)),)

    def update(self, d: Any, allow_val_change: bool | None = None) -> None:
        self._guard.write(
            self, d, lambda values, free: self._base.update(values, allow_val_change=free or allow_val_change)
        )

    def setdefaults(self, d: Any) -> None:
        with self._guard.listener.undisturbed():
            values = given_values(d)
            self.update({name: values[name] for name in values if not self._base.__contains__(name)} if values else d)

    def __setitem__(self, name: str, value: Any) -> None:
        def write(values: Any, free: bool) -> None:
            if free:
                self._base.update(values, allow_val_change=True)
            else:
                self._base.__setitem__(name, values[str(name)])

        self._guard.write(self, {name: value}, write)

    __setattr__ = __setitem__

    def update_locked(self, d: Any, *args: Any, **kwargs: Any) -> None:
        self._base.update_locked(d, *args, **kwargs)
        self._guard.listener.after_change(given_values(d))

    def merge_locked(self, d: Any, *args: Any, **kwargs: Any) -> None:
        self._base.merge_locked(d, *args, **kwargs)
        self._guard.listener.after_change(given_values(d))

    def __getitem__(self, name: str) -> Any:
        self._before_read(name)
        return self._base.__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._before_read(name)
        return bool(self._base.__contains__(name))

    def get(self, *args: Any) -> Any:
        self._before_read(args[0] if args else None)
        return self._base.get(*args)

    def keys(self) -> Any:
        self._guard.listener.before_read()
        return self._base.keys()

    def items(self) -> Any:
        self._guard.listener.before_read()
        return self._base.items()

    def __len__(self) -> int:
        return len(self.keys())  # wandb's config has no length, but a `ConfigView` does

    def __bool__(self) -> bool:
        return True  # as for wandb's config

    def _before_read(self, name: Any) -> None:
        listener = self._guard.listener
        listener.before_read()
        if not self._base.__contains__(name) and not str(name).startswith("_"):
            listener.before_read(name)


@functools.cache
def _guarded_kind(kind: type[Any]) -> type[Any]:
    return type(kind.__name__, (_Guarded, kind), {"__module__": kind.__module__})


def can_hold(value: object) -> bool:
    """Return whether W&B can hold a value in the config of a run, tested with a config that belongs to no run."""
    import wandb

    kind = _kind_of_config()
    if kind is None or isinstance(value, wandb.Artifact):
        return True
    probe = kind()
    try:
        probe.update({"value": value}, allow_val_change=True)
        json.dumps(probe["value"], default=_json_of_builtin)
    except Exception:  # noqa: BLE001  # values execute their own code, which may raise anything
        return False
    return True


def _kind_of_config() -> type[Any] | None:
    """Return the class of the configs of runs. The name is public, but wandb hides it from type checkers."""
    import wandb

    return getattr(wandb, "Config", None)


def _json_of_builtin(value: object) -> Any:
    """Convert built-in objects without a JSON form as W&B does."""
    if isinstance(value, (set, frozenset)):
        return list(value)
    if isinstance(value, complex):
        return str(value)
    raise TypeError(type(value).__name__)


def is_wandb_config(config: object) -> bool:
    """Return whether this is the config of a wandb run, rather than a mock."""
    kind = _kind_of_config()
    return kind is not None and issubclass(type(config), kind)
