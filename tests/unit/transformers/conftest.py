"""Fixtures of the tests of the callback for the Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState


@pytest.fixture
def fresh_state(bare_environment: None) -> Iterator[None]:  # noqa: ARG001  # goes first
    """Accelerate keeps its state for the whole process."""
    AcceleratorState._reset_state(True)  # it takes nothing else
    yield
    AcceleratorState._reset_state(True)  # it takes nothing else
