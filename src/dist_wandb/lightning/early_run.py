"""What a script reads of its run before the ranks are known: in processes that Lightning's ddp strategy has started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dist_wandb.runs import job_arguments, run_metadata, sweeps
from dist_wandb.settings.config_values import given_values

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun


class EarlyRun:
    """The run of one logger before its session is open, as far as it is known here.

    `told` returns what the main process has told of its run (`told_of`).
    """

    def __init__(
        self, arguments: Mapping[str, Any], *, is_offline: bool, told: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._arguments = arguments  # of `wandb.init`, as the stock logger has them
        self._is_offline = is_offline
        self._told = told

    @cached_property
    def config(self) -> dict[str, Any]:
        """What this rank was given, then the values of a sweep, then rank 0's. The script may change it."""
        theirs = job_arguments.with_own_secrets(self._told(), self._arguments)
        return {**job_arguments.chosen_config(self._arguments), **sweeps.values(), **theirs.get("config", {})}

    @property
    def used_config(self) -> Mapping[str, Any]:
        """The config, if the script has used it; else nothing."""
        return self.config if "config" in vars(self) else {}

    def metadata(self, run_id: str | None) -> dict[str, Any]:
        """The metadata that this rank requests, then that of rank 0's run; `run_id` is the id, if it is known."""
        arguments, run_id = sweeps.of_trial(self._arguments), sweeps.trial_id() or run_id
        theirs = run_metadata.from_json(self._told().get("metadata", {}))
        return {**run_metadata.as_requested(arguments, run_id, is_offline=self._is_offline), **theirs}


def told_of(run: AnyRun) -> dict[str, Any]:
    """Return what further processes of the script are told of a run: its config, without secrets, and its metadata."""
    config = job_arguments.arguments_for_others({"config": given_values(getattr(run, "config", None))})
    return {**config, "metadata": run_metadata.metadata_of(run)}
