"""Fixtures of the tests of the exchange with real gloo groups."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
from units import Ranks, making


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    """Create units; their threads are ended after the test."""
    with making() as make:
        yield make


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "dist_wandb")
