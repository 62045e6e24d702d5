"""Calls that need the run, on ranks without it: alerts reach it, and what is not saved is reported."""

from __future__ import annotations

import copy
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from fakes import THREE, FakeWandb, Job, on_ranks
from units import eventually
from wandb.sdk.internal import profiler
from wandb.sdk.wandb_alerts import AlertLevel

import dist_wandb
from dist_wandb.errors import RendezvousError
from dist_wandb.job.job_store import SharedList
from dist_wandb.session import own_run
from dist_wandb.session.opener import open_session
from dist_wandb.settings.options import Options


def test_an_alert_of_all_ranks_is_sent_once_for_each_time(job: Job, fake_wandb: FakeWandb) -> None:
    sessions = job(THREE)

    def alert(rank: int) -> None:
        for _ in range(2):
            sessions[rank].alert("epoch", text="done")
        if rank == 1:
            sessions[rank].alert("mine", "")
        sessions[rank].finish()

    on_ranks(3, alert)
    assert sorted(fake_wandb.runs[0].alerts) == [("epoch", "done", None, None)] * 2 + [("mine", "", None, None)]


def test_an_alert_of_wandbs_own_function_is_the_sessions(fake_wandb: FakeWandb) -> None:
    """As a library calls it on all ranks; that of rank 0 was not known, so the run had both."""
    fake_wandb.sets_globals = True
    open_session(Options(), {"id": "exp"}, integration="test", topology=THREE[0])
    with pytest.raises(ValueError, match="level must be one of"):
        vars(wandb)["alert"]("NaN", "in the loss", level="bogus")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_alert_that_wandb_refuses_is_refused_on_every_rank(job: Job, fake_wandb: FakeWandb, rank: int) -> None:
    """With the errors of wandb 0.31, each time."""
    session = job(THREE)[rank]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"level must be one of 'INFO', 'WARN', or 'ERROR'"):
            session.alert("NaN", "in the loss", level="bogus")
    with pytest.raises(TypeError, match="wait_duration must be an int, float, or"):
        session.alert("NaN", "in the loss", wait_duration="1 min")
    with pytest.raises(TypeError, match="'text'"):
        session.alert("NaN")
    assert fake_wandb.runs[0].alerts == []


def test_an_alert_of_another_rank_that_fails_is_said_where_the_run_is(
    job: Job, fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    sessions = job(THREE)
    fake_wandb.runs[0].alert = fail  # type: ignore[method-assign]
    sessions[2].alert("NaN", "in the loss")
    said = "an alert of another rank could not be sent: 'NaN': ConnectionError('no network')"
    eventually(lambda: said in caplog.text)


def test_an_alert_is_sent_however_often_other_ranks_have_published_something(job: Job, fake_wandb: FakeWandb) -> None:
    sessions = job(THREE)
    for epoch in range(5):
        sessions[0].config.update({"epoch": epoch}, allow_val_change=True)
    time.sleep(0.5)  # some rounds, in which all ranks hear of it
    sessions[2].alert("NaN", "in the loss")
    eventually(lambda: fake_wandb.runs[0].alerts)


class BusyList(SharedList):
    """A list whose store does not answer at first, or answers no more once it has told how many values there are."""

    refusals = iter(["an error", "nothing"])

    def read_new(self, *, soon: bool = False) -> list[Any]:
        refusal = next(self.refusals, None)
        if refusal == "an error":
            raise RendezvousError("busy")
        return [] if refusal else super().read_new(soon=soon)


def test_an_alert_is_read_again_if_the_store_did_not_answer(
    job: Job, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_run, "SharedList", BusyList)
    sessions = job(THREE)
    sessions[2].alert("NaN", "in the loss", AlertLevel.ERROR, timedelta(minutes=5))
    eventually(lambda: fake_wandb.runs[0].alerts == [("NaN", "in the loss", "ERROR", 300.0)])


@pytest.mark.usefixtures("fake_wandb")
def test_an_alert_without_a_store_is_said_not_to_reach_the_run(caplog: pytest.LogCaptureFixture) -> None:
    session = open_session(Options(), {"id": "exp"}, integration="test", topology=THREE[2])
    session.alert("NaN", "in the loss")
    why = "did not reach the rank that has the run: this process has no store of the job, as before init_process_group"
    assert f"the alert 'NaN' of rank 2 {why}" in caplog.text


@pytest.mark.parametrize("name", ["save", "log_artifact", "log_model", "log_code", "use_artifact"])
def test_what_ranks_without_a_run_save_is_reported_once(job: Job, name: str, caplog: pytest.LogCaptureFixture) -> None:
    sessions = job(THREE)
    for session in sessions[1:]:
        for _ in range(2):
            assert not getattr(session, name)("part.pt", name="part")
    (message,) = [message for message in caplog.messages if " nothing there" in message]
    what = "returns" if name == "use_artifact" else "saves"
    assert message.startswith(f"dist_wandb: rank 1 called {name}, which {what} nothing there")
    assert ("run_mode='shared'" in message) == (what == "saves")


def test_ranks_with_a_run_save_without_a_message(job: Job, caplog: pytest.LogCaptureFixture, fake_wandb: Any) -> None:
    sessions = job(THREE, run_mode="shared")
    for run in fake_wandb.runs:
        run.save = lambda path: path
    assert [session.save("part.pt") for session in sessions] == ["part.pt"] * 3
    assert "saves nothing" not in caplog.text


def test_a_copy_of_a_session_is_the_session_and_its_config_can_be_saved_in_a_checkpoint(job: Job) -> None:
    for session in job(THREE, lambda _: {"config": {"lr": 0.1, "mlp": {"depth": 2}}}):
        assert copy.deepcopy({"model": [session]})["model"][0] is copy.copy(session) is session
        saved = pickle.loads(pickle.dumps({"cfg": session.config}))["cfg"]  # noqa: S301  # our own
        assert dict(saved) == dict(copy.deepcopy(session.config)) == {"lr": 0.1, "mlp": {"depth": 2}}


def test_a_deep_copy_of_what_stands_in_for_a_run_logs(job: Job, fake_wandb: FakeWandb) -> None:
    """As wandb's run, which is its own deep copy."""
    sessions = job(THREE)
    for rank, session in enumerate(sessions):
        run = copy.deepcopy([session.run])[0] if rank else session.run
        run.log({"loss": float(rank)}, step=0)
        run.summary["best"] = rank
    assert [session.summary["best"] for session in sessions] == [0, 1, 2]
    on_ranks(3, lambda rank: sessions[rank].finish())
    assert [row["loss"] for row in fake_wandb.runs[0].rows] == [1.0]


@pytest.mark.parametrize("mode", [{"mode": "disabled"}, {}], ids=["argument", "environment"])
def test_a_disabled_run_takes_every_call(
    bare_environment: None,  # noqa: ARG001  # used for its effect
    monkeypatch: pytest.MonkeyPatch,
    mode: dict[str, Any],
) -> None:
    """As that of wandb 0.31: its summary shows what was logged, its step is 0, and only `dict` refuses a row."""
    monkeypatch.setenv("WANDB_MODE", "online" if mode else "disabled")
    with dist_wandb.init(**mode) as session:
        session.define_metric()
        session.alert()
        session.log({1: 2, "loss": 0.5}, "x", -1)  # type: ignore[arg-type, dict-item]  # that is the test
        session.run.log({"a\0": 1}, -1, "bogus", 7)  # type: ignore[arg-type, call-arg]  # that is the test
        assert (session.summary[1], session.summary["loss"], session.summary["a\0"]) == (2, 0.5, 1)
        assert session.run.step == 0
        for row in (10, None):
            with pytest.raises(TypeError, match="is not iterable"):
                session.log(row)  # type: ignore[arg-type]  # that is the test
    session.log({"late": 1})
    assert session.summary["late"] == 1


def test_disabled_runs_take_every_row_on_all_ranks(job: Job) -> None:
    sessions = job(THREE, lambda _: {"mode": "disabled"})

    def log(rank: int) -> None:
        session = sessions[rank]
        session.log({1: 2, "loss": torch.tensor(float(rank))}, -1)  # type: ignore[dict-item]  # that is the test
        session.finish()
        session.log({"late": rank})

    on_ranks(3, log)
    assert [dict(session.summary)["loss"] for session in sessions[1:]] == [1.0, 2.0]


def test_wandbs_own_module_can_be_used_on_a_rank_without_a_run(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    sessions = job(THREE, lambda _: {"config": {"lr": 0.1}})
    wandb.define_metric("loss", summary="min")
    wandb.watch(torch.nn.Linear(1, 1))
    wandb.save("part.pt")
    assert "called save, which saves nothing there" in caplog.text
    assert wandb.run is not None, "which is an error for many libraries"
    assert not wandb.run
    assert wandb.init(project="other") is wandb.init(reinit="return_previous") is wandb.run, "as where it is open"
    assert wandb.config["lr"] == wandb.config.lr == 0.1
    wandb.summary["best"] = 0.5
    assert wandb.summary["best"] == 0.5
    opened = wandb.init(reinit="create_new")
    assert opened
    opened.finish()
    with ThreadPoolExecutor() as pool:
        pool.submit(sessions[0].finish)  # waits for the others
        for _ in sessions[1:]:  # the last one first, as they share this process
            assert not wandb.run
            wandb.finish()
    assert wandb.run is None
    for call in (lambda: wandb.config["lr"], lambda: wandb.save("part.pt")):
        with pytest.raises(wandb.Error, match=r"must call wandb\.init"):
            call()


def test_an_artifact_saves_itself_on_a_rank_without_a_run_as_while_a_run_is_open(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a run, `Artifact.save` opens one and finishes it: this would be the end of the session."""
    session = job(THREE, lambda _: {})[-1]
    artifact = wandb.Artifact("weights", type="model")
    artifact.save()
    assert artifact.wait() is artifact, "not an error: it is on its way elsewhere"
    artifact.link("models/digits")
    assert "called log_artifact, which saves nothing there" in caplog.text
    session.log({"loss": 0.5})
    assert session.summary["loss"] == 0.5


@pytest.mark.newest  # with the profiler's handler
def test_a_rank_without_a_run_writes_no_trace_of_torchs_profiler(job: Job, fake_wandb: FakeWandb) -> None:
    """wandb's handler raises if ``pytorch_traces`` exists in the directory of the run."""
    job(THREE, lambda _: {})
    traces = Path(fake_wandb.runs[0].dir, "pytorch_traces")
    traces.mkdir(parents=True)
    handler: Any = profiler.torch_trace_handler
    with torch.profiler.profile(on_trace_ready=handler()):
        torch.ones(1)
    assert not list(traces.iterdir())
