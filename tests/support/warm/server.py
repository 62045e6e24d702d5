"""The process that imports the large libraries, and forks a child for each stand-in."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import importlib
import inspect
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import types
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from . import ALIVE, fresh
from .request import ColdError, Known, Request, namespaces_of, open_namespaces, read_request, rights_of

_LIBRARIES = (
    *("torch", "torch.distributed.run", "torch.multiprocessing", "wandb", "torchmetrics"),
    *("accelerate", "accelerate.commands.launch", "lightning", "lightning.pytorch"),
    *("wandb.sdk.launch", "wandb.sdk.launch.inputs.internal", "requests"),  # wandb.init imports them
    *("torch.distributed.checkpoint", "sklearn.datasets", "PIL.Image", "psutil"),
    *("pytest", "http.server"),  # of tests whose functions are called
)
_OF_ENVIRON = {os.getenv.__code__.co_filename, Mapping.get.__code__.co_filename}
_MESSAGE = 65_536
_MOST_DESCRIPTORS = 253


def main() -> None:
    """Serve until the test run ends; in a forked child, run its program instead."""
    listening, home = socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2])
    os.environ.pop("_", None)
    sys.path[:] = [entry for entry in sys.path if entry not in ("", str(Path(__file__).parents[1]))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "warm"]:
        del sys.modules[name]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    request = Server(listening, home, _preload()).serve()
    if request is None:
        shutil.rmtree(home, ignore_errors=True)
        os._exit(0)  # skip the exit hooks of the libraries
    fresh.run(request)


# --- the libraries ----------------------------------------------------------------------------------------------------


def _preload() -> Known:
    environment = dict(os.environ)
    fresh.shorten_ends()
    with _reads() as read:
        for name in _LIBRARIES:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    _put_off_media_directory()
    inspect.stack()  # from now on it finds the modules of frames at once: see `fresh.note_own_files`
    for ending in weakref.finalize._registry.copy():  # type: ignore[attr-defined]
        ending.atexit = False  # registrations with torch, which end with the process
    fresh.note_libraries()
    threads = threading.active_count(), len(list(Path("/proc/self/task").iterdir()))
    assert threads == (1, 1), f"a process with threads cannot be forked: {threads}"
    gc.collect()
    gc.freeze()
    made = {name: value for name, value in os.environ.items() if environment.get(name) != value}
    modules = {name.partition(".")[0] for name in sys.modules} - {"__main__"}  # not imported by this name
    modules |= {"sitecustomize", "usercustomize"}
    own = os.getpid()
    return Known(environment, frozenset(read), made, frozenset(modules), rights_of(own), namespaces_of(own))


@contextlib.contextmanager
def _reads() -> Iterator[set[str]]:
    """Yield the names of environment variables that are looked up, without lookups by iteration over all of them."""
    names: set[str] = set()
    by_line: dict[tuple[str, int], set[str]] = defaultdict(set)
    kind: Any = type(os.environ)

    class Recording(kind):  # type: ignore[misc]
        def __getitem__(self, name: str) -> str:
            by_line[_asking_line()].add(name)
            return str(super().__getitem__(name))

        def __contains__(self, name: object) -> bool:
            by_line[_asking_line()].add(str(name))
            return self.encodekey(name) in self._data

    everything = set(os.environ)
    os.environ.__class__ = Recording
    try:
        yield names
    finally:
        os.environ.__class__ = kind
        names.update(*(found for found in by_line.values() if not everything <= found))


def _asking_line() -> tuple[str, int]:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in _OF_ENVIRON:
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)


class _LaterDirectory(tempfile.TemporaryDirectory):  # type: ignore[type-arg]
    """A temporary directory that each process creates for itself, on the first access to its name."""

    def __getattr__(self, name: str) -> Any:
        if name != "name":
            raise AttributeError(name)
        Path(tempfile.gettempdir()).mkdir(parents=True, exist_ok=True)  # a random job may have removed it meanwhile
        super().__init__("wandb-media")
        return self.__dict__[name]


def _put_off_media_directory() -> None:
    """Remove the directory that wandb creates on import: each child needs its own."""
    made = getattr(sys.modules.get("wandb.sdk.data_types._private"), "MEDIA_TMP", None)
    if isinstance(made, tempfile.TemporaryDirectory):
        atexit.unregister(made.cleanup)  # a finalizer does the same
        made.cleanup()
        made.__dict__.clear()
        made.__class__ = _LaterDirectory


# --- the children -----------------------------------------------------------------------------------------------------


@dataclass
class _Client:
    connection: socket.socket
    child: int = 0
    early: list[int] = field(default_factory=list)


class Server:
    """Forks a child for each stand-in that connects."""

    def __init__(self, listening: socket.socket, home: Path, known: Known) -> None:
        self._listening = listening
        self._known = known
        self._base_path = list(sys.path)
        self._selector = selectors.DefaultSelector()
        self._alive = os.open(home / ALIVE, os.O_RDONLY | os.O_NONBLOCK)
        self._clients: dict[int, _Client] = {}  # by the process descriptor (pidfd) of the child
        self._open: list[_Client] = []
        self._forked: Request | None = None

    def serve(self) -> Request | None:
        """Serve until the test run ends, and return `None`; in a forked child, return the request to run."""
        self._selector.register(self._listening, selectors.EVENT_READ, self._accept)
        self._selector.register(self._alive, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._alive:
                    self._kill_all()
                    return None
                key.data()
                if self._forked is not None:
                    return self._forked

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        client = _Client(connection)
        self._open.append(client)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._receive, client))

    def _receive(self, client: _Client) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(client.connection, _MESSAGE, _MOST_DESCRIPTORS)
        except OSError:
            message, descriptors = b"", []
        if message.startswith(b"start"):
            self._start(client, [int(number) for number in message.split()[1:]], descriptors)
            for descriptor in descriptors if self._forked is None else ():
                os.close(descriptor)
        elif message and not client.child:
            client.early.append(int(message))
        elif message:
            self._signal(client, int(message))
        else:  # the stand-in was killed
            self._signal(client, signal.SIGKILL)
            self._disconnect(client)

    def _start(self, client: _Client, numbers: list[int], descriptors: list[int]) -> None:
        begin = time.monotonic()
        pid, _, _ = _peer(client.connection)
        namespaces: dict[str, int] = {}
        try:
            request = read_request(pid, numbers, self._known)
            terminals = [number for number, one in zip(numbers, descriptors, strict=True) if os.isatty(one)]
            if 0 in terminals or (terminals and not request.unbuffered):  # as Open MPI's, without buffers of lines
                raise ColdError("a terminal")  # noqa: TRY301
            namespaces = open_namespaces(pid, self._known)
        except (ColdError, OSError) as error:
            _log(f"cold {pid}: {error}")
            self._send(client, b"cold")
            return
        self._fork(client, dataclasses.replace(request, namespaces=namespaces), descriptors)
        for descriptor in namespaces.values() if self._forked is None else ():
            os.close(descriptor)
        if self._forked is None:
            took = time.monotonic() - begin
            _log(f"warm {pid} -> {client.child} in {took:.3f} s: {request.kind} {request.target[:80]!r}")

    def _fork(self, client: _Client, request: Request, descriptors: list[int]) -> None:
        server = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        client.child = os.fork()
        if client.child == 0:
            fresh.die_with_parent(server)
            self._close_sockets()
            fresh.become(request, descriptors, self._base_path)
            self._forked = request
            return
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        descriptor = os.pidfd_open(client.child)
        self._clients[descriptor] = client
        self._selector.register(descriptor, selectors.EVENT_READ, partial(self._reap, descriptor))
        for number in client.early:
            self._signal(client, number)
        self._send(client, b"forked")

    def _close_sockets(self) -> None:
        """In a child: close the server's sockets, so that no object closes a descriptor of this number later."""
        self._selector.close()
        self._listening.close()
        for client in self._open:
            client.connection.close()

    def _reap(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        client = self._clients.pop(descriptor)
        _, status, used = os.wait4(client.child, 0)
        _log(f"ended {client.child}: {used.ru_utime:.2f} s + {used.ru_stime:.2f} s of processor time")
        client.child = 0
        code = os.waitstatus_to_exitcode(status)
        self._send(client, b"exit %d" % code if code >= 0 else b"signal %d" % -code)
        self._disconnect(client)

    def _signal(self, client: _Client, number: int) -> None:
        if client.child:
            os.kill(client.child, number)

    def _send(self, client: _Client, message: bytes) -> None:
        with contextlib.suppress(OSError):  # the stand-in was killed
            client.connection.send(message)

    def _disconnect(self, client: _Client) -> None:
        if client in self._open:
            self._open.remove(client)
            self._selector.unregister(client.connection)
            client.connection.close()

    def _kill_all(self) -> None:
        for client in self._clients.values():
            self._signal(client, signal.SIGKILL)
        for client in self._clients.values():
            os.waitpid(client.child, 0)


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, user, group = (int.from_bytes(data[at : at + 4], sys.byteorder) for at in (0, 4, 8))
    return pid, user, group


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")
