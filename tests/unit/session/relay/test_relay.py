"""Rows of other processes for a session: forks, and processes into which it was pickled."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import wandb
from fakes import TWO, FakeWandb, Job, on_ranks
from limits import Limit
from new_process import begin_new_process
from processes import wait_until
from torchmetrics import MeanMetric

import dist_wandb
from dist_wandb.errors import ConfigurationError
from dist_wandb.job.topology import Topology
from dist_wandb.session import relay, remote_session
from dist_wandb.session.relay import Relay
from dist_wandb.session.remote_session import LOG, RemoteSession, socket_name

ONE = Topology.single()
_PATIENCE = 60  # seconds


def through_a_pickle(session: dist_wandb.Session) -> RemoteSession:
    copy = pickle.loads(pickle.dumps(session))  # noqa: S301  # our own bytes
    assert isinstance(copy, RemoteSession)
    return copy


def in_fork(work: Callable[[], None]) -> int:
    """Run `work` in a fork of this process. Return its exit code."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(_PATIENCE)
    if process.is_alive():
        process.kill()
    assert process.exitcode is not None
    return process.exitcode


def relay_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "dist_wandb-relay"}


def own_sockets() -> set[tuple[int, str]]:
    """Return the sockets of relays in this process: their descriptors and names."""
    found = set()
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208  # names are numbers, not paths
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
            name = one.getsockname()
            if one.family == socket.AF_UNIX and isinstance(name, bytes) and name.startswith(b"\0dist-wandb-"):
                found.add((number, name.decode()))
    return found


@pytest.fixture(autouse=True)
def fresh_notices(monkeypatch: pytest.MonkeyPatch, limit: Limit) -> Iterator[None]:
    begin_new_process(monkeypatch)
    limit(relay, _LAST_ROWS=30.0)
    limit(remote_session, HANDSHAKE=30.0)  # a thread that receives rows may be delayed
    before = relay_threads()  # a test that failed before may have left some
    yield
    wait_until(lambda: not relay_threads() - before, within=_PATIENCE)  # one may be starting


@dataclass
class Served:
    """A relay and what it has taken."""

    relay: Relay
    key: bytes
    taken: list[tuple[Any, ...]]
    may_take: threading.Event

    def child(self) -> RemoteSession:
        return RemoteSession(self.key, ONE, {})


@pytest.fixture
def served() -> Iterator[Served]:
    taken: list[tuple[Any, ...]] = []
    may_take = threading.Event()
    may_take.set()

    def take(*arguments: Any) -> None:
        may_take.wait(_PATIENCE)
        taken.append(arguments)

    relay = Relay(take, ONE, lambda _: {})
    key = relay.open()
    assert key is not None
    yield Served(relay, key, taken, may_take)
    may_take.set()
    relay.close()


def test_rows_of_a_pickled_session_arrive_before_the_run_ends(fake_wandb: FakeWandb) -> None:
    with dist_wandb.init(config={"lr": 0.1}) as session:
        copy = through_a_pickle(session)
        copy.log({"loss": 0.5})
        copy.log({"loss": 0.25, "text": "t", "nested": {"a": 1}}, step=7)
        copy.log({"tensor": torch.tensor(2.0, requires_grad=True), "numpy": np.float32(3.0)})
    (run,) = fake_wandb.runs
    assert run.rows == [
        {"loss": 0.5, "global_step": 0},
        {"loss": 0.25, "text": "t", "nested": {"a": 1}, "global_step": 7},
        {"tensor": 2.0, "numpy": 3.0, "global_step": 2},
    ]
    assert run.exit_codes == [None]


@pytest.mark.usefixtures("fake_wandb")
def test_a_pickled_session_has_the_facts_of_the_run_and_accepts_all_calls() -> None:
    with dist_wandb.init(id="exp", config={"lr": 0.1}) as session:
        copy = through_a_pickle(session)
        assert (copy.id, copy.url, copy.config) == ("exp", session.url, {"lr": 0.1})
        assert copy
        assert not copy.run
        copy.summary["best"] = 1
        copy.define_metric("loss")
        copy.run.alert("done")
        with copy.timed("data"):
            assert copy.timed("load", waits=True)(lambda: 7)() == 7, "a decorated function is called"
        assert through_a_pickle(copy).id == "exp"  # type: ignore[arg-type]  # into a grandchild process
        assert "rank 0 run='exp'" in repr(copy)


@pytest.mark.parametrize(("ranks", "said"), [((TWO[0], TWO[0], TWO[1]), 1), ((TWO[1], None, ONE), 0)])
def test_ranks_that_log_to_a_run_of_their_parent_are_told_the_way_to_a_mean(
    fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture, ranks: tuple[Topology | None, ...], said: int
) -> None:
    with dist_wandb.init() as session, mock.patch.object(Topology, "from_torch_distributed", side_effect=ranks):
        for _ in ranks:
            through_a_pickle(session).log({"loss": 0.5})
    assert len(fake_wandb.runs[0].rows) == 3
    message = (
        "rank 0 of 2 logs to a run that its parent process has opened, so no mean of the ranks is written. Call init"
    )
    assert caplog.text.count(message) == said


def test_rows_of_child_processes_are_reduced_over_ranks(fake_wandb: FakeWandb, job: Job) -> None:
    sessions = job(TWO)

    def work(rank: int) -> None:
        copy = through_a_pickle(sessions[rank])
        copy.log({"loss": 1.0 + 2 * rank}, step=1, weight=3 - 2 * rank)
        metric = MeanMetric(sync_on_compute=False)
        metric.update(1.0 + 2 * rank)
        copy.log({"merged": metric}, step=2)
        assert copy.flush()
        sessions[rank].finish()

    on_ranks(2, work)
    rows = {row["global_step"]: row for row in fake_wandb.runs[0].rows}
    assert rows[1]["loss"] == 1.5
    assert rows[2]["merged"] == 2.0


def test_rows_of_forks_and_their_forks_arrive(fake_wandb: FakeWandb) -> None:
    others = own_sockets()  # of sessions that earlier tests have left open
    with dist_wandb.init() as session:
        session.log({"loss": 0.0})

        def work() -> None:
            assert not own_sockets()
            session.log({"loss": 1.0})
            dist_wandb.get_run().log({"loss": 2.0})
            assert session.flush()
            session.finish()  # ends nothing here
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            os._exit(in_fork(lambda: session.log({"loss": 3.0})))

        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert not own_sockets() - others, "it listens only after the first fork"
        assert in_fork(work) == 0
        assert len({name for _, name in own_sockets() - others}) == 1, "an accepted connection has the same name"
        session.log({"loss": 4.0})
    assert [row["loss"] for row in fake_wandb.runs[0].rows] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [row["global_step"] for row in fake_wandb.runs[0].rows] == [0, 1, 2, 3, 4]


def test_many_concurrent_children_lose_no_rows(fake_wandb: FakeWandb) -> None:
    rows, children = 200, 4
    with dist_wandb.init() as session:

        def work(child: int) -> None:
            for row in range(rows):
                session.log({f"child-{child}": row})

        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=work, args=(child,)) for child in range(children)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(_PATIENCE)
        assert [process.exitcode for process in processes] == [0] * children
    written = fake_wandb.runs[0].rows
    assert len({row["global_step"] for row in written}) == rows * children
    for child in range(children):
        assert [row[f"child-{child}"] for row in written if f"child-{child}" in row] == list(range(rows))


def test_a_child_that_outlives_the_session_warns_once_and_continues(
    fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    session = dist_wandb.init()
    copy = through_a_pickle(session)
    copy.log({"loss": 1.0})
    assert copy.flush()
    session.finish()
    with caplog.at_level(logging.ERROR, "dist_wandb"):
        for _ in range(5):
            copy.log({"loss": 2.0})
        assert not copy.flush(1.0)
        copy.finish()
    assert [row["loss"] for row in fake_wandb.runs[0].rows] == [1.0]
    assert len(caplog.records) == 1  # although the connection breaks for one reason, and cannot be reopened for another
    assert "could not send this to the process that holds the session (it has ended)" in caplog.text


def test_media_and_values_that_cannot_be_pickled_are_reported_and_others_arrive(
    fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    with dist_wandb.init() as session:
        copy = through_a_pickle(session)
        html = wandb.Html("<b>x</b>")
        copy.log({"picture": html, "pictures": [html], "loss": 1.0})
        copy.log({"picture": html, "pictures": [html]})
        copy.log({"function": lambda: None})
        copy.log({"loss": 2.0})
    assert [row["loss"] for row in fake_wandb.runs[0].rows] == [1.0, 2.0]
    media, function = caplog.messages
    assert "picture, pictures: W&B keeps these in files of the process that made them" in media
    assert "lost a row that could not be sent to the session's process" in function


class Unreadable:
    """An object that can be pickled, but not unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("not a number",)


def test_rows_refused_by_the_session_are_reported_and_others_arrive(
    fake_wandb: FakeWandb, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = job(TWO)
    copy = through_a_pickle(sessions[0])
    copy.log({"odd": Unreadable()}, step=1)
    copy.log({"loss": 1.0}, step=1)
    assert copy.flush()
    sessions[1].log({"loss": 2.0}, step=1)
    on_ranks(2, lambda rank: sessions[rank].finish())
    assert fake_wandb.runs[0].rows == [{"loss": 1.5, "global_step": 1}]
    assert "lost a row that another process had sent" in caplog.text


@pytest.mark.usefixtures("fake_wandb")
@pytest.mark.parametrize("arguments", [([("loss", 1)],), ({1: 2},), ({"loss": 1.0}, 1.5), ({"loss": 1.0}, 1, -1)])
def test_invalid_input_is_an_error_in_the_child(arguments: tuple[Any, ...]) -> None:
    with dist_wandb.init() as session, pytest.raises(ConfigurationError, match=r"mapping|names are text|step=1.5|weig"):
        through_a_pickle(session).log(*arguments)


def test_a_client_without_the_key_is_not_served_and_dropped_after_the_timeout(served: Served, limit: Limit) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(socket_name(served.key))
        connection = Connection(os.dup(client.fileno()))
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.send_bytes(b"k" * len(served.key))
            connection.send_bytes(pickle.dumps((LOG, ({"loss": 1.0}, None, None, None))))
            client.settimeout(_PATIENCE)
            assert client.recv(1) == b""
        connection.close()
    child = served.child()
    child.log({"loss": 2.0})
    assert child.flush()
    limit(relay, HANDSHAKE=0.3)
    be_dropped(served.key)
    served.relay.close()
    assert [arguments[0] for arguments in served.taken] == [{"loss": 2.0}]
    assert served.relay.open() is None


CLIENTS: dict[str, Callable[[socket.socket], None]] = {
    "silent": lambda _: None,
    "half-open": lambda client: client.sendall(struct.pack("!i", 64)[:2]),
    "unfinished": lambda client: client.sendall(struct.pack("!i", 64) + b"what"),
    "talking": lambda client: client.sendall(b"\x7f\xff\xff\xff" + b"GET / HTTP/1.1\r\n" * 100),
}


@pytest.mark.parametrize("kind", CLIENTS)
def test_unauthenticated_clients_do_not_block_children(kind: str, served: Served) -> None:
    """One after the other, they would block a child for 64 times 30 seconds."""
    clients = []
    for _ in range(64):
        client = socket.socket(socket.AF_UNIX)
        client.connect(socket_name(served.key))
        with suppress(BrokenPipeError, ConnectionResetError):
            CLIENTS[kind](client)
        clients.append(client)
    child = served.child()
    longest = 0.0
    for row in range(20):
        begin = time.monotonic()
        child.log({"row": row})
        longest = max(longest, time.monotonic() - begin)
    assert child.flush()
    for client in clients:
        client.close()
    assert [row["row"] for row, *_ in served.taken] == list(range(20))
    assert longest < 15


def test_a_fork_closes_the_sockets_of_the_relay(served: Served) -> None:
    """Otherwise other children would not notice that the session's process was killed, and block."""
    child = served.child()
    assert child.flush()
    parts: Any = vars(served.relay)
    (connection,) = parts["_children"]

    def work() -> None:
        served.relay.after_fork()
        assert connection.closed
        assert parts["_listener"].fileno() == -1

    assert in_fork(work) == 0
    assert child.flush(), "the session's own are open"


def be_dropped(key: bytes) -> None:
    """Connect without the key, and see the end of the connection before anything else."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_PATIENCE)
        client.connect(socket_name(key))
        assert client.recv(1) == b""


def test_other_users_are_rejected_before_anything_is_sent(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:  # the test has only one user
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
        be_dropped(served.key)
        monkeypatch.undo()
        return

    def be_dropped_as_a_stranger() -> None:
        os.setuid(65534)
        be_dropped(served.key)

    assert in_fork(be_dropped_as_a_stranger) == 0
    assert served.child().flush()


@pytest.mark.usefixtures("fake_wandb")
def test_a_child_sends_nothing_to_a_socket_of_another_user(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    child = served.child()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 65534)
        child.log({"loss": 1.0})
    assert "another user listens in its place" in caplog.text


def test_a_socket_that_accepts_no_connection_delays_log_once(limit: Limit, caplog: pytest.LogCaptureFixture) -> None:
    limit(remote_session, HANDSHAKE=0.3, _RETRY_AFTER=1000.0)
    with socket.socket(socket.AF_UNIX) as full:
        full.bind(place := socket_name(b"key"))
        full.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(8)]
        with suppress(BlockingIOError):  # once the backlog is full
            for one in waiting:
                one.setblocking(False)
                one.connect(place)
        child = RemoteSession(b"key", ONE, {})
        begin = time.monotonic()
        for _ in range(200):  # 60 s, if each call tried to connect
            child.log({"loss": 1.0})
        assert time.monotonic() - begin < 20
        for one in waiting:
            one.close()
    assert "the session's process accepts no connection for 0.3 s" in caplog.text
    assert len(caplog.records) == 1


def test_a_session_that_reads_nothing_delays_log_once(
    served: Served, limit: Limit, caplog: pytest.LogCaptureFixture
) -> None:
    limit(remote_session, _STUCK=0.3, _RETRY_AFTER=1000.0)
    served.may_take.clear()
    child = served.child()
    assert child.flush()
    begin = time.monotonic()
    for _ in range(500):
        child.log({"text": "t" * 5000})
    assert time.monotonic() - begin < 20
    assert "the session's process reads nothing for 0.3 s" in caplog.text
    assert len(caplog.records) == 1


def test_a_failed_session_does_not_wait_for_its_children(fake_wandb: FakeWandb, limit: Limit) -> None:
    limit(relay, _LAST_ROWS=_PATIENCE)
    session = dist_wandb.init()
    copy = through_a_pickle(session)
    copy.log({"loss": 1.0})
    assert copy.flush()
    begin = time.monotonic()
    session.finish(exit_code=1)
    assert time.monotonic() - begin < _PATIENCE / 2
    assert fake_wandb.runs[0].exit_codes == [1]


def test_children_of_ranks_without_a_run_have_the_same_facts(job: Job) -> None:
    sessions = job(TWO, lambda _: {"id": "exp", "config": {"lr": 0.1, "net": {"width": 3}}})

    def facts(session: dist_wandb.Session) -> bool:
        return (session.config["lr"], session.config.lr) == (0.1, 0.1) and session.id in ("exp", None)

    for session in sessions:
        copy = through_a_pickle(session)
        assert (copy.id, copy.url) == ("exp", session.url)
        assert (copy.config["lr"], copy.config.lr, copy.config.net["width"]) == (0.1, 0.1, 3)
        copy.config.update({"lr": 0.2}, allow_val_change=True)
        assert (copy.config.lr, session.config["lr"]) == (0.2, 0.1)
        with pytest.raises(AttributeError, match="the config has no 'epochs'"):
            _ = copy.config.epochs
        assert in_fork(lambda session=session: os._exit(not facts(session))) == 0  # type: ignore[misc]
    on_ranks(2, lambda rank: sessions[rank].finish())


@pytest.mark.parametrize("failed", [False, True])
def test_children_notice_the_end_even_if_another_process_has_the_socket(served: Served, *, failed: bool) -> None:
    """Such as a fork that was made while a child was being accepted."""
    child = served.child()
    assert child.flush()
    copies = [os.dup(number) for number, name in own_sockets() if name == socket_name(served.key)]
    assert len(copies) == 2, "that of the connection, and the one that listens"
    try:
        served.relay.close(failed=failed)
        begin = time.monotonic()
        assert not child.flush(_PATIENCE)
        assert time.monotonic() - begin < _PATIENCE / 2
    finally:
        for copy in copies:
            os.close(copy)


def test_a_late_answer_is_not_mistaken_for_the_next_one(served: Served) -> None:
    served.may_take.clear()
    child = served.child()
    assert child.flush()
    child.log({"loss": 1.0})
    assert not child.flush(0.1)
    served.may_take.set()
    child.log({"loss": 2.0})
    assert child.flush()
    assert len(served.taken) == 2


@pytest.mark.usefixtures("fake_wandb")
def test_a_fork_is_not_blocked_by_locks_of_other_threads(served: Served) -> None:
    """One of these waits for an answer, another one until the session reads what it sends."""
    served.may_take.clear()
    copy, sent = served.child(), list[int]()

    def log_much() -> None:
        for number in range(300):
            copy.log({"text": "t" * 5000})
            sent.append(number)

    def work() -> None:
        copy.log({"loss": 2.0})
        assert copy.flush()

    threads = [threading.Thread(target=copy.flush), threading.Thread(target=log_much)]
    for thread in threads:
        thread.start()
    known = -1
    while known < len(sent) or not sent:
        known = len(sent)
        time.sleep(0.5)
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    served.may_take.set()
    process.join(_PATIENCE)
    exit_code = process.exitcode
    process.kill()
    for thread in threads:
        thread.join()
    assert (len(sent), exit_code) == (300, 0)
    assert known < len(sent), "a thread was sending when the process was forked"


def test_the_relay_closes_after_the_user_finishes_the_run(fake_wandb: FakeWandb) -> None:
    session = dist_wandb.init()
    copy = through_a_pickle(session)
    copy.log({"loss": 1.0})
    assert copy.flush()
    fake_wandb.runs[0].end_by_wandb()
    assert in_fork(lambda: os._exit(bool(dist_wandb.get_run()))) == 0  # ends nothing here
    assert copy.flush()
    assert not dist_wandb.get_run()
    assert not copy.flush()


@pytest.mark.usefixtures("fake_wandb")
def test_a_child_that_keeps_logging_does_not_prevent_finishing(caplog: pytest.LogCaptureFixture, limit: Limit) -> None:
    limit(relay, _LAST_ROWS=1.0)
    session = dist_wandb.init()
    copy, is_over = through_a_pickle(session), threading.Event()

    def work() -> None:
        while not is_over.is_set():
            copy.log({"loss": 1.0})

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.2)
    begin = time.monotonic()
    session.finish()
    took = time.monotonic() - begin
    is_over.set()
    thread.join(_PATIENCE)
    assert took < 1.0 + 15
    assert len(caplog.records) < 10


def test_a_missing_socket_is_reported_only_by_children_that_log(
    fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    with mock.patch.object(socket, "socket", side_effect=OSError("too many open files")), dist_wandb.init() as session:
        for _ in range(3):
            copy = through_a_pickle(session)
        assert caplog.records == []
        copy.log({"loss": 1.0})
    assert "it was not prepared for other processes" in caplog.text
    assert fake_wandb.runs[0].exit_codes == [None]
