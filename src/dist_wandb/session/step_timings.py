"""Timings that an integration measures automatically: each part of a training step is a section.

The sections are ``data`` (loading the next batch), ``forward``, ``backward`` and ``optimizer``. Gradients are reduced
in ``backward`` and clipped after it, so it waits for other ranks. The other sections do not, unless the parameters are
sharded: then ``forward`` and ``optimizer`` also wait, because layers and updates are gathered in them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from dist_wandb.errors import ConfigurationError
from dist_wandb.session.sections import Section
from dist_wandb.session.session import Session

Part: TypeAlias = Literal["data", "forward", "backward", "optimizer"]


def check_timings(timings: bool) -> bool:
    """Check the argument `timings` of an integration."""
    if not isinstance(timings, bool):
        raise ConfigurationError(f"timings={timings!r} is neither True nor False. Pass one of them.")
    return timings


class StepTimings:
    """Measures how long this rank is in each part of a step, on the training thread, while there is a session.

    If parameters are sharded, they are gathered from other ranks in the forward pass and for the update.
    """

    def __init__(self, session: Callable[[], Session | None], *, is_sharded: bool = False) -> None:
        self._session = session  # whose rows include the timings
        self._waiting: set[Part] = {"backward", "forward", "optimizer"} if is_sharded else {"backward"}
        self._thread: int | None = None
        self._current: Section | None = None

    @property
    def part(self) -> Part | None:
        """The part that is being measured."""
        return None if self._current is None else self._current.name  # type: ignore[return-value]

    def waits_in(self, part: Part) -> None:
        """Treat a part as one that waits for other ranks, from now on."""
        self._waiting.add(part)

    def enter(self, part: Part | None) -> None:
        """Enter a part, or leave the current one (`None`). Calls on a thread other than the first have no effect."""
        thread = threading.get_ident()
        if self._thread not in (None, thread):
            return
        if self._current is not None:
            self._current.__exit__()
            self._current = None
        session = self._session() if part is not None else None
        if part is None or session is None:
            return
        self._thread = thread
        self._current = session.timed(part, waits=part in self._waiting)
        self._current.__enter__()

    def end(self) -> None:
        """Leave the current part. Another thread may train next."""
        self.enter(None)
        self._thread = None


class ForwardHook:
    """A hook that calls a function with its module. In copies and saved versions of the module it does nothing."""

    def __init__(self, call: Callable[[Any], None] | None = None) -> None:
        self._call = call

    def __call__(self, module: Any, *_: Any) -> None:
        """Called by the module."""
        if self._call is not None:
            self._call(module)

    def __reduce__(self) -> tuple[type[ForwardHook], tuple[()]]:
        return ForwardHook, ()  # without the function, which belongs to one training
