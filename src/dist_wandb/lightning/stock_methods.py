"""Methods of the stock logger, adapted to our logger once its session is open."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

from dist_wandb.errors import ConfigurationError
from dist_wandb.lightning.name_spaces import OfLightning

if TYPE_CHECKING:
    from torch import nn

    from dist_wandb.lightning.logger import DistWandbLogger
    from dist_wandb.session.session import Session

_Item = TypeVar("_Item")


def stock_method(logger: Any, name: str) -> Callable[..., None]:
    """Return a method of the stock logger. If it works on rank 0 only, that wrapper is removed."""
    bound: Any = getattr(super(OfLightning, logger), name)
    return MethodType(inspect.unwrap(bound.__func__), logger)


def file_policy(logger: DistWandbLogger, policy: str) -> dict[str, Any]:
    """Return the argument `add_file_policy` if the stock logger has it: in Lightning 2.6 and newer."""
    if "add_file_policy" in inspect.signature(stock_method(logger, "__init__")).parameters:
        return {"add_file_policy": policy}
    if policy != "mutable":
        raise ConfigurationError(
            f"add_file_policy={policy!r} was given to DistWandbLogger, but this version of Lightning does not know it. "
            "Leave it out, or install lightning>=2.6."
        )
    return {}


def where_runs_are(name: str) -> Callable[..., None]:
    """Make a media method of the stock logger work on all ranks that have a run: W&B's media objects are files."""

    def log(self: DistWandbLogger, *args: Any, **kwargs: Any) -> None:
        """As in the stock logger, on every rank that has a run."""
        session = self._open()  # the logger's own method
        if session is not None and session.plan.opens_run:
            stock_method(self, name)(*args, **kwargs)

    log.__name__ = name
    return log


def watch(
    logger: DistWandbLogger, session: Session | None, model: nn.Module, log: str | None, log_freq: int, log_graph: bool
) -> None:
    """Watch a model on the primary only: W&B writes watched values under plain names."""
    if session is not None and session.plan.primary:
        stock_method(logger, "watch")(model, log, log_freq, log_graph)


def log_hyperparams(logger: DistWandbLogger, session: Session | None, params: dict[str, Any] | Namespace) -> None:
    """Write hyperparameters; in a shared run, other ranks do not overwrite the primary's: W&B keeps the last value."""
    write = stock_method(logger, "log_hyperparams")
    if session is None or not session.plan.shared or session.plan.primary:
        write(params)
        return
    with session.unchanged_config() as known:
        values = vars(params) if isinstance(params, Namespace) else params
        write({name: value for name, value in values.items() if name not in known})


def prefixed(logger: DistWandbLogger, row: Mapping[str, _Item]) -> Mapping[str, _Item]:
    """Return a row under the names that it has in the run."""
    if not logger._prefix:  # noqa: SLF001  # an attribute of the stock logger
        return row
    return {f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}{name}": value for name, value in row.items()}  # noqa: SLF001
