"""Fixtures for the tests of the tracker for Accelerate."""

from __future__ import annotations

from accelerate_state import fresh_state

__all__ = ["fresh_state"]
