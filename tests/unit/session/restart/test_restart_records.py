"""The record that a start writes for a later one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeWandb
from new_process import begin_new_process
from restarts import RECORDS, SLURM, Start, given, kill, last_warnings, record_files

import dist_wandb
from dist_wandb.session.opener import open_session
from dist_wandb.session.restart import RestartStore
from dist_wandb.settings.options import Options


def test_the_record_describes_the_start(start: Start) -> None:
    (first, _) = start(environ={**SLURM, "MASTER_ADDR": "host", "MASTER_PORT": "1"}, project="digits", dir="place")
    records = sorted((Path("place") / RECORDS).iterdir())
    assert [path.name.partition("-")[0] for path in records] == ["job", "latest"]
    expected = {
        "format": 1,
        "base_id": first.plan.base_id,
        "session": "test/1",
        "project": "digits",
        "entity": None,
        "run_mode": "new",
        "rank_scope": "global",
        "world_size": 2,
        "job": "slurm-7-0",
        "requeues": 0,
        "rendezvous": "host:1/0",
    }
    assert [json.loads(path.read_text()) for path in records] == [expected] * 2


def test_only_rank_0_writes_a_record(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    monkeypatch.setattr(RestartStore, "leave", lambda _, base_id: left.append(base_id))
    first = start()
    assert left == [first[0].plan.base_id]


def test_a_disabled_run_writes_no_record(start: Start) -> None:
    start(mode="disabled")
    assert not Path("wandb").exists()


@pytest.mark.parametrize("obstacle", ["wandb", str(RECORDS)])
def test_a_record_that_cannot_be_written_warns_once(
    start: Start, caplog: pytest.LogCaptureFixture, obstacle: str
) -> None:
    Path("place", obstacle).parent.mkdir(parents=True)
    Path("place", obstacle).touch()
    sessions = start(dir="place", options={"run_mode": "auto"}, environ=SLURM)
    sessions[0].finish()
    (warning,) = [one for one in last_warnings(caplog) if "so its run is written to" not in one]
    assert f"could not write a restart record of the run {sessions[0].id} to {Path('place') / RECORDS}" in warning


def test_a_run_finished_by_the_user_is_not_continued(start: Start, fake_wandb: FakeWandb) -> None:
    start(options={"run_mode": "auto"})
    assert record_files() == ["latest"]
    fake_wandb.runs[0].end_by_wandb()
    dist_wandb.get_run()
    assert record_files() == []


def test_a_world_of_one_is_continued_by_its_id(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    first = dist_wandb.init("digits")
    kill([first])
    begin_new_process(monkeypatch)
    assert dist_wandb.init("digits", resume="auto").id == first.id
    assert given(fake_wandb, "resume", last=1) == ["allow"]  # W&B would follow its own record, whoever owns it
    assert given(fake_wandb, "id", last=1) == [first.id]


def test_an_adopted_run_has_no_record(fake_wandb: FakeWandb) -> None:
    theirs: Any = fake_wandb.init(id="theirs")
    open_session(Options(), {}, integration="test", adopt=lambda _: theirs)
    assert record_files() == []
