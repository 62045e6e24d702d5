"""Arguments for `wandb.init` from a tracker's constructor and from `init_trackers`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from accelerate import PartialState

from dist_wandb.accelerate.late_join import INTEGRATION
from dist_wandb.errors import ConfigurationError
from dist_wandb.runs.argument_checks import check_init_arguments


class InitArguments:
    """The arguments of one tracker. Those of its constructor take precedence; `run_name` is another name for `project`.

    Raises `ConfigurationError` if `wandb.init` does not know an argument, or `project` and `run_name` differ.
    """

    def __init__(self, own: Mapping[str, Any], project: str | None, run_name: str | None) -> None:
        if run_name is not None and project not in (None, run_name):
            raise ConfigurationError(
                f"{INTEGRATION} was given project={project!r} and run_name={run_name!r}, which both name the W&B "
                "project. Give one of them; for the name of the run pass name=."
            )
        project = run_name if project is None else project
        self._own = dict(own) if project is None else {"project": project, **own}
        self._given: dict[str, Any] = {}
        self.requested: dict[str, Any] = {}  # the arguments of `init_trackers` when the run was opened
        check_init_arguments(self._own, INTEGRATION)

    @property
    def merged(self) -> dict[str, Any]:
        """The arguments with which the run is opened."""
        return {**self._given, **self._own}

    def set_config(self, config: Mapping[str, Any]) -> None:
        """Set the config to start the run with, unless the constructor was given one."""
        self._given = {"config": config, **self._given}

    def set_requested(self, project: str, init_kwargs: Mapping[str, Any], *, is_open: bool) -> None:
        """Set the arguments of `init_trackers`. A run that is open already continues unchanged, with a warning.

        Raises `ConfigurationError` for an argument that `wandb.init` does not know.
        """
        if is_open:
            self._warn_of_changes({"project": project, **init_kwargs})
        else:
            check_init_arguments(init_kwargs, "init_trackers")
            self._given = self.requested = {"project": project, **init_kwargs}

    def _warn_of_changes(self, requested: Mapping[str, Any]) -> None:
        before = self.requested
        # Compared by their text, because `==` of a user's objects may do anything.
        new = [name for name, value in requested.items() if name != "config" and repr(value) != repr(before.get(name))]
        if new:
            warnings.warn(
                f"init_trackers was called again on rank {PartialState().process_index} with another "
                f"{', '.join(map(repr, new))}, but its run is open and continues unchanged. To open another run, call "
                "tracker.finish() on all ranks first.",
                stacklevel=5,
            )
