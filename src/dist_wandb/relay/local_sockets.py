"""Sockets between processes of one user on one host, in a private directory, with time limits.

Other users of the host cannot enter the directory. On systems that report the peer's user, they are also rejected
before a byte is read. A child sends the session's key first, so that no other process of the user is taken for one.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import tempfile
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

HANDSHAKE = 5.0  # seconds that a child waits to be accepted, and that the session waits for a part of its key

_LONGEST = 100  # bytes of a socket's path: Linux allows 107, macOS 103
_RETRY = 0.01  # seconds between two attempts to connect


@dataclass(frozen=True)
class Address:
    """The address at which a session's process accepts its children."""

    path: str  # of the socket
    key: bytes = field(repr=False)  # secret shared by this job's processes only


class Listener:
    """A listening socket in a private directory, made in the first of `directories` that can hold it."""

    def __init__(self, directories: Iterable[Path], backlog: int) -> None:
        error: OSError = FileNotFoundError("no directory has a name that is short enough for a socket")
        for directory in directories:
            try:
                self._listen(directory, backlog)
            except OSError as failure:  # noqa: PERF203  # three directories at most
                error = failure
            else:
                return
        raise error

    def _listen(self, directory: Path, backlog: int) -> None:
        private = tempfile.mkdtemp(prefix="dist-wandb-", dir=directory)  # mode 0700
        remove = weakref.finalize(self, _remove, private, os.getpid())
        self.path: str = str(Path(private, "socket"))
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            if len(os.fsencode(self.path)) > _LONGEST:
                raise FileNotFoundError(f"{directory} has too long a name for a socket")
            self._socket.bind(self.path)
            self._socket.listen(backlog)
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
        if not _is_own(accepted):
            accepted.close()
            return None
        accepted.setblocking(True)
        return Connection(accepted.detach())

    def close(self) -> None:
        """Stop listening. In the process that created it, also delete the directory."""
        self._socket.close()
        self._remove()


def connect(address: Address, seconds: float, *, stuck: float) -> Connection:
    """Connect within `seconds`, and send the key; raise `OSError` if that fails, or another user listens.

    Writes raise `BlockingIOError` if nothing is read for `stuck` seconds.
    """
    deadline = time.monotonic() + seconds
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        while True:
            try:
                client.connect(address.path)
                break
            except BlockingIOError:  # too many connections are waiting
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the session's process accepts no connection for {seconds:g} s") from None
                time.sleep(_RETRY)
        client.setblocking(True)
        if not _is_own(client):
            raise PermissionError("another user listens in its place")
        connection = Connection(client.detach())
    try:
        limit(connection, receiving=0.0, sending=stuck)
        connection.send_bytes(address.key)
    except BaseException:
        connection.close()
        raise
    return connection


def shut_down(connection: Connection) -> None:
    """Shut down both directions: the peer notices at once, even while a fork still holds this end."""
    with suppress(OSError), socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.shutdown(socket.SHUT_RDWR)


def _is_own(connected: socket.socket) -> bool:
    """Return whether the peer is a process of this user. macOS does not report it, and relies on the directory."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.geteuid())


def limit(connection: Connection, *, receiving: float, sending: float) -> None:
    """Limit how long reads and writes wait without progress; 0 for no limit."""
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.setblocking(True)  # a default timeout set by the user would make it non-blocking
        for option, seconds in ((socket.SO_RCVTIMEO, receiving), (socket.SO_SNDTIMEO, sending)):
            whole, rest = divmod(seconds, 1.0)
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(whole), int(rest * 1e6)))


def _remove(directory: str, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(directory, ignore_errors=True)
