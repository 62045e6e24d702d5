"""The stand-in for the W&B server, with the real wandb as client: it records all actions, also after failures."""

from __future__ import annotations

import json
import sys
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from processes import Finished, run_job, started, torchrun
from wandb_records import HISTORY, PLAIN, RecordedRun, WriterRecord
from wandb_server import MEASURED, Request, WandbServer

SCRIPTS = Path(__file__).parent / "scripts"
SUPPORT = Path(__file__).parents[1] / "support"
ROWS = [{"loss": 10.0 - step} for step in range(5)]
MORE_ROWS = [{"loss": -1.0 - step} for step in range(4)]
TIMEOUT = 120


def client(directory: Path, **order: Any) -> list[str | Path]:
    """Return the command of a client; its run has the id `exp` by default."""
    directory.mkdir(exist_ok=True)
    order["init"] = {"id": "exp", "dir": str(directory), **order.get("init", {})}
    return [sys.executable, SCRIPTS / "wandb_client.py", json.dumps(order)]


def run(server: WandbServer, directory: Path, *commands: list[str | Path], **extra: str) -> Finished:
    environment = server.environment(directory, PYTHONPATH=str(SUPPORT), **extra)
    return run_job(*commands, cwd=directory, environment=environment, timeout=TIMEOUT)


def losses(recorded: RecordedRun) -> list[float]:
    return [row["loss"] for row in recorded.rows]


def values(rows: list[dict[str, float]]) -> list[float]:
    return [row["loss"] for row in rows]


def test_a_plain_run_is_recorded(wandb_server: WandbServer, tmp_path: Path) -> None:
    described = {"name": "nm", "group": "g", "job_type": "train", "notes": "why", "tags": ["a", "b"]}
    command = client(tmp_path, init={**described, "config": {"lr": 0.1}}, rows=ROWS)
    run(wandb_server, tmp_path, command, WANDB_CONSOLE="wrap").check()
    recorded = wandb_server.runs["tester/tests/exp"]
    assert losses(recorded) == values(ROWS)
    assert [row["_step"] for row in recorded.rows] == list(range(len(ROWS)))
    assert recorded.summary["loss"] == ROWS[-1]["loss"]
    assert recorded.config == {"lr": 0.1}
    assert (recorded.display_name, recorded.group, recorded.job_type) == ("nm", "g", "train")
    assert (recorded.notes, recorded.tags) == ("why", ("a", "b"))
    assert (list(recorded.writers), recorded.completions, recorded.exit_codes) == ([PLAIN], 1, [0])
    assert sum(f"logged {ROWS[0]}" in line for line in recorded.console) == 1


def test_an_exit_code_is_recorded(wandb_server: WandbServer, tmp_path: Path) -> None:
    run(wandb_server, tmp_path, client(tmp_path, exit_code=3)).check()
    recorded = wandb_server.run("exp")
    assert (recorded.rows, recorded.exit_codes) == ([], [3])


@pytest.mark.parametrize("resume", ["allow", "must"])
def test_a_resumed_run_continues_after_its_rows(wandb_server: WandbServer, tmp_path: Path, resume: str) -> None:
    run(wandb_server, tmp_path, client(tmp_path, init={"config": {"lr": 0.1}}, rows=ROWS)).check()
    run(wandb_server, tmp_path, client(tmp_path, init={"resume": resume}, rows=MORE_ROWS)).check()
    recorded = wandb_server.run("exp")
    assert losses(recorded) == values(ROWS + MORE_ROWS)
    assert [row["_step"] for row in recorded.rows] == list(range(len(ROWS + MORE_ROWS)))
    assert recorded.config == {"lr": 0.1}
    assert recorded.completions == 2


def test_a_run_that_must_be_resumed_has_to_exist(wandb_server: WandbServer, tmp_path: Path) -> None:
    finished = run(wandb_server, tmp_path, client(tmp_path, init={"resume": "must"}))
    assert finished.exit_codes == (1,)
    assert wandb_server.runs == {}


def test_plain_writers_of_one_id_overwrite_each_other(wandb_server: WandbServer, tmp_path: Path) -> None:
    """Both open before either logs: of two rows at the same offset, the last received one is kept."""
    opened, joined = str(tmp_path / "opened"), str(tmp_path / "joined")
    first = client(tmp_path / "first", opened=opened, goes_on_after=joined, more_rows=ROWS)
    second = client(tmp_path / "second", opens_after=opened, opened=joined, rows=MORE_ROWS)
    run(wandb_server, tmp_path, first, second).check()
    recorded = wandb_server.run("exp")
    by_offset = dict(enumerate(losses(recorded)))
    assert list(by_offset) == list(range(len(ROWS)))
    assert by_offset[4] == ROWS[4]["loss"]
    assert all(by_offset[offset] in (ROWS[offset]["loss"], MORE_ROWS[offset]["loss"]) for offset in range(4))
    assert (list(recorded.writers), recorded.completions) == ([PLAIN], 2)


@pytest.mark.parametrize("counts_lines", [True, False])
def test_a_reopened_plain_run_starts_at_the_servers_line_count(tmp_path: Path, counts_lines: bool) -> None:
    with WandbServer(counts_lines=counts_lines) as server:
        run(server, tmp_path, client(tmp_path, rows=ROWS)).check()
        run(server, tmp_path, client(tmp_path, rows=MORE_ROWS)).check()
        left = values(ROWS) if counts_lines else values(MORE_ROWS)
        right = values(MORE_ROWS) if counts_lines else values(ROWS)[len(MORE_ROWS) :]
        assert losses(server.run("exp")) == left + right
        assert server.unknown == []


def shared(directory: Path, rank: int, **order: Any) -> list[str | Path]:
    """Return the command of a writer of a shared run; rank 0 is its primary."""
    settings = {"mode": "shared", "x_label": f"rank-{rank}", "x_primary": rank == 0}
    settings["x_update_finish_state"] = rank == 0
    settings |= {name.removeprefix("WANDB_").lower(): float(value) for name, value in MEASURED.items()}
    return client(directory / f"{rank}", settings=settings, is_measured=True, **order)


def shared_pair(directory: Path) -> tuple[list[str | Path], list[str | Path]]:
    """Return two writers: the secondary opens after the primary, which finishes after the secondary has logged."""
    opened, logged = str(directory / "opened"), str(directory / "logged")
    primary = shared(directory, 0, rows=ROWS, opened=opened, goes_on_after=logged)
    return primary, shared(directory, 1, rows=MORE_ROWS, opens_after=opened, logged=logged)


def test_shared_writers_are_clients_of_one_run(wandb_server: WandbServer, tmp_path: Path) -> None:
    run(wandb_server, tmp_path, *shared_pair(tmp_path), WANDB_CONSOLE="wrap").check()
    recorded = wandb_server.run("exp")
    streamed = sorted((values(writer.rows) for writer in recorded.writers.values()), key=len)
    assert streamed == [values(MORE_ROWS), values(ROWS)]
    assert PLAIN not in recorded.writers
    assert {upsert.client for upsert in recorded.upserts} == set(recorded.writers)
    assert recorded.exit_codes == [0]
    (completed,) = [writer for writer in recorded.writers.values() if writer.completions]
    assert values(completed.rows) == values(ROWS)
    for writer in recorded.writers.values():
        assert labels_of(writer) == {"rank-0" if writer is completed else "rank-1"}


def labels_of(writer: WriterRecord) -> set[str]:
    """Return the labels in the system metrics and the console lines of a writer."""
    in_metrics = {name.partition("/l:")[2] for event in writer.events for name in event if "/l:" in name}
    in_lines = {str(json.loads(line).get("label")) for line in writer.console}
    assert in_metrics
    assert in_lines
    return in_metrics | in_lines


FAULTS: dict[str, dict[str, Any]] = {
    "answered with 500": {"status": 500},
    "dropped": {"drop": True},
    "recorded, but the response dropped": {"drop": True, "processed": True},
    "slow": {"delay": 0.5},
}


def has_rows(request: Request) -> bool:
    return HISTORY in request.message.get("files", {})


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_faults_neither_lose_nor_duplicate_rows(
    wandb_server: WandbServer, tmp_path: Path, fault: dict[str, Any]
) -> None:
    opening = wandb_server.fail("UpsertBucket", count=1, **fault)
    streaming = wandb_server.fail("file_stream", count=1, only=has_rows, **fault)
    run(wandb_server, tmp_path, client(tmp_path, rows=ROWS)).check()
    assert (opening.hits, streaming.hits) == (1, 1)
    recorded = wandb_server.run("exp")
    assert losses(recorded) == values(ROWS)
    assert set(recorded.exit_codes) == {0}


def test_a_server_that_is_temporarily_down_receives_all_rows(wandb_server: WandbServer, tmp_path: Path) -> None:
    again = tmp_path / "again"
    command = client(tmp_path, rows=ROWS, more_rows=MORE_ROWS, goes_on_after=str(again))
    with started(command, cwd=tmp_path, environment=wandb_server.environment(tmp_path)) as job:
        wandb_server.wait_until(lambda: len(losses_so_far(wandb_server)) == len(ROWS))
        wandb_server.stop()
        again.touch()
        time.sleep(1.0)
        assert losses_so_far(wandb_server) == values(ROWS)
        wandb_server.restart()
        output, _ = job.processes[0].communicate(timeout=TIMEOUT)
        assert job.processes[0].returncode == 0, output
    assert losses_so_far(wandb_server) == values(ROWS + MORE_ROWS)
    assert wandb_server.run("exp").exit_codes == [0]


def losses_so_far(server: WandbServer) -> list[float]:
    return [loss for run in server.runs.values() for loss in losses(run)]


def test_a_fault_lasts_until_it_is_stopped(wandb_server: WandbServer, tmp_path: Path) -> None:
    fault = wandb_server.fail("file_stream", status=500)
    command = client(tmp_path, rows=ROWS)
    with started(command, cwd=tmp_path, environment=wandb_server.environment(tmp_path)) as job:
        wandb_server.wait_until(lambda: fault.hits >= 3)
        assert losses_so_far(wandb_server) == []
        fault.stop()
        output, _ = job.processes[0].communicate(timeout=TIMEOUT)
        assert job.processes[0].returncode == 0, output
    assert losses_so_far(wandb_server) == values(ROWS)


def test_files_and_artifacts_arrive(wandb_server: WandbServer, tmp_path: Path) -> None:
    weights = tmp_path / "weights.bin"
    weights.write_bytes(bytes(range(256)))
    wandb_server.fail("files", count=1, status=500)
    run(wandb_server, tmp_path, client(tmp_path, rows=ROWS, file=str(weights))).check()
    recorded = wandb_server.run("exp")
    assert recorded.files["weights.bin"] == weights.read_bytes()
    (artifact,) = wandb_server.artifacts
    assert (artifact.run, artifact.name, artifact.kind, artifact.committed) == (recorded.key, "weights", "model", True)
    assert "best" in artifact.aliases
    assert artifact.files == {"weights.bin": weights.read_bytes()}
    assert artifact.manifest is not None
    assert list(artifact.manifest["contents"]) == ["weights.bin"]


def test_unsupported_requests_are_errors_and_recorded() -> None:
    with WandbServer() as server:
        for path, body in (("/graphql", {"query": "query Nonsense { x }"}), ("/nowhere", {})):
            connection = HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT)
            connection.request("POST", path, json.dumps(body))
            assert connection.getresponse().status in (400, 404)
            connection.close()
        assert [text.split(":")[0] for text in server.unknown] == ["Nonsense", "POST /nowhere"]


def test_dist_wandb_shared_run_under_torchrun(wandb_server: WandbServer, tmp_path: Path) -> None:
    job = torchrun(SCRIPTS / "shared_online.py", tmp_path)
    run(wandb_server, tmp_path, *job, WANDB_CONSOLE="wrap", **MEASURED).check()
    recorded = wandb_server.run("exp")
    assert recorded.exit_codes == [0]
    assert {frozenset(labels_of(writer)) for writer in recorded.writers.values()} == {
        frozenset({"rank-0"}),
        frozenset({"rank-1"}),
    }
    for step in range(5):
        (row,) = [row for row in recorded.rows if row["global_step"] == step and "loss" in row]
        assert row["loss"] == 2.0 * step + 0.5
    assert {upsert.client for upsert in recorded.upserts if upsert.display_name == "nm"} == set(recorded.writers)
    assert recorded.config == {"lr": 0.1}
    assert [definition["1"] for definition in recorded.metric_definitions if "1" in definition] == ["global_step"]
