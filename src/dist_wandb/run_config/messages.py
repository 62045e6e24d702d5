"""The messages about configs in the job's store: their keys and types, and the connection that carries them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, get_args, get_origin, get_type_hints, is_typeddict

from dist_wandb.errors import ConfigurationError, RendezvousError
from dist_wandb.store.timed_caller import STORE_PATIENCE, TimedCaller

if TYPE_CHECKING:
    from dist_wandb.settings.limits import Limits
    from dist_wandb.store.job_store import JobStore
    from dist_wandb.topology.model import Topology

GIVEN, RESULT = "config/given", "config/result"
ALL_GIVEN = "config/given by all"  # a list of the configs that all ranks were given
# Claimed by the rank that warns for all.
DIFFERS, OTHER_RUNS, REFUSED = "config/differs", "config/other runs", "config/refused"
OF_VERSION = "/version"  # appended to the key of a `PublishedRun`: its `Version`
_PAIR = 2  # text and digest of a value
_T = TypeVar("_T")
_LEAST_LIMIT = 0.5  # seconds that the store gets to answer


class GivenConfig(TypedDict):
    """The config that a rank was given, and the run that it was asked for, for other ranks to compare."""

    values: dict[str, list[str]]
    run: dict[str, list[str]]


class Version(TypedDict):
    """How often a run was published, and whether its user has finished it: the only key that followers poll."""

    number: int
    is_over: bool


class ComparisonResult(TypedDict):
    """The result of the comparison with ``config_sync="check"``."""

    differences: list[str]


class PublishedRun(TypedDict):
    """The run of a primary."""

    values: str  # its config, as JSON without secrets
    withheld: dict[str, str]  # by name of each value that lacks secrets: `config_values.state`
    given: dict[str, str]  # digests of what this rank was given, by which followers find values that differ from theirs
    imposed: list[str]  # names whose values come from a sweep, and replace those that any rank was given
    metadata: dict[str, Any]


def checked(message: Any, kind: type[_T], key: str) -> _T:
    """Return a message from the job's store; raise `ConfigurationError` if it is not of this `kind`."""
    if not fits(message, kind):
        raise ConfigurationError(
            f"The job's store holds {str(message)[:100]!r} as {key!r}, which is not a {kind.__name__}. Something else "
            "writes to the store, or a rank has another version of dist_wandb: install the same one on all ranks."
        )
    return message  # type: ignore[no-any-return]  # just checked


def fits(message: Any, kind: Any) -> bool:
    """Return whether a message is of a kind."""
    if not _is_a(message, kind):
        return False
    pairs = [*message["values"].values(), *message["run"].values()] if kind is GivenConfig else []
    return all(len(pair) == _PAIR for pair in pairs)


def _is_a(value: Any, kind: Any) -> bool:
    """Return whether a value decoded from JSON has a type, at any depth."""
    origin, of = get_origin(kind) or kind, get_args(kind)
    if origin is dict:
        return isinstance(value, dict) and all(_is_a(item, of[1]) for item in value.values())
    if origin is list:
        return isinstance(value, list) and all(_is_a(item, of[0]) for item in value)
    if is_typeddict(kind):
        fields = get_type_hints(kind).items()
        return isinstance(value, dict) and all(name in value and _is_a(value[name], field) for name, field in fields)
    return kind is Any or type(value) is kind


def values_of(run: PublishedRun) -> dict[str, Any]:
    """Return the config in a message; raise `ConfigurationError` if it has none."""
    try:
        return checked(json.loads(run["values"]), dict[str, Any], "values")
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"A config in the job's store cannot be read: {error}.") from error


def run_key(unit: str) -> str:
    """Return the key of a `PublishedRun`: of a unit's primary or, for an empty name, of the coordinator."""
    return f"config/of/{unit}"


class Connection:
    """A separate connection to the job's store, so that it is never in use by another thread of the exchange."""

    def __init__(self, limits: Limits, topology: Topology) -> None:
        self.topology = topology
        self.rank: int = topology.global_rank
        self.join_timeout: float = limits.join_timeout  # seconds
        # Returns the job's store, which may appear only after this rank's session was opened.
        self.find: Callable[[], JobStore | None] = lambda: None
        # Waits until a query finds that the primary has opened its run, as long as reads may wait.
        self.await_primary: Callable[[Callable[[], bool]], None] = lambda _: None
        # The exchange's thread uses it, too: a stalled store must not make this rank look dead to the others.
        self._limit = max(_LEAST_LIMIT, min(STORE_PATIENCE, limits.peer_timeout / 2))
        self._job_store: JobStore | None = None
        self._pid = os.getpid()
        self._is_closed = False

    @property
    def is_usable(self) -> bool:
        """Whether other ranks can be reached; not in a fork, where the connection belongs to the parent."""
        return self.topology.world_size > 1 and not self._is_closed and os.getpid() == self._pid

    def store(self) -> JobStore | None:
        """Return the job's store; `None` while there is none."""
        if self._job_store is None:
            self._job_store = self.open(TimedCaller(self._limit))
        return self._job_store

    def open(self, caller: TimedCaller | None = None) -> JobStore | None:
        """Open a further connection to the job's store; `None` while there is none."""
        found = self.find()
        return None if found is None else found.beside("config_sync", caller)

    def try_get(self, key: str, kind: type[_T]) -> _T | None:
        """Return the checked message of a key; `None` if it is not set, or there is no store yet."""
        job_store = self.store()
        message = None if job_store is None else job_store.try_get(key)
        return None if message is None else checked(message, kind, key)

    def is_first(self, key: str) -> bool:
        """Claim a key. Return whether no other rank has claimed it before; `True` if that cannot be determined."""
        with suppress(RendezvousError):
            job_store = self.store() if self.is_usable else None
            return job_store is None or job_store.claim(key, self.rank) == self.rank
        return True

    def close(self) -> None:
        """Drop the connection, which cannot be used afterwards."""
        self._is_closed = True
        self._job_store, self.find = None, lambda: None  # breaks a reference cycle
