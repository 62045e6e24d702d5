"""What processes log that a rank has started: it goes to the session in the rank's own process, by a local socket."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import pickle
import secrets
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_wandb.notices import Notices
from dist_wandb.payloads.checks import check_row, checked_step
from dist_wandb.payloads.devices import copied_tensor, whole_tensors
from dist_wandb.payloads.scalars import Weight, take_weight
from dist_wandb.relay.local_sockets import Listener, connect, hang_up, let_in
from dist_wandb.runs.directories import runtime_directory
from dist_wandb.runs.null_run import NullRun
from dist_wandb.runs.wandb_media import is_media
from dist_wandb.topology.model import Topology

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger("dist_wandb")

_PAUSE = 0.2  # seconds between two looks whether the session ends
_LAST_ROWS = 2.0  # seconds that a session which ends takes what its children have said already
_HANDSHAKE = 5.0  # seconds that a child gets to show that it knows the key, and waits until it is let in
_BACKLOG = 128  # children that may knock at the same time
_MOST_KNOCKING = 128  # children that may be showing it at the same time, each in a thread of its own
_CERTAIN = 1.0  # seconds that a child has for it, also where so many are
_STUCK = 30.0  # seconds that a child waits while the session's process takes nothing
_AGAIN = 30.0  # seconds after such a failure in which a child does not try again
_FLUSH_PATIENCE = 60.0  # seconds
_LOG, _FLUSH = "log", "flush"
_ENDED = (EOFError, BrokenPipeError, ConnectionResetError, ConnectionRefusedError, FileNotFoundError)


@dataclass(frozen=True)
class Address:
    """Where a session's process takes what its children log.

    Args:
        place: Of the socket.
        key: Known to this job's processes alone.
    """

    place: Any
    key: bytes = field(repr=False)


class Relay:
    """Takes what children of this process log, in threads of their own.

    Args:
        deliver: Called with the arguments of `Session.log`, in the order in which each child said them.
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
        self._knocking: dict[Connection, float] = {}  # since when
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
        except (OSError, RuntimeError):  # no socket, or no thread: children say so, if they log
            self._has_failed = True
            if self._listener is not None:
                self._listener.close()
            return
        self._address = Address(self._listener.place, key)

    def let_go(self) -> None:
        """In a fork, hold no socket of this process's: who knocks there would never be let in.

        And who has been let in would not notice the end of this process: a full socket would hold it up for ever.
        """
        if self._listener is not None:
            self._listener.close()
        for connection in self._connections:
            connection.close()

    def close(self, *, failed: bool = False) -> None:
        """Take what children have said until now, and no more.

        Args:
            failed: Whether not even that.
        """
        with self._lock:
            self._until = time.monotonic() + (0.0 if failed else _LAST_ROWS)
            self._closing.set()
            listener, address = self._listener, self._address
        if listener is None or address is None:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX) as knock:
            knock.setblocking(False)
            knock.connect(address.place)  # wakes who waits for the next child
        self._await(self._threads[:1])  # who lets children in: then no further thread begins
        self._await(self._threads[1:])
        listener.close()
        for connection in self._connections.copy():
            self._hang_up_held(connection)  # its thread closes it

    def _await(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join(max(0.0, self._until - time.monotonic()))

    def _begin(self, what: Callable[[Any], None], argument: Any) -> None:
        thread = threading.Thread(target=what, args=(argument,), name="dist_wandb-relay", daemon=True)
        thread.start()
        self._threads = [*(held for held in self._threads if held.is_alive()), thread]

    def _accept(self, listener: Listener, key: bytes) -> None:
        while True:
            is_over = self._closing.is_set()  # who has knocked before that is let in
            if is_over and time.monotonic() > self._until:
                return
            if not self._has_room():
                time.sleep(_PAUSE / 4)
            elif listener.is_knocked(0.0 if is_over else _PAUSE):
                self._open_to(listener, key)
            elif is_over:
                return

    def _has_room(self) -> bool:
        """Whether one more may come, once those are gone that show nothing for too long."""
        now = time.monotonic()
        with self._lock:
            waiting = sorted(self._knocking.items(), key=lambda item: item[1])
        crowd = len(waiting) >= _MOST_KNOCKING
        for number, (connection, since) in enumerate(waiting):
            if now - since > (_CERTAIN if crowd and not number else _HANDSHAKE):
                self._hang_up_held(connection)
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
            self._knocking[connection] = time.monotonic()
        try:
            self._begin(lambda connection: self._serve(connection, key), connection)
        except RuntimeError:  # no more threads: the child says so
            self._part_with(connection)

    def _hang_up_held(self, connection: Connection) -> None:
        with self._lock:  # what is closed meanwhile may be somebody else's socket by then
            if connection in self._connections:
                hang_up(connection)

    def _serve(self, connection: Connection, key: bytes) -> None:
        try:
            let_in(connection, key, _HANDSHAKE)
            with self._lock:
                self._knocking.pop(connection, None)
            while time.monotonic() < self._until:
                if connection.poll(0.0 if self._closing.is_set() else _PAUSE):
                    self._take(connection)
                elif self._closing.is_set():
                    break
        except (EOFError, OSError, multiprocessing.AuthenticationError) as error:
            _log.debug("dist_wandb: a process that knocked is gone: %r", error)
        finally:
            self._part_with(connection)

    def _part_with(self, connection: Connection) -> None:
        with self._lock:
            self._knocking.pop(connection, None)
            hang_up(connection)
            self._connections.discard(connection)
            connection.close()

    def _take(self, connection: Connection) -> None:
        message = connection.recv_bytes()
        try:
            # Its sender has shown that it knows the key, so it is a child of this very process.
            kind, arguments = pickle.loads(message)  # noqa: S301  # raises what the objects' own code raises
            if kind == _LOG:
                self._deliver(*arguments)
        except Exception:  # noqa: BLE001  # the training must not suffer from it
            _log.exception("dist_wandb: a row that another process handed over is lost")
        else:
            if kind == _FLUSH:
                connection.send_bytes(pickle.dumps(arguments))


class RemoteSession:
    """What a session is in another process, into which it was pickled or forked: what is logged arrives all the same.

    Everything else that a run can do (`summary`, `alert`, `define_metric`) is accepted there and does nothing.

    Rows go to the process that holds the session, in the order of the calls, until that session ends. Text, numbers,
    tensors, arrays and torchmetrics' objects may be logged, but no media of W&B: they lie in files of this process.

    Args:
        address: Of the session's process; `None` if it does not listen.
        topology: Who the rank is that holds the session.
        facts: `id`, `url` and `config` of its run, as they were.
    """

    def __init__(self, address: Address | None, topology: Topology, facts: Mapping[str, Any]) -> None:
        self.topology = topology
        self.id: str | None = facts.get("id")
        self.url: str | None = facts.get("url")
        self.config = RemoteConfig(facts.get("config", {}))
        self._address = address
        self._facts = facts
        self._let_go()
        _remotes.add(self)

    def _let_go(self) -> None:
        """Begin anew: a fork must not share a connection, nor wait for threads that it does not have."""
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._flushes = 0
        self._mute_until = -math.inf  # by the monotonic clock

    @property
    def run(self) -> NullRun:
        """There is no run in this process: something that accepts every use and does nothing."""
        return NullRun(self.id, None, self.url)

    def log(
        self,
        metrics: Mapping[str, Any],
        step: int | None = None,
        weight: Weight = None,
        *,
        commit: bool | None = None,
    ) -> None:
        """Log one row, as `Session.log` does in the session's own process. Waits for tensors on a device.

        Args:
            metrics: Values by name.
            step: Place of the row on the x axis; counted by the session if `None`, over all processes.
            weight: What a mean over ranks is weighted with.
            commit: As in `wandb.Run.log`.

        Raises:
            ConfigurationError: As for `Session.log`.
        """
        rank = self.topology.global_rank
        check_row(metrics, rank)
        if weight is not None:
            take_weight(weight, rank)
            weight = whole_tensors({"weight": weight}, rank)["weight"]
        place = None if step is None else checked_step(step, rank)
        values = _without_media(whole_tensors(metrics, rank), rank)
        if values or not metrics:
            self._send(_LOG, (_on_host(values), place, _on_host(weight), commit))

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the session's process has taken what was logged here.

        Args:
            timeout: How long to wait, in seconds; `None` for 60.

        Returns:
            Whether it has.
        """
        deadline = time.monotonic() + (_FLUSH_PATIENCE if timeout is None else timeout)
        if not self._flushing.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return False
        try:
            self._flushes += 1
            return self._send(_FLUSH, (self._flushes,)) and self._is_answered((self._flushes,), deadline)
        finally:
            self._flushing.release()

    def _is_answered(self, flush: tuple[int], deadline: float) -> bool:
        """Whether this flush is answered in time; answers to earlier ones, that nobody waited for, do not count."""
        connection = self._connection
        with suppress(EOFError, OSError):
            while connection is not None and connection.poll(max(0.0, deadline - time.monotonic())):
                if pickle.loads(connection.recv_bytes()) == flush:  # noqa: S301  # it has shown that it knows the key
                    return True
        return False

    def finish(self, exit_code: int | None = None) -> None:
        """Nothing ends here: the run is the other process's. What was logged here is handed over.

        Args:
            exit_code: Not used.
        """
        del exit_code
        self.flush()

    def _send(self, kind: str, arguments: tuple[Any, ...]) -> bool:
        try:
            message = pickle.dumps((kind, arguments))
            with self._lock:
                if time.monotonic() < self._mute_until:
                    return False
                self._hand_over(message)
        except (OSError, EOFError, multiprocessing.AuthenticationError) as error:
            why = "it has ended" if isinstance(error, _ENDED) else str(error) or type(error).__name__
            _tell_once(self.topology.global_rank, why)
            return False
        except Exception as error:  # noqa: BLE001  # objects have pickling code of their own
            _log.error("dist_wandb: a row could not be handed to another process, and is lost: %s", error)
            return False
        return True

    def _hand_over(self, message: bytes) -> None:
        try:
            self._connect().send_bytes(message)
        except (BlockingIOError, TimeoutError, multiprocessing.AuthenticationError) as error:
            self._mute_until = time.monotonic() + _AGAIN  # `log` is not to wait each time
            if self._connection is not None:  # a part of the message may be on its way
                self._connection.close()
                self._connection = None
                raise TimeoutError(f"the session's process takes nothing for {_STUCK:g} s") from error
            raise

    def _connect(self) -> Connection:
        if self._address is None:
            raise ConnectionError("it was not prepared for other processes, or has ended")
        if self._connection is None:
            self._connection = connect(self._address.place, self._address.key, _HANDSHAKE, stuck=_STUCK)
        return self._connection

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteSession, (self._address, self.topology, self._facts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Hand over what was logged, and let exceptions through."""
        self.finish()

    def __getattr__(self, name: str) -> Any:
        return getattr(NullRun(), name)

    def __repr__(self) -> str:
        return f"<dist_wandb.RemoteSession of rank {self.topology.global_rank} run={self.id!r}>"


_remotes: weakref.WeakSet[RemoteSession] = weakref.WeakSet()


def _after_fork() -> None:
    for remote in list(_remotes):
        remote._let_go()  # noqa: SLF001


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class RemoteConfig(dict[str, Any]):
    """The config of a run as it was, in another process. Names can be read as attributes; changes stay here."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the config has no {name!r}") from None

    def update(  # type: ignore[override]  # as W&B's config
        self, values: Any = (), allow_val_change: bool | None = None, **kwargs: Any
    ) -> None:
        """Change values, here alone.

        Args:
            values: Values by name.
            allow_val_change: As in W&B's config; not needed here.
            **kwargs: Further values.
        """
        del allow_val_change
        super().update(values, **kwargs)


def _listener() -> Listener:
    """A socket in the directory for temporary files, or in another one if its path is too long for a socket's."""
    directories = (Path(tempfile.gettempdir()), runtime_directory(), Path("/tmp"))  # noqa: S108  # in a private one
    return Listener(filter(None, directories), _BACKLOG)


def _without_media(metrics: Mapping[str, Any], rank: int) -> dict[str, Any]:
    media = [name for name, value in metrics.items() if is_media(value)]
    if media:
        _tell_once(rank, f"{', '.join(media)}: what W&B keeps in files of the process that made it")
    return {name: value for name, value in metrics.items() if name not in media}


def _on_host(value: Any) -> Any:
    """Values without what only this process has: graphs, and memory of devices."""
    if isinstance(value, Mapping):
        return {name: _on_host(item) for name, item in value.items()}
    tensor = copied_tensor(value)
    return value if tensor is value else tensor.cpu()


_notices = Notices()


def _tell_once(rank: int, why: str) -> None:
    if _notices.is_first((os.getpid(), why)):
        _log.error(
            "dist_wandb: %s logged for rank %d, whose session is another process's, but that could not be handed "
            "over (%s). Log in the training process instead.",
            multiprocessing.current_process().name,
            rank,
            why,
        )
