"""Fixtures of the tests of one config on all ranks: ranks are threads that share a real store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import fakes
import pytest
import torch.distributed as dist
from config_jobs import LIMITS, Open
from fakes import Job, on_ranks
from limits import Limit

from dist_wandb.exchange.membership import generations
from dist_wandb.job.topology import Topology
from dist_wandb.session.session import Session


@pytest.fixture
def open_rank(store: dist.Store) -> Iterator[Open]:  # noqa: ARG001  # they meet there
    """Open a session on one rank, on this thread."""
    opened: list[Session] = []

    def open_one(
        topology: Topology, config: object = None, wandb_init: Mapping[str, Any] = MappingProxyType({}), **options: Any
    ) -> Session:
        given = {"mode": "offline", **({} if config is None else {"config": config}), **wandb_init}
        limits = {**LIMITS, **options.pop("limits", {})}
        opened.append(fakes.open_rank(topology, wandb_init=given, limits=limits, create_new=False, **options))
        return opened[-1]

    yield open_one
    if opened:  # in turn, each would wait for the others' next heartbeat
        on_ranks(len(opened), lambda number: opened[number].finish(1))


@pytest.fixture
def job(open_rank: Open, limit: Limit) -> Job:
    """Open a session on every rank at once."""

    def open_all(topologies: list[Topology], configs: Mapping[int, object] | None = None, **options: Any) -> Any:
        if len(topologies) == topologies[0].world_size:
            limit(generations, APART=15.0)

        def open_one(rank: int) -> Session:
            return open_rank(topologies[rank], (configs or {}).get(rank), **options)

        return on_ranks(len(topologies), open_one)

    return open_all
