"""One config on all ranks: which ranks a rank waits for, and what it reads without the others."""

from __future__ import annotations

import copy
import pickle
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from config_jobs import HEARTBEAT, Open, alike, begin_to_open, connection_of, reads, sync_of
from fakes import THREE, TWO, Job, Meeting, on_ranks
from units import eventually

from dist_wandb.session import job_link, registry


def test_reading_the_config_waits_until_the_primary_has_opened_its_run(open_rank: Open) -> None:
    second = open_rank(TWO[1], {"lr": 0.2}, config_sync="off")
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.append(second.config["lr"]))
    reader.start()
    time.sleep(0.1)
    assert found == []
    open_rank(TWO[0], {"lr": 0.1}, config_sync="off")
    reader.join(30)
    assert found == [0.1]


@pytest.mark.parametrize(("sweep", "name"), [("", "lr"), ("which may have a value of it", "own")])
def test_reads_wait_once_in_all_with_one_warning_for_a_primary_that_opens_no_run(
    open_rank: Open, store: dist.Store, monkeypatch: pytest.MonkeyPatch, sweep: str, name: str
) -> None:
    begin_to_open(store)
    second = open_rank(TWO[1], {"lr": 0.2, "p": Path("x")}, limits={"join_timeout": 1.0})
    second.config.update({"own": 1})
    assert second.config.own == 1  # known on this rank, so it does not wait
    monkeypatch.setenv("WANDB_SWEEP_ID", sweep)
    with pytest.warns(UserWarning, match="read on rank 1, but its primary did not open its run .* 1 s"):
        assert second.config[name] in (0.2, 1)

    def poll_once(is_settled: Callable[[], object], *_: Any) -> None:
        if is_settled() is None:
            pytest.fail("it waits again")

    with warnings.catch_warnings(), mock.patch.object(job_link, "poll", poll_once):
        warnings.simplefilter("error")
        assert dict(second.config) == {"lr": 0.2, "p": Path("x"), "own": 1}
        assert (second.id, second.name, second.id) == (None, None, None)


def test_reads_do_not_wait_for_a_primary_whose_init_has_failed(open_rank: Open) -> None:
    second = open_rank(TWO[1], {"lr": 0.2}, config_sync="off")
    with mock.patch("wandb.init", side_effect=ValueError("wrong")), pytest.raises(ValueError, match="wrong"):
        open_rank(TWO[0], {"lr": 0.1}, config_sync="off")
    began = time.monotonic()
    with pytest.warns(UserWarning, match="read on rank 1, but its primary did not open its run"):
        assert second.config.lr == 0.2
    assert time.monotonic() < began + 15  # of 30 s


def test_reads_wait_for_the_rank_that_writes_the_run_without_a_primary(open_rank: Open) -> None:
    limits = {"join_timeout": 1.0}

    def read(index: int) -> tuple[Any, ...]:
        session = open_rank(THREE[index + 1], {"lr": 0.1 * index}, limits=limits, config_sync="off")
        config = session.config
        config.update({"own": index})
        return session.id, session.name, config.lr, config, session

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (first_id, name, lr, _, first), (second_id, second_name, second_lr, config, _) = on_ranks(2, read)
        assert (second_id, second_name, second_lr) == (first_id, name, lr)
        assert first_id is not None
        first.config.update({"steps": 7})
        eventually(lambda: config.get("steps") == 7)
    assert dict(config) == {"lr": 0.0, "steps": 7, "own": 1}


def test_a_rank_reads_its_given_config_until_there_is_a_store(open_rank: Open, meeting: Meeting) -> None:
    with warnings.catch_warnings(record=True) as caught:  # another thread may find the store, and compare, at any time
        warnings.simplefilter("always")
        with mock.patch.object(meeting, "store_of", return_value=None):  # before the process group
            first, second = (open_rank(TWO[rank], {"lr": 0.1 * (rank + 1)}) for rank in range(2))
            assert second.config.lr == 0.2
        first.config.update({"steps": 7})
        assert reads(second, {"lr": 0.1, "steps": 7})
    texts = [str(warning.message) for warning in caught]
    assert ["the job has no store yet" in text for text in texts].count(True) == 1
    assert ["were given different configs" in text for text in texts].count(True) == 1


def test_the_config_stays_readable_and_writable_if_the_store_is_gone(job: Job, meeting: Meeting) -> None:
    outage = meeting.outage()
    first, second = job(TWO, alike({"lr": 0.1}))
    assert second.config.lr == 0.1
    outage.begin()
    time.sleep(2 * HEARTBEAT)
    first.config.update({"steps": 7})
    second.config.update({"own": 1})
    assert (dict(first.config), dict(second.config)) == ({"lr": 0.1, "steps": 7}, {"lr": 0.1, "own": 1})


@pytest.mark.parametrize("run_mode", ["auto", "new"])
def test_a_fork_requests_nothing_from_the_store(job: Job, run_mode: str) -> None:
    sessions = job(TWO, alike({"lr": 0.1}), run_mode=run_mode)
    asked_by: list[threading.Thread] = []

    def noted(ask: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *key: (asked_by.append(threading.current_thread()), ask(*key))[1]  # type: ignore[func-returns-value]

    for session in sessions:
        connection = connection_of(session)
        connection.try_get = noted(connection.try_get)
    time.sleep(2 * HEARTBEAT)
    for session in sessions:
        registry.shutdowns[session].relay.prepare_fork()
    assert threading.current_thread() not in asked_by


def test_reading_requests_the_store_once_per_heartbeat(job: Job) -> None:
    _, second = job(TWO, alike({"lr": 0.1}), limits={"heartbeat": 1000.0})
    assert second.config.lr == 0.1
    requests: list[str] = []  # the exchange's threads have their own requests to the store
    connection_of(second).try_get = lambda key, _: requests.append(key)
    for _ in range(1000):
        assert second.config.lr == 0.1
        assert second.config["lr"] == 0.1
    assert len(requests) <= 1


def test_a_copied_or_pickled_config_keeps_known_values(job: Job) -> None:
    _, second = job(TWO, alike({"net": {"h": 3}}))
    for twin in (copy.copy(second.config), copy.deepcopy(second.config), pickle.loads(pickle.dumps(second.config))):  # noqa: S301
        assert twin.net == twin["net"] == {"h": 3}
        assert twin.as_dict() == {"net": {"h": 3}}
        with pytest.raises(AttributeError, match="none"):
            _ = twin.none


def test_the_config_stays_readable_after_the_end_without_requests(job: Job) -> None:
    first, second = job(TWO, alike({"lr": 0.1}), run_mode="shared")
    second.finish(1)
    first.config.update({"steps": 7})
    sync_of(second).refresh(at_once=True)
    assert dict(second.run.config) == {"lr": 0.1}
    first.finish(1)
    assert dict(first.config) == {"lr": 0.1, "steps": 7}


def test_a_first_read_after_the_end_returns_the_given_config(open_rank: Open) -> None:
    second = open_rank(TWO[1], {"lr": 0.2}, limits={"join_timeout": 60.0}, reduce=None)
    second.finish(1)
    assert dict(second.config) == {"lr": 0.2}
