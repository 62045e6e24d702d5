"""The value of `logger.experiment` on a rank without a W&B run.

It refers to the holder, not to a session, because scripts keep an experiment that they got before the ranks were known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dist_wandb.lightning.name_spaces import OfLightning
from dist_wandb.run_config.targets import ConfigView
from dist_wandb.runs.null_run import NullPart, NullRun, NullSummary
from dist_wandb.settings.config_values import ConfigCopy, given_values

if TYPE_CHECKING:
    from dist_wandb.lightning.session_holder import SessionHolder
    from dist_wandb.session.session import Session

# Methods of a run whose result scripts use.
GIVE_BACK = frozenset(
    {
        *("use_artifact", "log_artifact", "link_artifact", "upsert_artifact", "finish_artifact", "link_model"),
        *("use_model", "define_metric", "log_code", "save", "restore", "status", "display", "to_html"),
        *("get_url", "get_project_url", "get_sweep_url", "project_name"),  # of older versions
    }
)


class NullExperiment(NullRun, OfLightning):
    """`experiment` on a rank without a run. Lightning expects a `DummyExperiment` there.

    As in Lightning's class, methods return `None`, except those whose result scripts use (`GIVE_BACK`). The session of
    the holder may not be open yet.
    """

    stock = "loggers.logger.DummyExperiment"

    def __init__(self, holder: SessionHolder) -> None:
        super().__init__()
        self.__dict__["holder"] = holder

    @property
    def config(self) -> Any:
        """The config of the run that receives this rank's numbers; before the session is open, what is known of it."""
        session, holder = self._session, self.__dict__.get("holder")
        if session is not None:
            return session.config
        return ConfigCopy() if holder is None else ConfigView(_EarlyConfig(holder))

    @property
    def step(self) -> int:
        """The step of the next row of this rank."""
        session = self._session
        return 0 if session is None else session.step

    @property
    def summary(self) -> NullSummary:
        """This rank's own summary."""
        session = self._session
        return session.run.summary if session is not None and isinstance(session.run, NullRun) else super().summary

    @summary.setter
    def summary(self, summary: object) -> None:
        """Accept and ignore."""

    def log(self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None, **_kwargs: Any) -> None:
        """Log a row of this rank, like `log` of a run."""
        session = self._session
        if session is not None:
            session.log(data, step, commit=commit)

    def define_metric(self, *args: Any, **kwargs: Any) -> Any:
        """Define a metric for this rank's reads of the summary, and for its axes, like `define_metric` of a run."""
        session = self._session
        return NullPart() if session is None else session.run.define_metric(*args, **kwargs)

    def finish(self, exit_code: int | None = None, **_kwargs: Any) -> None:
        """Finish this rank's session, like `finish` of a run."""
        session = self._session
        if session is not None:
            session.finish(exit_code)

    @property
    def _session(self) -> Session | None:
        holder: SessionHolder | None = self.__dict__.get("holder")
        return None if holder is None else holder.session

    def metadata(self) -> Mapping[str, Any]:
        """Metadata of the run; before the session is open, what is known of it."""
        session, holder = self._session, self.__dict__.get("holder")
        if session is not None and isinstance(session.run, NullRun):
            return session.run.metadata()
        return super().metadata() if holder is None else holder.early.metadata(holder.known_id)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return _Nothing() if isinstance(found, NullPart) and name not in GIVE_BACK else found

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "holder": None}


class _EarlyConfig:
    """The config that a script reads before the ranks are known, and with the same object later: a `targets.Source`."""

    def __init__(self, holder: SessionHolder) -> None:
        self._holder = holder

    def read(self, name: str | None = None) -> Mapping[str, Any]:
        session = self._holder.session
        if session is None:
            return self._holder.early.config
        if name is not None:
            session.config.get(name)  # the primary may just have set it
        return given_values(session.config)

    def write(self, values: Mapping[str, Any]) -> None:
        session = self._holder.session
        if session is None:
            self._holder.early.config.update(values)
        else:
            session.config.update(values)


class _Nothing(NullPart):
    """An attribute of the stand-in that accepts any call and returns `None`."""

    def __call__(self, *_args: Any, **_kwargs: Any) -> None:  # type: ignore[override]  # on purpose
        """Do nothing."""
