"""Rows from processes that a rank has started: forks, and processes that the session was pickled into.

They send them to the session's own process, through a socket of Linux's abstract namespace, which has a name but no
file. It is opened at the first pickle or before the first fork. Other users of the host are rejected before a byte is
read. A child first sends the key that it has from the session, so that no other process of the user is taken for one.
Each child has a separate thread, so a silent connection does not block others, and its rows keep their order. Children
cannot log media, because wandb keeps these in files of the process that made them.

Before the exchange closes, `finish` reads what is in the sockets. At its end the session shuts all of them down: a fork
may hold a copy of a socket, and other children would otherwise write into it forever.
"""

from __future__ import annotations

import hmac
import logging
import math
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from dist_wandb.job.topology import Topology
from dist_wandb.session.remote_session import FLUSH, HANDSHAKE, LOG, RemoteSession, in_forks, is_own, limit, socket_name

_log = logging.getLogger("dist_wandb")

_PAUSE = 0.2  # seconds between two checks whether the session ends
_LAST_ROWS = 2.0  # seconds in which a session that ends receives rows that its children have already sent
_BACKLOG = 128  # connections that may wait to be accepted


class Relay:
    """Receives rows from the processes that hold a copy of this session, in separate threads.

    `deliver` gets those of each process in order. `metadata` returns the run's metadata for them; for `False`, without
    waiting for other ranks.
    """

    def __init__(
        self, deliver: Callable[..., None], topology: Topology, metadata: Callable[[bool], dict[str, Any]]
    ) -> None:
        self.deliver, self.metadata = deliver, metadata
        self.is_fork = False  # whether this process is one; `log` does not ask for its id: torch.compile would warn
        self.remote: RemoteSession = RemoteSession(None, topology, {})  # what a fork uses
        self.key: bytes | None = None  # which children have to send, after `open`
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._until = math.inf  # when receiving ends, by the monotonic clock
        self._accepting: threading.Thread | None = None  # the thread that accepts children, after `open`
        self._children: dict[Connection, threading.Thread] = {}  # their connections, and the threads that read these
        in_forks.add(self)

    def copied(self, *, waits: bool) -> RemoteSession:
        """Return the session for other processes: it sends rows to this one."""
        return self.remote if self.is_fork else RemoteSession(self.open(), self.remote.topology, self.metadata(waits))

    def prepare_fork(self) -> None:
        self.remote = self.copied(waits=False)

    def open(self) -> bytes | None:
        """Start to listen. Return the key for children; `None` once it is closed, or if no socket can be made."""
        with self._lock:
            if self.key is None and not self._closing.is_set():
                try:
                    listener = self._listener = socket.socket(socket.AF_UNIX)
                    listener.bind(socket_name(key := secrets.token_bytes(32)))
                    listener.listen(_BACKLOG)
                    listener.setblocking(False)
                    self._accepting = _thread(self._accept, listener)
                    self._accepting.start()
                    self.key = key
                except (OSError, RuntimeError):  # no socket, or no thread: children warn when they log
                    self._closing.set()
                    self._stop_listening()
            return None if self._closing.is_set() else self.key

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def after_fork(self) -> None:
        """In a fork, close the parent's sockets, because nothing accepts connections there."""
        self.is_fork = True
        self._stop_listening()
        # Otherwise, connected children would not notice the end of the parent: a full socket would block them forever.
        for connection in self._children:
            connection.close()

    def close(self, *, failed: bool = False) -> None:
        """Receive the rows that children have sent until now, and no more; if `failed`, not even these."""
        if self.is_fork:
            return
        with self._lock:
            self._until = time.monotonic() + (0.0 if failed else _LAST_ROWS)
            self._closing.set()
        if self.key is None or self._accepting is None:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.setblocking(False)
            client.connect(socket_name(self.key))  # wakes up the thread that waits for the next child
        self._accepting.join(max(0.0, self._until - time.monotonic()))
        for thread in filter(threading.Thread.is_alive, [*self._children.values()]):  # no further one starts
            thread.join(max(0.0, self._until - time.monotonic()))
        self._stop_listening()
        for connection in [*self._children]:
            with self._lock:  # the number of a closed socket may be in use again
                if connection in self._children:
                    _shut_down(connection)  # its thread closes it

    def _accept(self, listener: socket.socket) -> None:
        while True:
            is_over = self._closing.is_set()  # connections made before are still accepted
            try:
                if wait([listener], 0.0 if is_over else _PAUSE):
                    self._accept_one(listener.accept()[0])
                elif is_over:
                    return
            except ValueError:  # another thread has closed it
                return
            except OSError:  # too many open files
                time.sleep(_PAUSE)

    def _accept_one(self, accepted: socket.socket) -> None:
        if not is_own(accepted):
            accepted.close()
            return
        accepted.setblocking(True)
        connection = Connection(accepted.detach())
        self._children[connection] = _thread(self._serve, connection)
        try:
            self._children[connection].start()
        except RuntimeError:  # no more threads: the child warns
            self._drop(connection)

    def _serve(self, connection: Connection) -> None:
        try:
            limit(connection, receiving=HANDSHAKE, sending=HANDSHAKE)
            # `recv_bytes` raises OSError for more
            if self.key is None or not hmac.compare_digest(connection.recv_bytes(len(self.key)), self.key):
                return
            limit(connection, receiving=0.0, sending=HANDSHAKE)
            while time.monotonic() < self._until:
                if connection.poll(0.0 if self._closing.is_set() else _PAUSE):
                    message = connection.recv_bytes()
                    try:
                        # Its sender knows the key, so it is a child of this process.
                        kind, arguments = pickle.loads(message)  # noqa: S301  # raises what the objects' own code raises
                        if kind == LOG:
                            self.deliver(*arguments)
                    except Exception:  # noqa: BLE001  # must not affect the training
                        _log.exception("dist_wandb: lost a row that another process had sent")
                    else:
                        if kind == FLUSH:
                            connection.send_bytes(arguments)
                elif self._closing.is_set():
                    break
        except (EOFError, OSError) as error:
            _log.debug("dist_wandb: a process that connected is gone: %r", error)
        finally:
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        with self._lock:
            _shut_down(connection)
            del self._children[connection]
            connection.close()


def _thread(target: Callable[[Any], None], argument: Any) -> threading.Thread:
    return threading.Thread(target=target, args=(argument,), name="dist_wandb-relay", daemon=True)


def _shut_down(connection: Connection) -> None:
    """Shut down both directions: the peer notices at once, even while a fork still holds this end."""
    with suppress(OSError), socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.shutdown(socket.SHUT_RDWR)
