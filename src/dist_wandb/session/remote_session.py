"""The session in a process that its rank has started: sends its rows to the session's own process.

A `log` waits a few seconds for the connection, and longer for a session that reads nothing (`_STUCK`). After that, rows
are dropped for a while without waiting, with one warning, so that a session that is stuck does not delay its workers at
each row.
"""

from __future__ import annotations

import hashlib
import logging
import math
import multiprocessing
import os
import pickle
import socket
import struct
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from dist_wandb.job.topology import Topology
from dist_wandb.notices import Notices, warn
from dist_wandb.payloads.devices import as_tensor, known, whole
from dist_wandb.payloads.scalars import Weight, check_row, checked_step, commit_and_weight, copied_weight
from dist_wandb.runs.null_run import LikeRun, NullRun
from dist_wandb.runs.wandb_media import is_media
from dist_wandb.settings.config_values import ConfigCopy

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger("dist_wandb")

LOG, FLUSH = "log", "flush"  # kinds of messages
HANDSHAKE = 5.0  # seconds that a child waits to be accepted, and that the session waits for a part of its key

_STUCK = 30.0  # seconds that a child waits while the session's process reads nothing
_RETRY_AFTER = 30.0  # seconds after such a failure before a child tries again
_FLUSH_PATIENCE = 60.0  # seconds
_ENDED = (BrokenPipeError, ConnectionResetError, ConnectionRefusedError)


def socket_name(key: bytes) -> str:
    """Return the name of the socket at which a session's process accepts its children, which have its secret key."""
    return f"\0dist-wandb-{hashlib.sha256(key).hexdigest()[:32]}"


class RemoteSession(LikeRun):
    """A session in another process, into which it was pickled or forked: it sends rows to the session's own process.

    Rows arrive in the order of the calls, until the session ends. Text, numbers, tensors, arrays and torchmetrics
    objects may be logged, but not W&B media, because they are in files of this process. Everything else that a run can
    do (`summary`, `alert`, `define_metric`) is accepted and has no effect.
    """

    def __init__(self, key: bytes | None, topology: Topology, metadata: Mapping[str, Any]) -> None:
        # `key` is `None` if the session's process does not listen; `metadata` is from the time of the copy.
        self.topology = topology
        self.id: str | None = metadata.get("id")
        self.url: str | None = metadata.get("url")
        self.config: ConfigCopy = ConfigCopy(metadata.get("config", {}))
        self._arguments = key, topology, metadata
        self.after_fork()
        in_forks.add(self)

    def after_fork(self) -> None:
        """Start without a connection: a fork must not share one, nor wait for threads that it does not have."""
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._flushes = 0
        self._mute_until = -math.inf  # by the monotonic clock

    @property
    def run(self) -> NullRun:
        """A stand-in for the run, which is not in this process: it accepts every use and has no effect."""
        return NullRun(self.id, None, self.url)

    def log(
        self,
        data: Mapping[str, Any],
        step: int | None = None,
        *commit_or_weight: bool | Weight,
        commit: bool | None = None,
        weight: Weight = None,
    ) -> None:
        """Log one row, as `Session.log` does; waits for tensors on a device. Rows without a step are counted there."""
        commit, weight = commit_and_weight(commit_or_weight, commit, weight)
        rank = self.topology.global_rank
        check_row(data, rank)
        if self.topology.world_size == 1 and not _notices.has("ranks"):
            # They may be the ranks of a job. Once there is a group, that is settled: reading it is slow.
            group = Topology.from_torch_distributed()
            if group is not None and _notices.is_first("ranks") and group.world_size > 1 and group.is_coordinator:
                warn(
                    f"rank 0 of {group.world_size} logs to a run that its parent process has opened, so no mean of the "
                    "ranks is written. Call init on each rank instead, after init_process_group."
                )
        weight = known({"weight": copied_weight(weight, rank)})["weight"]
        step = None if step is None else checked_step(step, rank)
        media = [name for name, value in data.items() if is_media(value)]
        if media:
            _warn_once(rank, f"{', '.join(media)}: W&B keeps these in files of the process that made them")
        values = {name: _on_host(name, value, rank) for name, value in data.items() if name not in media}
        if values or not data:
            self._send(LOG, (values, step, weight, commit))

    def flush(self, timeout: float | None = None) -> bool:
        """Return whether the session's process has all rows logged here, within `timeout` seconds (`None`: 60)."""
        deadline = time.monotonic() + (_FLUSH_PATIENCE if timeout is None else timeout)
        if not self._flushing.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return False
        try:
            self._flushes += 1
            flush = b"%d" % self._flushes
            connection = self._connection if self._send(FLUSH, flush) else None
            with suppress(EOFError, OSError):
                while connection is not None and connection.poll(max(0.0, deadline - time.monotonic())):
                    if connection.recv_bytes() == flush:  # late answers to earlier ones do not count
                        return True
            return False
        finally:
            self._flushing.release()

    def finish(self, exit_code: int | None = None) -> None:
        """Flush the rows logged here. The run belongs to the other process: it does not end, and gets no exit code."""
        del exit_code
        self.flush()

    def _send(self, kind: str, arguments: tuple[Any, ...] | bytes) -> bool:
        try:
            message = pickle.dumps((kind, arguments))
            with self._lock:
                if time.monotonic() < self._mute_until:
                    return False
                try:
                    if (key := self._arguments[0]) is None:
                        raise ConnectionError("it was not prepared for other processes, or has ended")
                    if self._connection is None:
                        self._connection = _connect(key)
                    self._connection.send_bytes(message)
                except (BlockingIOError, TimeoutError) as error:
                    self._mute_until = time.monotonic() + _RETRY_AFTER  # so that `log` does not wait each time
                    if self._connection is not None:  # part of the message may be sent
                        self._connection.close()
                        self._connection = None
                        raise TimeoutError(f"the session's process reads nothing for {_STUCK:g} s") from error
                    raise
        except OSError as error:
            why = "it has ended" if isinstance(error, _ENDED) else str(error) or type(error).__name__
            _warn_once(self.topology.global_rank, why)
            return False
        except Exception as error:  # noqa: BLE001  # objects have pickling code of their own
            _log.error("dist_wandb: lost a row that could not be sent to the session's process: %s", error)
            return False
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteSession, self._arguments

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.finish()

    def __getattr__(self, name: str) -> Any:
        return getattr(NullRun(), name)

    def __repr__(self) -> str:
        return f"<dist_wandb.RemoteSession of rank {self.topology.global_rank} run={self.id!r}>"


in_forks: weakref.WeakSet[Any] = weakref.WeakSet()  # whose `after_fork` is called in each fork


def _after_fork() -> None:
    for one in list(in_forks):
        one.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _on_host(name: str, value: Any, rank: int) -> Any:
    """Copy a value to the host, without what only this process has: autograd graphs and device memory."""
    if isinstance(value, Mapping):
        return {inner: _on_host(inner, item, rank) for inner, item in value.items()}
    tensor = as_tensor(value)
    return value if tensor is None else whole(repr(name), tensor, rank).detach().clone().cpu()


def _connect(key: bytes) -> Connection:
    """Connect, and send the key; raise `OSError` if that fails, or another user listens.

    Writes raise `BlockingIOError` if nothing is read for `_STUCK` seconds.
    """
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(True)
        limit(client, receiving=0.0, sending=HANDSHAKE)
        try:
            client.connect(socket_name(key))  # waits while too many connections are waiting
        except BlockingIOError:
            raise TimeoutError(f"the session's process accepts no connection for {HANDSHAKE:g} s") from None
        if not is_own(client):
            raise PermissionError("another user listens in its place")
        connection = Connection(client.detach())
    try:
        limit(connection, receiving=0.0, sending=_STUCK)
        connection.send_bytes(key)
    except BaseException:
        connection.close()
        raise
    return connection


def is_own(connected: socket.socket) -> bool:
    """Return whether the peer is a process of this user."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.geteuid())


def limit(connection: Connection | socket.socket, *, receiving: float, sending: float) -> None:
    """Limit how long reads and writes wait without progress; 0 for no limit."""
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.setblocking(True)  # a default timeout set by the user would make it non-blocking
        for option, seconds in ((socket.SO_RCVTIMEO, receiving), (socket.SO_SNDTIMEO, sending)):
            whole, rest = divmod(seconds, 1.0)
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(whole), int(rest * 1e6)))


_notices = Notices()


def _warn_once(rank: int, why: str) -> None:
    if _notices.is_first((os.getpid(), why)):
        _log.error(
            "dist_wandb: %s called log for rank %d, but could not send this to the process that holds the session "
            "(%s). Log in the training process instead.",
            multiprocessing.current_process().name,
            rank,
            why,
        )
