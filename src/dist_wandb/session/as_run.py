"""Attributes of a session that it does not define itself: those of its W&B run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dist_wandb.runs import null_run

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun

_FOR_USERS = ("config", "finish", "flush", "group_url", "id", "log", "plan", "run", "topology", "url")
_SETTABLE = ("name", "notes", "tags")  # of a run


class AsRun:
    """Looks up undefined attributes on a run, and sets on it what users set of a run."""

    if TYPE_CHECKING:

        @property
        def run(self) -> AnyRun:
            """The run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "_own" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.run, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SETTABLE:
            setattr(self.run, name, value)  # no effect on a rank without a run: the primary sets them
        else:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*_FOR_USERS, *null_run.public_names(self.run)})
