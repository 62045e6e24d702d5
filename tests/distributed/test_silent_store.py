"""The network to the job's store fails while ranks exchange numbers. Ranks are threads, with real gloo groups."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from counting import CountedStore, Counts
from limits import Limit
from units import QUICK, SOON, Ranks, Stall, eventually, making
from wire import Wire, wired_store

from dist_wandb.errors import RendezvousError
from dist_wandb.exchange.membership import Membership
from dist_wandb.exchange.membership.generations import Generation
from dist_wandb.exchange.transport import BrokenError, GroupLayout, gloo
from dist_wandb.exchange.transport.gloo import GlooGroup
from dist_wandb.job import connection, leftovers
from dist_wandb.job.connection import StoreConnection, is_hung_up
from dist_wandb.job.job_store import JobStore, SharedList
from dist_wandb.job.topology import Topology
from dist_wandb.settings.options import DEFAULT_LIMITS, Limits
from dist_wandb.settings.plan import Unit

SHORT = replace(QUICK, join_timeout=2.0, peer_timeout=1.0, finish_timeout=1.0)


@pytest.fixture
def wire() -> Iterator[Wire]:
    with wired_store() as (_, made):
        yield made


@pytest.fixture
def limits() -> Limits:
    return SHORT


@pytest.fixture
def unit(wire: Wire, limits: Limits) -> Iterator[Ranks]:
    """Two ranks that reach their store through the `Wire`, and have written a row."""
    with making() as make:
        made = make(2, store=wire.client(), limits=limits, spread=["loss"], first=10)
        log(made, 0)
        eventually(lambda: made.last("loss") == {0: 0.5})
        yield made


def log(unit: Ranks, step: int) -> None:
    unit.log_all(lambda rank: {"loss": float(rank + step)}, step, ranks=range(2))


def job_store(store: dist.Store, timeout: float = 0.3) -> JobStore:
    return JobStore(store, "test/1", Topology(0, 0, 0, 2, 2, 1), timeout)


@pytest.mark.parametrize("limits", [replace(SHORT, peer_timeout=40.0)])
def test_connected_ranks_continue_without_the_store(unit: Ranks, wire: Wire) -> None:
    wire.cut()
    stall = Stall()
    unit.log(1, {"loss": stall.number()}, 1)
    unit.log(0, {"loss": 1.0}, 1)
    time.sleep(2.0)  # rank 0 waits, and polls the unresponsive store for whether the exchange was broken off
    stall.over.set()
    began = time.monotonic()
    eventually(lambda: unit.last("loss").get(1) == 0.5)
    log(unit, 2)
    eventually(lambda: unit.last("loss").get(2) == 2.5)
    assert time.monotonic() - began < SOON
    assert unit.last("loss/argmax_rank") == {0: 11, 1: 10, 2: 11}, "it needs no store"
    assert not unit.flagged()


def test_an_isolated_primary_writes_its_own_rows_in_time(unit: Ranks, wire: Wire) -> None:
    wire.cut()
    stall = Stall()
    unit.log(1, {"loss": stall.number()}, 1)
    unit.log(0, {"loss": 7.0}, 1)  # the exchange breaks, and the store does not answer
    began = time.monotonic()
    assert not unit.exchanges[0].close(SHORT.peer_timeout + 0.5)
    assert time.monotonic() - began < SOON
    stall.over.set()
    assert (unit.last("loss")[1], unit.flagged()[1]) == (7.0, 1)


def test_forming_a_group_times_out(wire: Wire, limit: Limit) -> None:
    limit(gloo, FORMING_MORE=0.2)
    store = wire.client()
    wire.cut()
    began = time.monotonic()
    with pytest.raises(BrokenError, match="not answered"):
        GlooGroup(store, 0, 2, 0.3, lambda: False)
    assert time.monotonic() - began < SOON


def test_without_an_answer_a_hint_is_none_and_a_fact_an_error(wire: Wire, limit: Limit) -> None:
    limit(connection, _QUICK_TIMEOUT=0.3, _LEAST_PATIENCE=0.3)
    asking = job_store(wire.client())
    asking.publish("key", 1)
    assert (asking.try_get("key", soon=True), asking.try_get("no key", soon=True)) == (1, None)
    wire.cut()
    assert asking.try_get("key", soon=True) is None
    with pytest.raises(RendezvousError, match=r"Rank 0 cannot reach the store .* or the network is cut off"):
        asking.try_get("key")
    wire.mend()
    eventually(lambda: asking.try_get("key", soon=True) == 1)


def test_a_lost_store_raises_for_hints_too_and_is_queried_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with wired_store() as (_, wire):
        asking = job_store(wire.client())
        asking.publish("key", 1)
    for _ in range(3):
        with pytest.raises(RendezvousError):
            asking.try_get("key", soon=True)
    traces = [line for line in capfd.readouterr().err.splitlines() if "TCPStore.cpp" in line and "SocketImpl" in line]
    assert sum(f":{wire.port})" in line for line in traces) <= 1, traces  # torch writes a trace each time


def test_a_store_whose_host_has_ended_is_not_used_again(capfd: pytest.CaptureFixture[str]) -> None:
    """torch would write a stack trace. This is detected if the rank has its own connection, which can be inspected."""
    with wired_store() as (_, wire):
        asking = job_store(wire.client())
        part = asking.beside("part")
        part.publish("key", 1)
        assert part.try_get("key") == 1
    eventually(lambda: part.connection.descriptor is not None and is_hung_up(part.connection.descriptor))
    for each in (part, asking, leftovers.place_of(asking)[0], asking.below("other")):
        with pytest.raises(RendezvousError, match="may have ended"):
            each.try_get("key")
    assert f":{wire.port})" not in capfd.readouterr().err


def test_no_second_connection_to_a_lost_store_is_attempted() -> None:
    with wired_store() as (_, wire):
        client = wire.client()
        asking = job_store(client, 30.0)
        asking.publish("key", 1)
    with contextlib.suppress(RuntimeError):
        client.set("key", "2")  # usually written into the connection before its end is detected
    began = time.monotonic()
    with pytest.raises(RendezvousError, match="may have ended"):
        asking.beside("part")
    assert time.monotonic() - began < SOON


# --- the addresses by which ranks reach each other --------------------------------------------------------------------


def test_a_rank_knows_its_own_address_towards_the_store(wire: Wire) -> None:
    assert job_store(wire.client()).connection.own_address() == "127.0.0.1"
    assert job_store(dist.HashStore()).connection.own_address() is None


@pytest.mark.parametrize(("reported", "wanted"), [("10.0.0.2", "10.0.0.1"), ("10.0.0.1", None)])
def test_members_publish_their_addresses_when_they_meet(
    monkeypatch: pytest.MonkeyPatch, reported: str, wanted: str | None
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(StoreConnection, "own_address", lambda _: "10.0.0.1")
    store, generation, group = dist.HashStore(), Generation(0, (0, 1)), GroupLayout(0, (0, 1), 0)
    assert not SharedList(job_store(store), "met/0/0/0").append_one_of([1, reported], 2)
    own = Membership(Unit("", 0, 2, 0, range(2)), DEFAULT_LIMITS, job_store(store), lambda: False).forming
    addresses = own.meet(generation, group, SOON)
    assert own.address(addresses) == wanted
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "net0")  # set by the user
    assert own.address(addresses) is None


@pytest.mark.parametrize(("has_options", "is_used"), [(True, True), (False, False)])
def test_a_group_is_formed_at_the_given_address(
    monkeypatch: pytest.MonkeyPatch, has_options: bool, is_used: bool
) -> None:
    """Or, if a later torch has renamed what that takes, at the one that gloo chooses."""
    if not has_options:
        monkeypatch.delattr(dist.ProcessGroupGloo, "_Options")
    published: list[bytes] = []
    store = dist.HashStore()

    def note(_key: str, value: Any) -> None:
        published.extend([bytes(value)] if isinstance(value, (bytes, bytearray, list)) else [])

    def form(rank: int) -> list[float]:
        group = GlooGroup(CountedStore(store, rank, Counts(), note), rank, 2, SOON, bool, "127.0.0.2")
        return group.reduce([1.0], [])[0]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(form, range(2))) == [[2.0]] * 2
    assert published
    assert any(bytes([127, 0, 0, 2]) in value for value in published) is is_used
