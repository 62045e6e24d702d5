"""What ended sessions have left in the job's store: deleted once no rank can come to need it.

Each rank deletes what it has set itself, when it opens a later session and all ranks have left the former, which they
count in the store: at the end of one, others still look things up. A rank 0 that was the only one deletes at its end.

What stays: the keys of the last two or three sessions; one key for each integration with the sessions that are over, by
which a late rank finds out; sessions that a rank never opens, or not yet, with ``reduce=None``; and those of
Lightning's loggers, which may open theirs again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from dist_wandb.errors import RendezvousError
from dist_wandb.store.job_store import JobStore
from dist_wandb.topology.ranges import numbers_in, spans_of

_LEFT, _CLEARED = "left", "cleared"  # keys: how many ranks have left a session, and have deleted what they had set
_OVER = "over"  # the key, beside those of an integration's sessions, of the coordinator's list of those that have ended
_MOST_LOOKED_AT = 4  # of the oldest sessions, and of the newest, at once
_MOST_KEPT = 200  # sessions that some rank has not left; what older ones have left stays


@dataclass
class _Leftover:
    """What this rank has set for a session that has ended here.

    Args:
        namespace: Prefix of the keys.
        keys: Their names; some may be added still.
        has_ended: Whether nothing of it goes on in this process.
        is_counted: Whether this rank is counted among those that have left it.
    """

    namespace: str
    keys: set[str]
    has_ended: Callable[[], bool]
    is_counted: bool = False


_leftovers: list[_Leftover] = []


def leave(job_store: JobStore, has_ended: Callable[[], bool]) -> None:
    """Remember an ended session, for what it has set to be deleted later.

    Args:
        job_store: The session's keys.
        has_ended: Whether its threads have ended, too.
    """
    del _leftovers[:-_MOST_KEPT]
    _leftovers.append(_Leftover(job_store.namespace, job_store.own_keys, has_ended))


def clear_away(job_store: JobStore, world_size: int) -> None:
    """Delete what this rank has set for sessions that all ranks have left.

    Ranks open the sessions of an integration in one order, so one that has left a session has left, or passed over, all
    before.

    Args:
        job_store: That of a session which begins, by whose store the others are reached.
        world_size: How many ranks there are.
    """
    with suppress(RendezvousError):  # of no use to anybody then
        for leftover in [known for known in _leftovers if not known.is_counted and known.has_ended()]:
            keys = _keys_at(job_store, leftover.namespace)
            if keys.has([next(iter(leftover.keys))]):
                keys.count(_LEFT)
                leftover.is_counted = True
            else:  # set in another store, which was that of an earlier process group
                _leftovers.remove(leftover)
        counted = [known for known in _leftovers if known.is_counted]
        for last in [*counted[:_MOST_LOOKED_AT], *counted[_MOST_LOOKED_AT:][-_MOST_LOOKED_AT:]]:
            if (_keys_at(job_store, last.namespace).try_get(_LEFT) or 0) >= world_size:
                _clear_until(last, job_store, world_size)


def _clear_until(last: _Leftover, job_store: JobStore, world_size: int) -> None:
    integration = _integration_of(last.namespace)
    until = _leftovers.index(last) if last in _leftovers else -1
    for leftover in [known for known in _leftovers[: until + 1] if known.is_counted]:
        if _integration_of(leftover.namespace) == integration:
            _leftovers.remove(leftover)
            keys = _keys_at(job_store, leftover.namespace)
            keys.delete(leftover.keys)
            if leftover is not last or keys.count(_CLEARED) >= world_size:
                keys.delete([_LEFT, _CLEARED])


def publish_over(job_store: JobStore) -> None:
    """Publish, as the coordinator, that a session has ended, so that a late rank does not join it."""
    number, over = _number_of(job_store), keys_of_integration(job_store)
    over.publish(_OVER, spans_of([*numbers_in(over.try_get(_OVER) or ()), number]))


def is_over(job_store: JobStore) -> bool:
    """Whether the coordinator has ended a session."""
    ended = keys_of_integration(job_store).try_get(_OVER) or ()
    return any(first <= _number_of(job_store) <= last for first, last in ended)


def keys_of_integration(job_store: JobStore) -> JobStore:
    """The keys beside those of a session, for all sessions of its integration."""
    return _keys_at(job_store, _integration_of(job_store.namespace))


def _keys_at(job_store: JobStore, namespace: str) -> JobStore:
    connection = job_store.connection
    return JobStore(connection.root, namespace, job_store.topology, job_store.timeout, connection)


def _integration_of(namespace: str) -> str:
    return namespace.rpartition("/")[0]


def _number_of(job_store: JobStore) -> int:
    return int(job_store.namespace.rpartition("/")[2])
