"""A session's end of the relay: receives rows over a local socket from processes that its rank has started.

Rows of a fork, or of a process that the session was pickled into, are sent to the session's own process, through a
socket in a directory of mode 0700, opened at the first pickle or before the first fork. Other users of the host cannot
enter it. On systems that report the peer's user, they are also rejected before a byte is read. A child first sends the
key that it has from the session, so that no other process of the user is taken for one. Each child has a separate
thread, so a silent connection does not block others, and its rows keep their order. Children cannot log media, because
wandb keeps these in files of the process that made them.

Before the exchange closes, `finish` reads what is in the sockets. At its end the session shuts all of them down: a fork
may hold a copy of a socket, and other children would otherwise write into it forever.
"""

from __future__ import annotations

import hmac
import logging
import math
import os
import pickle
import secrets
import shutil
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_wandb.runs.client_settings import runtime_directory
from dist_wandb.session.relay import remote_session
from dist_wandb.session.relay.remote_session import FLUSH, LOG, Address, RemoteSession, is_own, limit

if TYPE_CHECKING:
    from dist_wandb.job.model import Topology

_log = logging.getLogger("dist_wandb")

_PAUSE = 0.2  # seconds between two checks whether the session ends
_LAST_ROWS = 2.0  # seconds in which a session that ends receives rows that its children have already sent
_BACKLOG = 128  # connections that may wait to be accepted
_LONGEST = 100  # bytes of a socket's path: Linux allows 107, macOS 103


class Listener:
    """A listening socket in a private directory, made in the first of `directories` that can hold it."""

    def __init__(self, directories: Iterable[Path]) -> None:
        error: OSError = FileNotFoundError("no directory has a name that is short enough for a socket")
        for directory in directories:
            try:
                self._listen(directory)
            except OSError as failure:  # noqa: PERF203  # three directories at most
                error = failure
            else:
                return
        raise error

    def _listen(self, directory: Path) -> None:
        private = tempfile.mkdtemp(prefix="dist-wandb-", dir=directory)  # mode 0700
        remove = weakref.finalize(self, _remove, private, os.getpid())
        self.path: str = str(Path(private, "socket"))
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            if len(os.fsencode(self.path)) > _LONGEST:
                raise FileNotFoundError(f"{directory} has too long a name for a socket")
            self._socket.bind(self.path)
            self._socket.listen(_BACKLOG)
            self._socket.setblocking(False)
        except OSError:
            self._socket.close()
            remove()
            raise
        self._remove = remove

    def has_pending(self, timeout: float) -> bool:
        """Wait some seconds for a connection. Return whether there is one; `False` once the socket is closed."""
        try:
            return bool(wait([self._socket], timeout))
        except (OSError, ValueError):  # another thread has closed it
            return False

    def accept(self) -> Connection | None:
        """Accept the next connection; `None` if there is none. Processes of other users are rejected."""
        try:
            accepted, _ = self._socket.accept()
        except BlockingIOError:
            return None
        if not is_own(accepted):
            accepted.close()
            return None
        accepted.setblocking(True)
        return Connection(accepted.detach())

    def close(self) -> None:
        """Stop listening. In the process that created it, also delete the directory."""
        self._socket.close()
        self._remove()


def _remove(directory: str, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(directory, ignore_errors=True)


def _shut_down(connection: Connection) -> None:
    """Shut down both directions: the peer notices at once, even while a fork still holds this end."""
    with suppress(OSError), socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.shutdown(socket.SHUT_RDWR)


class Relay:
    """Receives rows from children of this process, in separate threads. `deliver` gets each child's in order."""

    def __init__(self, deliver: Callable[..., None]) -> None:
        self.deliver = deliver
        self._listener: Listener | None = None
        self.address: Address | None = None  # where it listens, after `open`
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._until = math.inf  # when receiving ends, by the monotonic clock
        self._threads: list[threading.Thread] = []
        self._connections: set[Connection] = set()
        self._has_failed = False

    def open(self) -> Address | None:
        """Start to listen. Return the address; `None` once it is closed, or if no socket can be made."""
        with self._lock:
            if self.address is None and not self._closing.is_set() and not self._has_failed:
                self._listen(secrets.token_bytes(32))
            return None if self._closing.is_set() else self.address

    def _listen(self, key: bytes) -> None:
        try:
            self._listener = _listener()
            self._start_thread(lambda listener: self._accept(listener, key), self._listener)
        except (OSError, RuntimeError):  # no socket, or no thread: children warn when they log
            self._has_failed = True
            if self._listener is not None:
                self._listener.close()
            return
        self.address = Address(self._listener.path, key)

    def after_fork(self) -> None:
        """In a fork, close the parent's sockets, because nothing accepts connections there."""
        if self._listener is not None:
            self._listener.close()
        # Otherwise, connected children would not notice the end of the parent: a full socket would block them forever.
        for connection in self._connections:
            connection.close()

    def close(self, *, failed: bool = False) -> None:
        """Receive the rows that children have sent until now, and no more; if `failed`, not even these."""
        with self._lock:
            self._until = time.monotonic() + (0.0 if failed else _LAST_ROWS)
            self._closing.set()
            listener, address = self._listener, self.address
        if listener is None or address is None:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.setblocking(False)
            client.connect(address.path)  # wakes up the thread that waits for the next child
        self._await(self._threads[:1])  # it accepts children: after it, no further thread starts
        self._await(self._threads[1:])
        listener.close()
        for connection in self._connections.copy():
            with self._lock:  # the number of a closed socket may be in use again
                if connection in self._connections:
                    _shut_down(connection)  # its thread closes it

    def _await(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join(max(0.0, self._until - time.monotonic()))

    def _start_thread(self, target: Callable[[Any], None], argument: Any) -> None:
        thread = threading.Thread(target=target, args=(argument,), name="dist_wandb-relay", daemon=True)
        thread.start()
        self._threads = [*(held for held in self._threads if held.is_alive()), thread]

    def _accept(self, listener: Listener, key: bytes) -> None:
        while True:
            is_over = self._closing.is_set()  # connections made before are still accepted
            if is_over and time.monotonic() > self._until:
                return
            if listener.has_pending(0.0 if is_over else _PAUSE):
                self._accept_one(listener, key)
            elif is_over:
                return

    def _accept_one(self, listener: Listener, key: bytes) -> None:
        try:
            connection = listener.accept()
        except OSError:  # too many open files
            time.sleep(_PAUSE)
            return
        if connection is None:
            return
        with self._lock:
            self._connections.add(connection)
        try:
            self._start_thread(lambda connection: self._serve(connection, key), connection)
        except RuntimeError:  # no more threads: the child warns
            self._drop(connection)

    def _serve(self, connection: Connection, key: bytes) -> None:
        try:
            limit(connection, receiving=remote_session.HANDSHAKE, sending=remote_session.HANDSHAKE)
            if not hmac.compare_digest(connection.recv_bytes(len(key)), key):  # `recv_bytes` raises OSError for more
                return
            limit(connection, receiving=0.0, sending=remote_session.HANDSHAKE)
            while time.monotonic() < self._until:
                if connection.poll(0.0 if self._closing.is_set() else _PAUSE):
                    self._receive(connection)
                elif self._closing.is_set():
                    break
        except (EOFError, OSError) as error:
            _log.debug("dist_wandb: a process that connected is gone: %r", error)
        finally:
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        with self._lock:
            _shut_down(connection)
            self._connections.discard(connection)
            connection.close()

    def _receive(self, connection: Connection) -> None:
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


def _listener() -> Listener:
    """Listen in the directory for temporary files, or in another one if its path is too long for a socket's."""
    directories = (Path(tempfile.gettempdir()), runtime_directory(), Path("/tmp"))  # noqa: S108  # in a private one
    return Listener(filter(None, directories))


class Children:
    """The processes that hold a copy of this process's session. Their rows are passed to `deliver`."""

    def __init__(
        self, deliver: Callable[..., None], topology: Topology, metadata: Callable[[bool], dict[str, Any]]
    ) -> None:
        self._pid = os.getpid()
        self._topology = topology
        self._metadata = metadata  # returns the run's metadata for them; for `False`, without waiting for other ranks
        self._relay = Relay(deliver)
        self._for_forks: dict[str, Any] = {}
        self._remote: RemoteSession | None = None

    @property
    def is_fork(self) -> bool:
        """Whether this process is a fork of the session's."""
        return os.getpid() != self._pid

    def remote(self) -> RemoteSession:
        """Return the stand-in for the session in a fork of its process."""
        if self._remote is None:
            self._remote = RemoteSession(self._relay.address, self._topology, self._for_forks)
        return self._remote

    def reduced(self) -> tuple[Any, ...]:
        """Reduce the session for pickle: in another process, such as a spawned worker, it sends rows to this one."""
        if self.is_fork:
            return self.remote().__reduce__()
        return RemoteSession, (self._relay.open(), self._topology, self._metadata(True))

    def prepare_fork(self) -> None:
        """Prepare to receive rows from a fork of this process."""
        if not self.is_fork:
            self._relay.open()
            self._for_forks = self._metadata(False)

    def after_fork(self) -> None:
        """In the fork, close what only the session's own process may hold."""
        self._relay.after_fork()

    def continue_for(self, earlier: Children) -> None:
        """Take over the processes that hold a copy of an earlier session, which continues as this one."""
        own, self._relay = self._relay, earlier._relay
        self._relay.deliver, earlier._relay = own.deliver, own

    def close(self, *, failed: bool) -> None:
        """Receive the rows that they have logged until now, and no more; if `failed`, not even these."""
        if not self.is_fork:
            self._relay.close(failed=failed)
