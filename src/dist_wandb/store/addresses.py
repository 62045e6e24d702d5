"""Which of its addresses a rank gives to the others, where they are on several hosts.

gloo takes the address that the host's own name resolves to. On many hosts that is loopback, or none: a training by NCCL
works there, and so must the exchange. The address from which a host reaches the job's store is one that others reach.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections.abc import Collection

_ANY_PORT = 9  # nothing is sent


def address_towards(host: str, port: int = _ANY_PORT) -> str | None:
    """The address of this host from which it reaches another one; `None` if there is no way.

    Nothing is sent: a datagram socket that is connected only has a route.

    Args:
        host: Name or address of the other one.
        port: A port of it.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
        except OSError:  # noqa: PERF203  # a few at most
            continue
    return None


def address_among(own: str | None, published: Collection[str | None]) -> str | None:
    """The address by which the others are to reach this rank.

    Args:
        own: That from which it reaches the job's store.
        published: Those that all ranks, itself included, have published.

    Returns:
        `None` where gloo's own choice is as good: on one host, or if nothing is known.

    Example:
        Rank 0 keeps the store, and reaches it as 127.0.1.1; rank 1 published 10.0.0.2. On rank 0 this is its address
        towards 10.0.0.2, such as 10.0.0.1; on rank 1 it is 10.0.0.2.
    """
    if own is None or len(set(published)) == 1:
        return None
    if not _is_loopback(own):
        return own
    others = sorted(address for address in published if address is not None and not _is_loopback(address))
    return address_towards(others[0]) if others else None


def connections_to(port: int) -> set[int]:
    """Descriptors of this process's connections to a port, on whatever host; none where they cannot be listed."""
    try:
        held = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208  # of numbers there are no paths
    except OSError:
        return set()
    return {descriptor for descriptor in held if _peer_port(descriptor) == port}


def is_hung_up(descriptor: int) -> bool:
    """Whether the other side has closed a connection, as far as is known here. Reads nothing of what it has sent."""
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
    """Somebody else's socket, to be detached again; `None` if there is none behind the descriptor."""
    try:
        return socket.socket(fileno=descriptor) if stat.S_ISSOCK(os.fstat(descriptor).st_mode) else None
    except OSError:
        return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
