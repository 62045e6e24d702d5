"""Call sites: where the script calls this package, to recognise a repeated call."""

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
class CallSite:
    """Where the script calls this package, including the call stack that led there.

    A function that opens a run and is called from two lines has two call sites; a loop returns to the same one.

    Args:
        stack: For each frame of the call stack: file, function, first line of the function, instruction in it.
        flow: The thread, and its asyncio task.
        line: File and line, for messages.
    """

    stack: tuple[tuple[str, str, int, int], ...]
    flow: tuple[int, int]
    line: str

    @classmethod
    def current(cls) -> CallSite:
        """Return the place from which the script called this package."""
        frame = inspect.currentframe()
        while frame is not None and frame.f_back is not None and _is_ours(frame):
            frame = frame.f_back
        line = "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        stack = []
        while frame is not None:
            code = frame.f_code
            stack.append((code.co_filename, code.co_name, code.co_firstlineno, frame.f_lasti))
            frame = frame.f_back
        return cls(tuple(stack), (threading.get_ident(), _task()), line)


def is_notebook() -> bool:
    """Whether this is an interactive session of IPython, such as a notebook, whose cells are run again and again."""
    module: Any = sys.modules.get("IPython")  # without it, there is none
    return module is not None and getattr(module, "get_ipython", lambda: None)() is not None


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == _PACKAGE


def _task() -> int:
    try:
        return id(asyncio.current_task())
    except RuntimeError:  # no event loop is running
        return 0
