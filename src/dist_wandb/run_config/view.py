"""The config of a run that another rank has opened, as users read and write it."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Any, Protocol

from dist_wandb.settings.config_values import ConfigCopy, given_values
from dist_wandb.settings.config_withheld import Known


class Source(Protocol):
    """The source of a `ConfigView`'s values."""

    def read(self, name: str | None = None) -> Mapping[str, Any]:
        """Return all values; `name` is the one to read."""

    def write(self, values: Mapping[str, Any]) -> None:
        """Set values on this rank."""


class ConfigView(Mapping[str, Any]):
    """The config of a run that another rank has opened.

    It is read like wandb's own `Config`, by attribute and by item. Values of the primary, including those that it sets
    later, are visible here within one heartbeat; an unknown name is polled for at once. The first read waits up to
    `join_timeout` for the primary to open its run. Values written here do not reach the run: they are visible on this
    rank only, until the primary sets another value for the name.
    """

    # It is not a `MutableMapping`: as in wandb's own, nothing can be deleted, so `clear` would never end.

    __slots__ = ("_source",)
    _source: Source

    def __init__(self, source: Source) -> None:
        object.__setattr__(self, "_source", source)

    def __getitem__(self, name: str) -> Any:
        return self._source.read(name)[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy, pickle and so on check for such names
            raise AttributeError(name)
        values = self._source.read(name)
        if name in values:
            return values[name]
        why = values.why_not(name) if isinstance(values, Known) else name
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

    def values(self) -> ValuesView[Any]:
        """The current values."""
        return self.as_dict().values()

    def items(self) -> ItemsView[str, Any]:
        """The current names and values."""
        return self.as_dict().items()

    def as_dict(self) -> dict[str, Any]:
        """Values by name."""
        return dict(self._source.read())

    def update(self, values: Any = None, *_args: Any, **_kwargs: Any) -> None:
        """Set values on this rank."""
        self._source.write(given_values(values))

    update_locked = update
    merge_locked = update

    def setdefaults(self, values: Any = None) -> None:
        """Set values of missing names on this rank."""
        known = self._source.read()
        self.update({name: value for name, value in given_values(values).items() if name not in known})

    def persist(self, *_: object) -> None:
        """Do nothing: this rank sends no config, and nothing can be deleted."""

    __delitem__ = persist
