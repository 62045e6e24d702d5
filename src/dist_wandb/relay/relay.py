"""A session's end of the relay: takes what processes log that its rank has started, over a local socket.

Rows of a fork, or of a process that the session was pickled into, go to the session's own process, by a socket in a
directory of mode 0700, opened at the first pickle or before the first fork. A child and the session prove to each other
that they know a key, each child in a thread of its own and with limits of number and time: a connection that stays
silent keeps nobody out. Each child's rows keep their order; media are refused there, because wandb keeps them in files
of the process that made them.

Before the exchange closes, `finish` takes what is in the sockets. At its end the session shuts all of them down: a fork
may hold a copy of the socket, and others would write into it for ever.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import pickle
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dist_wandb.relay import local_sockets
from dist_wandb.relay.local_sockets import Address, Listener, authenticate, shut_down
from dist_wandb.relay.remote_session import FLUSH, LOG
from dist_wandb.runs.directories import runtime_directory

_log = logging.getLogger("dist_wandb")

_PAUSE = 0.2  # seconds between two looks whether the session ends
_LAST_ROWS = 2.0  # seconds that a session which ends takes what its children have sent already
_BACKLOG = 128  # connections that may wait to be accepted
_MOST_UNAUTHENTICATED = 128  # accepted connections that are being authenticated, each in a thread of its own
_CERTAIN = 1.0  # seconds that a child gets to authenticate at least, also if there are so many


class Relay:
    """Takes what children of this process log, in threads of their own.

    Args:
        deliver: Called with the arguments of `Session.log`, in the order in which each child sent them.
    """

    def __init__(self, deliver: Callable[..., None]) -> None:
        self._deliver = deliver
        self._listener: Listener | None = None
        self._address: Address | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._until = math.inf  # when taking ends, by the monotonic clock
        self._threads: list[threading.Thread] = []
        self._connections: set[Connection] = set()
        self._unauthenticated: dict[Connection, float] = {}  # since when
        self._has_failed = False

    @property
    def address(self) -> Address | None:
        """Where it listens; `None` as long as nobody has asked it to."""
        return self._address

    def open(self) -> Address | None:
        """Listen, from now on; `None` once it is closed, or where no socket can be made."""
        with self._lock:
            if self._address is None and not self._closing.is_set() and not self._has_failed:
                self._listen(secrets.token_bytes(32))
            return None if self._closing.is_set() else self._address

    def _listen(self, key: bytes) -> None:
        try:
            self._listener = _listener()
            self._begin(lambda listener: self._accept(listener, key), self._listener)
        except (OSError, RuntimeError):  # no socket, or no thread: children warn, if they log
            self._has_failed = True
            if self._listener is not None:
                self._listener.close()
            return
        self._address = Address(self._listener.path, key)

    def after_fork(self) -> None:
        """In a fork, close the sockets of its parent: nothing accepts connections there.

        And connected children would not notice the end of the parent: a full socket would block them for ever.
        """
        if self._listener is not None:
            self._listener.close()
        for connection in self._connections:
            connection.close()

    def close(self, *, failed: bool = False) -> None:
        """Take what children have sent until now, and no more.

        Args:
            failed: Whether not even that.
        """
        with self._lock:
            self._until = time.monotonic() + (0.0 if failed else _LAST_ROWS)
            self._closing.set()
            listener, address = self._listener, self._address
        if listener is None or address is None:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.setblocking(False)
            client.connect(address.path)  # wakes the thread that waits for the next child
        self._await(self._threads[:1])  # it accepts children: after it no further thread begins
        self._await(self._threads[1:])
        listener.close()
        for connection in self._connections.copy():
            self._shut_down_held(connection)  # its thread closes it

    def _await(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join(max(0.0, self._until - time.monotonic()))

    def _begin(self, what: Callable[[Any], None], argument: Any) -> None:
        thread = threading.Thread(target=what, args=(argument,), name="dist_wandb-relay", daemon=True)
        thread.start()
        self._threads = [*(held for held in self._threads if held.is_alive()), thread]

    def _accept(self, listener: Listener, key: bytes) -> None:
        while True:
            is_over = self._closing.is_set()  # those that connected before are accepted
            if is_over and time.monotonic() > self._until:
                return
            if not self._has_room():
                time.sleep(_PAUSE / 4)
            elif listener.has_pending(0.0 if is_over else _PAUSE):
                self._open_to(listener, key)
            elif is_over:
                return

    def _has_room(self) -> bool:
        """Whether one more may be accepted; those are shut down that take too long to authenticate."""
        now = time.monotonic()
        with self._lock:
            waiting = sorted(self._unauthenticated.items(), key=lambda item: item[1])
        crowd = len(waiting) >= _MOST_UNAUTHENTICATED
        for number, (connection, since) in enumerate(waiting):
            if now - since > (_CERTAIN if crowd and not number else local_sockets.HANDSHAKE):
                self._shut_down_held(connection)
        return not crowd

    def _open_to(self, listener: Listener, key: bytes) -> None:
        try:
            connection = listener.accept()
        except OSError:  # too many open files
            time.sleep(_PAUSE)
            return
        if connection is None:
            return
        with self._lock:
            self._connections.add(connection)
            self._unauthenticated[connection] = time.monotonic()
        try:
            self._begin(lambda connection: self._serve(connection, key), connection)
        except RuntimeError:  # no more threads: the child warns
            self._part_with(connection)

    def _shut_down_held(self, connection: Connection) -> None:
        with self._lock:  # what is closed meanwhile may be somebody else's socket by then
            if connection in self._connections:
                shut_down(connection)

    def _serve(self, connection: Connection, key: bytes) -> None:
        try:
            authenticate(connection, key, local_sockets.HANDSHAKE)
            with self._lock:
                self._unauthenticated.pop(connection, None)
            while time.monotonic() < self._until:
                if connection.poll(0.0 if self._closing.is_set() else _PAUSE):
                    self._take(connection)
                elif self._closing.is_set():
                    break
        except (EOFError, OSError, multiprocessing.AuthenticationError) as error:
            _log.debug("dist_wandb: a process that connected is gone: %r", error)
        finally:
            self._part_with(connection)

    def _part_with(self, connection: Connection) -> None:
        with self._lock:
            self._unauthenticated.pop(connection, None)
            shut_down(connection)
            self._connections.discard(connection)
            connection.close()

    def _take(self, connection: Connection) -> None:
        message = connection.recv_bytes()
        try:
            # Its sender has shown that it knows the key, so it is a child of this very process.
            kind, arguments = pickle.loads(message)  # noqa: S301  # raises what the objects' own code raises
            if kind == LOG:
                self._deliver(*arguments)
        except Exception:  # noqa: BLE001  # the training must not suffer from it
            _log.exception("dist_wandb: a row that another process handed over is lost")
        else:
            if kind == FLUSH:
                connection.send_bytes(pickle.dumps(arguments))


def _listener() -> Listener:
    """A socket in the directory for temporary files, or in another one if its path is too long for a socket's."""
    directories = (Path(tempfile.gettempdir()), runtime_directory(), Path("/tmp"))  # noqa: S108  # in a private one
    return Listener(filter(None, directories), _BACKLOG)
