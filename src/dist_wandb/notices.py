"""Warnings that are logged once each."""

from __future__ import annotations

import logging

_log = logging.getLogger("dist_wandb")


class Notices:
    """The warnings given so far, for one object or one process."""

    def __init__(self) -> None:
        self._given: set[object] = set()

    def is_first(self, kind: object) -> bool:
        """Whether this is the first notice of its kind; record it."""
        if kind in self._given:
            return False
        self._given.add(kind)
        return True

    def warn(self, kind: object, message: str) -> None:
        """Log a warning, unless there was one of its kind."""
        if self.is_first(kind):
            _log.warning("dist_wandb: %s", message)
