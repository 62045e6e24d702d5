"""Jobs of several ranks, as threads, for tests that compare and read configs."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from fakes import TWO

from dist_wandb.exchange.membership.generations import keys_of, publish_opened
from dist_wandb.job.job_store import JobStore
from dist_wandb.job.topology import Topology
from dist_wandb.session.config.sync import ConfigSync
from dist_wandb.session.session import Session
from dist_wandb.settings.plan import unit_of

HEARTBEAT = 0.05
NODES = [Topology(2 * node + rank, rank, node, 4, 2, 2) for node in range(2) for rank in range(2)]
LIMITS = {"join_timeout": 30.0, "finish_timeout": 30.0, "peer_timeout": 30.0, "heartbeat": HEARTBEAT}
Open = Callable[..., Session]


class Colour(enum.Enum):
    RED = 1


class Nameless:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


LOOP: dict[str, Any] = {}
LOOP["loop"] = LOOP


def sync_of(session: Session) -> ConfigSync:
    """Return what keeps the config of a session like those of the other ranks."""
    return session._config_sync


def connection_of(session: Session) -> Any:
    """Return what asks the job's store about the config of a session."""
    return sync_of(session).connection


def begin_to_open(store: dist.Store) -> None:
    """Let rank 0 of `TWO` begin to open its session, so that no other rank writes the run instead."""
    unit = unit_of(TWO[0], "global")
    publish_opened(JobStore(store, "test/1", TWO[0], 1.0).below(keys_of(unit)), unit)


def reads(session: Session, expected: Mapping[str, Any]) -> bool:
    """Return whether a rank reads the expected config within some seconds, without further calls."""
    deadline = time.monotonic() + 20.0
    while session.config.as_dict() != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return dict(session.config) == expected


def alike(values: object) -> dict[int, object]:
    return dict.fromkeys(range(4), values)


NESTED = {"lr": 0.1, "net": {"sizes": [3, {"x": None}], "names": {1: "a", 2: "b"}}, "debug": False, "big": 10**30}
