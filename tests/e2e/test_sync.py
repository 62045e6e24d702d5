"""`dist-wandb sync` with the real `wandb sync`: the server gets the data of an online run, once, despite failures."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import wandb
from processes import Finished, clean_environment, python, run_job, started, torchrun, wait_until
from stored import PATIENT, ended_runs, find_runs, read_files, without_own
from wandb_records import HISTORY, PLAIN, RecordedRun, WriterRecord
from wandb_server import MEASURED, Request, WandbServer

import dist_wandb
from dist_wandb.cli import main

MODULES = os.pathsep.join([str(Path(dist_wandb.__file__).parents[1]), str(Path(__file__).parents[1] / "support")])
WATCHED = {"WANDB_CONSOLE": "wrap", **MEASURED}
IMPATIENT = {f"WANDB_X_{client}_RETRY_MAX": "1" for client in ("GRAPHQL", "FILE_STREAM", "FILE_TRANSFER")}
TIMEOUT = 120
ROWS = [{"loss": 10.0 - step} for step in range(5)]
MORE_ROWS = [{"loss": -1.0 - step} for step in range(4)]
LONG_AGO = 1e9  # seconds since the epoch


def log_shared(directory: str) -> None:
    """One rank that logs into a shared run, online or as the environment specifies."""
    dist.init_process_group("gloo")
    with dist_wandb.init(
        "tests",
        run_mode="shared",
        limits=dist_wandb.Limits(heartbeat=PATIENT),
        id="exp",
        name="nm",
        group="g",
        job_type="train",
        notes="why",
        tags=["t"],
        dir=directory,
        config={"lr": 0.1},
    ) as run:
        for step in range(5):
            run.log({"loss": 2.0 * step + run.topology.global_rank}, step=step)
        sys.stdout.write(f"hello from {run.topology.global_rank}\n")
        wait_for_measurement(run.run.dir)
    dist.destroy_process_group()


def wait_for_measurement(directory: str) -> None:
    """Wait until wandb has measured the machine: a run that is over before that has no system metrics."""
    files = Path(directory).parent
    wait_until(
        lambda: any(b"proc.memory" in path.read_bytes() for path in files.glob("run-*.wandb")),
        TIMEOUT,
        "a measurement of the machine by wandb",
    )


def log_rows(run: wandb.Run, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        run.log(row)
        sys.stdout.write(f"logged {row}\n")


def use_wandb(given: str) -> None:
    """Open a run, log, log more once a file exists (`goes_on_after`), finish."""
    order = json.loads(given)
    run = wandb.init(project="tests", **order["init"])
    log_rows(run, order["rows"])
    if path := order.get("goes_on_after"):
        wait_until(Path(path).exists, TIMEOUT, path)
    log_rows(run, order.get("more_rows", []))
    run.finish()


def sync_command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "dist_wandb", "sync", *map(str, arguments)]


def sync_environment(server: WandbServer, directory: Path, **variables: str) -> dict[str, str]:
    return server.environment(directory, PYTHONPATH=MODULES, **{**WATCHED, **IMPATIENT, **variables})


def sync(server: WandbServer, directory: Path, *options: str, **variables: str) -> Finished:
    """Upload the runs below a directory, which is also the place of W&B's caches and of the state of uploads."""
    command, environment = sync_command(*options, directory), sync_environment(server, directory, **variables)
    return run_job(command, cwd=directory, environment=environment, timeout=TIMEOUT)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two runs offline: a shared run of two ranks, and a plain run of five rows."""
    top = tmp_path_factory.mktemp("recorded")
    shared, plain = top / "shared", top / "plain"
    shared.mkdir()
    plain.mkdir()
    environment = clean_environment(PYTHONPATH=MODULES, **WATCHED)
    run_job(*torchrun(log_shared, shared), cwd=shared, environment=environment, timeout=TIMEOUT).check()
    environment = clean_environment(**WATCHED, WANDB_X_SAVE_REQUIREMENTS="true")
    run_job(plain_run(plain), cwd=plain, environment=environment, timeout=TIMEOUT).check()
    ended_runs(top, 3)
    return top


@pytest.fixture
def offline(recorded: Path, tmp_path: Path) -> Path:
    """Return a copy of the shared run."""
    return shutil.copytree(recorded / "shared", tmp_path / "copy", symlinks=True)


@pytest.fixture
def plain(recorded: Path, tmp_path: Path) -> Path:
    """Return a copy of the plain run."""
    return shutil.copytree(recorded / "plain", tmp_path / "copy", symlinks=True)


def plain_run(directory: Path, **order: Any) -> list[str | Path]:
    """Return the command that writes a run `exp` with wandb itself."""
    order = {"init": {"id": "exp", "dir": str(directory)}, "rows": ROWS, **order}
    (command,) = python(use_wandb, json.dumps(order))
    return command


def losses(run: RecordedRun) -> list[float]:
    return [row["loss"] for row in run.rows]


def has_rows(request: Request) -> bool:
    return HISTORY in request.message.get("files", {})


# --- shared runs ------------------------------------------------------------------------------------------------------


def test_an_offline_shared_run_becomes_the_same_as_an_online_one(
    offline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with WandbServer() as online:
        environment = online.environment(tmp_path, PYTHONPATH=MODULES, **WATCHED)
        job = torchrun(log_shared, tmp_path / "online")
        run_job(*job, cwd=tmp_path, environment=environment, timeout=TIMEOUT).check()
        expected = online.run("exp")
    with WandbServer() as server:
        planned = sync(server, offline, "--dry-run").check().output
        assert (server.answered, "2. rank-0 (primary): 5 rows" in planned) == ([], True)
        assert "✓ exp rank-1: 5 rows uploaded" in sync(server, offline).check().output
        found = server.run("exp")
        assert described(found) == described(expected)
        assert described(found)["group"] == "g"
        assert {label: written(*writer) for label, writer in by_label(found).items()} == {
            label: written(*writer) for label, writer in by_label(expected).items()
        }
        last = [request for request, _ in server.answered if request.scope == "file_stream"][-1]
        assert (last.message["complete"], last.client) == (True, by_label(found)["rank-0"][0].client)
        put = [request.path for request, _ in server.answered if request.scope == "files"]
        assert sum(path.endswith("wandb-summary.json") for path in put) == 1  # the primary's
        before = len(server.answered)
        monkeypatch.setenv("XDG_STATE_HOME", server.environment(offline)["XDG_STATE_HOME"])
        assert "1 run: 1 uploaded before" in sync(server, offline).check().output
        assert main(["show", str(offline)]) == 0
        assert capsys.readouterr().out.count("finished · 10 rows · uploaded") == 1
        assert len(server.answered) == before
        assert server.unknown == online.unknown == []


def described(run: RecordedRun) -> dict[str, Any]:
    return {
        "name": run.display_name,
        "group": run.group,
        "tags": run.tags,
        "notes": run.notes,
        "job type": run.job_type,
        "config": run.config,
        "metrics": run.metric_definitions,
        "completions": run.completions,
        "exit codes": run.exit_codes,
        "summary": without_own(run.summary),
        "files": sorted(run.files),
    }


def by_label(run: RecordedRun) -> dict[str, tuple[WriterRecord, RecordedRun]]:
    labels = {client: {json.loads(line)["label"] for line in writer.console} for client, writer in run.writers.items()}
    assert PLAIN not in labels
    return {label: (run.writers[client], run) for client, (label,) in labels.items()}


def written(writer: WriterRecord, run: RecordedRun) -> dict[str, Any]:
    """Return all that one writer sent, except times, measurements, and wandb's own text about online and offline."""
    upserts = [upsert for upsert in run.upserts if upsert.client == writer.client]
    return {
        "rows": [{**without_own(row), "_step": row["_step"]} for row in writer.rows],
        "events": (set(writer.events[0]), labels_of_events(writer)),
        "console": [json.loads(line)["content"] for line in writer.console if "hello" in line],
        "summary": without_own(writer.summary),
        "completions": (writer.completions, writer.exit_codes),
        "described by": {**upserts[0].values, "stored_config": None},
        "config": {
            name: item for name, item in upserts[-1].values.get("stored_config", {}).items() if name != "_wandb"
        },
    }


def labels_of_events(writer: WriterRecord) -> set[str]:
    names = {name for event in writer.events for name in event}
    return {name.partition("/l:")[2] for name in names if name.startswith("system.")}


def test_a_killed_rank_is_uploaded_as_failed_once_it_is_dead(offline: Path, wandb_server: WandbServer) -> None:
    (primary,) = offline.glob("wandb/rank-0/wandb/offline-run-*/run-exp.wandb")
    content = primary.read_bytes()
    primary.write_bytes(content[: int(0.9 * len(content))])
    left, _ = read_files(find_runs(offline))
    finished = sync(wandb_server, offline)
    assert (finished.exit_codes, wandb_server.answered) == ((1,), [])
    assert "is still being written" in finished.output
    os.utime(primary, (LONG_AGO, LONG_AGO))
    assert "marked as failed" in sync(wandb_server, offline).check().output
    run = wandb_server.run("exp")
    assert (run.exit_codes, len(run.rows)) == ([1], sum(run.rows for run in left))


def test_the_primary_waits_for_secondaries_that_fail(offline: Path, wandb_server: WandbServer) -> None:
    fault = wandb_server.fail("file_stream", status=404, only=has_rows)
    finished = sync(wandb_server, offline)
    assert finished.exit_codes == (1,)
    assert "0 of 5 rows are confirmed: HTTP 404" in finished.output
    assert (
        wandb_server.run("exp").completions,
        len({upsert.client for upsert in wandb_server.run("exp").upserts}),
    ) == (0, 1)
    assert not list(offline.rglob("*.synced"))
    fault.stop()
    sync(wandb_server, offline).check()
    run = wandb_server.run("exp")
    assert (len(run.rows), run.exit_codes) == (10, [0])
    assert sorted(row["rank-1/loss"] for row in run.rows if "rank-1/loss" in row) == [1.0, 3.0, 5.0, 7.0, 9.0]


# --- plain runs -------------------------------------------------------------------------------------------------------


def test_refusals_are_reported_and_can_be_repeated(plain: Path, wandb_server: WandbServer) -> None:
    wandb_server.stop()
    dead = sync(wandb_server, plain)
    wandb_server.restart()
    fault = wandb_server.fail("graphql", status=401)
    unknown = sync(wandb_server, plain)
    fault.stop()
    fault = wandb_server.fail("UpsertBucket", status=409)
    deleted = sync(wandb_server, plain, WANDB_X_GRAPHQL_RETRY_MAX="20")
    fault.stop()
    assert fault.hits <= 3  # W&B's client alone tries for minutes
    assert (dead.exit_codes, unknown.exit_codes, deleted.exit_codes) == ((1,), (1,), (1,))
    assert "HTTP 409 for requests to /graphql. W&B refuses the run's id" in deleted.output
    assert "tries again" not in deleted.output
    assert re.search(r"exp: .*connection refused\. W&B's client tries again", dead.output)
    assert "HTTP 401 for POST /graphql. Authentication failed" in unknown.output
    assert wandb_server.runs == {}
    fault = wandb_server.fail("files", status=404)
    assert sync(wandb_server, plain).exit_codes == (1,)
    fault.stop()
    sync(wandb_server, plain).check()  # the files, without the rows
    run = wandb_server.run("exp")
    assert (losses(run), run.exit_codes, list(run.writers)) == ([row["loss"] for row in ROWS], [0], [PLAIN])
    assert {"config.yaml", "wandb-summary.json", "requirements.txt"} <= run.files.keys()


def test_rows_that_may_have_arrived_are_not_sent_again(plain: Path, wandb_server: WandbServer) -> None:
    fault = wandb_server.fail("file_stream", drop=True, processed=True, only=has_rows)
    assert sync(wandb_server, plain).exit_codes == (1,)
    fault.stop()
    refused = sync(wandb_server, plain)
    assert refused.exit_codes == (1,)
    unsure = re.search(r"the server has confirmed 0 of its \d rows, and may have (\d) more", refused.output)
    assert unsure is not None
    all_losses = [row["loss"] for row in ROWS]
    there = all_losses[: int(unsure[1])]  # as many as the first request had
    assert losses(wandb_server.run("exp")) == there
    sync(wandb_server, plain, "--force").check()
    assert losses(wandb_server.run("exp")) == there + all_losses


@pytest.mark.parametrize("answers", [True, False])
def test_an_interrupt_waits_for_the_answer_to_rows_that_were_sent(
    plain: Path, tmp_path: Path, wandb_server: WandbServer, answers: bool
) -> None:
    waits = re.compile(r"exp: Waiting up to 10 s for the server's answer about \d rows that were sent")
    log, environment = tmp_path / "output.txt", sync_environment(wandb_server, plain)
    fault = wandb_server.fail("file_stream", delay=TIMEOUT, count=1, only=has_rows)
    with started(sync_command(plain), cwd=plain, environment=environment, output=log) as job:
        wait_until(lambda: fault.hits == 1, within=TIMEOUT)
        job.processes[0].send_signal(signal.SIGINT)
        wait_until(lambda: bool(waits.search(log.read_text())), within=TIMEOUT)
        if answers:
            fault.stop()
        else:
            job.processes[0].send_signal(signal.SIGINT)
        assert job.processes[0].wait(TIMEOUT) == 130
    output = log.read_text()
    assert ("but the server has not confirmed them. Look at the run" in output) is not answers
    assert sync(wandb_server, plain).exit_codes == ((0,) if answers else (1,))
    if answers:
        assert losses(wandb_server.run("exp")) == [row["loss"] for row in ROWS]


def test_an_online_run_that_was_cut_off_gets_its_missing_rows(tmp_path: Path, wandb_server: WandbServer) -> None:
    directory, more = tmp_path / "run", tmp_path / "more"
    directory.mkdir()
    environment = wandb_server.environment(directory, **WATCHED, **IMPATIENT)
    command = plain_run(directory, more_rows=MORE_ROWS, goes_on_after=str(more))
    with started(command, cwd=directory, environment=environment) as job:
        wandb_server.wait_until(lambda: any(len(run.rows) == len(ROWS) for run in wandb_server.runs.values()))
        wandb_server.stop()
        more.touch()
        output, _ = job.processes[0].communicate(timeout=TIMEOUT)
        assert "Fatal error while uploading data" in output
    wandb_server.restart()
    assert losses(wandb_server.run("exp")) == [row["loss"] for row in ROWS]
    assert "continues after 5 rows" in sync(wandb_server, directory).check().output
    run = wandb_server.run("exp")
    assert losses(run) == [row["loss"] for row in ROWS + MORE_ROWS]
    assert [row["_step"] for row in run.rows] == list(range(len(ROWS + MORE_ROWS)))
    assert run.exit_codes == [0]
    assert [sum(f"logged {row}" in line for line in run.console) for row in ROWS + MORE_ROWS] == [1] * 9
    assert "1 uploaded before" in sync(wandb_server, directory).check().output


def test_a_rewind_that_was_recorded_offline_is_sent(tmp_path: Path, wandb_server: WandbServer) -> None:
    branch = {"init": {"dir": str(tmp_path), "resume_from": "exp?_step=2"}, "rows": MORE_ROWS}
    for order in ({}, branch):
        run_job(plain_run(tmp_path, **order), cwd=tmp_path, environment=clean_environment(), timeout=TIMEOUT).check()
    ended_runs(tmp_path, 2)
    sync(wandb_server, tmp_path).check()
    assert [request.operation for request, _ in wandb_server.answered].count("RewindRun") == 1
    kept = [row["loss"] for row in ROWS[:3]]
    assert losses(wandb_server.run("exp")) == [*kept, *(row["loss"] for row in MORE_ROWS)]


def test_an_upload_that_was_killed_or_ended_continues(plain: Path, wandb_server: WandbServer) -> None:
    fault = wandb_server.fail("UpsertBucket", delay=30, drop=True)
    environment = sync_environment(wandb_server, plain)
    with started(sync_command(plain), cwd=plain, environment=environment) as job:
        wait_until(lambda: fault.hits == 1, within=TIMEOUT)
        job.processes[0].kill()  # its child process continues
        job.processes[0].communicate(timeout=TIMEOUT)
        second = sync(wandb_server, plain)
    assert second.exit_codes == (1,)
    assert "another upload of this file is under way (pid " in second.output
    for hits, number, code in ((2, signal.SIGINT, 130), (3, signal.SIGTERM, 143)):
        with started(sync_command(plain), cwd=plain, environment=environment) as job:
            wait_until(lambda hits=hits: fault.hits == hits, within=TIMEOUT)  # type: ignore[misc]
            job.processes[0].send_signal(number)
            output, _ = job.processes[0].communicate(timeout=TIMEOUT)
            wait_until(lambda job=job: not job.living(), within=30)  # type: ignore[misc]
        assert (job.processes[0].returncode, "continues after the rows" in output) == (code, True)
    fault.stop()
    sync(wandb_server, plain).check()
    run = wandb_server.run("exp")
    assert (losses(run), run.exit_codes) == ([row["loss"] for row in ROWS], [0])


# --- only the files of a run, from a copy; for other files see test_hostile_trees.py ----------------------------------

RICH_RUN = """
import pathlib, wandb
pathlib.Path("weights.bin").write_bytes(bytes(range(256)) * 8192)
run = wandb.init(project="digits", id="rich", config={"lr": 0.1})
run.log({"loss": 1.0, "table": wandb.Table(columns=["a"], data=[[1], [2]]), "page": wandb.Html("<b>bold</b>")})
artifact = wandb.Artifact("weights", "model")
artifact.add_file("weights.bin")
run.log_artifact(artifact)
run.finish()
"""


def contents_below(top: Path) -> dict[Path, bytes]:
    """Return the contents of all files, except the log of wandb's own process, which ends after the job."""
    return {path: path.read_bytes() for path in top.rglob("*") if path.is_file() and path.name != "debug-core.log"}


def test_a_run_with_media_and_artifacts_is_uploaded_completely(tmp_path: Path, wandb_server: WandbServer) -> None:
    data = {"WANDB_DATA_DIR": wandb_server.environment(tmp_path)["WANDB_DATA_DIR"]}
    job = [sys.executable, "-c", RICH_RUN]
    run_job(job, cwd=tmp_path, environment=clean_environment(**data), timeout=TIMEOUT).check()
    (stored,) = ended_runs(tmp_path, 1)
    path = stored.path
    before = contents_below(path.parent)
    assert "✓ rich: 1 row uploaded" in sync(wandb_server, tmp_path).check().output
    run = wandb_server.run("rich")
    media = {name for name in before if "media" in name.parts}
    assert {str(name.relative_to(path.parent / "files")): before[name] for name in media}.items() <= run.files.items()
    weights = bytes(range(256)) * 8192
    assert [found.files for found in wandb_server.artifacts if found.name == "weights"] == [{"weights.bin": weights}]
    assert {found.kind for found in wandb_server.artifacts} == {"model", "run_table"}
    after = contents_below(path.parent)
    assert after.keys() - before.keys() == {path.with_name("run-rich.wandb.synced")}
    assert {name: after[name] for name in before} == before
    assert not list((tmp_path / "state").rglob("copy"))
