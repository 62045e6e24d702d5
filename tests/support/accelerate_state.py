"""Accelerate's state, which it keeps for the whole process, and a tracker that is not ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from accelerate import Accelerator, PartialState
from accelerate import accelerator as accelerators
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker
from accelerate.utils import DistributedType

from dist_wandb import DistWandbTracker, Limits
from dist_wandb.settings.options import Options

QUICK = Options(reduce=None, limits=Limits(join_timeout=30.0, finish_timeout=0.2))


def reset() -> None:
    """Forget the state, as in a new process."""
    AcceleratorState._reset_state(True)  # the argument is positional only


@contextmanager
def unchanged(owner: Any) -> Iterator[None]:
    """Restore all attributes of a class or a module at the end."""
    before = dict(vars(owner))
    yield
    for name in vars(owner).keys() - before.keys():
        delattr(owner, name)
    for name, value in before.items():
        if vars(owner).get(name) is not value:
            setattr(owner, name, value)


@pytest.fixture
def fresh_state(bare_environment: None) -> Iterator[None]:  # noqa: ARG001  # must run first
    """Reset the state before and after a test, and undo what was wrapped meanwhile."""
    reset()
    with unchanged(Accelerator), unchanged(accelerators):
        yield
    reset()


def set_state(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    """Set values of the state: those of a process and of its accelerators are the same."""
    for name, value in values.items():
        monkeypatch.setitem(vars(PartialState()), name, value)


def look_like(monkeypatch: pytest.MonkeyPatch, rank: int, kind: DistributedType = DistributedType.MULTI_CPU) -> None:
    """Make this process look like one of two, without a process group."""
    PartialState(cpu=True)
    set_state(monkeypatch, num_processes=2, process_index=rank, distributed_type=kind)


def accelerator_with(log_with: Any) -> Accelerator:
    return Accelerator(cpu=True, log_with=log_with)


def quick(join_timeout: float = 30.0) -> DistWandbTracker:
    return DistWandbTracker(reduce=None, limits=Limits(join_timeout=join_timeout, finish_timeout=0.2))


class Recorder(GeneralTracker):  # type: ignore[misc]  # Accelerate ships no types
    """A tracker that is not ours and records its calls."""

    name = "recorder"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def start(self) -> None:
        self.calls.append(("start",))

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(("config", values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append(("log", values, step, kwargs))

    def finish(self) -> None:
        self.calls.append(("finish",))
