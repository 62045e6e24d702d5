"""Fixtures of the tests of one config on all ranks: ranks are threads that share a real store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch.distributed as dist
from config_jobs import LIMITS, Open
from fakes import Job, on_ranks

from dist_wandb.job.topology import Topology
from dist_wandb.session.opener import open_session
from dist_wandb.session.session import Session
from dist_wandb.settings.options import Options


@pytest.fixture
def open_rank(store: dist.Store) -> Iterator[Open]:  # noqa: ARG001  # they meet there
    """Open a session on one rank, on this thread."""
    opened: list[Session] = []

    def open_one(
        topology: Topology,
        config: object = None,
        wandb_init: Mapping[str, Any] = MappingProxyType({}),
        limits: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> Session:
        session = open_session(
            Options(limits=replace(LIMITS, **limits), **options),
            {"mode": "offline", **({} if config is None else {"config": config}), **wandb_init},
            integration="test",
            topology=topology,
            number=1,
            create_new=False,
        )
        opened.append(session)
        return session

    yield open_one
    with ThreadPoolExecutor(max(len(opened), 1)) as pool:  # in turn, each would wait for the others' next heartbeat
        list(pool.map(lambda session: session.finish(1), opened))


@pytest.fixture
def job(open_rank: Open) -> Job:
    """Open a session on every rank at once."""

    def open_all(topologies: list[Topology], configs: Mapping[int, object] | None = None, **options: Any) -> Any:
        def open_one(rank: int) -> Session:
            return open_rank(topologies[rank], (configs or {}).get(rank), **options)

        return on_ranks(len(topologies), open_one)

    return open_all
