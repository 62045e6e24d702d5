"""Fixtures for the tests of the callback for the Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import wandb
from accelerate.state import AcceleratorState

if TYPE_CHECKING:
    from tests.conftest import FakeWandb


@pytest.fixture
def fresh_state(bare_environment: None) -> Iterator[None]:  # noqa: ARG001  # must run first
    """Reset Accelerate's state, which it keeps for the whole process."""
    AcceleratorState._reset_state(True)  # the argument is positional only
    yield
    AcceleratorState._reset_state(True)  # the argument is positional only


@pytest.fixture
def whole_run(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    """Add to the runs what the stock callback also uses. The module has names for the current run, as wandb has."""
    fake, open_run = fake_wandb, fake_wandb.init
    done: list[tuple[str, Any]] = []

    def init(**arguments: Any) -> Any:
        run: Any = open_run(**arguments)
        run.done = done
        run.watch = lambda _model, **how: done.append(("watch", how))
        run.log_artifact = lambda artifact, aliases: done.append((artifact.name, aliases))
        run._telemetry_callback = lambda _message: None
        run.get_url = lambda: run.url  # in transformers 4
        run._label = lambda code: done.append(("label", code))
        for name in ("config", "summary", "watch", "log_artifact", "finish"):
            monkeypatch.setattr(wandb, name, getattr(run, name))
        return run

    fake.sets_globals = True
    monkeypatch.setattr(fake, "init", init)
    return fake
