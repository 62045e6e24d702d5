"""Metadata of a run on ranks without it: published by the primary, and up to date."""

from __future__ import annotations

import copy
import pickle
import time
from typing import Any

import pytest
import torch.distributed as dist
import wandb
from config_jobs import begin_to_open
from fakes import TWO, FakeWandb, Job, open_rank
from units import eventually
from wandb.sdk.wandb_summary import Summary

from dist_wandb.job.topology import Topology
from dist_wandb.lightning.session_holder import GIVE_BACK
from dist_wandb.runs import run_metadata
from dist_wandb.runs.null_run import NullRun
from dist_wandb.runs.run_metadata import METADATA
from dist_wandb.session.session import Session

NODES = [Topology(rank, rank % 2, rank // 2, 4, 2, 2) for rank in range(4)]


def alone(rank: int) -> Session:
    limits = {"join_timeout": 0.3, "finish_timeout": 0.3, "heartbeat": 0.05}
    return open_rank(rank, wandb_init={"id": "exp"}, limits=limits, create_new=False)


def test_a_rank_without_a_run_receives_all_metadata(job: Job, fake_wandb: FakeWandb) -> None:
    given = {"name": "night", "project": "digits"}
    first, second = job(TWO, lambda _: given)
    run: Any = fake_wandb.runs[0]
    assert isinstance(second.run, NullRun)
    received = {name: getattr(second.run, name) for name in METADATA}
    assert received == {name: getattr(run, name, None) for name in METADATA}
    assert received["name"] == "night"
    assert received["url"] == f"https://wandb.example/team/digits/runs/{first.id}"
    assert (received["offline"], received["disabled"], received["resumed"]) == (False, False, False)
    assert second.name == "night", "a session looks up missing attributes on its run"


def test_settings_that_a_rank_without_a_run_was_given_are_read_there(job: Job) -> None:
    given = (wandb.Settings(silent=True, program="train.py", run_name="rank"), {"silent": True, "program": "train.py"})
    for settings in given:
        run: Any = job(TWO, lambda _, settings=settings: {"name": "night", "settings": settings})[1].run
        assert (run.settings.silent, run.settings.program) == (True, "train.py")
        assert (run.settings.run_name, run.settings.quiet) == ("night", False)
        assert (run.name, copy.copy(run).settings.silent) == ("night", True)


def test_changes_by_the_primary_appear_within_a_heartbeat(job: Job, fake_wandb: FakeWandb) -> None:
    _, second = job(TWO, lambda _: {"name": "night"})
    assert second.run.name == "night"
    fake_wandb.runs[0].name = "day"
    eventually(lambda: second.run.name == "day")


@pytest.mark.parametrize("resumed", [True, False])
def test_the_summary_of_a_resumed_run_is_read_on_all_ranks(job: Job, fake_wandb: FakeWandb, resumed: bool) -> None:
    opened, picture = fake_wandb.init, {"_type": "image-file"}
    before = {"best": 3, "val": {"acc": 0.5, "shown": picture}, "shown": picture, "text": "x", "other": 4, "_step": 2}

    def init(**arguments: Any) -> Any:
        run = opened(**arguments)
        vars(run).update(resumed=resumed, summary=Summary(lambda: before))
        return run

    fake_wandb.init = init  # type: ignore[method-assign]
    summary: Any = job(TWO)[1].run.summary
    summary["other"] = 5
    wanted = {"best": 3, "val": {"acc": 0.5}, "text": "x", "other": 5} if resumed else {"other": 5}
    assert (summary.get("best", 0), "best" in summary, dict(summary)) == (wanted.get("best", 0), resumed, wanted)
    summary["best"] = 4
    assert summary["best"] == 4
    del summary["best"]
    assert "best" not in summary


def test_every_unit_receives_the_metadata_of_its_own_run(job: Job) -> None:
    sessions = job(NODES, lambda _: {"id": "exp", "name": "night"}, rank_scope="worker")
    seen = [[one.run.id, one.run.name] for one in sessions]
    assert seen == [["exp-worker-0", "night-worker-0"]] * 2 + [["exp-worker-1", "night-worker-1"]] * 2


def test_metadata_have_the_same_types_as_on_the_rank_with_the_run(job: Job, fake_wandb: FakeWandb) -> None:
    first, second = job(TWO)
    fake_wandb.runs[0].tags = ("a", "b")  # type: ignore[attr-defined]
    fake_wandb.runs[0].start_time = 1.5  # type: ignore[attr-defined]
    fake_wandb.runs[0].notes = object()  # type: ignore[attr-defined]  # cannot be published
    first.config["lr"] = 0.1
    eventually(lambda: second.run.start_time == 1.5)
    run: Any = second.run
    assert run.tags == ("a", "b")
    assert not run.notes.deeper()


def test_the_first_read_waits_for_the_primary_until_the_timeout_but_a_planned_id_is_known(
    store: dist.Store,
    fake_wandb: FakeWandb,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin_to_open(store)
    second = alone(1)
    began = time.monotonic()
    with pytest.warns(UserWarning, match="read on rank 1, but its primary did not open its run .* 0.3 s"):
        assert (second.run.name, second.run.url) == (None, None)
    with monkeypatch.context() as after_that:
        after_that.setattr("dist_wandb.session.job_link.poll", lambda *_: pytest.fail("the wait must happen only once"))
        assert {name for name in METADATA if getattr(second.run, name)} == {"id"}
        assert second.run.id == "exp"
    assert 0.2 < time.monotonic() - began < 20
    first = alone(0)
    eventually(lambda: second.run.url == first.url)
    assert second.run.id == fake_wandb.runs[0].id == "exp"


def test_the_address_of_a_run_on_disk_is_not_read() -> None:
    class Touchy:
        id, offline, disabled = "exp", True, False

        @property
        def url(self) -> str:
            raise AssertionError("wandb warns about this")

        project_url = sweep_url = url

    run: Any = Touchy()
    found = run_metadata.metadata_of(run)
    known = {"id": "exp", "offline": True, "disabled": False}
    assert {name: value for name, value in found.items() if value is not None} == known
    assert found["sweep_url"] is None  # not a stand-in


@pytest.mark.parametrize("twin_of", [copy.copy, lambda it: pickle.loads(pickle.dumps(it))])  # noqa: S301
def test_a_copy_keeps_the_metadata_known_at_its_time(job: Job, fake_wandb: FakeWandb, twin_of: Any) -> None:
    _, second = job(TWO, lambda _: {"name": "night", "config": {"lr": 0.1}})
    twin = twin_of(second.run)
    fake_wandb.runs[0].name = "day"
    eventually(lambda: second.run.name == "day")
    assert isinstance(twin, NullRun)
    assert (twin.name, twin.id, twin.offline) == ("night", fake_wandb.runs[0].id, False)
    assert twin.config["lr"] == 0.1


@pytest.mark.newest  # wandb 0.19 has no public class of its runs
def test_metadata_and_methods_with_a_result_are_those_of_wandb() -> None:
    assert all(isinstance(getattr(wandb.Run, name, None), property) for name in METADATA)
    methods = {name: getattr(wandb.Run, name) for name in dir(wandb.Run) if not name.startswith("_")}
    giving = {
        name
        for name, method in methods.items()
        if callable(method) and method.__annotations__.get("return") not in (None, "None")
    }
    assert {"use_artifact", "define_metric"} <= giving <= GIVE_BACK
    assert GIVE_BACK.isdisjoint({"log", "watch", "alert", "finish", "something"})
