"""Opening runs when W&B cannot be reached. Ranks are threads; no wandb process is started."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import wandb
from fakes import THREE, TWO, FakeRun, FakeWandb, Job, on_ranks, open_rank
from limits import Limit

import dist_wandb
from dist_wandb.errors import ConfigurationError, UnavailableError
from dist_wandb.job.topology import Topology
from dist_wandb.runs import opening
from dist_wandb.runs.null_run import NullRun

DEAD = wandb.errors.CommError("Timed out\ninitializing run.")


class Unreliable:
    """Makes a fake `wandb.init` fail; `failures` has the number of failures by mode and rank."""

    def __init__(self, fake: FakeWandb, failures: dict[str, int], error: Exception) -> None:
        self.opened: list[str] = []
        self._init = fake.init
        self.failures = dict(failures)
        self._error = error
        self._lock = threading.Lock()
        fake.init = self.init  # type: ignore[method-assign]

    def init(self, **arguments: Any) -> FakeRun:
        label = getattr(arguments.get("settings"), "x_label", None) or ""
        key = f"{label} {arguments.get('mode') or 'online'}".strip()
        with self._lock:
            self.opened.append(key)
            if self.failures.get(key, 0) > 0:
                self.failures[key] -= 1
                raise self._error
        return self._init(**arguments)


@pytest.fixture
def unreliable(fake_wandb: FakeWandb, limit: Limit) -> Any:
    def make(error: Exception = DEAD, **failures: int) -> Unreliable:
        by_key = {key.replace("_", " ").replace("rank ", "rank-"): n for key, n in failures.items()}
        return Unreliable(fake_wandb, by_key, error)

    limit(opening, _PAUSE=0.01)
    return make


ANSWERS = [
    "failed to rewind run: returned error 400: {}",
    "Timed out while retrying: HTTP 409: {}\nConsider increasing the init_timeout setting",
    "entity nobody not found during upsertBucket",
    "permission denied",
    "<no message>",
]
LAST_ATTEMPT = "Error initializing run: POST http://w/graphql giving up after 21 attempt(s) while retrying: HTTP {}: x"
SILENCE = [
    'Timed out while retrying: Post "http://w/graphql": dial tcp 127.0.0.1:1: connect: connection refused',
    'Timed out while retrying: Post "http://w/graphql": EOF',
    "Timed out initializing run: POST http://w/graphql giving up after 1 attempt(s): context deadline exceeded",
    "Timed out while retrying: HTTP 500: {}",
    "Timed out while retrying: HTTP 429: {}",
    "Run initialization has timed out after 90.0 sec.",
]


@pytest.mark.parametrize(
    "error",
    [
        *map(wandb.errors.CommError, ANSWERS),
        wandb.Error(LAST_ATTEMPT.format(409)),
        wandb.errors.UsageError("resume is wrong"),
        TypeError("what?"),
        ValueError("no"),
    ],
)
def test_what_the_server_answers_and_what_the_arguments_lack_is_an_error(
    unreliable: Any, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    wandb_ = unreliable(error, online=1)
    with pytest.raises(type(error)) as raised:
        dist_wandb.init(entity="nobody")
    assert raised.value is error
    assert wandb_.opened == ["online"]
    is_answer = type(error) in (wandb.Error, wandb.errors.CommError)
    assert ("W&B's server refused the run of rank 0" in caplog.text) is is_answer
    assert "dist-wandb sync" not in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        DEAD,
        *map(wandb.errors.CommError, SILENCE),
        wandb.Error(LAST_ATTEMPT.format(500)),
        wandb.errors.UsageError("No API key configured. Use `wandb login` to log in."),
    ],
)
def test_without_an_answer_or_credentials_the_run_is_written_to_disk(
    unreliable: Any, error: wandb.Error, caplog: pytest.LogCaptureFixture, fake_wandb: FakeWandb
) -> None:
    wandb_ = unreliable(error, online=1)
    assert dist_wandb.init("digits", id="exp").run.offline
    assert wandb_.opened == ["online", "offline"]
    assert fake_wandb.torn_down == 1
    assert fake_wandb.arguments[-1]["project"] == "digits"
    assert "rank 0 could not open its run: " in caplog.text
    assert error is not DEAD or "run: Timed out initializing run. Continuing offline" in caplog.text


def test_training_continues_even_if_the_disk_fails(unreliable: Any, caplog: pytest.LogCaptureFixture) -> None:
    unreliable(online=1, offline=1)
    run = dist_wandb.init()
    assert isinstance(run.run, NullRun)
    run.log({"loss": 0.5})
    run.finish()
    assert "rank 0 cannot write its run to disk either" in caplog.text


def test_another_run_of_the_process_is_not_torn_down(
    unreliable: Any, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb_ = unreliable(online=0)
    monkeypatch.setenv("WANDB_SERVICE", "of wandb's own process")
    dist_wandb.init()
    wandb_.failures["online"] = 1
    inner = dist_wandb.init(reinit="create_new")
    assert fake_wandb.torn_down == 0
    assert "WANDB_SERVICE" not in os.environ  # the failed run keeps its id in use in the other run's process
    assert inner.run.offline


def test_if_the_primary_is_offline_so_are_its_secondaries(job: Job, unreliable: Any) -> None:
    wandb_ = unreliable(rank_0_online=1)
    first, second = job(TWO, lambda _: {"id": "exp"}, run_mode="shared")
    assert first.run.offline
    assert second.run.offline
    assert "rank-1 online" not in wandb_.opened


@pytest.mark.usefixtures("store")
def test_strict_is_an_error_on_all_ranks(unreliable: Any) -> None:
    wandb_ = unreliable(rank_0_online=1)

    def open_one(rank: int) -> str:
        with pytest.raises(UnavailableError) as raised:
            open_rank(rank, wandb_init={"id": "exp"}, run_mode="shared", strict=True, limits={"join_timeout": 60.0})
        return str(raised.value)

    first, second = on_ranks(2, open_one)
    assert first == "Timed out initializing run"
    assert second == "its primary could not open the run: Timed out initializing run"
    assert wandb_.opened == ["rank-0 online"]


@pytest.mark.usefixtures("store")
def test_a_refused_run_is_an_error_on_all_its_writers(unreliable: Any, caplog: pytest.LogCaptureFixture) -> None:
    wandb_ = unreliable(wandb.errors.CommError("permission denied"), rank_0_online=1)

    def open_one(rank: int) -> str:
        with pytest.raises((wandb.errors.CommError, ConfigurationError)) as raised:
            open_rank(rank, wandb_init={"id": "exp"}, run_mode="shared")
        return str(raised.value)

    first, second = on_ranks(2, open_one)
    assert first == "permission denied"
    assert second.startswith("Rank 1 opens no run, because W&B's server refused that of its primary: permission denied")
    assert wandb_.opened == ["rank-0 online"]
    assert "dist-wandb sync" not in caplog.text


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("reduce", ["auto", None])
def test_if_the_only_run_is_refused_the_other_ranks_say_so_and_do_not_wait(
    unreliable: Any, caplog: pytest.LogCaptureFixture, reduce: Any
) -> None:
    unreliable(wandb.errors.CommError("permission denied"), online=1)
    limits = {"join_timeout": 600.0, "finish_timeout": 600.0}

    def train(rank: int) -> bool:
        try:
            session = open_rank(THREE[rank], wandb_init={"id": "exp"}, reduce=reduce, limits=limits)
        except wandb.errors.CommError:
            return False
        session.log({"loss": 0.5}, step=0)
        session.finish()
        return reduce is None or not session.flush()

    trained = on_ranks(3, train) if reduce else [train(rank) for rank in range(3)]  # without waiting for rank 0
    assert trained == [False, True, True]
    why = "init failed on rank 0, which has the run"
    told = sorted(record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert [line.partition(" Correct")[0] for line in told] == [
        f"dist_wandb: what rank {rank} logs is lost, because {why}: permission denied."
        if reduce
        else f"dist_wandb: {why} to which rank {rank} logs: permission denied"
        for rank in (1, 2)
    ]


def test_a_secondary_retries(job: Job, unreliable: Any) -> None:
    wandb_ = unreliable(rank_1_online=2)
    _, second = job(TWO, lambda _: {"id": "exp"}, run_mode="shared")
    assert wandb_.opened.count("rank-1 online") == 3
    assert not second.run.offline


def test_a_secondary_that_cannot_attach_writes_to_disk_alone(
    job: Job, unreliable: Any, caplog: pytest.LogCaptureFixture
) -> None:
    wandb_ = unreliable(rank_1_online=3)
    first, second = job(TWO, lambda _: {"id": "exp"}, run_mode="shared")
    assert wandb_.opened.count("rank-1 online") == 3
    assert (first.run.offline, second.run.offline) == (False, True)
    on_ranks(2, lambda rank: (first, second)[rank].finish())
    what = "what rank 1 has logged of the run exp is only on its disk, while the run is online"
    assert [what in record.getMessage() for record in caplog.records].count(True) == 1


@pytest.mark.usefixtures("store")
def test_a_rank_that_attaches_for_hardware_sends_the_primarys_arguments(fake_wandb: FakeWandb) -> None:
    nodes = [Topology(rank, 0, rank, 2, 1, 2) for rank in range(2)]
    mine = {"id": "exp", "name": "nm", "config": {"lr": 0.1}}
    theirs = {"id": "exp", "name": "other", "tags": ["t"], "config": {"lr": 0.2}}
    for topology, given in zip(nodes, (mine, theirs), strict=True):
        open_rank(topology, wandb_init=given, create_new=False, system_metrics="all-nodes")
    first, second = fake_wandb.arguments
    assert {name: second[name] for name in mine} == {name: first[name] for name in mine} == mine
    assert second["settings"].x_label == "worker-1"
    assert second["reinit"] == "create_new"


@pytest.mark.usefixtures("store")
def test_a_node_that_cannot_attach_for_hardware_trains_without_it(
    unreliable: Any, fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [Topology(rank, 0, rank, 2, 1, 2) for rank in range(2)]
    unreliable(**{"worker-1_online": 9})
    for topology in nodes:
        open_rank(topology, wandb_init={"id": "exp"}, create_new=False, system_metrics="all-nodes")
    assert "rank 1 does not record the hardware of its node: " in caplog.text
    assert len(fake_wandb.runs) == 1


@pytest.mark.usefixtures("store")
def test_if_the_primary_refuses_its_arguments_the_other_ranks_say_why() -> None:
    with pytest.raises(ConfigurationError, match="Rank 0 is the primary of the job, but it is not in unit"):
        open_rank(0, run_mode="shared", unit=[1])
    with pytest.raises(ConfigurationError, match="Rank 0 opens no run: Rank 0 is the primary of the job"):
        open_rank(1, run_mode="shared")


def test_a_sidecar_that_cannot_be_written_does_not_end_the_training(
    job: Job, fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    (fake_wandb.directory / "run-0" / "dist-wandb.json").mkdir(parents=True)
    first, _ = job(TWO, lambda _: {"id": "exp", "mode": "offline"})
    assert first.run.offline
    assert "rank 0 could not write dist-wandb.json beside its run (Is a directory)" in caplog.text
