"""Ranks exchange values through a real store. Ranks are threads, because the job's store needs no process group."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from counting import CountedStore, Counts
from fakes import on_ranks
from limits import Limit

from dist_wandb.errors import RendezvousError
from dist_wandb.job import connection, job_identity
from dist_wandb.job.connection import address_among, address_towards
from dist_wandb.job.job_identity import agree_on_base_id, learn_layout
from dist_wandb.job.job_store import JobStore, RankValues, SharedList
from dist_wandb.job.timed_caller import UnansweredError
from dist_wandb.job.topology import Topology

PATIENCE = 30.0  # seconds, if the other ranks arrive
SHORT = 0.05  # seconds, if they do not

pytestmark = pytest.mark.usefixtures("bare_environment")


def rank(number: int, world_size: int = 2) -> Topology:
    return Topology(number, None, None, world_size, None, None)


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def at(store: dist.Store) -> Callable[..., JobStore]:
    """Return a rank's access to the test's store."""

    def make(
        number: int, world_size: int = 2, timeout: float = PATIENCE, namespace: str = "DistWandbLogger/1"
    ) -> JobStore:
        return JobStore(store, namespace, rank(number, world_size), timeout)

    return make


At = Callable[..., JobStore]


# --- publish, fetch, gather -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["text", 7, 0.5, True, None, ["a", 1], {"url": None, "é": ["ü"]}])
def test_published_values_are_fetched_unchanged(at: At, value: Any) -> None:
    at(0).publish("key", value)
    assert at(1).wait_get("key", "rank 0") == value


def test_a_fork_does_not_use_the_connection_of_its_parent(at: At) -> None:
    """Both processes would read answers that are the other's, and hang."""
    here = at(0)
    here.publish("key", 1)
    with patch.object(os, "getpid", return_value=-1), pytest.raises(RendezvousError, match="this process is a fork"):
        here.publish("key", 2)
    assert at(1).try_get("key") == 1


@pytest.mark.parametrize("junk", ["junk", "{", "\x80", "[" * 200_000], ids=["text", "{", "\\x80", "deep"])
def test_malformed_values_are_reported_with_their_key(at: At, store: dist.Store, junk: str) -> None:
    here, keys = at(0, 1), dist.PrefixStore("DistWandbLogger/1", store)
    keys.set("base_id", junk)
    here.count("node/count")
    keys.set("node/1", junk)
    looks: list[Callable[[], Any]] = [
        lambda: here.wait_get("base_id", "rank 0"),
        lambda: here.try_get("base_id"),
        lambda: here.claim("base_id", 1),
        lambda: RankValues(here, "node").read(),
    ]
    for look in looks:
        with pytest.raises(RendezvousError, match=r"The job's store holds b.* as '(base_id|node/1)', which no rank"):
            look()


def test_a_malformed_base_id_is_refused(at: At) -> None:
    for junk in (7, ["a"], {"a": 1}, None):
        at(0).publish("base_id", junk)
        with pytest.raises(RendezvousError, match=r"^Rank 1 found .* as base id, which no rank has written"):
            agree_on_base_id(at(1), Topology(1, 1, 0, 2, 2, 1), None, None, "init/1")


def test_a_missing_key_is_named_with_the_rank_that_should_publish_it(at: At) -> None:
    with pytest.raises(RendezvousError) as late:
        at(1, timeout=SHORT).wait_get("base_id", "rank 0")
    assert str(late.value).startswith("Rank 1 waited 0.05 s for rank 0 to publish 'base_id'.")
    assert "or raise join_timeout" in str(late.value)


def test_every_rank_gets_all_values_in_rank_order(at: At) -> None:
    def act(number: int) -> list[str] | None:
        values = RankValues(at(number, 5), "node")
        values.publish(f"host-{number}")
        return values.try_get_all(PATIENCE)

    gathered = on_ranks(5, act)
    assert gathered == [[f"host-{number}" for number in range(5)]] * 5


def test_a_second_value_of_a_rank_replaces_the_first(at: At) -> None:
    values = RankValues(at(0, 2), "node")
    for number, value in ((0, "old"), (0, "new")):
        RankValues(at(number, 2), "node").publish(value)
    assert values.try_get_all(SHORT) is None
    assert (values.read(), values.missing()) == ({0: "new"}, [1])
    RankValues(at(1, 2), "node").publish("other")
    assert values.try_get_all(SHORT) == ["new", "other"]


# --- the store --------------------------------------------------------------------------------------------------------


@pytest.fixture
def agent(bare_environment: None, monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:  # noqa: ARG001  # goes first
    """Provide a store like that of torchrun's agent, with its environment variables."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    return agent


def find(number: int, timeout: float = PATIENCE) -> JobStore:
    found = JobStore.find("name", rank(number), timeout)
    assert found is not None
    return found


@pytest.mark.usefixtures("agent")
def test_the_store_of_torchruns_agent_is_used_without_a_process_group() -> None:
    find(0).publish("key", "value")
    assert find(1).wait_get("key", "rank 0") == "value"


@pytest.mark.usefixtures("agent")
def test_another_session_and_a_restarted_job_do_not_see_earlier_values(monkeypatch: pytest.MonkeyPatch) -> None:
    find(0).publish("key", "value")
    another = JobStore.find("another", rank(1), PATIENCE)
    assert another is not None
    assert another.try_get("key") is None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert find(1).try_get("key") is None


def test_an_unreachable_agent_is_named_with_its_variables(
    agent: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any, **_kwargs: Any) -> dist.TCPStore:
        raise dist.DistNetworkError("connection refused")

    monkeypatch.setattr(dist, "TCPStore", refuse)
    message = f"Rank 1 cannot reach torchrun's store at 127.0.0.1:{agent.port} (MASTER_ADDR, MASTER_PORT): connection"
    with pytest.raises(RendezvousError, match=re.escape(message)):
        JobStore.find("name", rank(1), SHORT)


def test_ranks_whose_nodes_count_restarts_differently_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's agent counts only failures of its own processes, not a restart because of another node's."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        find(0).publish("key", "value")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert find(1).try_get("key") == "value"
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("agent")
def test_the_store_of_a_process_group_has_precedence() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        find(0).publish("key", "value")
        assert find(1).try_get("key") == "value"
    finally:
        dist.destroy_process_group()
    assert find(1).try_get("key") is None  # not in the agent's store


# --- the base id ------------------------------------------------------------------------------------------------------


def agree(at: At, number: int, requested: str | None = None, proposed: str | None = None) -> str:
    return agree_on_base_id(at(number, 3), rank(number, 3), requested, proposed, "DistWandbLogger/1")


@pytest.mark.parametrize(("requested", "agreed"), [(None, "proposal-0"), ("mine", "mine")])
def test_the_users_id_is_used_or_the_proposal_of_rank_0(at: At, requested: str | None, agreed: str) -> None:
    assert on_ranks(3, lambda number: agree(at, number, requested, f"proposal-{number}")) == [agreed] * 3


def alone(number: int) -> str:
    """Return the base id of a rank of a job without a store."""
    with patch.dict(os.environ, {"SLURM_PROCID": str(number), "SLURM_NTASKS": "2"}):
        return agree_on_base_id(None, rank(number), None, None, "init/1")


def test_ids_derived_from_a_job_are_the_same_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = set()
    for job, step, restart in (("7", "0", "0"), ("8", "0", "0"), ("7", "1", "0"), ("7", "0", "1")):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_STEP_ID", step)
        monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
        ids.add(alone(0))
    assert len(ids) == 3
    assert all(re.fullmatch("[a-z0-9]{8}", one) for one in ids)


def test_an_error_without_store_or_job_name_explains_what_to_do() -> None:
    with pytest.raises(RendezvousError) as lost:
        alone(1)
    assert str(lost.value).startswith("Rank 1 of 2 (given) has no way to agree on a run id with the other ranks")
    assert "Call init_process_group first, or pass id= (the same on all ranks), or set WANDB_RUN_ID" in str(lost.value)


# --- the layout -------------------------------------------------------------------------------------------------------


@pytest.fixture
def my_node(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Let each thread, which acts as a rank, choose its node."""
    here = threading.local()
    monkeypatch.setattr(job_identity, "node_identity", lambda: here.node)
    return here


@pytest.mark.parametrize("nodes", [["a", "a", "b"], ["a", "b", "a"], ["a", "a", "a"], ["a", "b", "c"]], ids="".join)
def test_ranks_learn_the_layout_over_nodes(at: At, my_node: threading.local, nodes: list[str]) -> None:
    def learn(number: int) -> Topology:
        my_node.node = nodes[number]
        return learn_layout(at(number, 3), rank(number, 3), needed=True)

    assert on_ranks(3, learn) == [rank(number, 3).with_layout(nodes) for number in range(3)]


def test_a_rank_that_does_not_publish_its_node_is_named(at: At, my_node: threading.local) -> None:
    my_node.node = "a"
    with pytest.raises(RendezvousError, match="for the 'node' of rank 1 of 2, without which the layout"):
        learn_layout(at(0, timeout=SHORT), rank(0), needed=True)


def publishing_together(number: int) -> Callable[[RankValues, Any], bool]:
    """Return what publishes a node, and returns once so many ranks have done so."""
    publish, all_there = RankValues.publish, threading.Barrier(number, timeout=PATIENCE)

    def publish_and_gather(self: RankValues, value: Any) -> bool:
        is_last = publish(self, value)
        all_there.wait()
        return is_last

    return publish_and_gather


def test_one_rank_reports_the_missing_ranks_to_all(at: At, my_node: threading.local, limit: Limit) -> None:
    """Ranks 8 to 15, a node, do not arrive. Only one rank reads the list of the others."""
    reads: list[int] = []
    read = RankValues.read

    def read_and_note(self: RankValues) -> dict[int, Any]:
        reads.append(self._keys.topology.global_rank)
        return read(self)

    def learn(number: int) -> str:
        my_node.node = "a"
        here = number if number < 8 else number + 8
        with pytest.raises(RendezvousError) as missed:
            learn_layout(at(here, 24, timeout=0.3), rank(here, 24), needed=True)
        return str(missed.value)

    limit(job_identity, _TERM=PATIENCE)
    with patch.multiple(RankValues, publish=publishing_together(16), read=read_and_note):
        messages = on_ranks(16, learn)
    assert all("waited 0.3 s for the 'node' of ranks 8-15 of 24, without which" in message for message in messages)
    assert len(set(reads)) == 1


def test_each_rank_checks_itself_if_the_elected_one_is_gone(at: At, my_node: threading.local, limit: Limit) -> None:
    limit(job_identity, _TERM=SHORT)
    my_node.node = "a"
    at(2, 4).claim("layout/elected", 2)  # and then it dies
    RankValues(at(2, 4), "node").publish("b")
    with pytest.raises(RendezvousError, match="for the 'node' of ranks 1, 3 of 4"):
        learn_layout(at(0, 4, timeout=SHORT), rank(0, 4), needed=True)


def test_another_rank_publishes_the_layout_if_the_last_one_dies(at: At, my_node: threading.local) -> None:
    SharedList(at(0, 3), "node").append([0, "a"])  # and then it dies, before it finds that it is the last one

    def learn(index: int) -> Topology:
        my_node.node = "ab"[index]
        return learn_layout(at(1 + index, 3, timeout=SHORT), rank(1 + index, 3), needed=True)

    with patch.object(RankValues, "publish", publishing_together(2)):
        learnt = on_ranks(2, learn)
    assert learnt == [rank(number, 3).with_layout(["a", "a", "b"]) for number in (1, 2)]
    assert at(0, 3).try_get("layout") == [[0, 2, 1], [1, 1, 1]]


# --- lists to which all ranks append ----------------------------------------------------------------------------------

MANY = 2500  # more than in one call

ListOf = Callable[[int], SharedList]


@pytest.fixture
def counts() -> Counts:
    return Counts()


@pytest.fixture
def keys_of(store: dist.Store, counts: Counts) -> Callable[[int], JobStore]:
    return lambda number: JobStore(CountedStore(store, number, counts), "test", rank(number), PATIENCE)


@pytest.fixture
def list_of(keys_of: Callable[[int], JobStore]) -> ListOf:
    """Return the list for a rank that has not read it yet."""
    return lambda number: SharedList(keys_of(number), "list")


@pytest.mark.parametrize("number", [1, 4, 5, MANY])
def test_appended_values_are_read_once_in_order(list_of: ListOf, number: int) -> None:
    appending, reading = list_of(0), list_of(1)
    assert [appending.append([value, "text"]) for value in range(number)] == list(range(1, number + 1))
    assert reading.read_new() == [[value, "text"] for value in range(number)]
    assert reading.read_new() == []
    assert reading.append("own") == number + 1
    assert (reading.read_new(), len(reading.values)) == (["own"], number + 1)
    assert (list_of(0).count(), list_of(1).read_new(soon=True)[-1]) == (number + 1, "own")


def test_checking_for_news_reads_one_key(list_of: ListOf, counts: Counts) -> None:
    appending, reading = list_of(0), list_of(1)
    for value in range(MANY):
        appending.append(value)
    reading.read_new()
    before = counts.of(1), counts.operations[1]
    for _ in range(10):
        reading.read_new()
    assert (counts.of(1) - before[0], counts.operations[1] - before[1]) == (10, 10)
    assert before[0] == 1 + 2 * MANY, "each key is checked, and read"
    assert before[1] <= 1 + 2 * 3


def test_append_once_counts_a_value_once(list_of: ListOf, counts: Counts) -> None:
    for number in (0, 1, 0):
        list_of(number).append_once(number)
    before = counts.of(1)
    reading = list_of(1)
    assert (reading.count(), counts.of(1) - before) == (2, 1)
    assert reading.read_new() == [0, 1]


def test_a_counted_value_that_is_not_set_yet_is_read_later(list_of: ListOf, keys_of: Callable[[int], JobStore]) -> None:
    reading = list_of(1)
    for value in range(10):
        list_of(0).append(value)
    assert keys_of(0).count("list/count") == 11
    list_of(0).append(12)
    assert reading.read_new() == [*range(10), 12]
    assert reading.read_new() == []
    keys_of(0).publish("list/11", 11)
    assert reading.read_new() == [11]


def test_only_the_rank_that_sets_the_last_value_finds_the_list_complete(
    list_of: ListOf, keys_of: Callable[[int], JobStore]
) -> None:
    held_up = keys_of(0)
    assert held_up.count("list/count") == 1
    assert not list_of(1).append_one_of("b", 3)
    assert not list_of(1).append_one_of("c", 3), "it has the last index, but a value is missing"
    held_up.publish("list/1", "a")
    assert held_up.count("list/there") == 3
    other = SharedList(keys_of(0), "other")
    assert [other.append_one_of(value, 3) for value in "abc"] == [False, False, True]
    assert other.read_new() == ["a", "b", "c"]


def test_news_soon_returns_nothing_if_the_store_does_not_answer(
    list_of: ListOf, keys_of: Callable[[int], JobStore]
) -> None:
    keys: Any = keys_of(1)
    reading = SharedList(keys, "list")
    list_of(0).append(1)
    get_present = keys.get_present

    def stall(_: list[str], *, soon: bool) -> dict[str, int]:
        assert soon
        raise UnansweredError("it has not answered")

    keys.get_present = stall
    assert reading.read_new(soon=True) == []
    keys.get_present = get_present
    assert reading.read_new(soon=True) == [1]


# --- the address that a rank publishes -------------------------------------------------------------------------------


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


def test_the_host_of_the_store_uses_its_address_towards_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """In many hosts files, the host's own name, by which it reaches the store, is 127.0.1.1."""
    monkeypatch.setattr(connection, "address_towards", {"10.0.0.2": "10.0.0.1"}.get)
    assert address_among("127.0.1.1", ["127.0.1.1", "10.0.0.3", "10.0.0.2", None]) == "10.0.0.1"
