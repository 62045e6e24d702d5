"""Attributes of a session that it does not define itself: those of its W&B run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dist_wandb.runs import null_run

if TYPE_CHECKING:
    from typing_extensions import Self

    from dist_wandb.runs.null_run import AnyRun
    from dist_wandb.session.intake import Intake
    from dist_wandb.session.own_run import OwnRun

_FOR_USERS = ("config", "finish", "flush", "group_url", "id", "log", "plan", "run", "topology", "url")
_SETTABLE = ("name", "notes", "tags")  # of a run


class AsRun:
    """Looks up undefined attributes on the run, and sets on it what users set of a run."""

    if TYPE_CHECKING:
        _intake: Intake
        _own: OwnRun
        log: Callable[..., None]

        @property
        def run(self) -> AnyRun:
            """The run."""

    @property
    def step(self) -> int:
        """The step of the next row of this rank, as with wandb: after ``log(..., step=200)`` 200, as its row is open.

        Without steps, it is the number of rows that this rank has logged, after those of a run that is continued.
        """
        return self._intake.step

    @property
    def starting_step(self) -> int:
        """The step of the first row of this start: 0, or after the last step of a run that is continued.

        On a rank without a run it is the primary's; the first read waits for it, up to `join_timeout`.
        """
        return self._own.starting_step

    def _log(self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """`log` under the name that W&B's own integrations call."""
        self.log(data, step, commit=commit)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: object) -> Self:
        """Return the session itself, as wandb does for a run: models that hold it are copied."""
        return self

    def __getattr__(self, name: str) -> Any:
        is_private = name.startswith("_")
        if "_own" not in self.__dict__ or (is_private and not null_run.is_private_name(name)):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.run, name, null_run.NullPart()) if is_private else getattr(self.run, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SETTABLE:
            setattr(self.run, name, value)  # no effect on a rank without a run: the primary sets them
        else:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*_FOR_USERS, *null_run.public_names(self.run)})
