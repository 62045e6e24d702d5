"""`make test-gpu` passes ``--cuda``: all tests run on a CUDA device. Without it, some run on a stand-in for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import devices
import processes
import pytest
import torch
from stored import ended_runs, read_history

import dist_wandb

Rows = Callable[[], list[dict[str, Any]]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cuda", action="store_true", help="run all tests of tests/gpu, on a CUDA device")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cuda") and not torch.cuda.is_available():
        build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        pytest.exit(
            f"make test-gpu needs a CUDA device, and torch {torch.__version__}, built {build}, finds none on this "
            "machine. Nothing was tested.",
            returncode=3,
        )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out, without ``--cuda``, the files that need the device itself."""
    return True if collection_path.name.startswith("test_cuda") and not config.getoption("--cuda", False) else None


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    if not request.config.getoption("--cuda", False):
        return "stand-in"
    processes.starts_cold = True  # each job has its own state of the device
    return "cuda"


@pytest.fixture
def device(kind: str) -> Iterator[devices.Device]:
    with devices.used(kind) as device:
        yield device


@pytest.fixture
def session(tmp_path: Path, bare_environment: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[dist_wandb.Session]:  # noqa: ARG001
    for name, value in processes.clean_environment().items():
        if name.startswith("WANDB_"):
            monkeypatch.setenv(name, value)
    session = dist_wandb.init(project="gpu", dir=tmp_path)
    yield session
    session.finish()


@pytest.fixture
def rows(session: dist_wandb.Session, tmp_path: Path) -> Rows:
    """A function that ends the run and returns its rows."""

    def rows() -> list[dict[str, Any]]:
        session.finish()
        (run,) = ended_runs(tmp_path, 1)
        return read_history(run.path)

    return rows
