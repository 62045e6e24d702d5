"""Lightning's classes, in its two name spaces ``lightning.pytorch`` and ``pytorch_lightning``: the same code twice.

A Trainer recognizes only loggers and callbacks of its own name space, and ``pip install lightning`` installs both. What
counts is what the script imports, often after this package: imports are sorted. So classes of this room that Lightning
has to recognize get their base classes from Lightning when an object is created: those of each name space that this
process has imported by then. Nearly always that is one. If a library has imported the other one, an object belongs to
both. Only if there is none, the first one that is installed is imported.
"""

from __future__ import annotations

import copyreg
import importlib
import importlib.util
import inspect
import sys
import types
from abc import ABCMeta
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from operator import attrgetter
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from dist_wandb.errors import ConfigurationError, MissingExtraError

if TYPE_CHECKING:
    from lightning.pytorch.loggers import WandbLogger as _OfLightning
    from pytorch_lightning.loggers import WandbLogger as _OfPytorchLightning
    from torch import nn
    from typing_extensions import Self

    from dist_wandb.lightning.logger import DistWandbLogger
    from dist_wandb.session.session import Session

_Item = TypeVar("_Item")
LIGHTNING, PYTORCH_LIGHTNING = "lightning.pytorch", "pytorch_lightning"
_EXTRAS = {LIGHTNING: "lightning", PYTORCH_LIGHTNING: "pytorch-lightning"}
_FABRIC = "lightning_fabric"  # a part of the package pytorch_lightning


def loaded() -> list[Any]:
    """Return the name spaces that this process has imported: the modules, each once, even under two names."""
    found = (sys.modules.get(name) for name in _EXTRAS)
    return list(dict.fromkeys(space for space in found if hasattr(space, "Trainer")))


def is_a(thing: object, name: str) -> bool:
    """Whether something is an instance of Lightning's class `name`, such as ``"Trainer"``, of either name space."""
    return any(isinstance(thing, attrgetter(name)(space)) for space in loaded())


def check_installed(who: str) -> None:
    """Raise the error of `imported` if no name space is installed, without importing one."""
    for name in _EXTRAS:
        with suppress(ModuleNotFoundError, ValueError):
            if importlib.util.find_spec(name.partition(".")[0]) is not None:
                return
    imported(tuple(_EXTRAS), who)


def imported(names: tuple[str, ...], who: str) -> Any:
    # Returns the first one that is installed. Raises `MissingExtraError` if none is, or it lacks a package that it
    # needs.
    missing: list[str] = []
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:  # noqa: PERF203  # at most two
            missing.append(repr(error.name))
    extras = " or ".join(f"pip install 'dist-wandb[{_EXTRAS[name]}]'" for name in names)
    raise MissingExtraError(f"{who} needs Lightning, but cannot import {' or '.join(missing)}. Run: {extras}")


class _Kind(ABCMeta):
    """The type of the classes below."""

    def __instancecheck__(cls, instance: Any) -> bool:
        """Whether it is one, also if its class was made when fewer or more name spaces had been imported."""
        origin, stock = vars(cls).get("_origin", (cls, ()))
        bases = type(instance).__mro__
        return super().__instancecheck__(instance) or (origin in bases and not set(stock).isdisjoint(bases))

    @property
    def __signature__(cls) -> inspect.Signature:  # Python 3.10 prefers an inherited `__new__`
        of_init = inspect.signature(cls.__init__)  # type: ignore[misc]  # that of this class, on purpose
        return inspect.Signature([*of_init.parameters.values()][1:])

    if not TYPE_CHECKING:

        def __iter__(cls) -> Any:
            """Refuse `Trainer(logger=DistWandbLogger)`: a Trainer looks for a list there, and fails later without."""
            raise ConfigurationError(
                f"The class {cls.__name__} was given instead of an object. Write {cls.__name__}(), for example "
                f"Trainer(logger={cls.__name__}())."
            )

        def __getattribute__(cls, name: str) -> Any:
            """Refuse a class in a list of loggers, or in Fabric, too: Lightning uses these names first."""
            frame = inspect.currentframe() if name in ("experiment", "finalize", "log_metrics") else None
            caller = frame.f_back.f_globals.get("__name__", "") if frame is not None and frame.f_back else ""
            if caller.startswith((f"{PYTORCH_LIGHTNING}.", "lightning.", f"{_FABRIC}.")):
                iter(cls)
            return super().__getattribute__(name)

        def __getattr__(cls, name: str) -> Any:
            """Find what Lightning's class has, such as `WandbLogger.download_artifact`, before there is an object."""
            made = cls if name.startswith("_") or name == "stock" else cls.in_use()
            if made is cls:
                raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
            return getattr(made, name)


class OfLightning(metaclass=_Kind):
    """A class whose objects are also instances of Lightning's class `stock`, in each name space that is in use."""

    stock: ClassVar[str]
    """Name of Lightning's class in a name space."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        return super().__new__(cls.in_use())

    @classmethod
    def in_use(cls) -> type[Self]:
        names = (PYTORCH_LIGHTNING, LIGHTNING) if _FABRIC in sys.modules else (LIGHTNING, PYTORCH_LIGHTNING)
        spaces = loaded() or [imported(names, cls.__name__)]
        found = dict.fromkeys(attrgetter(cls.stock)(space) for space in spaces)
        return cls.with_bases(*(stock for stock in found if not issubclass(cls, stock)))

    @classmethod
    def of(cls, name: str) -> type[Self]:
        """Return this class with the base class of one name space, which is imported."""
        return cls.with_bases(attrgetter(cls.stock)(imported((name,), cls.__name__)))

    @classmethod
    @cache  # the same class each time
    def with_bases(cls, *stock: type) -> type[Self]:
        """Return this class with further base classes."""
        if not stock:
            return cls
        origin, before = vars(cls).get("_origin", (cls, ()))
        copied = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
        names = {**copied, "_origin": (origin, (*before, *stock))}
        return types.new_class(cls.__name__, (cls, *stock), None, lambda body: body.update(names))


def _reduced(cls: _Kind) -> str | tuple[Any, ...]:
    home, origin = vars(cls).get("_home"), vars(cls).get("_origin")
    if home is not None:
        return resolve_name, (home,)
    return cls.__qualname__ if origin is None else (origin[0].with_bases, origin[1])


copyreg.pickle(_Kind, _reduced)


if TYPE_CHECKING:

    class StockLogger(_OfLightning, _OfPytorchLightning, OfLightning):  # type: ignore[misc]  # equal, but in name
        """What type checkers know: a logger is a `WandbLogger` of both name spaces."""

else:

    class StockLogger(OfLightning):
        """The base class of the logger; the stock loggers follow it when an object is created."""

        stock = "loggers.WandbLogger"


# --- methods of the stock logger, adapted to ours once its session is open --------------------------------------------


def stock_method(logger: Any, name: str) -> Callable[..., None]:
    """Return a method of the stock logger. If it works on rank 0 only, that wrapper is removed."""
    bound: Any = getattr(super(OfLightning, logger), name)
    return types.MethodType(inspect.unwrap(bound.__func__), logger)


def file_policy(logger: DistWandbLogger, policy: str) -> dict[str, Any]:  # Lightning 2.6 and newer have it
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


def placed(row: Mapping[str, Any], step: Any, axis: str | None) -> tuple[Mapping[str, Any], int | None]:
    """Return a row and its step; a step that is no count is only a value of the row, as all are in the stock logger."""
    row = {name: value for name, value in row.items() if name != axis}  # the step replaces it, as there
    try:
        x = float(step)
    except (TypeError, ValueError):  # the session refuses it
        return row, step
    if x >= 0 and x.is_integer():
        return row, int(x)
    return row if axis is None else {**row, axis: x}, None


def prefixed(logger: DistWandbLogger, row: Mapping[str, _Item]) -> Mapping[str, _Item]:
    if not logger._prefix:  # noqa: SLF001  # an attribute of the stock logger
        return row
    return {f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}{name}": value for name, value in row.items()}  # noqa: SLF001
