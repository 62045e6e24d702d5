"""What `logger.experiment` is on a rank without a W&B run.

It refers to the holder, not to a session, because scripts keep what they were given before there are ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers.logger import DummyExperiment

from dist_wandb.runs.null_run import NullPart, NullRun, NullSummary

if TYPE_CHECKING:
    from dist_wandb.lightning.session_holder import SessionHolder
    from dist_wandb.session.session import Session

# Methods of a run that give something back, which scripts go on with.
GIVE_BACK = frozenset(
    {
        *("use_artifact", "log_artifact", "link_artifact", "upsert_artifact", "finish_artifact", "link_model"),
        *("use_model", "define_metric", "log_code", "save", "restore", "status", "display", "to_html"),
        *("get_url", "get_project_url", "get_sweep_url", "project_name"),  # of older versions
    }
)


class NullExperiment(NullRun, DummyExperiment):
    """What `experiment` is on a rank without a run: Lightning asks for a `DummyExperiment` there.

    As Lightning's own, it answers calls of its methods with `None`, but for those with which a script goes on.

    Args:
        holder: Holds the session of the logger whose experiment it is. It may have none yet.
    """

    def __init__(self, holder: SessionHolder) -> None:
        super().__init__()
        self.__dict__["holder"] = holder

    @property
    def config(self) -> Any:
        """The config of the run that this rank's numbers go to."""
        session = self._session
        return _Nothing() if session is None else session.config

    @property
    def summary(self) -> NullSummary:
        """What this rank has written into the summary."""
        session = self._session
        return session.run.summary if session is not None and isinstance(session.run, NullRun) else super().summary

    @summary.setter
    def summary(self, summary: object) -> None:
        """Accept and forget."""

    def log(self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None, **_kwargs: Any) -> None:
        """Log a row of this rank, as the run's own `log` does where this rank has one."""
        session = self._session
        if session is not None:
            session.log(data, step, commit=commit)

    def finish(self, exit_code: int | None = None, **_kwargs: Any) -> None:
        """End this rank's part: W&B's own `finish` does, where this rank has a run."""
        session = self._session
        if session is not None:
            session.finish(exit_code)

    @property
    def _session(self) -> Session | None:
        holder: SessionHolder | None = self.__dict__.get("holder")
        return None if holder is None else holder.session

    def metadata(self) -> Mapping[str, Any]:
        """What is known of the run: before there is a session, what the logger knows before."""
        session, holder = self._session, self.__dict__.get("holder")
        if session is not None and isinstance(session.run, NullRun):
            return session.run.metadata()
        return super().metadata() if holder is None else {"id": holder.known_id, "name": None, "url": None}

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return _Nothing() if isinstance(found, NullPart) and name not in GIVE_BACK else found

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "holder": None}


class _Nothing(NullPart):
    """A part of a stand-in for a run that answers calls with `None`."""

    def __call__(self, *_args: Any, **_kwargs: Any) -> None:  # type: ignore[override]  # on purpose
        """Accept a call of anything."""
