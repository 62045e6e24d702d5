"""Limits and times that are constants of a module, for one test."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

Limit = Callable[..., None]


def set_limits(patch: pytest.MonkeyPatch, room: ModuleType, **limits: float) -> None:
    for name, value in limits.items():
        assert isinstance(vars(room)[name], int | float)
        patch.setattr(room, name, value)
