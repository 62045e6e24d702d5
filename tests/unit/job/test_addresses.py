"""The address that a rank publishes."""

from __future__ import annotations

import socket

import pytest

from dist_wandb.job import connection
from dist_wandb.job.connection import address_among, address_towards


def test_the_address_towards_this_host_is_loopback() -> None:
    assert address_towards("127.0.0.1", 29500) == "127.0.0.1"
    assert address_towards("localhost") in {"127.0.0.1", "::1"}


def test_an_unreachable_host_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", connect)
    assert address_towards("127.0.0.1") is None

    def find(*_: object, **__: object) -> list[object]:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", find)
    assert address_towards("no-such-host") is None


def test_the_address_that_reaches_the_store_is_used_on_several_hosts() -> None:
    assert address_among("10.0.0.2", ["127.0.1.1", "10.0.0.2"]) == "10.0.0.2"
    assert address_among("fd00::2", ["fd00::1", "fd00::2"]) == "fd00::2"


def test_the_host_of_the_store_uses_its_address_towards_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """In many hosts files, the host's own name, by which it reaches the store, is 127.0.1.1."""
    monkeypatch.setattr(connection, "address_towards", {"10.0.0.2": "10.0.0.1"}.get)
    assert address_among("127.0.1.1", ["127.0.1.1", "10.0.0.3", "10.0.0.2", None]) == "10.0.0.1"
