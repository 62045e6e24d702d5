"""The choice of an address at which other hosts can reach this rank.

By default, gloo uses the address that the host's own name resolves to. On many hosts that is a loopback address, or
none. Training with NCCL works there, so the exchange has to work as well. Other hosts can reach the address from which
this host reaches the job's store.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections.abc import Collection

_ANY_PORT = 9  # nothing is sent to it


def address_towards(host: str, port: int = _ANY_PORT) -> str | None:
    """Return the address from which this host reaches another one; `None` if there is no route. Sends nothing."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(place)  # only selects a route
                return str(probe.getsockname()[0])
        except OSError:  # noqa: PERF203  # there are only a few
            continue
    return None


def address_among(own: str | None, published: Collection[str | None]) -> str | None:
    """Return the address at which other ranks can reach this rank; `None` if gloo's own choice is sufficient.

    `own` is the address from which it reaches the job's store, and `published` has those of all ranks; `None` is
    unknown. If rank 0 hosts the store and reaches it from 127.0.1.1, and rank 1 has published 10.0.0.2, the result on
    rank 0 is its address towards 10.0.0.2, such as 10.0.0.1.
    """
    if own is None or len(set(published)) == 1:
        return None
    if not _is_loopback(own):
        return own
    others = sorted(address for address in published if address is not None and not _is_loopback(address))
    return address_towards(others[0]) if others else None


def connections_to(port: int) -> set[int]:
    """Return file descriptors of this process's connections to a port of any host; none if they cannot be listed."""
    try:
        descriptors = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208  # names are numbers, not paths
    except OSError:
        return set()
    return {descriptor for descriptor in descriptors if _peer_port(descriptor) == port}


def is_hung_up(descriptor: int) -> bool:
    """Return whether the other side is known to have closed a connection. Does not consume received data."""
    connection = _borrowed(descriptor)
    if connection is None:
        return False
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.detach()


def _peer_port(descriptor: int) -> int | None:
    connection = _borrowed(descriptor)
    if connection is None:
        return None
    try:
        name = connection.getpeername()
        return name[1] if connection.family in (socket.AF_INET, socket.AF_INET6) else None
    except OSError:
        return None
    finally:
        connection.detach()


def _borrowed(descriptor: int) -> socket.socket | None:
    """Return a socket object for a descriptor, to be detached after use; `None` if it is not a socket."""
    try:
        return socket.socket(fileno=descriptor) if stat.S_ISSOCK(os.fstat(descriptor).st_mode) else None
    except OSError:
        return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
