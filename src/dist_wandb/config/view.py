"""The config of a run that another rank has opened, as users read and write it."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, Protocol

from dist_wandb.settings.config_copy import ConfigCopy
from dist_wandb.settings.config_values import given_values
from dist_wandb.settings.config_withheld import Known


class Source(Protocol):
    """Where a `ConfigView` has its values from."""

    def read(self, name: str | None = None) -> Mapping[str, Any]:
        """All values; `name` is the one that is looked for."""

    def write(self, values: Mapping[str, Any]) -> None:
        """Keep values for this rank."""


class ConfigView(Mapping[str, Any]):
    """The config of a run that another rank has opened.

    It reads as wandb's own `Config` does, by attribute and by item. What the primary has, also what it sets later,
    shows here within a heartbeat; a name that is not there yet is looked for at once. The first read waits up to
    `join_timeout` for the primary to open its run. What is written here does not reach the run: it shows on this rank,
    until the primary sets another value for that name.

    Args:
        source: Where the values come from, such as a `LocalConfig`.

    Example:
        Two ranks, ``run_mode="auto"``::

            run = dist_wandb.init(config={"lr": 0.1})
            run.config.lr, run.config["lr"], dict(run.config)  # rank 0 and rank 1: 0.1, 0.1, {"lr": 0.1}
    """

    __slots__ = ("_source",)
    _source: Source

    def __init__(self, source: Source) -> None:
        object.__setattr__(self, "_source", source)

    def __getitem__(self, name: str) -> Any:
        return self._source.read(name)[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # protocols like copy and pickle must see that they are not implemented
            raise AttributeError(name)
        values = self._source.read(name)
        if name in values:
            return values[name]
        why = values.why_not(name) if isinstance(values, Known) else name
        raise AttributeError(f"the config of the run has no {name!r}" if why == name else why)

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def __setattr__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def __delitem__(self, name: str) -> None:
        """Accept: wandb's own cannot delete either."""

    # These are written out, so that a warning has the user's line rather than one of `collections.abc`.

    def __contains__(self, name: object) -> bool:
        return name in self._source.read(str(name))

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

    def keys(self) -> KeysView[str]:
        """The names, as they are now."""
        return self.as_dict().keys()

    def values(self) -> ValuesView[Any]:
        """The values, as they are now."""
        return self.as_dict().values()

    def items(self) -> ItemsView[str, Any]:
        """Names and values, as they are now."""
        return self.as_dict().items()

    def get(self, name: str, default: Any = None) -> Any:
        """The value of `name`; `default` where there is none."""
        return self._source.read(name).get(name, default)

    def as_dict(self) -> dict[str, Any]:
        """Values by name."""
        return dict(self._source.read())

    def update(self, values: Any = None, *_args: Any, **_kwargs: Any) -> None:
        """Keep values for this rank."""
        self._source.write(given_values(values))

    def setdefaults(self, values: Any = None) -> None:
        """Keep values of names that are not there, for this rank."""
        new = given_values(values)
        known = self._source.read()
        self._source.write({name: value for name, value in new.items() if name not in known})

    update_locked = merge_locked = update

    def persist(self) -> None:
        """Accept: there is nothing to be sent from here."""
