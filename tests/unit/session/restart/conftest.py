"""Fixtures of the tests of restarts."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from fakes import FakeWandb, on_ranks, open_rank, ranks
from restarts import AGENT, Start

from dist_wandb.job import job_identity, job_store
from dist_wandb.job.launch import Launch
from dist_wandb.session.session import Session


@pytest.fixture
def start(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> Start:  # noqa: ARG001  # goes first
    """Start a job of two ranks again, with the environment that its launcher sets.

    With `agent`, its store outlives the processes, as torchrun's does. Otherwise the ranks use a store that does not
    or, with ``store=False``, none.
    """

    def start(
        *,
        world: int = 2,
        agent: dist.Store | None = None,
        store: bool = True,
        number: int = 1,
        options: dict[str, Any] | None = None,
        environ: dict[str, str] | None = None,
        **arguments: Any,
    ) -> list[Session]:
        for name in ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE", "SLURM_RESTART_COUNT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {**(AGENT if agent is not None else {}), **(environ or {})}.items():
            monkeypatch.setenv(name, value)
        met = agent if agent is not None else dist.HashStore() if store else None
        monkeypatch.setattr(job_store, "_store_of_agent", lambda *_: met)
        # ranks are threads here, and share one SLURM_PROCID
        monkeypatch.setattr(job_identity, "job_name", lambda _: Launch.detect().slurm_step)
        given = {"run_mode": "new", "reduce": None, "limits": {"join_timeout": 10.0}, **(options or {})}
        return on_ranks(world, lambda rank: open_rank(ranks(world)[rank], wandb_init=arguments, number=number, **given))

    return start
