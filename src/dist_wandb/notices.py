"""Warnings that are logged only once."""

from __future__ import annotations

import logging

_log = logging.getLogger("dist_wandb")


class Notices:
    """The warnings logged so far, for one object or one process."""

    def __init__(self) -> None:
        self._given: set[object] = set()

    def has(self, kind: object) -> bool:
        """Return whether a notice of this kind is recorded."""
        return kind in self._given

    def is_first(self, kind: object) -> bool:
        """Record a notice; return whether it is the first of its kind."""
        if self.has(kind):
            return False
        self._given.add(kind)
        return True

    def warn(self, kind: object, message: str) -> None:
        """Log a warning, unless one of its kind has been logged."""
        if self.is_first(kind):
            _log.warning("dist_wandb: %s", message)
