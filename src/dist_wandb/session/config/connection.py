"""The config's way through the job's store: the messages, the connection that carries them, and when it is used.

A refresh publishes what is new on this rank, once per heartbeat or at once, never twice at the same time. It may also
poll the other ranks, a request to the job's store. A session's thread polls when the exchange reports that some rank
has published something. Otherwise it polls, for messages from ranks of other units, when this rank has not polled for a
pause that doubles from a heartbeat up to `_SELDOM`. A read refreshes and polls once per heartbeat, or at once for a
missing name. `flush` and `finish` do so at once, for a second at most. `log` never does. If a unit has one rank, or
with ``reduce=None``, there is no thread: then only reads, writes, `flush` and `finish` refresh.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, get_args, get_origin, get_type_hints, is_typeddict

from dist_wandb.errors import ConfigurationError, RendezvousError
from dist_wandb.job.timed_caller import STORE_PATIENCE, TimedCaller
from dist_wandb.notices import Notices

if TYPE_CHECKING:
    from dist_wandb.job.job_store import JobStore
    from dist_wandb.job.model import Topology
    from dist_wandb.settings.options import Limits

_T = TypeVar("_T")
_log = logging.getLogger("dist_wandb")

GIVEN, RESULT = "config/given", "config/result"
ALL_GIVEN = "config/given by all"  # a list of the configs that all ranks were given
# Claimed by the rank that warns for all.
DIFFERS, OTHER_RUNS, REFUSED = "config/differs", "config/other runs", "config/refused"
OF_VERSION = "/version"  # appended to the key of a `PublishedRun`: its `Version`
_PAIR = 2  # text and digest of a value
_LEAST_LIMIT = 0.5  # seconds that the store gets to answer
_PATIENCE = 1.0  # seconds that a write waits for a refresh by another thread
_SELDOM = 10.0  # seconds between two polls, at most, unless the exchange reports something new


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


class Refresh:
    """Refreshes the config on this rank. Never waits for a rank, and raises nothing.

    `heartbeat` is in seconds, and longer than the exchange's if there are very many ranks. `update` publishes what is
    new here, and applies what other ranks have published. Its arguments are whether to check all values for changes,
    and whether to poll the other ranks.
    """

    def __init__(self, connection: Connection, heartbeat: float, update: Callable[[bool, bool], None]) -> None:
        self._connection = connection
        self._heartbeat = heartbeat
        self._update = update
        self._lock = threading.RLock()
        self._is_busy = False  # reads and writes of the config by this thread do not start another refresh
        self._polled = -math.inf  # when this rank polled last, by the monotonic clock
        self._next_refresh = -math.inf  # of the session's thread
        self.published: float = 0.0  # how often any rank had published something when the session's thread polled last
        self.pause: float = heartbeat  # seconds after a poll until that thread polls, unless something new is reported
        self._notices = Notices()

    def __call__(self, *, at_once: bool = False, whole: bool = False) -> None:
        """Refresh and poll, if it is time to: once per heartbeat, or `at_once`; `whole` as for `Publisher.publish`."""
        if at_once or time.monotonic() >= self._polled + self._heartbeat:
            self._refresh(_PATIENCE if at_once else 0.0, whole=whole, polls=True)

    def in_background(self, published: float) -> None:
        """Refresh, if it is time to, on a thread whose rounds other ranks wait for.

        `published` is how often any rank has published something, as far as the exchange reports it.
        """
        now, is_news = time.monotonic(), published != self.published
        if not is_news and now < self._next_refresh:
            return
        polls = is_news or now >= self._polled + self.pause
        if not self._refresh(0.0, whole=False, polls=polls):
            return
        self._next_refresh = now + self._heartbeat
        if polls:
            longer = min(2 * self.pause, max(self._heartbeat, _SELDOM))
            self.published, self.pause = published, self._heartbeat if is_news else longer

    def _refresh(self, patience: float, *, whole: bool, polls: bool) -> bool:
        """Refresh, unless another thread does so for longer than `patience` seconds. Return whether this one could."""
        if not self._connection.is_usable or not self._lock.acquire(timeout=patience):
            return False
        was_busy, self._is_busy = self._is_busy, True
        try:
            if not was_busy:
                if polls:
                    self._polled = time.monotonic()
                self._update(whole, polls)
        except RendezvousError as error:  # the store is gone, usually because the job has ended
            _log.debug("dist_wandb: rank %d can neither publish nor read its config: %s", self._connection.rank, error)
        except ConfigurationError as error:  # another rank's message cannot be read
            if self._notices.is_first("malformed"):
                _log.warning("dist_wandb: rank %d cannot follow the config: %s", self._connection.rank, error)
        except Exception:  # noqa: BLE001  # must not affect the training
            if self._notices.is_first("failed"):
                _log.exception("dist_wandb: rank %d could not bring its config up to date", self._connection.rank)
        finally:
            self._is_busy = was_busy
            self._lock.release()
        return True

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Refresh before and after the block, but not inside it, because what is written depends on what was read."""
        self(at_once=True)
        if self._lock.acquire(timeout=_PATIENCE):
            was_busy, self._is_busy = self._is_busy, True
            try:
                yield
            finally:
                self._is_busy = was_busy
                self._lock.release()
            self(at_once=True)
        else:  # another thread waits for a stalled store
            yield
