"""The examples as a new user runs them: from any directory, without a W&B login, on real data."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from processes import clean_environment, python, run_job, torchrun
from stored import ended_runs, find_runs, read_files

from dist_wandb.cli.uploads.plan import plan_uploads

EXAMPLES = Path(__file__).parents[2] / "examples"
LIGHTNING, ACCELERATE, TRANSFORMERS, TORCH = (
    EXAMPLES / name / "train_digits.py" for name in ("lightning", "accelerate", "transformers", "torch")
)
NO_LOGIN = "W&B has no API key, so it writes to disk only."


def without_login(home: Path) -> dict[str, str]:
    environment = clean_environment(HOME=str(home))
    return {name: value for name, value in environment.items() if name not in ("WANDB_MODE", "NETRC")}


@pytest.mark.parametrize(
    ("commands", "file_count", "run_count"),
    [
        pytest.param(python(LIGHTNING), 1, 1, marks=pytest.mark.cold),
        (python(LIGHTNING, "--strategy", "ddp", "--devices", "2"), 1, 1),
        (torchrun(ACCELERATE, "--run-mode", "new", "--rank-scope", "worker"), 2, 2),
        (torchrun(TRANSFORMERS, "--run-mode", "shared"), 2, 1),
        (python(TORCH, "--run-mode", "shared"), 1, 1),
        (torchrun(TORCH, "--run-mode", "shared"), 2, 1),
    ],
    ids=["lightning", "lightning-ddp", "accelerate-new", "transformers-shared", "torch", "torch-shared"],
)
def test_example_trains_offline_and_prints_the_directory_of_its_runs(
    tmp_path: Path, commands: tuple[list[str | Path], ...], file_count: int, run_count: int
) -> None:
    (command,) = commands
    log_dir = tmp_path / "logs"
    finished = run_job(
        [*command, "--epochs", "4", "--log-dir", log_dir], cwd=tmp_path, environment=without_login(tmp_path)
    ).check()
    runs = ended_runs(log_dir, file_count)
    assert len({run.run_id for run in runs}) == run_count
    val, epoch, rate = (
        ("eval", "train/epoch", "train/learning_rate") if TRANSFORMERS in command else ("val", "epoch", "lr")
    )
    accuracies = [run.metrics[f"{val}/accuracy"].last for run in runs if f"{val}/accuracy" in run.metrics]
    assert len(accuracies) == run_count
    assert min(accuracies) > 0.9
    assert {"train/loss", f"{val}/loss", epoch} <= set(runs[0].metrics)
    assert any(name.startswith(rate) for name in runs[0].metrics)

    assert len(finished.lines(NO_LOGIN)) == 1
    messages = finished.lines("dist_wandb: ")
    assert len([line for line in messages if "run_mode=" in line]) == 1
    others = [line for line in messages if "run_mode=" not in line and "Upload it with: dist-wandb sync" not in line]
    assert all("A corrected row follows" in line for line in others), others  # a busy machine's ranks may be late
    assert finished.lines("    dist-wandb show ") == [f"    dist-wandb show {log_dir}"]
    directory = re.findall(r"^    dist-wandb sync (.+)$", finished.output, re.MULTILINE)[-1]
    uploads = plan_uploads(read_files(find_runs(directory))[0])
    assert [run.refusals for run in uploads] == [()] * run_count
    assert {file.path for run in uploads for file in run.files} == {run.path for run in runs}


@pytest.mark.parametrize("script", [LIGHTNING, ACCELERATE, TORCH], ids=lambda script: script.parent.name)
@pytest.mark.usefixtures("bare_environment")
def test_example_goes_offline_only_if_nothing_is_configured(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode_without_login = runpy.run_path(str(script))["mode_without_login"]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    assert mode_without_login() == "offline"
    for name, value in {"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "online"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert mode_without_login() is None
    for host in ("api.wandb.ai", "api.forge.coreweave.com"):
        (tmp_path / ".netrc").write_text(f"machine {host}\n  login user\n  password key\n")
        assert mode_without_login() is None


def test_the_slow_rank_is_named_and_no_other_one(tmp_path: Path) -> None:
    slow = ("--slow-rank", 0, "--slowdown", 2)  # a difference that a busy machine does not hide
    run_job(
        *python(EXAMPLES / "lightning" / "slow_rank.py", "--devices", 3, "--epochs", 5, *slow, "--log-dir", tmp_path),
        cwd=tmp_path,
    ).check()
    (run,) = ended_runs(tmp_path, 1)
    metrics = run.metrics
    named = metrics["time/straggler_rank"]
    assert (named.smallest, named.largest) == (0, 0)
    assert metrics["time/straggler_excess"].last > 0.05
    assert metrics["time/data/argmax_rank"].counts[0][0] == 0
    assert metrics["time/optimizer"].count == metrics["time/forward"].count == metrics["time/step"].count >= 20
