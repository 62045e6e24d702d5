"""Lines of the user's code, which warnings name that our threads or frameworks give. Pure."""

from __future__ import annotations

import inspect
import logging
import warnings
from dataclasses import dataclass, field
from typing import Any

_log = logging.getLogger("dist_wandb")

_OURS = "dist_wandb"
# May lie on the stack between the user's code and ours.
_FRAMEWORKS = frozenset(
    {
        *("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "accelerate", "torch", "wandb"),
        *("asyncio", "collections", "concurrent", "contextlib", "functools", "inspect", "multiprocessing", "threading"),
    }
)


@dataclass(frozen=True)
class Line:
    """A line of code.

    Args:
        file: Its file.
        number: Its number there.
        module: The module's name.
        names: The module's names, among which Python keeps the warnings it has shown.
    """

    file: str
    number: int
    module: str
    names: dict[str, Any] = field(repr=False, compare=False)


def users_line() -> Line | None:
    """The line of the user's code that has led to this call.

    Returns:
        The innermost one that is neither ours nor a framework's; where there is none, as in a process that Lightning
        has started, the innermost one that is not ours; `None` on a thread of ours.
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


def warn(message: str, line: Line | None, *, may_raise: bool = True) -> None:
    """Warn in the name of a line of the user's code.

    Args:
        message: The message.
        line: The line; `None` if unknown: the message is logged then.
        may_raise: Whether the warning may become an error where the user asked for that (``-W error``). On a thread of
            ours nobody would catch it; the message is logged then.
    """
    if line is None:
        _log.warning("dist_wandb: %s", message)
        return
    shown_already = line.names.setdefault("__warningregistry__", {})
    try:
        warnings.warn_explicit(message, UserWarning, line.file, line.number, line.module, shown_already)
    except UserWarning:
        if may_raise:
            raise
        _log.warning("dist_wandb: %s", message)
