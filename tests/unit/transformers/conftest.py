"""Fixtures for the tests of the callback for the Hugging Face Trainer."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import wandb
from accelerate_state import fresh_state
from fakes import FakeWandb

__all__ = ["fresh_state", "whole_run"]


@pytest.fixture(scope="module", autouse=True)
def _few_objects() -> None:
    """Exempt what earlier tests have left from garbage collection, which the Trainer requests at each end."""
    gc.freeze()


@pytest.fixture
def whole_run(fake_wandb: FakeWandb) -> FakeWandb:
    """Add to the runs what the stock callback also uses. The module has names for the current run, as wandb has."""
    fake, open_run = fake_wandb, fake_wandb.init
    done: list[tuple[str, Any]] = []

    def init(**arguments: Any) -> Any:
        run: Any = open_run(**arguments)
        run.done = done
        run.watch = lambda _model, **how: done.append(("watch", how))
        run.log_artifact = lambda artifact, aliases: done.append((artifact.name, aliases))
        run.get_url = lambda: run.url  # in transformers 4
        for name in ("config", "summary", "watch", "log_artifact", "finish"):
            setattr(wandb, name, getattr(run, name))
        return run

    fake.sets_globals = True
    fake.init = init  # type: ignore[method-assign]
    return fake
