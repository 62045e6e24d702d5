"""Deletion of the keys that ended sessions have left in the job's store, once no rank can need them.

Each rank deletes the keys that it has set itself. It does so when it opens a later session, and all ranks have left the
former one, which they count in the store; at the end of a session, other ranks still read its keys. If rank 0 was the
only rank, it deletes its keys at the end.

These keys remain: those of the last two or three sessions; the restart record of each, which says that its runs have
ended; one key for each integration with its ended sessions, for late ranks; those of sessions that some rank never
opens, or has not opened yet, with ``reduce=None``; and those of Lightning's loggers, which may reopen their sessions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from dist_wandb.errors import RendezvousError
from dist_wandb.job.job_store import JobStore
from dist_wandb.job.ranges import numbers_in, spans_of

_LEFT, _CLEARED = "left", "cleared"  # keys: how many ranks have left a session, and have deleted their keys
_OVER = "over"  # key of an integration: the coordinator's list of ended sessions
_MOST_LOOKED_AT = 4  # sessions to check at once, both of the oldest and of the newest
_MOST_KEPT = 200  # sessions that some rank has not left; the keys of older ones remain


@dataclass
class _Leftover:
    """The keys that this rank has set for a session that it has ended."""

    namespace: str  # prefix of the keys
    keys: set[str]  # more may be added later
    has_ended: Callable[[], bool]  # whether all threads of the session have ended
    is_counted: bool = False  # whether this rank is counted as having left the session


_leftovers: list[_Leftover] = []


def leave(job_store: JobStore, has_ended: Callable[[], bool]) -> None:
    """Schedule the keys of an ended session for deletion, once its threads have ended, too (`has_ended`)."""
    del _leftovers[:-_MOST_KEPT]
    _leftovers.append(_Leftover(job_store.namespace, job_store.own_keys, has_ended))


def delete_stale_keys(job_store: JobStore, world_size: int) -> None:
    # Ranks open the sessions of an integration in the same order. So a rank that has left a session has left, or
    # skipped, all earlier ones.
    with suppress(RendezvousError):  # then the store is gone, with its keys
        for leftover in [known for known in _leftovers if not known.is_counted and known.has_ended()]:
            keys = _keys_at(job_store, leftover.namespace)
            if keys.has([next(iter(leftover.keys))]):
                keys.count(_LEFT)
                leftover.is_counted = True
            else:  # the keys are in the store of an earlier process group
                _leftovers.remove(leftover)
        counted = [known for known in _leftovers if known.is_counted]
        for last in [*counted[:_MOST_LOOKED_AT], *counted[_MOST_LOOKED_AT:][-_MOST_LOOKED_AT:]]:
            if (_keys_at(job_store, last.namespace).try_get(_LEFT) or 0) < world_size or last not in _leftovers:
                continue
            for former in [known for known in _leftovers[: _leftovers.index(last) + 1] if known.is_counted]:
                if former.namespace.rpartition("/")[0] == last.namespace.rpartition("/")[0]:  # of one integration
                    _leftovers.remove(former)
                    keys = _keys_at(job_store, former.namespace)
                    keys.delete(former.keys)
                    if former is not last or keys.count(_CLEARED) >= world_size:
                        keys.delete([_LEFT, _CLEARED])


def publish_over(job_store: JobStore) -> None:
    """Publish on the coordinator that a session has ended, so that a late rank does not join it."""
    of_integration, number = place_of(job_store)
    of_integration.publish(_OVER, spans_of([*numbers_in(of_integration.try_get(_OVER) or ()), number]))


def is_over(job_store: JobStore) -> bool:
    of_integration, number = place_of(job_store)
    return any(first <= number <= last for first, last in of_integration.try_get(_OVER) or ())


def unended(job_store: JobStore) -> list[JobStore]:
    # The coordinator, which opens sessions in order, has a present one, if any, and has not opened the others. The last
    # one is first.
    of_integration, number = place_of(job_store)
    ended = [one for one in numbers_in(of_integration.try_get(_OVER) or ()) if one < number]
    numbers = reversed(range(max(ended, default=-1) + 1, number))  # loggers are counted from 0
    return [_keys_at(job_store, f"{of_integration.namespace}/{one}") for one in numbers]


def before(job_store: JobStore) -> JobStore | None:
    """Return the keys of the session before this one of the same integration."""
    of_integration, number = place_of(job_store)
    return _keys_at(job_store, f"{of_integration.namespace}/{number - 1}") if number > 1 else None


def place_of(job_store: JobStore) -> tuple[JobStore, int]:
    """Return the keys of a session's integration, and the session's number in it."""
    namespace, _, number = job_store.namespace.rpartition("/")
    return _keys_at(job_store, namespace), int(number)


def _keys_at(job_store: JobStore, namespace: str) -> JobStore:
    connection = job_store.connection
    return JobStore(connection.root, namespace, job_store.topology, job_store.timeout, connection)
