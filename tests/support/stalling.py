"""A job's store on a network that can be cut off: nothing is answered, and no connection is closed."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import torch.distributed as dist


class Wire:
    """A proxy between a store and its clients.

    Args:
        port: Port of the store on 127.0.0.1.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._open = threading.Event()
        self._open.set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listening]
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def client(self) -> dist.TCPStore:
        """Return a client of the store that connects through this proxy."""
        return dist.TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)

    def cut(self) -> None:
        """Stop forwarding."""
        self._open.clear()

    def mend(self) -> None:
        """Resume forwarding, including data that arrived meanwhile."""
        self._open.set()

    def close(self) -> None:
        """Close all connections: clients that wait for an answer get an error."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._open.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listening.accept()[0]
                host = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, host]
                for source, sink in ((client, host), (host, client)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._open.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def wired_store() -> Iterator[tuple[dist.TCPStore, Wire]]:
    """Provide a store in this process, and a proxy to it."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    wire = Wire(host.port)
    try:
        yield host, wire
    finally:
        wire.close()
