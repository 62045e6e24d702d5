"""`dist-wandb sync` uploads all files of a run, from a copy. For those of others see test_hostile_trees.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from processes import clean_environment, run_job
from record_files import content_of, make_run, new_record
from stored import ended_runs
from syncing import TIMEOUT, sync
from wandb_server import WandbServer

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


def test_what_wandb_wrote_behind_the_end_of_a_short_run_is_uploaded(tmp_path: Path, wandb_server: WandbServer) -> None:
    """`wandb sync` itself drops it, and logs an error: what the machine is takes a moment to find out."""
    machine = new_record()
    machine.environment.host = "node-1"
    extended(make_run(tmp_path / "runs"), machine)
    assert "✓ exp: 3 rows uploaded" in sync(wandb_server, tmp_path).check().output
    assert json.loads(wandb_server.run("exp").files["wandb-metadata.json"])["host"] == "node-1"


def extended(path: Path, record: object) -> None:
    """Append a record to a file that was written by hand."""
    more = content_of([record])[7:]
    content = path.read_bytes()
    assert len(content) + len(more) < 32_768  # within the first block, where no padding is needed
    path.write_bytes(content + more)
    os.utime(path, (1e9, 1e9))
