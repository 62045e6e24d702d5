"""Sockets between processes of one user on one host: in a private directory, for who knows a key, with time limits.

Other users of the host do not reach the directory; where the system tells who is at the other end, they are turned away
before a byte is read, too. What multiprocessing has for this proves keys by HMAC-MD5 before Python 3.12, which hosts in
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
from multiprocessing.connection import Connection, wait
from pathlib import Path

_LONGEST = 100  # bytes of a socket's path: Linux takes 107, macOS 103
_NONCE = 32  # bytes; of a proof as many
_BETWEEN_KNOCKS = 0.01  # seconds
_CHILD, _SESSION = b"dist_wandb child", b"dist_wandb session"  # so that no proof can be handed back


class Listener:
    """A socket in a directory of its own, which nobody but this user may enter.

    Args:
        directories: Below which it may lie, the best first.
        backlog: How many may knock at the same time.

    Raises:
        OSError: It can be made in none of them.
    """

    def __init__(self, directories: Iterable[Path], backlog: int) -> None:
        error: OSError = FileNotFoundError("no directory has a name that is short enough for a socket")
        for directory in directories:
            try:
                self._listen(directory, backlog)
            except OSError as told:  # noqa: PERF203  # three directories at most
                error = told
            else:
                return
        raise error

    def _listen(self, directory: Path, backlog: int) -> None:
        private = tempfile.mkdtemp(prefix="dist-wandb-", dir=directory)  # mode 0700
        remove = weakref.finalize(self, _remove, private, os.getpid())
        self.place = str(Path(private, "socket"))
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            if len(os.fsencode(self.place)) > _LONGEST:
                raise FileNotFoundError(f"{directory} has too long a name for a socket")
            self._socket.bind(self.place)
            self._socket.listen(backlog)
            self._socket.setblocking(False)
        except OSError:
            self._socket.close()
            remove()
            raise
        self._remove = remove

    def is_knocked(self, timeout: float) -> bool:
        """Whether somebody knocks, within some seconds; not once it is closed."""
        try:
            return bool(wait([self._socket], timeout))
        except (OSError, ValueError):  # another thread has closed it
            return False

    def accept(self) -> Connection | None:
        """Who knocks; `None` for nobody, and for processes of other users, which are turned away.

        Raises:
            OSError: It cannot be let in.
        """
        try:
            taken, _ = self._socket.accept()
        except BlockingIOError:
            return None
        if not _is_own(taken):
            taken.close()
            return None
        taken.setblocking(True)
        return Connection(taken.detach())

    def close(self) -> None:
        """Listen no longer. In the process that made it the directory goes as well."""
        self._socket.close()
        self._remove()


def connect(place: str, key: bytes, seconds: float, *, stuck: float) -> Connection:
    """Knock, and prove to each other that both know the key.

    Args:
        place: Of the socket.
        key: Which both know.
        seconds: How long it may take until who listens opens, and for each answer.
        stuck: How many seconds later writing may wait while nothing is taken; then it raises `BlockingIOError`.

    Raises:
        OSError: Nobody opened in time, or it is another user who listens.
        AuthenticationError: Who listens does not know the key.
    """
    deadline = time.monotonic() + seconds
    with socket.socket(socket.AF_UNIX) as knocking:
        knocking.setblocking(False)
        while True:
            try:
                knocking.connect(place)
                break
            except BlockingIOError:  # too many knock already
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the session's process lets nobody in for {seconds:g} s") from None
                time.sleep(_BETWEEN_KNOCKS)
        knocking.setblocking(True)
        if not _is_own(knocking):
            raise PermissionError("another user listens in its place")
        connection = Connection(knocking.detach())
    try:
        _limit(connection, receiving=seconds, sending=seconds)
        asked, own = connection.recv_bytes(_NONCE), secrets.token_bytes(_NONCE)
        connection.send_bytes(own + _proof(key, _CHILD, asked + own))
        _check(connection.recv_bytes(_NONCE), _proof(key, _SESSION, asked + own))
        _limit(connection, receiving=0.0, sending=stuck)
    except BlockingIOError:
        connection.close()
        raise TimeoutError(f"the session's process says nothing for {seconds:g} s") from None
    except BaseException:
        connection.close()
        raise
    return connection


def let_in(connection: Connection, key: bytes, seconds: float) -> None:
    """Have who knocked prove that it knows the key, and prove it as well.

    Args:
        connection: To who knocked.
        key: Which both know.
        seconds: How long an answer may take, and how long writing may wait later.

    Raises:
        OSError: It said something else, or nothing.
        EOFError: It is gone.
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


def hang_up(connection: Connection) -> None:
    """Let who is at the other end know at once that nobody listens, also where a fork still holds this end."""
    with suppress(OSError), socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.shutdown(socket.SHUT_RDWR)


def _proof(key: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.new(key, who + nonces, "sha256").digest()


def _check(given: bytes, proof: bytes) -> None:
    if not hmac.compare_digest(given, proof):
        raise multiprocessing.AuthenticationError("it does not know the key")


def _is_own(connected: socket.socket) -> bool:
    """Whether a process of this user is at the other end; macOS does not tell, and has the directory alone."""
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
