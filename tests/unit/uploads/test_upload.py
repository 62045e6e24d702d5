"""What is uploaded together, in which order, what is refused and why; and uploads by a stand-in for `wandb sync`."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from offline_runs import sidecar_record
from record_files import content_of, new_record

from dist_wandb.cli import sync
from dist_wandb.cli.commands import main
from dist_wandb.errors import ReadError, UploadError
from dist_wandb.runs.destination import Destination
from dist_wandb.uploads import plan as plan_module
from dist_wandb.uploads import problems
from dist_wandb.uploads.execution import Outcome, remember, upload
from dist_wandb.uploads.log import Sent
from dist_wandb.uploads.model import Terms, UploadFile, UploadRun
from dist_wandb.uploads.plan import is_uploaded, plan_uploads
from dist_wandb.uploads.state import FileState, remove_left_copies
from dist_wandb.wandb_files.reading import StoredRun
from dist_wandb.wandb_files.record_file import Lines
from dist_wandb.wandb_files.sidecar import Sidecar

ENDED: list[dict[str, Any]] = [{"msg": "sender: closed"}]
CONFIRMED: dict[str, Any] = {"msg": "filestream: request sent"}
NOW, LONG_AGO = 1_000_000.0, 1_000.0
NO_RUN_RECORD = "its run record is lost, and with it name, project, group and config"


def rows(number: int) -> dict[str, Any]:
    return {"msg": "filestream: sending request", "history_lines": number}


def stored(
    directory: Path, folder: str = "offline-run-1-exp", *, changed: float = LONG_AGO, **values: Any
) -> StoredRun:
    """A run of five rows; its file has no records, as planning reads nothing but the logs."""
    path = directory / folder / "run-exp.wandb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b":W&B\xe1\xbe\x00")
    os.utime(path, (changed, changed))
    given: dict[str, Any] = {
        "path": path,
        "run_id": "exp",
        "name": "nm",
        "project": "digits",
        "group": None,
        "job_type": None,
        "tags": (),
        "config": {},
        "started": "2026-01-01T00:00:00Z",
        "exit_code": 0,
        "rows": 5,
        "metrics": {},
        "sidecar": None,
        "problems": (),
        **values,
    }
    return StoredRun(**given)


def of_rank(directory: Path, rank: int, *, world_size: int = 2, session: int = 1, **values: Any) -> StoredRun:
    """A writer of a shared run, rank 0 its primary."""
    primary = values.pop("primary", rank == 0)
    job = {name: values.pop(name) for name in ("rank_scope", "run_mode") if name in values}
    place = {"label": f"rank-{rank}", "global_rank": rank, "local_rank": rank, "world_size": world_size}
    record = sidecar_record(primary=primary, update_finish_state=primary, **place, **job)
    sidecar = Sidecar(**{name: value for name, value in record.items() if name != "format"})
    values = {"started": f"2026-01-0{session}T00:00:0{rank}Z", "sidecar": sidecar, **values}
    return stored(directory / f"rank-{rank}", f"offline-run-{session}-exp", **values)


def write_log(attempt: Path, *entries: dict[str, Any]) -> None:
    log = attempt / "wandb" / "logs" / "debug-sync.1.log"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))


def log_of_attempt(run: StoredRun, *entries: dict[str, Any]) -> None:
    """What this user's own upload of a run has left."""
    state = FileState(run.path)
    with state.locked():
        write_log(state.begin(Sent()), *entries)


TRUSTING = Terms(trust=True)


def planned(*runs: StoredRun, terms: Terms = Terms()) -> UploadRun:  # noqa: B008  # frozen
    (run,) = plan_uploads(runs, now=NOW, terms=terms)
    return run


def order(run: UploadRun) -> list[str]:
    return [f"{file.path.parent.parent.name}/{file.path.parent.name}" for file in run.files]


# --- what goes together, and in which order ---------------------------------------------------------------------------


def test_the_primary_comes_last_and_ends_the_run(tmp_path: Path) -> None:
    run = planned(*(of_rank(tmp_path, rank, world_size=3) for rank in range(3)))
    assert order(run) == [f"rank-{rank}/offline-run-1-exp" for rank in (1, 2, 0)]
    assert [file.finishes for file in run.files] == [False, False, True]
    assert (run.is_shared, run.refusals, run.notes) == (True, (), ())
    assert run.describing is run.files[-1].run


def test_the_files_of_a_restarted_shared_run_have_one_end(tmp_path: Path) -> None:
    run = planned(*(of_rank(tmp_path, rank, session=session) for rank in range(2) for session in (2, 1)))
    assert order(run) == [f"rank-{rank}/offline-run-{session}-exp" for rank in (1, 0) for session in (1, 2)]
    assert [file.finishes for file in run.files] == [False, False, False, True]
    assert run.refusals == ()


def test_the_files_of_a_resumed_plain_run_go_on_one_behind_the_other(tmp_path: Path) -> None:
    starts = {"offline-run-1-exp": "2026-01-03", "offline-run-2-exp": "2026-01-01", "offline-run-3-exp": "2026-01-02"}
    run = planned(*(stored(tmp_path, folder, started=f"{day}T00:00:00Z") for folder, day in starts.items()))
    assert order(run) == [f"{tmp_path.name}/offline-run-{number}-exp" for number in (2, 3, 1)]
    assert [(file.resumes, file.finishes) for file in run.files] == [(False, True), (True, True), (True, True)]


def test_other_runs_are_runs_of_their_own(tmp_path: Path) -> None:
    given = [
        stored(tmp_path, "offline-run-1-a", run_id="a"),
        stored(tmp_path, "offline-run-1-b", run_id="b"),
        stored(tmp_path, "offline-run-2-a", run_id="a", project="other"),
    ]
    assert [(run.run_id, run.project) for run in plan_uploads(given, now=NOW)] == [
        ("a", "digits"),
        ("b", "digits"),
        ("a", "other"),
    ]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("age", "exit_code", "refused"), [(30, None, True), (90, None, False), (30, 1, False)])
def test_a_run_that_is_still_written_to_is_refused(
    tmp_path: Path, age: float, exit_code: int | None, refused: bool
) -> None:
    run = planned(stored(tmp_path, exit_code=exit_code, changed=NOW - age))
    assert any("is still being written" in reason for reason in run.refusals) is refused
    assert any("marked as failed" in note for note in run.notes) is (exit_code is None)


@pytest.mark.parametrize(
    ("ranks", "reasons"),
    [
        ([1], ["The primary's file is missing", "Of its 2 ranks, rank 0 is missing"]),
        ([0], ["Of its 2 ranks, rank 1 is missing"]),
        ([0, 1], []),
    ],
)
def test_a_shared_run_that_is_not_whole_is_refused(tmp_path: Path, ranks: list[int], reasons: list[str]) -> None:
    run = planned(*(of_rank(tmp_path, rank) for rank in ranks))
    assert len(run.refusals) == len(reasons)
    assert all(reason in refusal for reason, refusal in zip(reasons, run.refusals, strict=True))


def test_of_many_missing_ranks_some_are_named(tmp_path: Path) -> None:
    (reason,) = planned(of_rank(tmp_path, 0, world_size=64)).refusals
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 and others are missing" in reason


def test_the_ranks_of_one_node_are_not_counted(tmp_path: Path) -> None:
    assert planned(of_rank(tmp_path, 0, world_size=8, rank_scope="worker")).refusals == ()


def test_ranks_that_attached_for_hardware_alone_are_not_missed(tmp_path: Path) -> None:
    """With ``system_metrics="all-nodes"`` one rank of each node has a file; how many nodes there are is not known."""
    assert planned(of_rank(tmp_path, 0, world_size=8, run_mode="auto")).refusals == ()


def test_several_primaries_are_refused(tmp_path: Path) -> None:
    run = planned(of_rank(tmp_path, 0), of_rank(tmp_path, 1, primary=True))
    assert run.refusals == ("It has several primaries: 'rank-0', 'rank-1'.",)


def test_a_rank_whose_sidecar_is_gone_is_refused(tmp_path: Path) -> None:
    run = planned(of_rank(tmp_path, 0), of_rank(tmp_path, 1, sidecar=None))
    assert any("rank-1/offline-run-1-exp has no dist-wandb.json" in reason for reason in run.refusals)


def test_copies_are_refused(tmp_path: Path) -> None:
    (reason,) = planned(stored(tmp_path / "a"), stored(tmp_path / "b")).refusals
    assert "are copies of one file: their rows would be uploaded 2 times" in reason


@pytest.mark.parametrize(
    ("problem", "refused"),
    [(NO_RUN_RECORD, True), ("dist-wandb.json: not in dist_wandb's format", True), ("skipped corrupt data", False)],
)
def test_damage_is_refused_where_it_is_not_known_what_the_file_is(tmp_path: Path, problem: str, refused: bool) -> None:
    run = planned(stored(tmp_path, problems=(problem,)))
    assert any(problem in reason for reason in run.refusals) is refused
    assert any(f"the readable part is uploaded, but {problem}" in note for note in run.notes)


def test_rows_that_may_have_arrived_are_refused(tmp_path: Path) -> None:
    run = stored(tmp_path)
    log_of_attempt(run, rows(2), CONFIRMED, rows(3))
    (reason,) = planned(run).refusals
    assert "of its 5 rows the server has confirmed 2, and of 3 more it is not known whether they arrived" in reason


ONLINE_LOGS: dict[str, tuple[list[dict[str, Any]] | None, bool]] = {
    "no log": (None, True),
    "a log that tells nothing": (ENDED, True),
    "a server that never answered": ([{"level": "ERROR", "msg": "no such host"}, *ENDED], False),
    "killed before it sent anything": ([], False),
    "cut off": ([rows(2), CONFIRMED], False),
}


@pytest.mark.parametrize(("entries", "refused"), ONLINE_LOGS.values(), ids=ONLINE_LOGS.keys())
def test_an_online_run_is_refused_if_nobody_knows_what_arrived(
    tmp_path: Path, entries: list[dict[str, Any]] | None, refused: bool
) -> None:
    run = stored(tmp_path, "run-1-exp")
    if entries is not None:
        (run.path.parent / "logs").mkdir()
        text = "".join(f"{json.dumps(entry)}\n" for entry in entries)
        (run.path.parent / "logs" / "debug-internal.log").write_text(text)
    assert any("does not show which rows arrived" in reason for reason in planned(run).refusals) is refused


def test_unequal_descriptions_are_told(tmp_path: Path) -> None:
    run = planned(of_rank(tmp_path, 0), of_rank(tmp_path, 1, name="other", config={"lr": 1}))
    assert run.notes == ("The ranks differ in name, config: the run gets the primary's.",)
    assert run.describing.name == "nm"


@pytest.mark.parametrize("world_size", [10**6, 10**12])
def test_a_world_of_any_size_is_not_counted_through(
    tmp_path: Path, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks were put into a set: with 10^10 of them, as a file may say, all memory was taken."""
    looked_at = 0

    def counted(size: int) -> Iterator[int]:
        nonlocal looked_at
        for rank in range(size):
            looked_at += 1
            yield rank

    monkeypatch.setattr(problems, "range", counted, raising=False)
    (reason,) = planned(of_rank(tmp_path, 0, world_size=world_size)).refusals
    assert f"Of its {world_size} ranks, ranks 1, 2, 3, 4, 5, 6, 7, 8 and others are missing" in reason
    assert looked_at < 100


HOSTILE_LOGS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pipe": (os.mkfifo, "debug-internal.log is a named pipe"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "debug-internal.log is a symbolic link"),
    "a directory": (Path.mkdir, "debug-internal.log is a directory"),
}


@pytest.mark.parametrize(("make", "reason"), HOSTILE_LOGS.values(), ids=HOSTILE_LOGS.keys())
def test_a_log_that_cannot_be_read_is_the_failure_of_its_run_alone(
    tmp_path: Path, make: Callable[[Path], None], reason: str
) -> None:
    hurt, healthy = stored(tmp_path / "a", "run-1-exp", run_id="hurt"), stored(tmp_path / "b", run_id="healthy")
    log = hurt.path.parent / "logs" / "debug-internal.log"
    log.parent.mkdir()
    make(log)
    first, second = plan_uploads([hurt, healthy], now=NOW, terms=TRUSTING)
    assert not is_uploaded(hurt)
    assert [reason in refusal for refusal in first.refusals] == [True]
    assert (second.refusals, second.files[0].rows_left) == ((), 5)
    with pytest.raises(UploadError, match=re.escape(reason)):
        upload(first.files[0])


@pytest.mark.parametrize("options", [["--dry-run"], ["--dry-run", "--force"]])
def test_whatever_planning_brings_about_is_told_of_its_run_which_is_not_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    hurt, healthy = stored(tmp_path / "a", run_id="hurt"), stored(tmp_path / "b", run_id="healthy")
    really = problems.problems_of_file

    def failing(file: UploadFile, now: float) -> Iterator[str]:
        if file.run is hurt:
            raise RecursionError("maximum recursion depth exceeded")
        return really(file, now)

    monkeypatch.setattr(plan_module, "problems_of_file", failing)
    assert command(monkeypatch, [hurt, healthy], *options) == 1
    out = capsys.readouterr().out
    assert f"so it is refused: {hurt.path}: RecursionError: maximum recursion depth exceeded" in out
    assert "2 runs: 1 to upload, 1 refused" in out


# --- what is uploaded already -----------------------------------------------------------------------------------------


STATES: dict[str, tuple[list[dict[str, Any]], bool, int]] = {
    "all confirmed": ([rows(5), CONFIRMED, *ENDED], True, 0),
    "not all": ([rows(4), CONFIRMED, *ENDED], False, 1),
    "not at its end": ([rows(5), CONFIRMED], False, 0),
    "with a problem": ([rows(5), CONFIRMED, {"level": "ERROR", "msg": "a file was refused"}, *ENDED], False, 0),
}


@pytest.mark.parametrize(("entries", "uploaded", "left"), STATES.values(), ids=STATES.keys())
def test_only_what_the_server_confirmed_is_uploaded(
    tmp_path: Path, entries: list[dict[str, Any]], uploaded: bool, left: int
) -> None:
    run = stored(tmp_path)
    log_of_attempt(run, *entries)
    (run.path.parent / "run-exp.wandb.synced").touch()  # `wandb sync` makes it whatever happened
    (file,) = planned(run).files
    assert (file.is_uploaded, file.rows_left) == (uploaded, left)


def test_what_wandb_sync_uploaded_is_left_out(tmp_path: Path) -> None:
    runs = [of_rank(tmp_path, rank) for rank in range(2)]
    (runs[1].path.parent / "run-exp.wandb.synced").touch()
    (reason,) = planned(*runs).refusals
    assert "was marked as uploaded by `wandb sync` (run-exp.wandb.synced), but you have not uploaded it" in reason
    run = planned(*runs, terms=TRUSTING)
    assert [file.is_uploaded for file in run.files] == [True, False]
    assert any("`wandb sync` marked it as uploaded" in note for note in run.notes)
    remember(run.files[0])
    assert [file.is_uploaded for file in planned(*runs).files] == [True, False]


def test_against_what_is_uploaded_nothing_is_said(tmp_path: Path) -> None:
    run = of_rank(tmp_path, 0)
    log_of_attempt(run, rows(5), CONFIRMED, *ENDED)
    assert (planned(run).is_uploaded, planned(run).refusals) == (True, ())


# --- uploading --------------------------------------------------------------------------------------------------------


WANDB_SYNC = """#!{python}
import json, os, pathlib, sys
here = pathlib.Path({here!r})
source = pathlib.Path(sys.argv[-1])
log = pathlib.Path(os.environ["WANDB_DIR"], "wandb", "logs", "debug-sync.1.log")
log.parent.mkdir(exist_ok=True)
log.write_text((here / "log").read_text())
source.with_name(source.name + ".synced").touch()
told = {{name: value for name, value in os.environ.items() if name.startswith("WANDB_")}}
(here / "told").write_text(json.dumps({{"arguments": sys.argv[1:], "environment": told, "content": source.exists()}}))
print("wandb: View run nm at https://server/team/digits/runs/exp")
"""


@pytest.fixture
def wandb_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare_environment: None) -> Path:  # noqa: ARG001
    """A stand-in for `wandb sync`: it writes the log that the test left in this directory, and what it was told."""
    here = tmp_path / "stand-in"
    here.mkdir()
    program = here / "python"
    program.write_text(WANDB_SYNC.format(python=sys.executable, here=str(here)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    return here


def uploaded(here: Path, run: UploadRun, *entries: dict[str, Any], file: int = 0) -> tuple[Outcome, dict[str, Any]]:
    (here / "log").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    outcome = upload(run.files[file])
    told: dict[str, Any] = json.loads((here / "told").read_text())
    return outcome, told


def test_a_file_is_uploaded_as_what_it_is(tmp_path: Path, wandb_sync: Path) -> None:
    run = planned(of_rank(tmp_path, 0), of_rank(tmp_path, 1))
    outcome, told = uploaded(wandb_sync, run, rows(5), CONFIRMED, *ENDED)
    assert (outcome.problem, outcome.sent.lines.history) == (None, 5)
    assert outcome.url == "https://server/team/digits/runs/exp"
    assert told["arguments"][:3] == ["-m", "wandb", "sync"]
    source = Path(told["arguments"][-1])
    assert (source.name, source.parents[1].parent) == (run.files[0].path.name, FileState(run.files[0].path).directory)
    assert (told["content"], source.exists()) == (True, False)
    environment = told["environment"]
    assert (environment["WANDB_MODE"], environment["WANDB_X_LABEL"]) == ("shared", "rank-1")
    assert (environment["WANDB_X_PRIMARY"], environment["WANDB_X_UPDATE_FINISH_STATE"]) == ("false", "false")
    _, told = uploaded(wandb_sync, run, rows(5), CONFIRMED, *ENDED, file=1)
    environment = told["environment"]
    assert (environment["WANDB_X_PRIMARY"], environment["WANDB_X_UPDATE_FINISH_STATE"]) == ("true", "true")
    assert planned(*(file.run for file in run.files)).is_uploaded


def test_the_mark_of_wandb_sync_goes_where_the_upload_failed(tmp_path: Path, wandb_sync: Path) -> None:
    run = planned(stored(tmp_path))
    mark = run.files[0].path.with_name("run-exp.wandb.synced")
    outcome, _ = uploaded(wandb_sync, run, {"level": "ERROR", "msg": "api: HTTP error", "status": 404}, *ENDED)
    assert outcome.problem is not None
    assert "The entity or project does not exist" in outcome.problem
    assert (outcome.concerns_all, mark.exists()) == (False, False)
    outcome, _ = uploaded(wandb_sync, planned(run.files[0].run), rows(5), CONFIRMED, *ENDED)
    assert (outcome.problem, mark.exists()) == (None, True)


@pytest.mark.parametrize(
    ("entries", "problem", "concerns_all"),
    [
        ([{"level": "ERROR", "msg": "api: HTTP error", "status": 401}, *ENDED], "run `wandb login`", True),
        ([{"level": "ERROR", "msg": "x", "error": "dial tcp: refused"}, *ENDED], "once W&B can be reached", True),
        ([rows(4), CONFIRMED, *ENDED], "the server confirmed 4 of 5 rows", False),
        (
            [{"level": "ERROR", "msg": "sender: failed to parse history item: dial tcp"}, *ENDED],
            "failed to parse",
            False,
        ),
        ([], "`wandb sync` ended without uploading it: View run nm at", False),
        ([rows(4), CONFIRMED], "`wandb sync` ended without uploading it", False),
    ],
)
def test_what_went_wrong_is_told(
    tmp_path: Path, wandb_sync: Path, entries: list[dict[str, Any]], problem: str, concerns_all: bool
) -> None:
    outcome, _ = uploaded(wandb_sync, planned(stored(tmp_path)), *entries)
    assert problem in str(outcome.problem)
    assert outcome.concerns_all is concerns_all


def test_a_plan_that_is_out_of_date_is_not_carried_out(tmp_path: Path, wandb_sync: Path) -> None:
    run = planned(stored(tmp_path))
    uploaded(wandb_sync, run, rows(5), CONFIRMED, *ENDED)
    with pytest.raises(UploadError, match="another process has uploaded from it meanwhile"):
        upload(run.files[0])


def test_a_state_directory_that_cannot_be_written_to_is_told(
    tmp_path: Path,
    wandb_sync: Path,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file" / "state"))
    (tmp_path / "file").write_text("in the way")
    run = planned(stored(tmp_path))
    with pytest.raises(UploadError, match=r"cannot be written to \(Not a directory\).* set XDG_STATE_HOME"):
        upload(run.files[0])


def test_whatever_an_upload_brings_about_is_told_of_its_file(tmp_path: Path, wandb_sync: Path) -> None:
    """A label with a NUL in it ended the uploads of all other runs, with a traceback."""
    del wandb_sync
    run = planned(of_rank(tmp_path, 0, world_size=1))
    shared_as = run.files[0].shared_as
    assert shared_as is not None
    file = replace(run.files[0], run=replace(run.files[0].run, sidecar=replace(shared_as, label="rank\0-1")))
    with pytest.raises(UploadError, match=r"run-exp.wandb: ValueError: embedded null byte"):
        upload(file)


# --- what the run's directory says and holds --------------------------------------------------------------------------


def test_a_mark_in_the_directory_is_not_believed(tmp_path: Path, wandb_sync: Path) -> None:
    run = stored(tmp_path)
    (run.path.parent / "run-exp.wandb.synced").touch()
    plan = planned(run)
    assert [(file.is_uploaded, file.rows_left) for file in plan.files] == [(False, 5)]
    assert "was marked as uploaded" in plan.refusals[0]
    assert planned(run, terms=TRUSTING).is_uploaded
    outcome, _ = uploaded(wandb_sync, plan, rows(5), CONFIRMED, *ENDED)  # as with --force
    assert (outcome.problem, outcome.sent.lines.history) == (None, 5)


def test_a_log_in_the_directory_of_an_offline_run_is_not_believed(tmp_path: Path) -> None:
    run = stored(tmp_path)
    log = run.path.parent / "logs" / "debug-internal.log"
    log.parent.mkdir()
    log.write_text("".join(f"{json.dumps(entry)}\n" for entry in (rows(5), CONFIRMED, *ENDED)))
    for terms in (Terms(), TRUSTING):
        assert [file.rows_left for file in planned(run, terms=terms).files] == [5]


@pytest.mark.parametrize("name", ["dist-wandb-upload/lock", "dist-wandb-upload", "run-exp.wandb.synced"])
@pytest.mark.parametrize("trust", [False, True])
def test_no_link_in_the_directory_is_written_through(tmp_path: Path, wandb_sync: Path, name: str, trust: bool) -> None:
    """`dist-wandb-upload/lock` was truncated, the mark and the logs were made where the links led."""
    victim, elsewhere = tmp_path / "authorized_keys", tmp_path / "elsewhere"
    victim.write_text("ssh-ed25519 AAAA me")
    elsewhere.mkdir()
    run = stored(tmp_path)
    link = run.path.parent / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(victim if name.endswith("lock") else elsewhere if "." not in name else tmp_path / "made")
    uploaded(wandb_sync, planned(run, terms=Terms(trust=trust, again=True)), rows(5), CONFIRMED, *ENDED)
    assert victim.read_text() == "ssh-ed25519 AAAA me"
    assert (list(elsewhere.iterdir()), (tmp_path / "made").exists()) == ([], False)


def test_an_endless_note_of_the_first_step_is_refused(tmp_path: Path, wandb_sync: Path) -> None:
    run = stored(tmp_path)
    (run.path.parent / "run-exp.wandb.syncstate").symlink_to("/dev/zero")
    with pytest.raises(UploadError, match=r"run-exp\.wandb\.syncstate is a symbolic link"):
        uploaded(wandb_sync, planned(run), rows(5), CONFIRMED, *ENDED)


def test_nothing_is_written_into_the_directory_but_the_mark(tmp_path: Path, wandb_sync: Path) -> None:
    run = stored(tmp_path)
    files = run.path.parent / "files"
    (files / "media").mkdir(parents=True)
    (files / "config.yaml").write_text("mine")
    before = {path for path in tmp_path.rglob("*") if wandb_sync not in path.parents}
    outcome, _ = uploaded(wandb_sync, planned(run), rows(5), CONFIRMED, *ENDED)
    assert outcome.problem is None
    after = {path for path in tmp_path.rglob("*") if wandb_sync not in path.parents}
    assert after - before == {run.path.with_name("run-exp.wandb.synced")}


def test_links_among_the_files_are_refused_unless_trusted(tmp_path: Path, wandb_sync: Path) -> None:
    run = stored(tmp_path)
    (run.path.parent / "files").mkdir()
    (run.path.parent / "files" / "notes.txt").symlink_to(tmp_path / "id_rsa")
    (tmp_path / "id_rsa").write_text("secret")
    plan = planned(run)
    (danger,) = plan.dangers
    assert "files/notes.txt is a symbolic link: its target is not uploaded unless you give --trust" in danger
    with pytest.raises(UploadError, match="is a symbolic link"):
        uploaded(wandb_sync, plan, rows(5), CONFIRMED, *ENDED)
    assert planned(run, terms=TRUSTING).dangers == ()


def test_what_is_no_file_among_the_files_is_told(tmp_path: Path) -> None:
    run = stored(tmp_path)
    (run.path.parent / "files").mkdir()
    os.mkfifo(run.path.parent / "files" / "pipe")
    plan = planned(run)
    assert (plan.dangers, plan.notes) == ((), (f"{run.path.parent}/files/pipe is a named pipe: it is left out.",))


@pytest.mark.parametrize("place", ["dist-wandb", "dist-wandb/uploads"])
def test_the_state_is_not_kept_where_a_link_leads(
    tmp_path: Path,
    wandb_sync: Path,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "state" / place).parent.mkdir(parents=True)
    (tmp_path / "state" / place).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UploadError, match=rf"{place} is not a directory, and the state of uploads is kept there"):
        upload(planned(stored(tmp_path)).files[0])
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_copies_of_uploads_that_were_killed_are_removed_by_the_next_one(tmp_path: Path) -> None:
    runs = [stored(tmp_path / name) for name in ("killed", "under-way")]
    copies = []
    for run in runs:
        state = FileState(run.path)
        with state.locked():
            copies.append(state.begin(Sent()) / "copy")
        copies[-1].mkdir()
    with FileState(runs[1].path).locked():
        remove_left_copies()
    assert [copy.exists() for copy in copies] == [False, True]


def test_what_changed_after_its_upload_is_refused(tmp_path: Path) -> None:
    run = stored(tmp_path)
    log_of_attempt(run, rows(5), CONFIRMED, *ENDED)
    with run.path.open("ab") as file:
        file.write(b"more, as the run was still written to")
    assert planned(run).is_uploaded  # by the number of its rows, which is still five here
    run.path.write_bytes(b":W&B\xe1\xbe\x01")
    (reason,) = planned(run).refusals
    assert "the file has changed since you uploaded it, so it is unknown which of its rows have arrived" in reason
    assert planned(run, terms=Terms(again=True)).refusals == ()


def recorded(text: str, row: str = "1", entity: str = "") -> bytes:
    """A file of a run record with a text of its own, and a row."""
    run, history = new_record(), new_record()
    run.run.run_id, run.run.entity, run.control.mailbox_slot = "exp", entity, text
    history.history.item.add().value_json = row
    return content_of([run, history])


def test_a_directory_that_was_moved_or_copied_is_known(tmp_path: Path) -> None:
    run = stored(tmp_path)
    run.path.write_bytes(recorded("random"))
    log_of_attempt(run, rows(5), CONFIRMED, *ENDED)
    copy = stored(tmp_path / "elsewhere")
    copy.path.write_bytes(recorded("random"))
    assert planned(copy).is_uploaded
    for content in (recorded("random", row="2"), recorded("another")):
        copy.path.write_bytes(content)
        assert not planned(copy).is_uploaded


def test_the_state_is_for_this_user_alone(tmp_path: Path, wandb_sync: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nbase_url = http://user:PASSWORD@host\n")
    uploaded(wandb_sync, planned(stored(tmp_path)), rows(5), CONFIRMED, *ENDED)
    ours = tmp_path / "state" / "dist-wandb"
    assert ours.stat().st_mode & 0o077 == 0
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and path.parents[0] != tmp_path / "wandb"]
    assert not [path for path in kept if b"PASSWORD" in path.read_bytes()]


def test_another_upload_of_the_file_is_told_before_anything_else(tmp_path: Path) -> None:
    run = stored(tmp_path)
    log_of_attempt(run, rows(2))  # of which it is not known whether they arrived, as they are under way
    with FileState(run.path).locked():
        (reason,) = planned(run).refusals
        assert f"another upload of this file is under way (pid {os.getpid()})" in reason
        with pytest.raises(UploadError, match=rf"another upload of this file is under way \(pid {os.getpid()}\)"):
            upload(planned(run).files[0])
    assert "of 2 more it is not known whether they arrived" in planned(run).refusals[0]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_the_command_names_directories_without_runs(
    tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    assert main(["sync", *options, str(tmp_path), str(tmp_path / "other")]) == 1
    assert f"No W&B run lies below {str(tmp_path)!r} or {str(tmp_path / 'other')!r}" in capsys.readouterr().err


class Uploads:
    """Stands in for `upload.upload`: what it was asked for, and what it answers."""

    def __init__(self) -> None:
        self.of: list[str] = []
        self.outcomes: dict[str, Outcome] = {}

    def __call__(self, file: UploadFile, on_progress: Callable[[int], None]) -> Outcome:
        name = f"{file.run.run_id} {file.run.label or ''}".rstrip()
        self.of.append(name)
        on_progress(file.run.rows)
        return self.outcomes.get(name, Outcome(Sent(Lines(file.run.rows)), "https://server/exp", None))


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> Uploads:
    stand_in = Uploads()
    monkeypatch.setattr(sync, "upload", stand_in)
    return stand_in


SERVER = Destination("https://wandb.example", "https://wandb.example", "environment", "WANDB_BASE_URL")


def command(
    monkeypatch: pytest.MonkeyPatch, runs: list[StoredRun], *options: str, errors: dict[Path, ReadError] | None = None
) -> int:
    """Run ``dist-wandb sync`` on runs as if they had been read from disk."""
    monkeypatch.setattr(sync, "find_runs", lambda _directory, **_: [run.path for run in runs])
    monkeypatch.setattr(sync, "read_runs", lambda _paths: (runs, errors or {}))
    monkeypatch.setattr(sync, "destination", lambda **_: SERVER)
    return main(["sync", *options, "somewhere"])


def test_the_command_says_what_it_will_do_and_does_it(
    tmp_path: Path, uploads: Uploads, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [of_rank(tmp_path, 0), of_rank(tmp_path, 1)]
    assert command(monkeypatch, runs, "--dry-run") == 0
    assert uploads.of == []
    plan = [
        "● exp  nm",
        "  to upload · shared run of 2 files · 10 rows · project digits",
        f"  1. rank-1: 5 rows  {runs[1].path.parent}",
        f"  2. rank-0 (primary): 5 rows  {runs[0].path.parent}",
    ]
    plan.append("to https://wandb.example (from WANDB_BASE_URL)")
    end = ["", "1 run: 1 to upload", "Nothing was uploaded: this was a dry run."]
    assert capsys.readouterr().out.splitlines() == plan + end
    assert command(monkeypatch, runs) == 0
    assert uploads.of == ["exp rank-1", "exp rank-0"]
    done = [f"✓ exp rank-{rank}: 5 rows uploaded  https://server/exp" for rank in (1, 0)]
    assert capsys.readouterr().out.splitlines() == [*plan, *done, "", "1 run: 1 uploaded"]


def test_what_is_refused_is_told_and_can_be_forced(
    tmp_path: Path, uploads: Uploads, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, [of_rank(tmp_path, 0)]) == 1
    out = capsys.readouterr().out
    assert "  refused · shared run of 1 file" in out
    assert "! Of its 2 ranks, rank 1 is missing." in out
    assert out.endswith("1 run: 1 refused (--force uploads them all the same)\n")
    assert uploads.of == []
    assert command(monkeypatch, [of_rank(tmp_path, 0)], "--force") == 0
    assert uploads.of == ["exp rank-0"]


def test_what_is_uploaded_is_not_uploaded_again_not_even_by_force(
    tmp_path: Path, uploads: Uploads, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stored(tmp_path)
    log_of_attempt(run, rows(5), CONFIRMED, *ENDED)
    assert command(monkeypatch, [run], "--force") == 0
    assert uploads.of == []
    assert "1 run: 1 uploaded before" in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--force", "--trust"]])
def test_nothing_is_uploaded_to_a_server_that_may_not_have_the_key(
    tmp_path: Path,
    uploads: Uploads,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
) -> None:
    monkeypatch.setitem(globals(), "SERVER", replace(SERVER, refusal="It is a stranger's."))
    assert command(monkeypatch, [stored(tmp_path)], *options) == 1
    assert uploads.of == []
    out = capsys.readouterr().out
    assert "✗ It is a stranger's." in out
    assert "1 run: 1 not uploaded" in out


def test_the_owner_is_told(
    tmp_path: Path, uploads: Uploads, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stored(tmp_path, entity="team")
    run.path.write_bytes(recorded("random", entity="team"))
    assert command(monkeypatch, [run]) == 1
    out = capsys.readouterr().out
    assert "  refused · run · 5 rows · project team/digits" in out
    assert "its owner is 'team', which is not known to be yours. To upload it there, give --entity team" in out
    assert out.endswith("1 run: 1 refused (see what each line says to give)\n")
    assert uploads.of == []
    assert command(monkeypatch, [run], "--entity", "me", "--dry-run") == 0
    assert "  to upload · run · 5 rows · project me/digits" in capsys.readouterr().out


@pytest.mark.parametrize(("concerns_all", "tried"), [(True, ["a"]), (False, ["a", "b"])])
def test_a_failure_ends_all_uploads_if_it_concerns_all(
    tmp_path: Path,
    uploads: Uploads,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    concerns_all: bool,
    tried: list[str],
) -> None:
    uploads.outcomes["a"] = Outcome(Sent(Lines(2)), None, "no way there", concerns_all)
    runs = [stored(tmp_path / name, run_id=name) for name in ("a", "b")]
    assert command(monkeypatch, runs) == 1
    assert uploads.of == tried
    out = capsys.readouterr().out
    assert "✗ a failed, 2 of 5 rows are confirmed: no way there" in out
    assert f"2 runs: {'2 not uploaded' if concerns_all else '1 uploaded, 1 not uploaded'}" in out


def test_a_file_that_cannot_be_read_is_told_and_the_others_are_uploaded(
    tmp_path: Path, uploads: Uploads, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = {tmp_path: ReadError("is empty")}
    assert command(monkeypatch, [stored(tmp_path)], errors=errors) == 1
    assert uploads.of == ["exp"]
    assert "✗ not readable  is empty" in capsys.readouterr().out


def test_an_interrupt_has_its_own_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> Outcome:
        raise KeyboardInterrupt

    monkeypatch.setattr(sync, "upload", interrupted)
    assert command(monkeypatch, [stored(tmp_path)]) == 130
    assert "continues where it stopped" in capsys.readouterr().err


def test_of_what_was_written_online_the_log_is_named_as_the_source(
    tmp_path: Path, uploads: Uploads, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stored(tmp_path, "run-1-exp")
    (run.path.parent / "logs").mkdir()
    entries = [rows(5), CONFIRMED, *ENDED]
    (run.path.parent / "logs" / "debug-internal.log").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    assert command(monkeypatch, [run], "--force") == 0
    out = capsys.readouterr().out
    assert "1 uploaded while it was written, according to W&B's log beside it (--again uploads" in out
    assert "uploaded before" not in out
    assert uploads.of == []
    assert command(monkeypatch, [run], "--again") == 0
    assert uploads.of == ["exp"]


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_ends_an_upload_as_an_interrupt_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, code: int
) -> None:
    """It ended this process alone, and the upload went on."""
    number = signal.Signals[name]
    monkeypatch.setattr(sync, "upload", lambda *_: signal.raise_signal(number))
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert command(monkeypatch, [stored(tmp_path)]) == code
        assert f"ended by {name}. An upload continues where it stopped" in capsys.readouterr().err
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
