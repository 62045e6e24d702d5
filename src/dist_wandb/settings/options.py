"""The arguments that all integrations share, and the limits on how long a rank waits, and for how many rows.

A missing argument is taken from the enclosing decorator `wandb_init`, then from the environment, then from the
defaults. The decorator's arguments and session are context variables (`outer_arguments`, `registry.outer_session`), so
concurrent calls (threads or tasks) have separate sessions, and nested calls share one. Sessions of several ranks are
matched by the order in which they are opened: concurrent calls must begin in the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

from dist_wandb.errors import ConfigurationError, suggest
from dist_wandb.job.launch import job_setting
from dist_wandb.job.units import Mesh, dimension_of, ranks_in_mesh, ranks_of
from dist_wandb.settings.plan import RANK_SCOPES, RUN_MODES, RankScope, RunMode, check_choice
from dist_wandb.settings.reduction import PerRank, Reduce, Reduction, Spread, check_patterns, check_reduce

ConfigSyncMode: TypeAlias = Literal["warn", "check", "off"]
SystemMetrics: TypeAlias = Literal["primary", "all-nodes"]
StallTimeout: TypeAlias = float | Literal["auto"] | None

CONFIG_SYNCS: tuple[ConfigSyncMode, ...] = ("warn", "check", "off")
SYSTEM_METRICS: tuple[SystemMetrics, ...] = ("primary", "all-nodes")
_LONGEST = 1e9  # the largest limit: 30 years in seconds; longer ones overflow in Python's and torch's clocks
# Dimensions, in the meshes of Accelerate and Lightning, along which ranks hold parts of one replica of the model.
_MODEL_PARALLEL = frozenset({"tp", "tensor_parallel"})
_T = TypeVar("_T")


def _check(name: str, value: object, kinds: tuple[type, ...], what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:  # type: ignore[operator]  # a number
        raise ConfigurationError(f"{name} must be a positive {what}, got {value!r}.")
    if value > _LONGEST:  # type: ignore[operator]  # a number
        raise ConfigurationError(f"{name} must be at most {_LONGEST:.0e}, got {value!r}.")


@dataclass(frozen=True)
class Limits:
    """Limits on how long a rank waits for other ranks and for W&B, and for how many rows. Times are in seconds.

    Pass it as ``limits=`` to `dist_wandb.init`, `DistWandbLogger` and `DistWandbTracker`, with the same values on all
    ranks.

    Args:
        join_timeout: How long to wait for ranks that have opened their session and do not arrive, and for what rank 0
            publishes. After it, the others begin without them.
        peer_timeout: How long a participating rank may keep the others waiting, because it does not answer or does not
            log a name that it usually logs. After it, they continue without it and mark their rows as degraded.
        finish_timeout: How long `finish` and `flush` wait for other ranks. `finish` then writes what is left, as long
            as W&B takes it, waits for the same time again for W&B to accept the remaining data, and reports the data
            that it did not accept. `None` for 60 s, and 600 s for the upload.
        max_pending_rows: How many rows may wait for ranks that have not logged them. Beyond this number, the oldest
            rows are written from the ranks that have. `log` takes as long as the exchange of a row while more rows
            wait to be exchanged. Without a reduction: how many rows may wait for wandb's own process while it is
            stalled; further rows are lost.
        heartbeat: Interval after which a rank that logs nothing takes part in an exchange anyway, so that rows which
            only other ranks log are written.

    Attributes:
        linger: How long a row waits for subsequent rows: exchanging many at once costs the training less than each one.
        grace: How long a rank has, at most `peer_timeout`, to publish its state after others have lost a rank.

    Raises:
        ConfigurationError: A limit that is not a positive number.
    """

    join_timeout: float = 60.0
    peer_timeout: float = 60.0
    finish_timeout: float | None = None
    max_pending_rows: int = 10_000
    heartbeat: float = 1.0
    linger: ClassVar[float] = 0.25
    grace: ClassVar[float] = 5.0

    def __post_init__(self) -> None:
        for name in ("join_timeout", "peer_timeout", "finish_timeout", "heartbeat"):
            if name != "finish_timeout" or self.finish_timeout is not None:
                _check(name, getattr(self, name), (int, float), "number of seconds")
        _check("max_pending_rows", self.max_pending_rows, (int,), "integer")

    @property
    def flush_timeout(self) -> float:
        """How long `finish` and `flush` wait for other ranks."""
        return 60.0 if self.finish_timeout is None else self.finish_timeout

    @property
    def upload_timeout(self) -> float:
        """How long `finish` waits for W&B to accept the remaining data. Checkpoints may take minutes."""
        return 600.0 if self.finish_timeout is None else self.finish_timeout


DEFAULT_LIMITS = Limits()
LIMIT_NAMES = tuple(field.name for field in fields(Limits))


def as_limits(given: object) -> Limits:
    """Return limits that were given as an object, or by name as in a configuration file."""
    if isinstance(given, Limits):
        return given
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"limits must be dist_wandb.Limits(...) or a mapping of its arguments, got {given!r}.")
    for name in given:
        if name not in LIMIT_NAMES:
            raise ConfigurationError(f"limits has an unknown name {name!r}. {suggest(name, LIMIT_NAMES)}")
    return Limits(**given)


@dataclass(frozen=True)
class Options:
    """The checked arguments that all integrations share; `dist_wandb.init` documents each of them."""

    run_mode: RunMode = "auto"
    rank_scope: RankScope = "global"
    reduce: Reduce = "auto"
    spread: Spread = False
    per_rank: PerRank = "auto"
    limits: Limits = DEFAULT_LIMITS
    config_sync: ConfigSyncMode = "warn"
    system_metrics: SystemMetrics = "primary"
    strict: bool = False
    unit: Sequence[int] | str | None = None
    primary_rank: int | None = None
    stall_timeout: StallTimeout = "auto"
    on_stall: Callable[[Any], object] | None = None

    def __post_init__(self) -> None:
        check_choice("run_mode", self.run_mode, RUN_MODES)
        check_choice("rank_scope", self.rank_scope, RANK_SCOPES)
        object.__setattr__(self, "unit", ranks_of(self.unit))
        rank = self.primary_rank
        if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool)):
            raise ConfigurationError(f"primary_rank={rank!r} is not a rank. Give a global rank, or -1 for the last.")
        for name, value in (("rank_scope", "worker"), ("system_metrics", "all-nodes")):
            if rank not in (None, 0, -1) and getattr(self, name) == value:
                raise ConfigurationError(
                    f'primary_rank={rank} cannot be combined with {name}="{value}", which needs a rank of each node. '
                    "Give 0, for the first rank of each, or -1, for the last one."
                )
        # These are published as JSON, and pickled.
        checked = check_reduce(self.reduce)
        if checked is not None and not isinstance(self.reduce, Mapping):
            object.__setattr__(self, "reduce", "auto" if self.reduce == "auto" else checked["*"])
        elif checked is not None:
            object.__setattr__(self, "reduce", checked)
        for selecting in ("spread", "per_rank"):
            given = getattr(self, selecting)
            patterns = list(check_patterns(selecting, given))
            object.__setattr__(self, selecting, given if isinstance(given, (bool, str)) else patterns)
        object.__setattr__(self, "limits", as_limits(self.limits))
        check_choice("config_sync", self.config_sync, CONFIG_SYNCS)
        check_choice("system_metrics", self.system_metrics, SYSTEM_METRICS)
        if not isinstance(self.strict, bool):
            raise ConfigurationError(f"strict={self.strict!r} is neither True nor False. Pass one of them.")
        given = self.stall_timeout
        if given not in ("auto", None) and (isinstance(given, (bool, str)) or not 0 < given < _LONGEST):
            raise ConfigurationError(
                f"stall_timeout={given!r} is neither a positive number of seconds nor 'auto' nor None. Pass one of "
                "them."
            )
        if self.on_stall is not None and not callable(self.on_stall):
            raise ConfigurationError(f"on_stall={self.on_stall!r} cannot be called. Pass a function of one argument.")

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> Options:
        """Select the options of a call; else the enclosing decorator's, the environment's, the default."""
        given = {name: arguments[name] for name in OPTION_NAMES if name in arguments}
        choices: dict[str, Sequence[str]] = {"run_mode": RUN_MODES, "rank_scope": RANK_SCOPES}
        for name, known in choices.items():
            if given.get(name) is None:
                given[name] = _ambient(name, known) or getattr(cls, name)
        return cls(**given)

    @property
    def unit_ranks(self) -> Sequence[int] | None:
        """Global ranks of the given unit; `None` for all, or those of a node. Raises for a name not yet in a mesh."""
        if isinstance(self.unit, str):
            raise ConfigurationError(
                f"unit={self.unit!r} is the name of a dimension, but there is no DeviceMesh to look it up in. Give the "
                f"dimension itself: unit=mesh[{self.unit!r}]."
            )
        return self.unit

    @property
    def is_rank_0_primary(self) -> bool:
        """Whether rank 0 leads the job; available before the ranks are known."""
        return self.primary_rank in (None, 0)

    @property
    def is_run_of_rank_0(self) -> bool:
        """Whether rank 0 opens the only run of the job, or of its node; available before the ranks are known."""
        return self.run_mode == "auto" and self.is_rank_0_primary

    def in_mesh(self, mesh: Mesh | None, rank: int) -> Options:
        """Return the options with the unit resolved to ranks, if the framework has a mesh.

        Unless the user passed a unit, the dimensions form it along which ranks do not hold parts of one replica of the
        model. Raises `ConfigurationError` for the name of a dimension that the mesh does not have.
        """
        if mesh is None:
            return self
        if isinstance(self.unit, str):
            return replace(self, unit=dimension_of(mesh, self.unit))
        names = mesh.mesh_dim_names or ()
        if self.unit is not None or self.rank_scope == "worker" or not _MODEL_PARALLEL & set(names):
            return self
        return replace(self, unit=ranks_in_mesh(mesh, set(names) - _MODEL_PARALLEL, rank))

    @property
    def reductions(self) -> dict[str, Reduction] | None:
        """Reductions by name pattern; other names have their default. `None` if numbers are not reduced."""
        if self.reduce == "auto":
            return None if self.run_mode == "new" else {}
        return check_reduce(self.reduce)


OPTION_NAMES = tuple(field.name for field in fields(Options))


class Current(Generic[_T]):
    """A value that applies in this thread or task for the duration of a block; outside of any, the default."""

    def __init__(self, name: str, default: _T) -> None:
        self._variable = ContextVar(name, default=default)  # debuggers show the name

    def __call__(self) -> _T:
        return self._variable.get()

    @contextmanager
    def by(self, value: _T) -> Iterator[None]:
        token = self._variable.set(value)
        try:
            yield
        finally:
            self._variable.reset(token)


_NOTHING: Mapping[str, Any] = {}
outer_arguments: Current[Mapping[str, Any]] = Current("outer_arguments", _NOTHING)  # of the enclosing `wandb_init`


def _ambient(name: str, known: Sequence[str]) -> str | None:
    """Return an argument of the enclosing decorator, else the environment's; `None` if neither sets it."""
    decorator: str | None = outer_arguments().get(name)
    if decorator is not None:
        return decorator
    variable = f"DIST_WANDB_{name.upper()}"
    text = job_setting(variable)
    try:
        return check_choice(name, text, known) if text else None
    except ConfigurationError as error:
        raise ConfigurationError(f"The environment variable {variable} is not valid: {error}") from None
