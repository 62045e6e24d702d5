"""The data that wandb's own process gave up, according to its log."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from offline_runs import fill_disk

from dist_wandb.wandb_files import record_file
from dist_wandb.wandb_files.debug_log import untaken, unwritten

RETRIED = (
    "filestream: fatal error: filestream: error making HTTP request: context canceled\n"
    'while retrying: HTTP 500: {"error": "overload"}. got response: <nil>'
)


@pytest.fixture
def log(tmp_path: Path) -> Any:
    def write(*entries: dict[str, Any] | str) -> Path:
        path = tmp_path / "debug-internal.log"
        lines = [entry if isinstance(entry, str) else json.dumps(entry, separators=(",", ":")) for entry in entries]
        path.write_text("\n".join(lines))
        return path

    return write


def error(message: str, **more: str) -> dict[str, str]:
    return {"time": "now", "level": "ERROR", "msg": message, **more}


LOSSES: dict[str, tuple[list[dict[str, str] | str], dict[str, str]]] = {
    "a truncated log": (
        ['{"level":"ERROR","msg":"filestr', '["level":"ERROR"]', error("filestream: fatal error: no")],
        {"rows and console lines": "no"},
    ),
    "a refused upload": (
        [
            error("api: HTTP error", status="404"),
            error("filestream: fatal error: filestream: failed to upload: 404 Not Found", level="ERROR+4"),
        ],
        {"rows and console lines": "failed to upload: 404 Not Found"},
    ),
    "the retried error, not the time-out": (
        [error(RETRIED)],
        {"rows and console lines": 'HTTP 500: {"error": "overload"}'},
    ),
    "the first reason of each kind": (
        [
            error("runupserter: failed to upload changes", error="connection refused"),
            error("runupserter: failed to upload changes", error="no route"),
            error("runfiles: CreateRunFiles returned error: no route"),
        ],
        {"name, config and the like": "connection refused", "files": "CreateRunFiles returned error: no route"},
    ),
    "files and artifacts, of which wandb prints nothing": (
        [
            error("file transfer: upload: failed to upload: status: 404 Not Found", task="DefaultUploadTask{...}"),
            error("sender: failed to log artifact: ArtifactSaver.createArtifact: returned error 404", artifactID=""),
        ],
        {
            "files": "to upload: status: 404 Not Found",
            "artifacts": "ArtifactSaver.createArtifact: returned error 404",
        },
    ),
    "no loss, after a successful retry": (
        [error("filestream: fatal error: no", level="INFO"), error("api: HTTP error", status="409")],
        {},
    ),
}


@pytest.mark.parametrize(("entries", "expected"), LOSSES.values(), ids=LOSSES.keys())
def test_what_was_lost_is_reported_with_its_reason(
    log: Any, entries: list[dict[str, str] | str], expected: dict[str, str]
) -> None:
    assert untaken(log(*entries)) == expected
    assert untaken(log().with_name("none")) == {}


def test_rows_that_were_not_written_to_disk_are_reported(log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unwritten(log(error("writer: failed to flush: write run.wandb: file too large"))) == {
        "rows": "to flush: write run.wandb: file too large"
    }
    assert unwritten(log()) == {}
    fill_disk(monkeypatch, free=1000)  # the log is on it, too
    (reason,) = unwritten(log()).values()
    assert reason.endswith("is full")


@pytest.mark.parametrize("before", [200, 32_750, 32_765, 70_000])  # bytes; a record may be in two blocks
def test_a_file_without_the_runs_end_is_reported(log: Any, tmp_path: Path, before: int) -> None:
    """On a disk that takes no further byte, the log does not tell it. The end may follow a moment later."""
    (tmp_path / "logs").mkdir()
    path = log().rename(tmp_path / "logs" / "debug-internal.log")
    with (tmp_path / "run-exp.wandb").open("wb", buffering=0) as file:
        file.write(record_file.FILE_HEADER)
        record_file.write_record(file, b"\x12\x92\x01" + bytes(before - 17))  # a row
        (reason,) = unwritten(path, 0.1).values()
        assert reason == f"after 0.1 s, the file in {tmp_path} lacks the run's end"
        end = threading.Timer(
            0.1, record_file.write_record, [file, b"\x08\x20\xc2\x0c\x05\n\x03exp\x92\x01\x02\x10\x02"]
        )
        end.start()
        assert unwritten(path, 20.0) == {}
        end.join()
        record_file.write_record(
            file, b"\xd2\x01\x82\x10" + bytes(2050)
        )  # what wandb found out about the machine, a moment later
        assert unwritten(path, 0.1) == {}
