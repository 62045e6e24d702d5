"""A copy of a config, in this process or another one. Pure."""

from __future__ import annotations

from typing import Any


class ConfigCopy(dict[str, Any]):
    """The config of a run as it was when it was copied. Names can be read as attributes; changes stay here."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the config has no {name!r}") from None

    def as_dict(self) -> dict[str, Any]:
        """Values by name."""
        return dict(self)

    def update(  # type: ignore[override]  # as W&B's config
        self, values: Any = (), allow_val_change: bool | None = None, **kwargs: Any
    ) -> None:
        """Change values, here alone.

        Args:
            values: Values by name.
            allow_val_change: As in W&B's config; not needed here.
            **kwargs: Further values.
        """
        del allow_val_change
        super().update(values, **kwargs)
