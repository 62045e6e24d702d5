"""Starts with resume="auto", and the records that they find."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from fakes import FakeWandb, on_ranks, open_rank
from restarts import RECORDS, SLURM, Start, given, ids, kill, last_warnings
from strangers import OBSTACLES, give_away

from dist_wandb.errors import ConfigurationError
from dist_wandb.job import job_store
from dist_wandb.session.restart import RestartRecord
from dist_wandb.session.session import Session


@pytest.mark.parametrize("resume", ["auto", True])
@pytest.mark.parametrize("run_mode", ["auto", "shared", "new"])
def test_a_second_start_continues_with_resume_auto(
    start: Start, fake_wandb: FakeWandb, run_mode: str, resume: Any
) -> None:
    options = {"run_mode": run_mode}
    first = kill(start(options=options, resume=resume))
    assert ids(start(options=options, resume=resume)) == ids(first)
    assert set(given(fake_wandb, "resume", last=1)) == {"allow"}  # W&B's own record would belong to one process


def test_a_second_start_without_resume_makes_new_runs_and_a_new_record(start: Start) -> None:
    first = kill(start())
    second = kill(start())
    assert ids(second) != ids(first)
    assert ids(start(resume="auto")) == ids(second)


def test_resume_auto_on_rank_0_alone_is_enough(start: Start, fake_wandb: FakeWandb) -> None:
    kill(start())
    store = dist.HashStore()
    job_store._store_of_agent = lambda *_: store  # undone together with the fixture's patch
    options: dict[str, Any] = {"run_mode": "new", "reduce": None, "limits": {"join_timeout": 10.0}}
    on_ranks(2, lambda rank: open_rank(rank, wandb_init={"resume": "auto"} if rank == 0 else {}, **options))
    assert given(fake_wandb, "resume") == ["allow", "allow"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"options": {"run_mode": "shared"}}, "run_mode was 'new', and is 'shared'"),
        ({"options": {"rank_scope": "worker"}}, "rank_scope was 'global', and is 'worker'"),
    ],
)
def test_a_record_of_different_options_is_not_used_and_warns(
    start: Start, caplog: pytest.LogCaptureFixture, change: dict[str, Any], reason: str
) -> None:
    first = kill(start())
    assert start(resume="auto", **change)[0].plan.base_id != first[0].plan.base_id
    (warning,) = last_warnings(caplog)
    assert f"the run {first[0].plan.base_id} of an earlier start" in warning
    assert reason in warning


def killed_with_record(start: Start) -> tuple[list[Session], Path]:
    """Return the sessions of a job that was killed, and the restart record that they wrote."""
    sessions = kill(start())
    (record,) = RECORDS.glob("latest-*.json")
    return sessions, record


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b'{"format": 2}', b'{"format": 1, "base_id": "x"}'],
    ids=["empty", "binary", "list", "newer", "part"],
)
def test_a_damaged_record_is_ignored_with_a_warning(
    start: Start, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    first, record = killed_with_record(start)
    for _ in range(2):
        record.write_bytes(content)
        assert ids(start(resume="auto")) != ids(first)
    (warning,) = last_warnings(caplog)  # for both starts, because they share a process
    assert f"{record} is not a valid restart record of this job" in warning


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_an_obstacle_in_place_of_a_record_does_not_block_a_start(
    start: Start, caplog: pytest.LogCaptureFixture, obstacle: str
) -> None:
    first, record = killed_with_record(start)
    record.unlink()
    OBSTACLES[obstacle](record)
    begun = time.monotonic()
    sessions = start(resume="auto")
    assert time.monotonic() - begun < 30
    assert ids(sessions) != ids(first)
    warning, *others = last_warnings(caplog)
    assert f"{record} is not a valid restart record of this job" in warning
    assert len(others) == (obstacle == "directory")  # which a record cannot replace
    assert record.is_file() == (obstacle != "directory")


@pytest.mark.parametrize("what", ["record", "directory"])
def test_a_record_of_another_user_is_not_trusted(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    first, record = killed_with_record(start)
    give_away(record if what == "record" else RECORDS, monkeypatch)
    second = start(resume="auto")
    assert ids(second) != ids(first)
    warning, *others = last_warnings(caplog)
    place = record if what == "record" else RECORDS
    assert f"{place} belongs to user 65534, while this process runs as {os.getuid()}, so it is not trusted" in warning
    could_not = f"could not write a restart record of the run {second[0].plan.base_id} to {RECORDS}"
    assert [could_not in other for other in others] == [True] * (what == "directory")


def test_a_symbolic_link_in_place_of_the_directory_is_not_followed(
    start: Start, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    RECORDS.parent.mkdir()
    RECORDS.symlink_to(elsewhere)
    sessions = start(options={"run_mode": "auto"}, environ=SLURM)
    sessions[0].finish()
    (warning,) = last_warnings(caplog)
    assert f"{RECORDS} is a symbolic link, so it is not the expected directory. Remove it." in warning
    assert list(elsewhere.iterdir()) == []
    assert elsewhere.stat().st_mode & 0o777 == 0o755


def test_records_are_readable_only_by_the_user(start: Start) -> None:
    start()
    (record,) = RECORDS.iterdir()
    assert (RECORDS.stat().st_mode & 0o777, record.stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.parametrize(
    "changed", [{"run_mode": "\x1b[2J"}, {"rank_scope": ""}, {"project": 7}, {"job": []}, {"base_id": "a/b"}]
)
def test_an_invalid_record_is_refused(changed: dict[str, Any]) -> None:
    record = RestartRecord("a", "test/1", None, None, "new", "global", 2, None, 0, "")
    assert RestartRecord.of(vars(record)) == record
    with pytest.raises(ValueError, match=r"unknown|wrong type|refuses in run ids"):
        RestartRecord.of({**vars(record), **changed})


def test_resume_auto_without_a_store_needs_a_single_writer(start: Start, fake_wandb: FakeWandb) -> None:
    first = kill(start(store=False, options={"run_mode": "auto"}))
    start(store=False, options={"run_mode": "auto"}, resume="auto")
    assert given(fake_wandb, "id") == [first[0].id] * 2
    with pytest.raises(ConfigurationError, match="resume='auto' takes the run id from a restart record"):
        start(store=False, resume="auto")
