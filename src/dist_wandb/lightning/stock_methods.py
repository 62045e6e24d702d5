"""The stock logger's methods for our logger, once its session is open."""

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
    """The argument `add_file_policy`, where the stock logger has it: Lightning 2.6 and newer."""
    if "add_file_policy" in inspect.signature(WandbLogger.__init__).parameters:
        return {"add_file_policy": policy}
    if policy != "mutable":
        raise ConfigurationError(
            f"add_file_policy={policy!r} was given to DistWandbLogger, but this version of Lightning does not know it. "
            "Leave it out, or install lightning>=2.6."
        )
    return {}


def where_runs_are(stock_method: Callable[..., None]) -> Callable[..., None]:
    """A method of the stock logger for media, on all ranks that have a run: W&B's objects for media are files.

    In the stock logger only rank 0 does it. Its wrapper is removed, because the session decides where they go.
    """
    method = inspect.unwrap(stock_method)

    @functools.wraps(method)
    def log(self: DistWandbLogger, *args: Any, **kwargs: Any) -> None:
        session = self._open()  # a method of the logger's
        if session is not None and session.plan.opens_run:
            method(self, *args, **kwargs)

    return log


def watch(
    logger: DistWandbLogger, session: Session | None, model: nn.Module, log: str | None, log_freq: int, log_graph: bool
) -> None:
    """W&B writes watched values under plain names, which in a shared run only the primary writes."""
    if session is not None and session.plan.primary:
        WandbLogger.watch(logger, model, log, log_freq, log_graph)


def log_hyperparams(logger: DistWandbLogger, session: Session | None, params: dict[str, Any] | Namespace) -> None:
    """In a shared run, other ranks do not write what the primary has written: W&B keeps the last value."""
    write = inspect.unwrap(WandbLogger.log_hyperparams)
    if session is None or not session.plan.shared or session.plan.primary:
        write(logger, params)
        return
    with session.unchanged_config() as known:
        values = vars(params) if isinstance(params, Namespace) else params
        write(logger, {name: value for name, value in values.items() if name not in known})


def prefixed(logger: DistWandbLogger, row: Mapping[str, _Item]) -> Mapping[str, _Item]:
    """A row with the names that it has in the run."""
    if not logger._prefix:  # noqa: SLF001  # the stock logger's
        return row
    return {f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}{name}": value for name, value in row.items()}  # noqa: SLF001
