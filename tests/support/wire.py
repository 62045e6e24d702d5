"""A relay on loopback that records all traffic, and can be cut off: then no connection is closed, and none answers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import torch.distributed as dist


class Wire:
    """A port of this host, `port`, that forwards to the port `target`."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._open = threading.Event()
        self._open.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = [self._listener]
        self._traffic: list[bytearray] = []  # one for each direction of each connection, so that texts are not split
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def traffic(self) -> bytes:
        """The recorded traffic, one direction of one connection after the other."""
        return b"\n".join(map(bytes, self._traffic))

    def client(self) -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)

    def cut(self) -> None:
        """Stop forwarding."""
        self._open.clear()

    def mend(self) -> None:
        self._open.set()

    def close(self) -> None:
        """Close all connections: clients that wait for an answer get an error."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._open.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._ends += [near, far]
                for source, sink in ((near, far), (far, near)):
                    self._traffic.append(bytearray())
                    threading.Thread(target=self._forward, args=(source, sink, self._traffic[-1]), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, record: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                record += data
                self._open.wait()
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def tapped(target: int) -> Iterator[Wire]:
    """Open a `Wire` to a port for the duration of the block."""
    wire = Wire(target)
    try:
        yield wire
    finally:
        wire.close()


@contextlib.contextmanager
def wired_store() -> Iterator[tuple[dist.TCPStore, Wire]]:
    """Provide a store in this process, and a `Wire` to it."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tapped(host.port) as wire:
        yield host, wire
