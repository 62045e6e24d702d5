"""The messages about configs in the job's store, and the comparison of the configs that the ranks were given.

The arguments that name the run (`name`, `id`, `project`, ...) are compared in the same way, but never raise.

With ``config_sync="warn"`` each rank compares its config with the coordinator's, once that is published; the first to
find a difference claims a key, and warns for all. With ``"check"`` the coordinator compares all configs and claims a
result, which all ranks read before they open anything. A rank that times out waiting for it claims a result without
differences, so that either all ranks raise or none does.

Values are compared as JSON holds them (`encoded`), objects by their repr, without addresses. Names whose values differ
between ranks by nature (`differs_by_rank`) are omitted, at any depth.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, TypedDict, TypeVar, get_origin, get_type_hints

from dist_wandb.errors import ConfigurationError, RendezvousError
from dist_wandb.job.job_store import JobStore, RankValues, is_first, not_of_a_rank
from dist_wandb.job.ranges import named
from dist_wandb.job.timed_caller import STORE_PATIENCE, TimedCaller
from dist_wandb.job.topology import Topology
from dist_wandb.notices import Line, users_line, warn
from dist_wandb.settings.config_values import DEEPEST, LEVEL, decoded, encoded, given_values, is_secret, redacted, shown
from dist_wandb.settings.options import Limits, Options

_T = TypeVar("_T")
GIVEN, RESULT = "config/given", "config/result"
ALL_GIVEN = "config/given by all"  # a list of the configs that all ranks were given
# Claimed by the rank that warns for all.
DIFFERS, OTHER_RUNS, REFUSED = "config/differs", "config/other runs", "config/refused"
OF_VERSION = "/version"  # appended to the key of a `PublishedRun`: its `Version`
_LEAST_LIMIT = 0.5  # seconds that the store gets to answer
_LONGEST_SHOWN = 40  # characters of a value in a message
_MOST_SHOWN = 10  # differences in a message
# Names of values that differ between ranks by nature. `-` counts as `_`; case is ignored.
_NAMES_OF_RANKS = frozenset(
    {
        *("rank", "local_rank", "global_rank", "world_rank", "node_rank", "group_rank", "machine_rank"),
        *("proc_id", "process_id", "process_index", "local_process_index", "node_id", "pid", "host", "hostname"),
        *("gpu", "gpu_id", "gpu_index", "local_gpu", "device", "device_id", "device_index", "cuda_device"),
        *("is_main_process", "is_local_main_process", "is_master", "master_process"),
    }
)


# --- messages ---------------------------------------------------------------------------------------------------------


class GivenConfig(TypedDict):
    """The config that a rank was given, `redacted`, and the run that it was asked for: both `encoded`."""

    values: dict[str, Any]
    run: dict[str, Any]


class Version(TypedDict):
    """How often a run was published, and whether its user has finished it: the only key that followers poll."""

    number: int
    is_over: bool


class PublishedRun(TypedDict):
    """The run of a primary."""

    values: dict[str, Any]  # its config, without secrets, and what it lacks: `config_values.publishable`
    withheld: dict[str, bool]
    imposed: list[str]  # names whose values come from a sweep, and replace those that any rank was given
    metadata: dict[str, Any]


def fits(message: Any, kind: type[Any]) -> bool:
    of = get_type_hints(kind).items()
    return isinstance(message, dict) and all(isinstance(message.get(name), get_origin(one) or one) for name, one in of)


def run_key(unit: str) -> str:
    """Return the key of a `PublishedRun`: of a unit's primary or, for an empty name, of the coordinator."""
    return f"config/of/{unit}"


class Connection:
    """A separate connection to the job's store, so that it is never in use by another thread of the exchange."""

    def __init__(self, limits: Limits, topology: Topology) -> None:
        self.topology = topology
        self.rank: int = topology.global_rank
        self.join_timeout: float = limits.join_timeout  # seconds
        self.publications: int = 0  # how often this rank has published anything, alerts included
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
        if self._job_store is None:
            found = self.find()
            self._job_store = None if found is None else found.beside("config_sync", TimedCaller(self._limit))
        return self._job_store

    def try_get(self, key: str, kind: type[_T]) -> _T | None:
        """Return a message of this `kind`; raise `ConfigurationError` if it is another one."""
        job_store = self.store()
        message = None if job_store is None else job_store.try_get(key)
        if message is None or fits(message, kind):
            return message
        raise ConfigurationError(
            f"The job's store holds {str(message)[:100]!r} as {key!r}, which is not a {kind.__name__}. Something else "
            "writes to the store, or a rank has another version of dist_wandb: install the same one on all ranks."
        )

    def is_first(self, key: str) -> bool:
        """Claim a key. Return whether no other rank has claimed it before; `True` if that cannot be determined."""
        with suppress(RendezvousError):
            job_store = self.store() if self.is_usable else None
            return job_store is None or is_first(job_store, key)
        return True

    def close(self) -> None:
        self._is_closed = True
        self._job_store, self.find = None, lambda: None  # breaks a reference cycle


# --- comparison -------------------------------------------------------------------------------------------------------


def differs_by_rank(name: str) -> bool:
    """Return whether values of this name differ between ranks by nature: ``ddp.local-rank``, ``GPU``; not ``gpus``."""
    return LEVEL.split(name)[-1].strip("-_").replace("-", "_").lower() in _NAMES_OF_RANKS


def _without_ranks(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_ranks(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_ranks(item) for name, item in value.items() if not differs_by_rank(name)}
    return value


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two `encoded` values are the same: NaN is, ``1`` and ``True`` are not."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _short(value: Any) -> str:
    text = shown(decoded(value))
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…"


def differences(mine: Mapping[str, Any], rank: int, theirs: Mapping[str, Any], other_rank: int) -> list[str]:
    """Describe each differing name of two parts of a `GivenConfig`: ``["'lr' is 0.2 on rank 1, but 0.1 on rank 0"]``.

    Values that differ by rank by nature, such as ``local_rank``, are left out at any depth.
    """
    return [
        f"{name!r} is {_short(mine[name])} on rank {rank}, but {_short(theirs[name])} on rank {other_rank}"
        for name, value in _without_ranks(mine).items()
        if name in theirs and not are_equal(value, _without_ranks(theirs[name]))
    ]


def listed(items: list[str]) -> str:
    more = f"; and {len(items) - _MOST_SHOWN} more" if len(items) > _MOST_SHOWN else ""
    return "; ".join(items[:_MOST_SHOWN]) + more


class Comparison:
    """Compares the config that this rank was given, and the arguments that name the run, with those of other ranks."""

    def __init__(self, options: Options, connection: Connection, config: object, run: Mapping[str, Any]) -> None:
        self.run: Mapping[str, Any] = run
        self.given: dict[str, Any] = _as_it_is(given_values(config))
        self.opened_at: Line | None = users_line()  # the user's line that opened the session, for warnings
        self._mode, self._scope = options.run_mode, options.rank_scope
        self._connection = connection
        self._is_coordinator = connection.topology.is_coordinator
        self._key = f"{GIVEN}/{connection.topology.coordinator}"
        # With `new`, each rank has a run of its own.
        is_silent = options.config_sync == "off" or (options.config_sync == "warn" and options.run_mode == "new")
        self._has_compared = is_silent or self._is_coordinator
        self._first: GivenConfig | None = None

    @cached_property
    def message(self) -> GivenConfig:
        given = {name: redacted(value, 1) for name, value in self.given.items() if not is_secret(name, value)}
        return GivenConfig(values=encoded(given), run=encoded(self.run))

    def check(self) -> None:
        """Raise `ConfigurationError` on all ranks if they were not given the same config. Waits for all of them."""
        job_store, rank, main = self._connection.find(), self._connection.rank, self._connection.topology.coordinator
        if job_store is None:
            raise RendezvousError(
                f"config_sync='check' compares the configs of all ranks, but rank {rank} has no store "
                "through which to reach them. Call init_process_group first, or start the job with torchrun."
            )
        given = RankValues(job_store, ALL_GIVEN)
        given.publish(self.message)
        if self._is_coordinator:
            self.publish_given()
            if given.try_get_all(job_store.timeout) is None:  # those that do not publish theirs in time are left out
                missing = given.missing()
                theirs = "its config is" if len(missing) == 1 else "their configs are"
                warn(
                    f"config_sync='check' waited {self._connection.join_timeout:g} s, but {named(missing)} did not "
                    f"open a run, so {theirs} not compared. Open it on all ranks, or pass config_sync='warn', which "
                    "never waits.",
                    self.opened_at,
                )
            found: list[str] = []
            for other, message in given.read().items():
                if fits(message, GivenConfig):
                    found += differences(message["values"], other, self.message["values"], main)
                else:
                    found.append(f"that of rank {other} cannot be read")
            found = job_store.claim(RESULT, found)
        else:
            try:
                found = job_store.wait_get(RESULT, f"rank {main}")
            except RendezvousError:  # later ranks read this result, so all continue or none
                found = job_store.claim(RESULT, [])
        if not isinstance(found, list):
            raise not_of_a_rank("the result of config_sync='check'", found, self._connection.topology)
        if found:
            raise ConfigurationError(
                f"config_sync='check', but the ranks were given different configs: {listed(found)}. "
                "Give all ranks the same, or pass config_sync='warn'."
            )

    def publish_given(self) -> None:
        job_store = self._connection.store() if self._is_coordinator and self._first is None else None
        if job_store is not None:
            job_store.publish(self._key, self.message)
            self._first = self.message
            self._connection.publications += 1

    def first(self) -> GivenConfig | None:
        """Return what the coordinator was given, once that is published."""
        if self._first is None:
            self._first = self._connection.try_get(self._key, GivenConfig)
        return self._first

    def own_names(self) -> set[str]:
        """Return the names that this rank was given with another value than the coordinator, which is published."""
        first = self.first()
        mine, theirs = self.message["values"], {} if first is None else first["values"]
        equal = {name for name in mine if name in theirs and are_equal(mine[name], theirs[name])}
        return self.given.keys() - equal

    def compare(self) -> None:
        """On the other ranks, compare the given config with the coordinator's, once it is published."""
        first = None if self._has_compared else self.first()
        if first is None:
            return
        self._has_compared = True
        main, rank, mode = self._connection.topology.coordinator, self._connection.rank, self._mode
        mine = differences(self.message["values"], rank, first["values"], main)
        asked = differences(self.message["run"], rank, first["run"], main)
        is_other = asked and mode != "new" and (mode, self._scope) != ("auto", "worker")
        if is_other and self._connection.is_first(OTHER_RUNS):
            warn(
                f"The ranks were asked to open different runs: {listed(asked)}. With run_mode={mode!r} they log to one "
                f"run, which has the values of rank {main}. For a run of each rank, pass run_mode='new'; for one run, "
                "pass the same values on all ranks.",
                self.opened_at,
                may_raise=False,
            )
        if mine and self._connection.is_first(DIFFERS):
            more = " Further ranks may differ, too." if self._connection.topology.world_size > 2 else ""  # noqa: PLR2004
            warn(
                f"The ranks were given different configs: {listed(mine)}.{more} Each run has the config "
                "of its primary. config_sync='check' makes this an error, 'off' silences it.",
                self.opened_at,
                may_raise=False,  # which thread finds it depends on timing
            )


def _as_it_is(value: Any, depth: int = 0) -> Any:
    """Return a copy of lists and dicts, at any depth: the script may change them later, before they are compared."""
    if type(value) is dict and depth < DEEPEST:
        return {name: _as_it_is(item, depth + 1) for name, item in value.items()}
    return [_as_it_is(item, depth + 1) for item in value] if type(value) is list and depth < DEEPEST else value
