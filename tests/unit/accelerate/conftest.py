"""Fixtures for the tests of the tracker for Accelerate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from accelerate_state import QUICK, fresh_state

from dist_wandb.accelerate.start import INTEGRATION
from dist_wandb.job.topology import Topology
from dist_wandb.session import registry
from dist_wandb.session.opener import open_session
from dist_wandb.session.session import Session
from dist_wandb.settings.options import Options

__all__ = ["fresh_state"]


@pytest.fixture
def open_main(store: dist.Store) -> Callable[..., Session]:  # noqa: ARG001  # they meet there
    """Return a function that opens the n-th session of the main process in this process too, with a shared store."""

    def open_on_main(options: Options = QUICK, number: int = 1, **arguments: Any) -> Session:
        main = Topology(0, 0, 0, 2, 2, 1)
        given = {"id": f"id-{number}", **arguments}
        session = open_session(options, given, integration=INTEGRATION, topology=main, number=number)
        registry.remove(session)  # of another process
        return session

    return open_on_main
