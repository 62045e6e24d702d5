"""A Trainer with everything that logs, and two of our loggers: every run has the rows of its ranks, each once."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from history import History, history_of
from processes import Finished, python, run_job
from stored import ended_runs
from wandb_server import WandbServer

from dist_wandb.wandb_files.reading import StoredRun

SCRIPT = Path(__file__).parent / "scripts" / "lightning_everything.py"
X = "trainer/global_step"
STEPS, EPOCHS = 3, 2  # as in the script
LOSSES = [float(step) for _ in range(EPOCHS) for step in range(STEPS)]  # of rank 0; those of rank 1 are larger by 10
STAGES = ("train", "validate", "test")
DEVICE = "DeviceStatsMonitor.on_train_batch_end/cpu_vm_percent"


@dataclass(frozen=True)
class Written:
    """All rows that one rank wrote into one run: each stage may have a file of its own."""

    files: list[StoredRun]

    @property
    def history(self) -> History:
        return History([row for file in self.files for row in history_of(file, X).rows], X)

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.files[0].config)


def run_script(directory: Path, strategy: str, *modes: str, server: WandbServer | None = None) -> Finished:
    environment = None if server is None else server.environment(directory)
    return run_job(*python(SCRIPT, directory, strategy, *modes), cwd=directory, environment=environment).check()


def stored(directory: Path, number: int) -> dict[tuple[str, int], Written]:
    """Return the content of `number` files that all ended well, by run id and rank."""
    found: dict[tuple[str, int], list[StoredRun]] = {}
    for run in ended_runs(directory, number):
        assert run.exit_code == 0
        rank = 0 if run.sidecar is None else run.sidecar.global_rank
        found.setdefault((run.run_id, rank), []).append(run)
    return {key: Written(files) for key, files in found.items()}


def check_rows(history: History, ranks: Sequence[int], prefix: str = "", *, validations: int = EPOCHS + 1) -> None:
    """Check the rows of a run whose values are the mean over ranks: each value once, at its step."""
    rank = sum(ranks) / len(ranks)
    assert history.values(f"{prefix}loss") == [10.0 * rank + loss for loss in LOSSES]
    assert [row[X] for row in history.rows_with(f"{prefix}loss")] == list(range(STEPS * EPOCHS))
    assert history.values(f"{prefix}val") == [4.0 * rank + 1] * validations
    assert history.values(f"{prefix}tested") == [10.0 * rank + 1]
    rates = [] if prefix else [0.1] * STEPS + [0.01] * STEPS  # equal on all ranks by nature, so without labels
    assert history.values(f"{prefix}lr-SGD") == pytest.approx(rates)
    assert not (prefix and history.values(f"{prefix}epoch"))
    assert len(history.values(f"{prefix}{DEVICE}")) == STEPS * EPOCHS
    assert not history.is_flagged


def check_media(history: History, names: set[str]) -> None:
    """Check that a run has one medium of each name, and no others."""
    kinds = {name.rpartition("._type")[0] for name in history.names if name.endswith("._type")}
    assert kinds == names
    assert all(len(history.values(f"{name}._type")) == 1 for name in names)


def check_of_rank_0_alone(history: History, *, has: bool) -> None:
    """Check ThroughputMonitor's rows, which Lightning logs on rank 0 only."""
    expected = {"train": STEPS * EPOCHS, "validate": STEPS * EPOCHS, "test": STEPS}
    assert {stage: len(history.values(f"{stage}/batches")) for stage in STAGES} == (
        expected if has else dict.fromkeys(STAGES, 0)
    )


def check_places(finished: Finished, directory: Path, run_id: str) -> None:
    """Check that all ranks agree on Lightning's directories, and that only rank 0 wrote there."""
    seen = [json.loads(line.removeprefix("SAW ")) for line in finished.lines("SAW ")]
    assert sorted(fact["rank"] for fact in seen) == [0, 1]
    assert {fact["log_dir"] for fact in seen} == {str(directory)}
    (checkpoints,) = {fact["checkpoints"] for fact in seen}
    assert checkpoints == str(directory / "tests" / run_id / "checkpoints")
    assert {path.name for path in Path(checkpoints).iterdir()} == {"epoch=0-step=3.ckpt", "last.ckpt"}
    assert (directory / "config.yaml").is_file()
    assert list(directory.glob("lightning_logs/*/metrics.csv"))
    assert list(directory.glob("lightning_logs/*/events.out.tfevents*"))


def check_csv(directory: Path) -> None:
    """Check that CSVLogger wrote rank 0's own numbers."""
    table = next(directory.glob("lightning_logs/*/metrics.csv")).read_text().splitlines()
    losses = [line.split(",")[table[0].split(",").index("loss")] for line in table[1:]]
    assert [float(loss) for loss in losses if loss] == LOSSES


def check_said(finished: Finished) -> None:
    """Check for one line per logger, and no warnings except one that a busy machine may cause."""
    messages = finished.lines("dist_wandb: ")
    assert len([line for line in messages if "run_mode=" in line]) == 2, messages
    others = [line for line in messages if "run_mode=" not in line and "Upload it with: dist-wandb sync" not in line]
    assert all("'epoch'" in line and "A corrected row follows" in line for line in others), others


MEDIA = {"image", "table", "text"}


def check_runs_of_each_rank(runs: dict[tuple[str, int], Written]) -> None:
    """Check the two runs of the logger with ``run_mode="new"``."""
    for rank in (0, 1):
        own = runs[f"new-rank-{rank}", rank]
        check_rows(own.history, [rank], validations=EPOCHS)
        check_media(own.history, MEDIA)
        check_of_rank_0_alone(own.history, has=rank == 0)
        assert (own.config["lr"], own.config["seen_by"]) == (0.1, rank)
        assert {(file.group, file.name) for file in own.files} == {("new", f"nm-rank-{rank}")}


def test_ddp_spawn_with_an_auto_and_a_new_logger(tmp_path: Path) -> None:
    """The parent holds the run of `auto` for all stages; for `new`, each stage's processes open their runs again."""
    finished = run_script(tmp_path, "ddp_spawn", "auto", "new")
    runs = stored(tmp_path, 1 + 2 * 2)
    assert set(runs) == {("auto", 0), ("new-rank-0", 0), ("new-rank-1", 1)}
    check_rows(runs["auto", 0].history, [0, 1], validations=EPOCHS)
    check_media(runs["auto", 0].history, MEDIA)
    check_of_rank_0_alone(runs["auto", 0].history, has=True)
    check_runs_of_each_rank(runs)
    check_places(finished, tmp_path, "auto")
    check_csv(tmp_path)
    check_said(finished)


def test_ddp_notebook_online_after_wandb_setup(wandb_server: WandbServer, tmp_path: Path) -> None:
    """Forked ranks inherit the process of wandb, which would refuse the second writer of a shared run."""
    run_script(tmp_path, "ddp_notebook", "shared", "new", server=wandb_server)
    assert {run.run_id for run in wandb_server.runs.values()} == {"shared", "new-rank-0", "new-rank-1"}
    for run_id, ranks in {"shared": [0, 1], "new-rank-0": [0], "new-rank-1": [1]}.items():
        run = wandb_server.run(run_id)
        assert run.exit_codes == [0] * len(STAGES)  # each stage has processes of its own
        check_rows(History(run.rows, X), ranks)
        assert (run.config["lr"], run.config["seen_by"]) == (0.1, ranks[0])
    shared = History(wandb_server.run("shared").rows, X)
    check_rows(shared, [0], "rank-0/")
    check_rows(shared, [1], "rank-1/")
    for kind in ("min", "max", "std", "argmax_rank"):  # the spread covers the devices of all ranks
        assert len(shared.values(f"{DEVICE}/{kind}")) == STEPS * EPOCHS
    for name in ("table", "text", "rank-1/table", "rank-1/text", "image", "rank-1/image"):
        assert len(shared.values(name)) == 1
    check_artifacts(wandb_server)


def check_artifacts(server: WandbServer) -> None:
    """Check that rank 0's runs have the checkpoints, and every run its own tables."""
    found: dict[tuple[str, str], int] = {}
    for artifact in server.artifacts:
        name = re.sub(r"(rank-1(table|text))-.+", r"\1", artifact.name)  # W&B changes names that contain a slash
        place = artifact.run.rpartition("/")[2], name
        found[place] = found.get(place, 0) + 1
    tables = {("shared", f"run-shared-{name}") for name in ("table", "text", "rank-1table", "rank-1text")}
    for rank in (0, 1):
        run_id = f"new-rank-{rank}"
        tables |= {(run_id, f"run-{run_id}-{name}") for name in ("table", "text")}
    models = {("shared", "model-shared"), ("new-rank-0", "model-new-rank-0")}
    assert set(found) == tables | models
    assert {place: found[place] for place in models} == dict.fromkeys(models, 2)  # the best one, and the last
