"""Exit codes of a job, as W&B and shells know them. Pure."""

from __future__ import annotations

import signal

FAILED = 1
SIGTERM = 128 + signal.SIGTERM  # as shells report it
_CTRL_C = 255  # as wandb records it


def exit_code_of(error: BaseException | None) -> int | None:
    """The exit code that an exception means.

    Args:
        error: The exception that ends a block or a process, if any.

    Returns:
        `None` for no exception, and for the end of a generator that is not exhausted; the code of `sys.exit`; 255 for
        Ctrl-C, as wandb records it; else 1.
    """
    if error is None or isinstance(error, GeneratorExit):
        return None
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return _CTRL_C if isinstance(error, KeyboardInterrupt) else FAILED
