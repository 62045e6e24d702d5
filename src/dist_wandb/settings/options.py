"""The arguments that all doors share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from dist_wandb.errors import ConfigurationError, suggest
from dist_wandb.settings.limits import Limits
from dist_wandb.settings.plan import RankScope, RunMode, check_rank_scope, check_run_mode
from dist_wandb.settings.reduction import PerRank, Reduce, Reduction, Spread, check_reduce, plain_patterns, plain_reduce
from dist_wandb.topology.launch import job_setting

ConfigSyncMode: TypeAlias = Literal["warn", "check", "off"]
SystemMetrics: TypeAlias = Literal["primary", "all-nodes"]

CONFIG_SYNCS: tuple[ConfigSyncMode, ...] = ("warn", "check", "off")
SYSTEM_METRICS: tuple[SystemMetrics, ...] = ("primary", "all-nodes")
_T = TypeVar("_T")
_UPLOAD_TIMEOUT = 600.0  # seconds
_LONGEST = 1e9  # the largest limit: 30 years in seconds; longer ones overflow in Python's and torch's clocks


@dataclass(frozen=True)
class Options:
    """The arguments that all doors share, checked.

    Args:
        run_mode: Which ranks open a W&B run: `"auto"`, `"shared"` or `"new"`.
        rank_scope: Whether the whole job or each node is one unit: `"global"` or `"worker"`.
        reduce: How one number comes from the ranks' numbers.
        spread: Of which names the spread over ranks is written as well.
        per_rank: Which names each rank of a shared run also writes under its label.
        join_timeout: How long to wait for other ranks when the run is opened, in seconds.
        peer_timeout: How long a rank may keep the others waiting, in seconds.
        finish_timeout: How long `finish` and `flush` wait for other ranks, and `finish` for the upload, in seconds;
            `None` for 60 s and 600 s.
        max_pending_rows: How many rows may wait for other ranks.
        heartbeat: After how many seconds a rank without anything to say takes part in an exchange.
        config_sync: What to do about ranks that pass different values of `config`: `"warn"`, `"check"` or `"off"`.
        system_metrics: Whose hardware metrics go into the run of ``run_mode="auto"``: `"primary"` or `"all-nodes"`.
        strict: Whether a run that cannot be opened is an error, rather than opened offline.

    Raises:
        ConfigurationError: A value that cannot be honoured.
    """

    run_mode: RunMode = "auto"
    rank_scope: RankScope = "global"
    reduce: Reduce = "auto"
    spread: Spread = False
    per_rank: PerRank = "auto"
    join_timeout: float = Limits.join_timeout
    peer_timeout: float = Limits.peer_timeout
    finish_timeout: float | None = None
    max_pending_rows: int = Limits.max_pending_rows
    heartbeat: float = Limits.heartbeat
    config_sync: ConfigSyncMode = "warn"
    system_metrics: SystemMetrics = "primary"
    strict: bool = False

    def __post_init__(self) -> None:
        check_run_mode(self.run_mode)
        check_rank_scope(self.rank_scope)
        object.__setattr__(self, "reduce", plain_reduce(self.reduce))  # other ranks are told them as JSON
        for selecting in ("spread", "per_rank"):
            object.__setattr__(self, selecting, plain_patterns(selecting, getattr(self, selecting)))
        for limit in ("join_timeout", "peer_timeout", "finish_timeout", "heartbeat"):
            if getattr(self, limit) is not None or limit != "finish_timeout":
                _check_limit(limit, getattr(self, limit), "60", (int, float), "It is in seconds.")
        _check_choice("config_sync", self.config_sync, CONFIG_SYNCS)
        _check_choice("system_metrics", self.system_metrics, SYSTEM_METRICS)
        if not isinstance(self.strict, bool):
            raise ConfigurationError(f"strict={self.strict!r} is neither True nor False. Pass one of them.")
        _check_limit("max_pending_rows", self.max_pending_rows, "10000", (int,), "It is a number of rows.")

    @property
    def limits(self) -> Limits:
        """How long, and how much, the exchange waits."""
        finish_timeout = Limits.finish_timeout if self.finish_timeout is None else self.finish_timeout
        return Limits(self.join_timeout, self.peer_timeout, finish_timeout, self.max_pending_rows, self.heartbeat)

    @property
    def all_nodes(self) -> bool:
        """Whether the run of `"auto"` also has the hardware metrics of nodes other than its primary's."""
        return self.system_metrics == "all-nodes"

    @property
    def upload_timeout(self) -> float:
        """How long `finish` waits for W&B to take what is left, in seconds. Checkpoints may take minutes."""
        return _UPLOAD_TIMEOUT if self.finish_timeout is None else self.finish_timeout

    @property
    def reductions(self) -> dict[str, Reduction] | None:
        """Name patterns and reductions; `None` where ranks' numbers are not brought together."""
        if self.reduce == "auto":
            return None if self.run_mode == "new" else check_reduce("mean")
        return check_reduce(self.reduce)


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigurationError(f"{name}={value!r} is unknown. {suggest(value, known)}")


def _check_limit(name: str, value: object, example: str, kinds: tuple[type, ...], unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ConfigurationError(f"{name}={value!r} is no number of the right kind. {unit} Pass e.g. {example}.")
    if not 0 < value <= _LONGEST:  # type: ignore[operator]  # a number
        raise ConfigurationError(f"{name}={value!r} must be greater than 0 and at most {_LONGEST:.0e}. {unit}")


class Current(Generic[_T]):
    """What holds in this thread or task as long as a block lasts.

    Args:
        name: For debuggers.
        default: What holds outside of any block.
    """

    def __init__(self, name: str, default: _T) -> None:
        self._variable = ContextVar(name, default=default)

    def __call__(self) -> _T:
        """What holds here."""
        return self._variable.get()

    @contextmanager
    def by(self, value: _T) -> Iterator[None]:
        """Have `value` hold in a block."""
        token = self._variable.set(value)
        try:
            yield
        finally:
            self._variable.reset(token)


_NOTHING: Mapping[str, Any] = {}
around = Current("around", _NOTHING)
"""The arguments of the decorator `wandb_init` around the code that runs."""


def run_mode_or_default(run_mode: RunMode | None) -> RunMode:
    """The run mode that holds: the given one, else the decorator's around, else the environment's, else `"auto"`.

    Raises:
        ConfigurationError: `DIST_WANDB_RUN_MODE` is none of them.
    """
    return run_mode if run_mode is not None else _wish("run_mode", check_run_mode) or "auto"


def rank_scope_or_default(rank_scope: RankScope | None) -> RankScope:
    """The rank scope that holds, as in `run_mode_or_default`; else `"global"`.

    Raises:
        ConfigurationError: `DIST_WANDB_RANK_SCOPE` is none of them.
    """
    return rank_scope if rank_scope is not None else _wish("rank_scope", check_rank_scope) or "global"


def _wish(name: str, check: Callable[[object], _T]) -> _T | None:
    decorator: _T | None = around().get(name)
    if decorator is not None:
        return decorator
    variable = f"DIST_WANDB_{name.upper()}"
    text = job_setting(variable)
    try:
        return check(text) if text else None
    except ConfigurationError as error:
        raise ConfigurationError(f"The environment variable {variable} says: {error}") from None
