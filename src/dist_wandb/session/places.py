"""Where in a script something is called, so that it can be told whether it is called there again."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any

_PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True)
class Place:
    """Where the script calls something of this package: there, and where all that is around was called.

    So a function that opens a run, and is called at two places, is at two places; a loop comes back to the same.

    Args:
        calls: For each call on the stack where in which code it is.
        flow: The thread, and the task of asyncio in it.
        line: File and line, for messages.
    """

    calls: tuple[tuple[str, str, int, int], ...]
    flow: tuple[int, int]
    line: str


def here() -> Place:
    """Where the script has called this package."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_back is not None and _is_ours(frame):
        frame = frame.f_back
    line = "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    calls = []
    while frame is not None:
        code = frame.f_code
        calls.append((code.co_filename, code.co_name, code.co_firstlineno, frame.f_lasti))
        frame = frame.f_back
    return Place(tuple(calls), (threading.get_ident(), _task()), line)


def is_notebook() -> bool:
    """Whether this is an interactive session of IPython, such as a notebook, whose cells are run again and again."""
    module: Any = sys.modules.get("IPython")  # nobody is in one without it
    return module is not None and getattr(module, "get_ipython", lambda: None)() is not None


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == _PACKAGE


def _task() -> int:
    try:
        return id(asyncio.current_task())
    except RuntimeError:  # no loop runs here
        return 0
