"""Methods of the stock logger, adapted to our logger once its session is open."""

from __future__ import annotations

import functools
import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from lightning.pytorch.loggers import WandbLogger

from dist_wandb.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import nn

    from dist_wandb.lightning.logger import DistWandbLogger
    from dist_wandb.session.session import Session

_Item = TypeVar("_Item")


def file_policy(policy: str) -> dict[str, Any]:
    """Return the argument `add_file_policy` if the stock logger has it: in Lightning 2.6 and newer."""
    if "add_file_policy" in inspect.signature(WandbLogger.__init__).parameters:
        return {"add_file_policy": policy}
    if policy != "mutable":
        raise ConfigurationError(
            f"add_file_policy={policy!r} was given to DistWandbLogger, but this version of Lightning does not know it. "
            "Leave it out, or install lightning>=2.6."
        )
    return {}


def where_runs_are(stock_method: Callable[..., None]) -> Callable[..., None]:
    """Make a media method of the stock logger work on all ranks that have a run: W&B's media objects are files.

    In the stock logger it works on rank 0 only. That wrapper is removed, because the session decides who writes.
    """
    method = inspect.unwrap(stock_method)

    @functools.wraps(method)
    def log(self: DistWandbLogger, *args: Any, **kwargs: Any) -> None:
        session = self._open()  # the logger's own method
        if session is not None and session.plan.opens_run:
            method(self, *args, **kwargs)

    return log


def watch(
    logger: DistWandbLogger, session: Session | None, model: nn.Module, log: str | None, log_freq: int, log_graph: bool
) -> None:
    """Watch a model on the primary only: W&B writes watched values under plain names."""
    if session is not None and session.plan.primary:
        WandbLogger.watch(logger, model, log, log_freq, log_graph)


def log_hyperparams(logger: DistWandbLogger, session: Session | None, params: dict[str, Any] | Namespace) -> None:
    """Write hyperparameters; in a shared run, other ranks do not overwrite the primary's: W&B keeps the last value."""
    write = inspect.unwrap(WandbLogger.log_hyperparams)
    if session is None or not session.plan.shared or session.plan.primary:
        write(logger, params)
        return
    with session.unchanged_config() as known:
        values = vars(params) if isinstance(params, Namespace) else params
        write(logger, {name: value for name, value in values.items() if name not in known})


def prefixed(logger: DistWandbLogger, row: Mapping[str, _Item]) -> Mapping[str, _Item]:
    """Return a row under the names that it has in the run."""
    if not logger._prefix:  # noqa: SLF001  # an attribute of the stock logger
        return row
    return {f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}{name}": value for name, value in row.items()}  # noqa: SLF001
