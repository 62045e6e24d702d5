"""The command ``dist-wandb sync``, with a stand-in for uploads."""

from __future__ import annotations

import functools
import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from upload_runs import CONFIRMED, ENDED, log_of_attempt, of_rank, recorded, rows, stored

from dist_wandb.cli import main, uploads
from dist_wandb.cli.uploads.execution import UploadOutcome
from dist_wandb.cli.uploads.plan import UploadFile
from dist_wandb.cli.uploads.state import Sent
from dist_wandb.wandb_files.reading import StoredRun


class Sync:
    """``dist-wandb sync`` on runs as if they had been read from disk, with a stand-in for `execution.upload`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.of: list[str] = []  # the requested uploads
        self.outcomes: dict[str, UploadOutcome] = {}
        self.ends: Callable[[], object] = int  # ends an upload early
        self.capsys = capsys
        self._found: list[StoredRun] = []
        monkeypatch.setattr(uploads, "upload", self._upload)
        monkeypatch.setattr(uploads, "runs_below", lambda _, **__: (self._found, []))

    def __call__(self, *runs: StoredRun, options: str = "") -> int:
        self._found = list(runs)
        return main(["sync", *options.split(), "somewhere"])

    def out(self) -> str:
        return self.capsys.readouterr().out

    def _upload(self, file: UploadFile, on_progress: Callable[[int], None], *_: Any) -> UploadOutcome:
        name = f"{file.run.run_id} {file.run.shared_as.label if file.run.shared_as else ''}".rstrip()
        self.of.append(name)
        self.ends()
        on_progress(file.run.rows)
        return self.outcomes.get(name, UploadOutcome(Sent(file.run.rows), "https://server/exp", None))


@pytest.fixture
def syncing(
    bare_environment: None,  # noqa: ARG001  # must run first
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Sync:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
    return Sync(monkeypatch, capsys)


def test_the_command_prints_its_plan_and_executes_it(tmp_path: Path, syncing: Sync) -> None:
    runs = [of_rank(tmp_path, 0), of_rank(tmp_path, 1)]
    assert syncing(*runs, options="--dry-run") == 0
    assert syncing.of == []
    plan = [
        "● exp  nm",
        "  to upload · shared run of 2 files · 10 rows · project digits",
        f"  1. rank-1: 5 rows  {runs[1].path.parent}",
        f"  2. rank-0 (primary): 5 rows  {runs[0].path.parent}",
    ]
    plan.append("to https://wandb.example (from WANDB_BASE_URL)")
    end = ["", "1 run: 1 to upload", "Nothing was uploaded: this was a dry run."]
    assert syncing.out().splitlines() == plan + end
    assert syncing(*runs) == 0
    assert syncing.of == ["exp rank-1", "exp rank-0"]
    done = [f"✓ exp rank-{rank}: 5 rows uploaded  https://server/exp" for rank in (1, 0)]
    assert syncing.out().splitlines() == [*plan, *done, "", "1 run: 1 uploaded"]


def test_refusals_are_reported_and_can_be_forced_but_not_a_second_upload(tmp_path: Path, syncing: Sync) -> None:
    assert syncing(of_rank(tmp_path, 0)) == 1
    out = syncing.out()
    assert "  refused · shared run of 1 file" in out
    assert "! Of its 2 ranks, rank 1 is missing." in out
    assert out.endswith("1 run: 1 refused (--force uploads them anyway)\n")
    assert syncing.of == []
    assert syncing(of_rank(tmp_path, 0), options="--force") == 0
    run = stored(tmp_path)
    log_of_attempt(run, rows(5), CONFIRMED, *ENDED)
    assert syncing(run, options="--force") == 0
    assert "1 run: 1 uploaded before" in syncing.out()
    assert syncing.of == ["exp rank-0"]


@pytest.mark.parametrize("options", ["--dry-run", "--force --trust"])
def test_nothing_is_uploaded_to_a_server_that_may_not_have_the_key(
    tmp_path: Path, syncing: Sync, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_BASE_URL")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nbase_url = https://stranger.example\n")
    assert syncing(stored(tmp_path), options=options) == 1
    assert syncing.of == []
    out = syncing.out()
    assert "✗ The server https://stranger.example is named by" in out
    assert "1 run: 1 not uploaded" in out


def test_the_owner_is_shown(tmp_path: Path, syncing: Sync) -> None:
    run = stored(tmp_path, entity="team")
    run.path.write_bytes(recorded("random", entity="team"))
    assert syncing(run) == 1
    out = syncing.out()
    assert "  refused · run · 5 rows · project team/digits" in out
    assert "its owner is 'team', which is not known to be yours. To upload it there, give --entity team" in out
    assert out.endswith("1 run: 1 refused (each line names the option that allows it)\n")
    assert syncing.of == []
    assert syncing(run, options="--entity me --dry-run") == 0
    assert "  to upload · run · 5 rows · project me/digits" in syncing.out()


@pytest.mark.parametrize(("concerns_all", "tried"), [(True, ["a"]), (False, ["a", "b"])])
def test_a_failure_that_affects_all_uploads_ends_them(
    tmp_path: Path, syncing: Sync, concerns_all: bool, tried: list[str]
) -> None:
    syncing.outcomes["a"] = UploadOutcome(Sent(2), None, "no way there", concerns_all)
    runs = [stored(tmp_path / name, run_id=name) for name in ("a", "b")]
    assert syncing(*runs) == 1
    assert syncing.of == tried
    out = syncing.out()
    assert "✗ a failed, 2 of 5 rows are confirmed: no way there" in out
    assert f"2 runs: {'2 not uploaded' if concerns_all else '1 uploaded, 1 not uploaded'}" in out


def test_for_an_online_run_the_log_is_named_as_the_source(tmp_path: Path, syncing: Sync) -> None:
    run = stored(tmp_path, "run-1-exp")
    (run.path.parent / "logs").mkdir()
    entries = [rows(5), CONFIRMED, *ENDED]
    (run.path.parent / "logs" / "debug-internal.log").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    assert syncing(run, options="--force") == 0
    out = syncing.out()
    assert "1 uploaded while it was written, according to W&B's log beside it (--again uploads" in out
    assert "uploaded before" not in out
    assert syncing.of == []
    assert syncing(run, options="--again") == 0
    assert syncing.of == ["exp"]


def test_a_signal_ends_an_upload_as_an_interrupt_does(tmp_path: Path, syncing: Sync) -> None:
    """A signal used to end only this process, and the upload continued. For others see test_sync.py."""
    syncing.ends = functools.partial(signal.raise_signal, signal.SIGHUP)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert syncing(stored(tmp_path)) == 129
        assert "ended by SIGHUP. An upload continues after the rows" in syncing.capsys.readouterr().err
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_any_error_of_planning_is_reported_for_its_run_which_is_not_uploaded(tmp_path: Path, syncing: Sync) -> None:
    hurt, healthy = stored(tmp_path / "a", run_id="hurt"), stored(tmp_path / "b", run_id="healthy")
    hurt = replace(hurt, problems=None)  # type: ignore[arg-type]  # a fault of ours
    assert syncing(hurt, healthy, options="--dry-run --force") == 1
    out = syncing.out()
    assert f"so it is refused: {hurt.path}: TypeError: " in out
    assert "2 runs: 1 to upload, 1 refused" in out
