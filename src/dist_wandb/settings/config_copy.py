"""A copy of a config, in this process or in another one. Pure."""

from __future__ import annotations

from typing import Any


class ConfigCopy(dict[str, Any]):
    """The config of a run at the time of the copy. Names can be read as attributes; changes affect only the copy."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the config has no {name!r}") from None

    def as_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        return dict(self)

    def update(  # type: ignore[override]  # as W&B's config
        self, values: Any = (), allow_val_change: bool | None = None, **kwargs: Any
    ) -> None:
        """Change values, in this copy only."""
        del allow_val_change
        super().update(values, **kwargs)
