"""A config as JSON, updated without reading all of it each time. Pure."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from dist_wandb.settings.config_values import encoded
from dist_wandb.settings.config_withheld import MISSING, withheld

_ENOUGH = 0.001  # seconds of checking values, after which no further value is checked
_SHARE = 0.01  # of the time that may be spent on these checks
_FIXED = (bool, int, float, str, type(None))  # types of values that cannot change inside


class ConfigText:
    """Names and values of a config as JSON, without secrets; `given` are the values that this rank was given."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, given: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self._clock = clock  # in seconds
        self._given = given
        self._pieces: dict[str, str] = {}
        self._changeable: dict[str, None] = {}  # names of values that can change inside, the last checked at the end
        self._next_check = 0.0

    def renew(self, values: Mapping[str, Any]) -> bool:
        """Set values by name. Return whether any of them has changed."""
        is_new = False
        for name, value in values.items():
            self._changeable.pop(name, None)
            if not isinstance(value, _FIXED):
                self._changeable[name] = None
            piece = f"{json.dumps(name)}: {json.dumps(encoded(withheld(name, value, self._given.get(name, MISSING))))}"
            is_new = is_new or self._pieces.get(name) != piece
            self._pieces[name] = piece
        return is_new

    def renew_some(self, read: Callable[[str], Any]) -> bool:
        """Check again some values that can change inside: for a short time, not too often. Return as `renew` does."""
        began = self._clock()
        if began < self._next_check:
            return False
        is_new = False
        for name in list(self._changeable):  # in the order of the last checks
            is_new = self.renew({name: read(name)}) or is_new
            if self._clock() - began > _ENOUGH:
                break
        now = self._clock()
        self._next_check = now + (now - began) / _SHARE
        return is_new

    def __str__(self) -> str:
        return f"{{{', '.join(self._pieces.values())}}}"
