"""Timings that an integration measures by itself: a training step is in one section after the other.

The sections are ``data`` (the next batch is loaded), ``forward``, ``backward`` and ``optimizer``. Gradients are reduced
in ``backward``, and frameworks clip them behind it, so it waits for other ranks. The others do not, unless the
parameters are sharded: then layers and updates are gathered in ``forward`` and ``optimizer``, which wait as well.
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
    """The argument `timings` of an integration.

    Raises:
        ConfigurationError: It is neither `True` nor `False`.
    """
    if not isinstance(timings, bool):
        raise ConfigurationError(f"timings={timings!r} is neither True nor False. Pass one of them.")
    return timings


class StepTimings:
    """Measures in which part of a step this rank is, on the thread that trains.

    Args:
        session: The session whose rows take the timings along; `None` while there is none, and nothing is measured.
        is_sharded: Whether parameters are gathered from other ranks in the forward pass and for the update.
    """

    def __init__(self, session: Callable[[], Session | None], *, is_sharded: bool = False) -> None:
        self._session = session
        self._waiting: set[Part] = {"backward", "forward", "optimizer"} if is_sharded else {"backward"}
        self._thread: int | None = None
        self._current: Section | None = None

    @property
    def part(self) -> Part | None:
        """The part that is measured now."""
        return None if self._current is None else self._current.name  # type: ignore[return-value]

    def waits_in(self, part: Part) -> None:
        """Other ranks are waited for in a part, from now on."""
        self._waiting.add(part)

    def enter(self, part: Part | None) -> None:
        """Be in a part, or in none, from now on; a call on another thread than the first one changes nothing."""
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
        """Be in no part; another thread may train next."""
        self.enter(None)
        self._thread = None


class ForwardHook:
    """A hook of a module that calls something; copies of the module, and what is saved of it, have one that does not.

    Args:
        call: What is called with the module; `None` to do nothing.
    """

    def __init__(self, call: Callable[[Any], None] | None = None) -> None:
        self._call = call

    def __call__(self, module: Any, *_: Any) -> None:
        """Called by the module."""
        if self._call is not None:
            self._call(module)

    def __reduce__(self) -> tuple[type[ForwardHook], tuple[()]]:
        """Without what is called: it belongs to one training."""
        return ForwardHook, ()
