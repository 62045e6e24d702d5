"""Warnings: those logged once, and those attributed to the line of the user's code that led to them.

A warning from our threads or from inside of frameworks names that line. Pure.
"""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from dataclasses import dataclass, field
from typing import Any

_log = logging.getLogger("dist_wandb")

_OURS = "dist_wandb"
# Packages that may be on the stack between the user's code and ours.
_FRAMEWORKS = frozenset(
    {
        *("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "accelerate", "torch", "wandb"),
        *("asyncio", "collections", "concurrent", "contextlib", "functools", "inspect", "multiprocessing", "threading"),
    }
)


@dataclass(frozen=True)
class Line:
    """A line of code."""

    file: str
    number: int
    module: str
    # globals of the module, in which Python records the warnings that it has shown
    names: dict[str, Any] = field(repr=False, compare=False)


def users_line() -> Line | None:
    """Return the line of the user's code that led to this call.

    It is the innermost line outside of our code and of frameworks; without such a line, as in a process that Lightning
    has started, the innermost line outside of our code; `None` on one of our threads.
    """
    frame, nearest = inspect.currentframe(), None
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        package = module.partition(".")[0]
        if package != _OURS:
            line = Line(frame.f_code.co_filename, frame.f_lineno, module, frame.f_globals)
            if package not in _FRAMEWORKS:
                return line
            nearest = nearest or (line if package != "threading" else None)
        frame = frame.f_back
    return nearest


def named_line(line: Line | None) -> str:
    """Return a short name of a line that is the same on all ranks."""
    return "an unknown place" if line is None else f"{os.path.basename(line.file)}:{line.number}"  # noqa: PTH119  # pure


def warn(message: str, line: Line | None = None, *, may_raise: bool = True) -> None:
    """Issue a warning that is attributed to a line of the user's code; log it if the line is `None`.

    It may become an error at the user's request (``-W error``). Where nobody would catch that, as on our threads, pass
    ``may_raise=False`` to log the message instead.
    """
    if line is None:
        _log.warning("dist_wandb: %s", message)
        return
    registry = line.names.setdefault("__warningregistry__", {})
    try:
        warnings.warn_explicit(message, UserWarning, line.file, line.number, line.module, registry)
    except UserWarning:
        if may_raise:
            raise
        _log.warning("dist_wandb: %s", message)


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
