"""Uploads, and the command ``dist-wandb sync``, with a stand-in for `wandb sync`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from record_files import content_of, new_record, row
from strangers import give_away
from upload_runs import CONFIRMED, ENDED, LONG_AGO, TRUSTING, log_of_attempt, of_rank, planned, recorded, rows, stored

from dist_wandb.cli import main, uploads
from dist_wandb.cli.uploads.contents import Terms
from dist_wandb.cli.uploads.execution import UploadOutcome, upload
from dist_wandb.cli.uploads.plan import UploadRun
from dist_wandb.cli.uploads.state import FileState, Sent, remove_left_copies
from dist_wandb.errors import UploadError
from dist_wandb.wandb_files.reading import StoredRun
from dist_wandb.wandb_files.record_file import records_of

WANDB_SYNC = """#!{python}
import json, os, pathlib, sys, time
here = pathlib.Path({here!r})
source = pathlib.Path(sys.argv[-1])
log = pathlib.Path(os.environ["WANDB_DIR"], "wandb", "logs", "debug-sync.1.log")
log.parent.mkdir(exist_ok=True)
log.write_text((here / "log").read_text())
source.with_name(source.name + ".synced").touch()
(here / "copy").write_bytes(source.read_bytes())
environment = {{name: value for name, value in os.environ.items() if name.startswith("WANDB_")}}
received = {{"arguments": sys.argv[1:], "environment": environment, "content": source.exists()}}
with (here / "received").open("a") as file:
    file.write(json.dumps(received) + "\\n")
if (here / "signal").exists():
    os.kill(os.getppid(), int((here / "signal").read_text()))
    time.sleep(60)
print("wandb: View run nm at https://server/team/digits/runs/exp")
"""


@pytest.fixture
def wandb_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare_environment: None) -> Path:  # noqa: ARG001
    """A stand-in for `wandb sync`: it writes the log that the test put into this directory, and its own arguments."""
    here = tmp_path / "stand-in"
    here.mkdir()
    (here / "received").touch()
    log(here, rows(5), CONFIRMED, *ENDED)
    program = here / "python"
    program.write_text(WANDB_SYNC.format(python=sys.executable, here=str(here)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    return here


def uploaded(
    here: Path, run: UploadRun, *entries: dict[str, Any], file: int = 0
) -> tuple[UploadOutcome, dict[str, Any]]:
    log(here, *entries)
    outcome = upload(run.files[file])
    return outcome, received(here)[-1]


def log(here: Path, *entries: dict[str, Any]) -> None:
    (here / "log").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))


def received(here: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, (here / "received").read_text().splitlines()))


@pytest.fixture
def sync(
    wandb_sync: Path,  # noqa: ARG001  # goes first
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Callable[..., tuple[int, str]]:
    """``dist-wandb sync`` on runs as if they had been read from disk; it returns exit code and output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")

    def run(*runs: StoredRun, options: str = "") -> tuple[int, str]:
        monkeypatch.setattr(uploads, "runs_below", lambda _, **__: (list(runs), []))
        return main(["sync", *options.split(), "somewhere"]), "".join(capsys.readouterr())

    return run


def test_the_command_prints_its_plan_and_executes_it(tmp_path: Path, sync: Any, wandb_sync: Path) -> None:
    runs = [of_rank(tmp_path, 0), of_rank(tmp_path, 1)]
    plan = [
        "● exp  nm",
        "  to upload · shared run of 2 files · 10 rows · project digits",
        f"  1. rank-1: 5 rows  {runs[1].path.parent}",
        f"  2. rank-0 (primary): 5 rows  {runs[0].path.parent}",
    ]
    plan.append("to https://wandb.example (from WANDB_BASE_URL)")
    code, out = sync(*runs, options="--dry-run")
    end = ["", "1 run: 1 to upload", "Nothing was uploaded: this was a dry run."]
    assert (code, out.splitlines(), received(wandb_sync)) == (0, plan + end, [])
    code, out = sync(*runs)
    done = [f"✓ exp rank-{rank}: 5 rows uploaded  https://server/team/digits/runs/exp" for rank in (1, 0)]
    assert (code, out.splitlines()) == (0, [*plan, *done, "", "1 run: 1 uploaded"])
    assert [one["environment"]["WANDB_X_LABEL"] for one in received(wandb_sync)] == ["rank-1", "rank-0"]


def test_refusals_are_reported_and_can_be_forced_but_not_a_second_upload(
    tmp_path: Path, sync: Any, wandb_sync: Path
) -> None:
    code, out = sync(of_rank(tmp_path, 0))
    assert (code, received(wandb_sync)) == (1, [])
    assert "  refused · shared run of 1 file" in out
    assert "! Of its 2 ranks, rank 1 is missing." in out
    assert out.endswith("1 run: 1 refused (--force uploads them anyway)\n")
    for message in ("1 run: 1 uploaded", "1 run: 1 uploaded before"):
        code, out = sync(of_rank(tmp_path, 0), options="--force")
        assert (code, out.splitlines()[-1]) == (0, message)
    (FileState(of_rank(tmp_path, 0)).directory / "state.json").write_text("[")
    for options in ("", "--force"):  # which does not help, and is not offered
        code, out = sync(of_rank(tmp_path, 0), options=options)
        assert (code, out.splitlines()[-1]) == (1, "1 run: 1 refused (see the reasons above)")
    assert len(received(wandb_sync)) == 1


@pytest.mark.parametrize("options", ["--dry-run", "--force --trust"])
def test_nothing_is_uploaded_to_a_server_that_may_not_have_the_key(
    tmp_path: Path, sync: Any, wandb_sync: Path, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_BASE_URL")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nbase_url = https://stranger.example\n")
    code, out = sync(stored(tmp_path), options=options)
    assert (code, received(wandb_sync)) == (1, [])
    assert "✗ The server https://stranger.example is named by" in out
    assert "1 run: 1 not uploaded" in out


def test_the_owner_is_shown(tmp_path: Path, sync: Any, wandb_sync: Path) -> None:
    run = stored(tmp_path, entity="team")
    run.path.write_bytes(recorded("random", entity="team"))
    code, out = sync(run)
    assert (code, received(wandb_sync)) == (1, [])
    assert "  refused · run · 5 rows · project team/digits" in out
    assert "its owner is 'team', which is not known to be yours. To upload it there, give --entity team" in out
    assert out.endswith("1 run: 1 refused (see the reasons above)\n")
    code, out = sync(run, options="--entity me --dry-run")
    assert (code, "  to upload · run · 5 rows · project me/digits" in out) == (0, True)


def test_for_an_online_run_the_log_is_named_as_the_source(tmp_path: Path, sync: Any, wandb_sync: Path) -> None:
    run = stored(tmp_path, "run-1-exp")
    (run.path.parent / "logs").mkdir()
    shutil.copy(wandb_sync / "log", run.path.parent / "logs" / "debug-internal.log")
    code, out = sync(run, options="--force")
    assert (code, received(wandb_sync)) == (0, [])
    assert "1 uploaded while it was written, according to W&B's log beside it (--again uploads" in out
    assert "uploaded before" not in out
    assert sync(run, options="--again")[0] == 0
    assert len(received(wandb_sync)) == 1


def test_a_signal_ends_an_upload_as_an_interrupt_does(tmp_path: Path, sync: Any, wandb_sync: Path) -> None:
    """A signal used to end only this process, and the upload continued. For others see test_sync.py."""
    (wandb_sync / "signal").write_text(str(int(signal.SIGHUP)))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        code, out = sync(stored(tmp_path))
        assert (code, "ended by SIGHUP. An upload continues after the rows" in out) == (129, True)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_any_error_of_planning_is_reported_for_its_run_which_is_not_uploaded(tmp_path: Path, sync: Any) -> None:
    hurt, healthy = stored(tmp_path / "a", run_id="hurt"), stored(tmp_path / "b", run_id="healthy")
    hurt = replace(hurt, problems=None)  # type: ignore[arg-type]  # a fault of ours
    code, out = sync(hurt, healthy, options="--dry-run --force")
    assert (code, f"so it is refused: {hurt.path}: TypeError: " in out) == (1, True)
    assert "2 runs: 1 to upload, 1 refused" in out


def test_a_file_is_uploaded_with_its_label_and_role(tmp_path: Path, wandb_sync: Path) -> None:
    run = planned(of_rank(tmp_path, 0), of_rank(tmp_path, 1))
    outcome, given = uploaded(wandb_sync, run, rows(5), CONFIRMED, *ENDED)
    assert (outcome.problem, outcome.sent.history) == (None, 5)
    assert given["arguments"][:3] == ["-m", "wandb", "sync"]
    source = Path(given["arguments"][-1])
    assert run.files[0].path.with_name("run-exp.wandb.synced").exists()
    assert (source.name, source.parents[1].parent) == (run.files[0].path.name, FileState(run.files[0].run).directory)
    assert (given["content"], source.exists()) == (True, False)
    environment = given["environment"]
    assert (environment["WANDB_MODE"], environment["WANDB_X_LABEL"]) == ("shared", "rank-1")
    assert (environment["WANDB_X_PRIMARY"], environment["WANDB_X_UPDATE_FINISH_STATE"]) == ("false", "false")
    _, given = uploaded(wandb_sync, run, rows(5), CONFIRMED, *ENDED, file=1)
    environment = given["environment"]
    assert (environment["WANDB_X_PRIMARY"], environment["WANDB_X_UPDATE_FINISH_STATE"]) == ("true", "true")
    assert planned(*(file.run for file in run.files)).is_uploaded
    with pytest.raises(UploadError, match="another process has uploaded from it meanwhile"):
        upload(run.files[0])  # an outdated plan


def summary(*, remove: tuple[str, ...] = (), **values: str) -> Any:
    record = new_record()
    for name, value in values.items():
        item = record.summary.update.add()
        item.nested_key.extend(name.split("__"))
        item.value_json = value
    for name in remove:
        record.summary.remove.add().nested_key.append(name)
    return record


def test_a_resumed_run_keeps_the_summary_of_its_earlier_files(tmp_path: Path, wandb_sync: Path) -> None:
    """W&B's uploader replaces the summary by that of the file."""
    found = [stored(tmp_path, f"offline-run-{n}-exp", started=f"2026-01-0{n}", branches=n == 2) for n in range(1, 5)]
    records = [
        [summary(of_former_branch="0")],
        [summary(a="1", loss="1", gone="1"), summary(a="2", val__acc="0.5"), summary(remove=("gone",))],
        [b"\x1a\x07damaged", summary(b="3")],
        [row(0), summary(loss="2", val__b="4"), summary(later="5")],
    ]
    for one, its_records in zip(found, records, strict=True):
        one.path.write_bytes(content_of(its_records))
        os.utime(one.path, (LONG_AGO, LONG_AGO))
    plan = planned(*found)
    uploaded(wandb_sync, plan, rows(5), CONFIRMED, *ENDED, file=2)
    content = found[1].path.read_bytes()
    found[1].path.write_bytes(content_of([summary(again="9")]))  # each file is read once
    uploaded(wandb_sync, plan, rows(5), CONFIRMED, *ENDED, file=3)
    sent = [new_record().FromString(message) for message, _ in records_of(wandb_sync / "copy")]
    found_items = [[("/".join(item.nested_key), item.value_json) for item in record.summary.update] for record in sent]
    earlier = [("loss", "1"), ("a", "2"), ("val/acc", "0.5"), ("b", "3")]
    assert sorted(found_items[1][:4]) == sorted(earlier)
    assert found_items[1][4:] == [("loss", "2"), ("val/b", "4")]
    assert found_items[2] == [("later", "5")]
    found[1].path.write_bytes(content)
    uploaded(wandb_sync, plan, rows(5), CONFIRMED, *ENDED, file=1)  # it rewinds the first one
    sent = [new_record().FromString(message) for message, _ in records_of(wandb_sync / "copy")]
    assert "of_former_branch" not in str(sent)


@pytest.mark.parametrize(
    ("entries", "problem", "concerns_all"),
    [
        ([{"level": "ERROR", "msg": "api: HTTP error", "status": 401}, *ENDED], "run `wandb login`", True),
        ([{"level": "ERROR", "msg": "api: HTTP error", "status": 404}, *ENDED], "The entity or project does", False),
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
def test_problems_are_reported_and_the_file_is_not_marked_as_uploaded(
    tmp_path: Path, sync: Any, wandb_sync: Path, entries: list[dict[str, Any]], problem: str, concerns_all: bool
) -> None:
    log(wandb_sync, *entries)
    code, out = sync(*(stored(tmp_path / name, run_id=name) for name in ("a", "b")))
    assert (code, problem in out) == (1, True)
    assert f"✗ a failed, {4 if rows(4) in entries else 0} of 5 rows are confirmed: " in out
    assert out.endswith("\n2 runs: 2 not uploaded\n")
    assert len(received(wandb_sync)) == (1 if concerns_all else 2)  # what concerns all ends the uploads
    assert not list(tmp_path.rglob("*.synced"))


@pytest.mark.usefixtures("wandb_sync")
def test_the_state_of_uploads_needs_a_place_that_is_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = planned(stored(tmp_path)).files[0]
    (tmp_path / "elsewhere").mkdir()
    for place in ("state/dist-wandb", "other/dist-wandb/uploads"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).symlink_to(tmp_path / "elsewhere")
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / place.partition("/")[0]))
        with pytest.raises(UploadError, match=rf"{place} is a symbolic link, .* The state of uploads is kept there"):
            upload(file)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    monkeypatch.setenv("XDG_STATE_HOME", str(file.path / "state"))
    with pytest.raises(UploadError, match=r"cannot be written to \(Not a directory\).* set XDG_STATE_HOME"):
        upload(file)
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "~")  # as without an entry for the user
    with pytest.raises(UploadError, match=r"Uploads need a directory: .*\. Set XDG_STATE_HOME to one"):
        upload(file)


@pytest.mark.usefixtures("wandb_sync")
def test_any_error_of_an_upload_names_its_file(tmp_path: Path) -> None:
    """A label that contains NUL used to end the uploads of all other runs, with a traceback."""
    run = planned(of_rank(tmp_path, 0, world_size=1))
    shared_as = run.files[0].run.shared_as
    assert shared_as is not None
    file = replace(run.files[0], run=replace(run.files[0].run, sidecar=replace(shared_as, label="rank\0-1")))
    with pytest.raises(UploadError, match=r"run-exp.wandb: ValueError: embedded null byte"):
        upload(file)


@pytest.mark.parametrize("what", ["file", "directory"])
def test_a_run_of_another_user_is_refused_unless_trusted(
    tmp_path: Path, wandb_sync: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    run = stored(tmp_path)
    plan = planned(run)
    path = run.path if what == "file" else run.path.parent
    give_away(path, monkeypatch)
    (danger,) = planned(run).dangers
    assert f"{path} belongs to user 65534, not to you (user {os.getuid()}). Copy the directory" in danger
    if what == "file":  # put there after planning
        with pytest.raises(UploadError, match="belongs to user 65534"):
            upload(plan.files[0])
    trusted = planned(run, terms=TRUSTING)
    assert trusted.dangers == ()
    assert uploaded(wandb_sync, trusted, rows(5), CONFIRMED, *ENDED)[0].problem is None


def test_copies_of_killed_uploads_are_removed_by_the_next_one(tmp_path: Path) -> None:
    runs = [stored(tmp_path / name) for name in ("killed", "under-way")]
    copies = []
    for run in runs:
        state = FileState(run)
        with state.locked():
            copies.append(state.begin(Sent()) / "copy")
        copies[-1].mkdir()
    with FileState(runs[1]).locked():
        remove_left_copies()
    assert [copy.exists() for copy in copies] == [False, True]


def test_a_file_that_changed_after_its_upload_is_refused(tmp_path: Path) -> None:
    run = stored(tmp_path)
    log_of_attempt(run, rows(5), CONFIRMED, *ENDED)
    with run.path.open("ab") as file:
        file.write(b"more, as the run was still written to")
    assert planned(run).is_uploaded  # because the number of its rows is still five
    run.path.write_bytes(b":W&B\xe1\xbe\x01")
    reason = "the file has changed since you uploaded it, so it is unknown which of its rows have arrived"
    assert reason in planned(run).dangers[0]
    assert reason not in planned(run, terms=Terms(again=True)).dangers[0]


def test_a_moved_or_copied_directory_is_recognised(tmp_path: Path) -> None:
    run = stored(tmp_path)
    run.path.write_bytes(recorded("random"))
    log_of_attempt(run, rows(5), CONFIRMED, *ENDED)
    copy = stored(tmp_path / "elsewhere")
    copy.path.write_bytes(recorded("random"))
    assert planned(copy).is_uploaded
    for content in (recorded("random", row="2"), recorded("another")):
        copy.path.write_bytes(content)
        assert not planned(copy).is_uploaded


def test_the_state_is_readable_only_by_this_user(
    tmp_path: Path, wandb_sync: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nbase_url = http://user:PASSWORD@host\n")
    uploaded(wandb_sync, planned(stored(tmp_path)), rows(5), CONFIRMED, *ENDED)
    ours = tmp_path / "state" / "dist-wandb"
    assert ours.stat().st_mode & 0o077 == 0
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and path.parents[0] != tmp_path / "wandb"]
    assert not [path for path in kept if b"PASSWORD" in path.read_bytes()]


def test_a_damaged_record_of_an_upload_is_named_with_what_to_remove(tmp_path: Path) -> None:
    run = stored(tmp_path)
    log_of_attempt(run, rows(5), CONFIRMED, *ENDED)
    record = FileState(run).directory / "state.json"
    for damaged in ('{"before": 1}', "[1]", "[", record.read_text().replace("history", "rows")):
        record.write_text(damaged)
        (reason,) = planned(run).dangers
        start = f"{record} is not in dist_wandb's format, so it is unknown what was uploaded. Remove"
        assert f"{start} {record.parent}" in reason


def test_contents_with_the_same_run_record_have_separate_states(tmp_path: Path) -> None:
    """Such as two copies of a run that was killed while it was written, one of which has continued."""
    runs = [stored(tmp_path / name) for name in ("a", "b")]
    for number, run in enumerate(runs):
        run.path.write_bytes(recorded("random", row=str(number)))
        log_of_attempt(run, rows(5 - number), CONFIRMED, *ENDED)
    assert [planned(run).files[0].rows_left for run in runs] == [0, 1]
    log_of_attempt(runs[1], rows(1), CONFIRMED, *ENDED, before=Sent(4, attempts=1, ended=True))
    assert [planned(run).is_uploaded for run in runs] == [True, True]
    assert len(list(FileState(runs[0]).directory.glob("upload-*"))) == 1


def test_another_upload_of_the_file_is_reported_first(tmp_path: Path) -> None:
    run = stored(tmp_path)
    log_of_attempt(run, rows(2))  # in flight, so it is unknown whether they arrived
    with FileState(run).locked():
        (reason,) = planned(run).dangers
        assert f"another upload of this file is under way (pid {os.getpid()})" in reason
        with pytest.raises(UploadError, match=rf"another upload of this file is under way \(pid {os.getpid()}\)"):
            upload(planned(run).files[0])
    assert ", and may have 2 more: the connection broke" in planned(run).refusals[0]


@pytest.mark.parametrize("what", ["run", "files", "run-exp.wandb.syncstate"])
@pytest.mark.usefixtures("wandb_sync")
def test_what_is_replaced_by_a_link_after_planning_is_not_uploaded(tmp_path: Path, what: str) -> None:
    """Somebody who may write there puts a link to a private run of this user in its place."""
    stored_run, private = (stored(tmp_path / name) for name in ("shared", "private"))
    for one in (stored_run, private):
        (one.path.parent / "files").mkdir()
        (one.path.parent / "files" / "output.log").touch()
        (one.path.parent / "run-exp.wandb.syncstate").touch()
    os.mkfifo(stored_run.path.parent / "files" / "pipe")
    run = planned(stored_run)
    assert (run.dangers, run.notes) == ((), (f"{stored_run.path.parent}/files/pipe is a named pipe: it is left out.",))
    shared = stored_run.path.parent / ("" if what == "run" else what)
    shared.rename(tmp_path / "moved")
    shared.symlink_to(private.path.parent / ("" if what == "run" else what))
    with pytest.raises(UploadError, match=r"was replaced by another directory|is a symbolic link"):
        upload(run.files[0])
