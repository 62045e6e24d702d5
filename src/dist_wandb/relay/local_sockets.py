"""Sockets between processes of one user on one host: in a private directory, authenticated by a key, with time limits.

Other users of the host do not reach the directory; where the system reports the peer's user, they are also rejected
before a byte is read. What multiprocessing has for this proves keys by HMAC-MD5 before Python 3.12, which hosts in
FIPS mode refuse, and waits without a limit.
"""

from __future__ import annotations

import hmac
import multiprocessing
import os
import secrets
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

HANDSHAKE = 5.0  # seconds that a child gets to authenticate, and waits until it is accepted

_LONGEST = 100  # bytes of a socket's path: Linux takes 107, macOS 103
_NONCE = 32  # bytes; of a proof as many
_RETRY = 0.01  # seconds between two attempts to connect
_CHILD, _SESSION = b"dist_wandb child", b"dist_wandb session"  # so that no proof can be handed back


@dataclass(frozen=True)
class Address:
    """Where a session's process accepts its children.

    Args:
        path: Of the socket.
        key: Known to this job's processes alone.
    """

    path: str
    key: bytes = field(repr=False)


class Listener:
    """A socket in a directory of its own, which only this user may enter.

    Args:
        directories: Where its directory may lie, the best first.
        backlog: How many connections may wait to be accepted.

    Raises:
        OSError: It can be made in none of them.
    """

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
        """Whether a connection comes within some seconds; not once it is closed."""
        try:
            return bool(wait([self._socket], timeout))
        except (OSError, ValueError):  # another thread has closed it
            return False

    def accept(self) -> Connection | None:
        """The next connection; `None` if there is none, and for processes of other users, which are rejected.

        Raises:
            OSError: It cannot be accepted.
        """
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
        """Stop listening. In the process that made it, the directory is deleted too."""
        self._socket.close()
        self._remove()


def connect(address: Address, seconds: float, *, stuck: float) -> Connection:
    """Connect, and authenticate both sides by the key.

    Args:
        address: Of the session's process.
        seconds: How long the listener may take to accept, and for each answer.
        stuck: How many seconds later writing may wait while nothing is read; then it raises `BlockingIOError`.

    Raises:
        OSError: Not accepted in time, or another user listens.
        AuthenticationError: The listener does not know the key.
    """
    deadline = time.monotonic() + seconds
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        while True:
            try:
                client.connect(address.path)
                break
            except BlockingIOError:  # too many connections wait already
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the session's process accepts no connection for {seconds:g} s") from None
                time.sleep(_RETRY)
        client.setblocking(True)
        if not _is_own(client):
            raise PermissionError("another user listens in its place")
        connection = Connection(client.detach())
    try:
        _limit(connection, receiving=seconds, sending=seconds)
        asked, own = connection.recv_bytes(_NONCE), secrets.token_bytes(_NONCE)
        connection.send_bytes(own + _proof(address.key, _CHILD, asked + own))
        _check(connection.recv_bytes(_NONCE), _proof(address.key, _SESSION, asked + own))
        _limit(connection, receiving=0.0, sending=stuck)
    except BlockingIOError:
        connection.close()
        raise TimeoutError(f"the session's process does not answer for {seconds:g} s") from None
    except BaseException:
        connection.close()
        raise
    return connection


def authenticate(connection: Connection, key: bytes, seconds: float) -> None:
    """Authenticate an accepted connection, and this process to it.

    Args:
        connection: The connection.
        key: Known to both sides.
        seconds: How long an answer may take, and how long writing may wait later.

    Raises:
        OSError: The answer is another one, or missing.
        EOFError: The other process is gone.
        AuthenticationError: It does not know the key.
    """
    _limit(connection, receiving=seconds, sending=seconds)
    own = secrets.token_bytes(_NONCE)
    connection.send_bytes(own)
    answer = connection.recv_bytes(2 * _NONCE)  # raises OSError for more
    nonces = own + answer[:_NONCE]
    _check(answer[_NONCE:], _proof(key, _CHILD, nonces))
    connection.send_bytes(_proof(key, _SESSION, nonces))
    _limit(connection, receiving=0.0, sending=seconds)


def shut_down(connection: Connection) -> None:
    """Shut both directions down: the peer notices at once, also while a fork still holds this end."""
    with suppress(OSError), socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.shutdown(socket.SHUT_RDWR)


def _proof(key: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.new(key, who + nonces, "sha256").digest()


def _check(given: bytes, proof: bytes) -> None:
    if not hmac.compare_digest(given, proof):
        raise multiprocessing.AuthenticationError("it does not know the key")


def _is_own(connected: socket.socket) -> bool:
    """Whether a process of this user is at the other end; macOS does not report it, and has the directory alone."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.geteuid())


def _limit(connection: Connection, *, receiving: float, sending: float) -> None:
    """Limit how long reading and writing wait while nothing moves; 0 for no limit."""
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.setblocking(True)  # a default timeout of the user's would make it another kind
        for option, seconds in ((socket.SO_RCVTIMEO, receiving), (socket.SO_SNDTIMEO, sending)):
            whole, rest = divmod(seconds, 1.0)
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(whole), int(rest * 1e6)))


def _remove(directory: str, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(directory, ignore_errors=True)
