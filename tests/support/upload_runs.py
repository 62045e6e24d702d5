"""Runs to upload, as input for planning, and logs of W&B's uploader."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from offline_runs import sidecar_record
from record_files import content_of, new_record

from dist_wandb.cli.uploads.contents import Terms
from dist_wandb.cli.uploads.plan import UploadRun, plan_uploads
from dist_wandb.cli.uploads.state import FileState, Sent
from dist_wandb.wandb_files.reading import StoredRun
from dist_wandb.wandb_files.sidecar import Sidecar
from dist_wandb.wandb_files.small_files import Directory

ENDED: list[dict[str, Any]] = [{"msg": "sender: closed"}]
CONFIRMED: dict[str, Any] = {"msg": "filestream: request sent"}
LONG_AGO = 1_000.0
NO_RUN_RECORD = "its run record is lost, and with it name, project, group and config"


def rows(number: int) -> dict[str, Any]:
    return {"msg": "filestream: sending request", "history_lines": number}


def stored(
    directory: Path, folder: str = "offline-run-1-exp", *, changed: float = LONG_AGO, **values: Any
) -> StoredRun:
    """Return a run of five rows. Its file has no records, because planning reads only the logs."""
    path = directory / folder / "run-exp.wandb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b":W&B\xe1\xbe\x00")
    os.utime(path, (changed, changed))
    given: dict[str, Any] = {
        "path": path,
        "directory": Directory.at(path.parent),
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
    """Return a writer of a shared run whose primary is rank 0."""
    primary = values.pop("primary", rank == 0)
    job = {name: values.pop(name) for name in ("rank_scope", "run_mode") if name in values}
    place = {"label": f"rank-{rank}", "global_rank": rank, "local_rank": rank, "world_size": world_size}
    record = sidecar_record(primary=primary, **place, **job)
    sidecar = Sidecar(**{name: value for name, value in record.items() if name != "format"})
    values = {"started": f"2026-01-0{session}T00:00:0{rank}Z", "sidecar": sidecar, **values}
    return stored(directory / f"rank-{rank}", f"offline-run-{session}-exp", **values)


def log_of_attempt(run: StoredRun, *entries: dict[str, Any], before: Sent = Sent()) -> None:  # noqa: B008  # frozen
    state = FileState(run)
    with state.locked():
        log = state.begin(before) / "wandb" / "logs" / "debug-sync.1.log"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))


TRUSTING = Terms(trust=True)


def planned(*runs: StoredRun, terms: Terms = Terms()) -> UploadRun:  # noqa: B008  # frozen
    (run,) = plan_uploads(runs, terms)
    return run


def order(run: UploadRun) -> list[str]:
    return [f"{file.path.parent.parent.name}/{file.path.parent.name}" for file in run.files]


def recorded(text: str, row: str = "1", entity: str = "") -> bytes:
    run, history = new_record(), new_record()
    run.run.run_id, run.run.entity, run.control.mailbox_slot = "exp", entity, text
    history.history.item.add().value_json = row
    return content_of([run, history])
