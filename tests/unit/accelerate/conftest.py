"""Fixtures for the tests of the tracker for Accelerate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState


@pytest.fixture
def fresh_state(bare_environment: None) -> Iterator[None]:  # noqa: ARG001  # must run first
    """Reset Accelerate's state, which it keeps for the whole process."""
    AcceleratorState._reset_state(True)  # the argument is positional only
    yield
    AcceleratorState._reset_state(True)  # the argument is positional only
