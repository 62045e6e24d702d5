"""Methods of one object, a run or a module, that call a session's handler first; the object's class is unchanged.

So `wandb.log` in a library, or `run.log`, goes a session's way as long as one is open, and `run.finish` ends it. With
`log` of a run object also ``wandb.log`` is intercepted, where ``wandb.run`` is that run; on a rank without a run the
stand-in's `log`, and ``wandb.log``. `Record` calls the original. Of several sessions on one run the last one is called.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from dist_wandb.runs.null_run import NullRun

if TYPE_CHECKING:
    from types import ModuleType

    from dist_wandb.runs.null_run import AnyRun

_OF_THE_MODULE = frozenset({"log", "define_metric"})  # wandb has these as functions of `wandb.run`, too

Handler: TypeAlias = Callable[..., Any]
"""Called in place of a method, with the original method and the arguments of the call."""


class Interception:
    """Replaces a method of one object: the handler that was added last is called instead.

    Args:
        owner: The object. It must have a `__dict__`.
        name: Name of the method.
    """

    def __init__(self, owner: object, name: str) -> None:
        self.original: Callable[..., Any] = getattr(owner, name)
        self._owner = owner
        self._name = name
        self._own = vars(owner).get(name)  # a module's function; a method of a disabled run in older versions
        self._handlers: list[Handler] = []
        self.method: Callable[..., Any] = self._method()
        vars(owner)[name] = self.method  # setattr does nothing on a NullRun

    def _method(self) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            handlers = self._handlers  # without handlers, a kept reference calls the original
            if not handlers or (id(self._owner), self._name) in _passing():
                return self.original(*args, **kwargs)
            return handlers[-1](self.original, *args, **kwargs)

        if inspect.isroutine(self.original):
            functools.update_wrapper(method, self.original)
        vars(method)[_MARK] = self
        return method

    @property
    def is_idle(self) -> bool:
        """Whether all handlers were removed."""
        return not self._handlers

    def add(self, handler: Handler) -> Callable[[], None]:
        """Call `handler` from now on, until the returned function is called."""
        self._handlers.append(handler)

        def remove() -> None:
            if handler in self._handlers:
                self._handlers.remove(handler)
            if not self._handlers and vars(self._owner).get(self._name) is self.method:
                del vars(self._owner)[self._name]
                if self._own is not None:
                    vars(self._owner)[self._name] = self._own

        return remove


_MARK = "__intercepted_by_dist_wandb__"


def intercept(owner: object, name: str, handler: Handler) -> tuple[Interception, Callable[[], None]]:
    """Call `handler` in place of a method of `owner`, and of no other object.

    Args:
        owner: The object.
        name: Name of the method.
        handler: Called with the original method, and the arguments of the call.

    Returns:
        The interception, and a function that removes the handler.
    """
    interception = _found(owner, name) or Interception(owner, name)
    return interception, interception.add(handler)


def original(owner: Any, name: str) -> Callable[..., Any]:
    """The method of an object without handlers.

    If other code has replaced the method meanwhile, it is that replacement, and handlers are skipped inside it.
    """
    interception = _found(owner, name)
    if interception is not None:
        return interception.original
    method: Callable[..., Any] = getattr(owner, name)
    return functools.partial(_past, (id(owner), name), method)


def _past(which: tuple[int, str], method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    passing = _passing()
    passing.append(which)
    try:
        return method(*args, **kwargs)
    finally:
        passing.remove(which)


_in_thread = threading.local()


def _passing() -> list[tuple[int, str]]:
    """The methods of objects whose handlers are skipped in this thread."""
    passing: list[tuple[int, str]] = _in_thread.__dict__.setdefault("passing", [])
    return passing


def _found(owner: object, name: str) -> Interception | None:
    method = getattr(owner, "__dict__", {}).get(name)
    found = getattr(method, "__dict__", {}).get(_MARK)
    return found if isinstance(found, Interception) else None


def intercept_methods(run: AnyRun, handlers: Mapping[str, Handler]) -> Callable[[], None]:
    """Call a session's handlers whenever methods of its run are called directly.

    Only the methods of this object are replaced, not those of its class. ``wandb.log`` and ``wandb.define_metric`` are
    replaced as well if ``wandb.run`` is this run; ``wandb.log`` also if this process has no run.

    Args:
        run: The run, or a `NullRun`.
        handlers: By the name of a method its handler, called with the original method and the arguments.

    Returns:
        A function that undoes it. wandb's functions are restored unless wandb has replaced them meanwhile.
    """
    removals = [remove for name, handler in handlers.items() for remove in _replaced(run, name, handler)]

    def remove_all() -> None:
        for remove in removals:
            remove()

    return remove_all


def _replaced(run: AnyRun, name: str, handler: Handler) -> Iterator[Callable[[], None]]:
    if not _has_method(run, name):  # a mock of a run
        return
    interception, remove = intercept(run, name, handler)
    yield remove
    module = sys.modules.get("wandb")
    running = getattr(module, "run", None)
    if module is None or name not in _OF_THE_MODULE or not hasattr(module, name):
        return
    if running is None and name == "log":
        yield intercept(module, name, handler)[1]
    elif running is run and running is not None:
        vars(module)[name] = interception.method
        yield lambda: _restore(module, name, interception)


def _has_method(run: AnyRun, name: str) -> bool:
    """Whether a run has a method that may be replaced: the `log` of a mock is inspected by the test that made it."""
    if not hasattr(run, "__dict__") or not hasattr(run, name):
        return False
    return isinstance(run, NullRun) or name == "finish" or callable(getattr(type(run), name, None))


def _restore(module: ModuleType, name: str, interception: Interception) -> None:
    """Restore one of wandb's functions, unless wandb has replaced it or other sessions still handle it."""
    if interception.is_idle and vars(module).get(name) is interception.method:
        vars(module)[name] = interception.original
