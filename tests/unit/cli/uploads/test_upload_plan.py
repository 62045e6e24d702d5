"""Planned uploads: which files belong together, their order, reasons to refuse, and earlier uploads."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from upload_runs import CONFIRMED, ENDED, NO_RUN_RECORD, TRUSTING, log_of_attempt, of_rank, order, planned, rows, stored

from dist_wandb.cli.uploads.execution import remember
from dist_wandb.cli.uploads.plan import is_uploaded, plan_uploads
from dist_wandb.wandb_files.reading import StoredRun


def test_the_primarys_files_come_last_and_the_last_one_ends_the_run(tmp_path: Path) -> None:
    run = planned(*(of_rank(tmp_path, rank, session=session) for rank in range(2) for session in (2, 1)))
    assert order(run) == [f"rank-{rank}/offline-run-{session}-exp" for rank in (1, 0) for session in (1, 2)]
    assert [file.finishes for file in run.files] == [False, False, False, True]
    assert (run.refusals, run.notes) == ((), ())
    run = planned(of_rank(tmp_path, 0), of_rank(tmp_path, 1, name="other", config={"lr": 1}))
    assert run.notes == ("The ranks differ in name, config: the run gets the primary's.",)
    assert run.files[-1].run.name == "nm"


def test_the_files_of_a_resumed_plain_run_are_sent_one_after_the_other(tmp_path: Path) -> None:
    starts = {"offline-run-1-exp": "2026-01-03", "offline-run-2-exp": "2026-01-01", "offline-run-3-exp": "2026-01-02"}
    others = [stored(tmp_path, run_id="b"), stored(tmp_path, project="other")]  # runs of their own
    run, *separate = plan_uploads(
        [*(stored(tmp_path, folder, started=f"{day}T00:00:00Z") for folder, day in starts.items()), *others]
    )
    assert [(one.run_id, one.project) for one in separate] == [("b", "digits"), ("exp", "other")]
    assert order(run) == [f"{tmp_path.name}/offline-run-{number}-exp" for number in (2, 3, 1)]
    assert [(bool(file.earlier), file.finishes) for file in run.files] == [(False, True), (True, True), (True, True)]


@pytest.mark.parametrize(("age", "exit_code", "refused"), [(30, None, True), (90, None, False), (30, 1, False)])
def test_a_run_that_is_still_written_to_is_refused(
    tmp_path: Path, age: float, exit_code: int | None, refused: bool
) -> None:
    run = planned(stored(tmp_path, exit_code=exit_code, changed=time.time() - age))
    assert any("is still being written" in reason for reason in run.refusals) is refused
    assert any("marked as failed" in note for note in run.notes) is (exit_code is None)


PARTS: dict[str, tuple[Callable[[Path], list[StoredRun]], list[str]]] = {
    "only a secondary": (
        lambda top: [of_rank(top, 1)],
        ["The primary's file is missing", "Of its 2 ranks, rank 0 is missing"],
    ),
    "one of an unknown number, in worker scope": (lambda top: [of_rank(top, 0, rank_scope="worker")], []),
    "one for each node, which records its hardware": (lambda top: [of_rank(top, 0, run_mode="auto")], []),
    "two primaries": (
        lambda top: [of_rank(top, 0), of_rank(top, 1, primary=True)],
        ["It has several primaries: 'rank-0', 'rank-1'."],
    ),
    "one without its sidecar": (
        lambda top: [of_rank(top, 0), of_rank(top, 1, sidecar=None)],
        ["rank-1/offline-run-1-exp has no dist-wandb.json", "Of its 2 ranks, rank 1 is missing"],
    ),
    "copies": (
        lambda top: [stored(top / "a"), stored(top / "b")],
        ["are copies of one file: their rows would be uploaded 2 times"],
    ),
}


@pytest.mark.parametrize(("parts", "reasons"), PARTS.values(), ids=PARTS.keys())
def test_a_run_is_refused_if_it_is_incomplete_or_ambiguous(
    tmp_path: Path, parts: Callable[[Path], list[StoredRun]], reasons: list[str]
) -> None:
    refusals = planned(*parts(tmp_path)).refusals
    assert len(refusals) == len(reasons)
    assert all(reason in refusal for reason, refusal in zip(reasons, refusals, strict=True)), refusals


def test_a_rewind_of_a_shared_run_is_refused(tmp_path: Path) -> None:
    """The other ranks' files are sent first, so that the server drops their rows after the branch point."""
    starts = [(rank, session) for session in (1, 2) for rank in (0, 1)]
    files = [of_rank(tmp_path, rank, session=session, branches=(rank, session) == (0, 2)) for rank, session in starts]
    (refusal,) = planned(*files).refusals
    assert "rank-0/offline-run-2-exp begins by rewinding or forking the shared run" in refusal
    assert planned(stored(tmp_path, branches=True)).refusals == ()  # a plain run's is sent
    log_of_attempt(files[2], rows(5), CONFIRMED, *ENDED)
    assert planned(*files).refusals == ()  # it was written online, or is uploaded


@pytest.mark.parametrize(
    ("problem", "refused"),
    [(NO_RUN_RECORD, True), ("dist-wandb.json: not in dist_wandb's format", True), ("skipped corrupt data", False)],
)
def test_damage_is_refused_only_if_the_run_of_the_file_is_unknown(tmp_path: Path, problem: str, refused: bool) -> None:
    run = planned(stored(tmp_path, problems=(problem,)))
    assert any(problem in reason for reason in run.refusals) is refused
    assert any(f"the readable part is uploaded, but {problem}" in note for note in run.notes)


ONLINE_LOGS: dict[str, tuple[list[dict[str, Any]] | None, bool]] = {
    "no log": (None, True),
    "a log that tells nothing": (ENDED, True),
    "a server that never answered": ([{"level": "ERROR", "msg": "no such host"}, *ENDED], False),
    "killed before it sent anything": ([], False),
    "cut off": ([rows(2), CONFIRMED], False),
}


@pytest.mark.parametrize(("entries", "refused"), ONLINE_LOGS.values(), ids=ONLINE_LOGS.keys())
def test_an_online_run_is_refused_if_its_log_does_not_show_what_arrived(
    tmp_path: Path, entries: list[dict[str, Any]] | None, refused: bool
) -> None:
    run = stored(tmp_path, "run-1-exp")
    if entries is not None:
        (run.path.parent / "logs").mkdir()
        text = "".join(f"{json.dumps(entry)}\n" for entry in entries)
        (run.path.parent / "logs" / "debug-internal.log").write_text(text)
    assert any("does not show which rows arrived" in reason for reason in planned(run).refusals) is refused


def test_a_log_that_is_a_pipe_is_a_danger_of_its_run(tmp_path: Path) -> None:
    run = stored(tmp_path, "run-1-exp")
    (run.path.parent / "logs").mkdir()
    os.mkfifo(run.path.parent / "logs" / "debug-internal.log")
    assert not is_uploaded(run)
    assert "debug-internal.log is a named pipe" in planned(run).dangers[0]


STATES: dict[str, tuple[list[dict[str, Any]], bool, int]] = {
    "all confirmed": ([rows(5), CONFIRMED, *ENDED], True, 0),
    "not all": ([rows(4), CONFIRMED, *ENDED], False, 1),
    "not at its end": ([rows(5), CONFIRMED], False, 0),
    "with a problem": ([rows(5), CONFIRMED, {"level": "ERROR", "msg": "a file was refused"}, *ENDED], False, 0),
}


@pytest.mark.parametrize(("entries", "uploaded", "left"), STATES.values(), ids=STATES.keys())
def test_only_confirmed_rows_count_as_uploaded(
    tmp_path: Path, entries: list[dict[str, Any]], uploaded: bool, left: int
) -> None:
    run = stored(tmp_path)
    log_of_attempt(run, *entries)
    (run.path.parent / "run-exp.wandb.synced").touch()  # `wandb sync` makes the mark in any case
    (file,) = planned(run).files
    assert (file.is_uploaded, file.rows_left) == (uploaded, left)


def test_files_uploaded_by_wandb_sync_are_left_out_if_trusted(tmp_path: Path) -> None:
    runs = [of_rank(tmp_path, rank) for rank in range(2)]
    (runs[1].path.parent / "run-exp.wandb.synced").touch()
    (reason,) = planned(*runs).refusals
    assert "was marked as uploaded by `wandb sync` (run-exp.wandb.synced), but you have not uploaded it" in reason
    run = planned(*runs, terms=TRUSTING)
    assert [file.is_uploaded for file in run.files] == [True, False]
    assert any("`wandb sync` marked it as uploaded" in note for note in run.notes)
    remember(run.files[0])
    assert [file.is_uploaded for file in planned(*runs).files] == [True, False]
