"""Methods of one object, a run or a module, that go to sessions first; the object's class stays as it is."""

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

_OF_THE_MODULE = frozenset({"log", "define_metric"})  # what wandb has as a function, too, of the run it was opened with

Handler: TypeAlias = Callable[..., Any]
"""Called in place of a method, with the original and then the arguments of the call."""


class Interception:
    """A method of one object, in whose place the handler that came last is called.

    Args:
        owner: The object. It must have a `__dict__`.
        name: Name of the method.
    """

    def __init__(self, owner: object, name: str) -> None:
        self.original: Callable[..., Any] = getattr(owner, name)
        self._owner = owner
        self._name = name
        self._own = vars(owner).get(name)  # a module's function; disabled runs of older versions have methods so, too
        self._handlers: list[Handler] = []
        self.method = self._method()
        vars(owner)[name] = self.method  # a NullRun forgets attributes that are set

    def _method(self) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            handlers = self._handlers  # who has kept the method beyond its time gets the original
            if not handlers or (id(self._owner), self._name) in _passing():
                return self.original(*args, **kwargs)
            return handlers[-1](self.original, *args, **kwargs)

        if inspect.isroutine(self.original):
            functools.update_wrapper(method, self.original)
        vars(method)[_MARK] = self
        return method

    @property
    def is_idle(self) -> bool:
        """Whether all handlers were taken back."""
        return not self._handlers

    def add(self, handler: Handler) -> Callable[[], None]:
        """Have `handler` called from now on; what is returned takes it back, once."""
        self._handlers.append(handler)

        def take_back() -> None:
            if handler in self._handlers:
                self._handlers.remove(handler)
            if not self._handlers and vars(self._owner).get(self._name) is self.method:
                del vars(self._owner)[self._name]
                if self._own is not None:
                    vars(self._owner)[self._name] = self._own

        return take_back


_MARK = "__intercepted_by_dist_wandb__"


def intercept(owner: object, name: str, handler: Handler) -> tuple[Interception, Callable[[], None]]:
    """Have `handler` called in place of a method of `owner`, and of this very object alone.

    Args:
        owner: The object.
        name: Name of the method.
        handler: Called with the original method, and the arguments of the call.

    Returns:
        The interception, and what takes the handler back.
    """
    interception = _found(owner, name) or Interception(owner, name)
    return interception, interception.add(handler)


def original(owner: Any, name: str) -> Callable[..., Any]:
    """The method of an object as it is without handlers.

    Where somebody has put another one over it meanwhile, it is that one; if that calls on, the handlers are passed by.
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
    """The methods of objects whose handlers are passed by in this thread."""
    passing: list[tuple[int, str]] = _in_thread.__dict__.setdefault("passing", [])
    return passing


def _found(owner: object, name: str) -> Interception | None:
    method = getattr(owner, "__dict__", {}).get(name)
    found = getattr(method, "__dict__", {}).get(_MARK)
    return found if isinstance(found, Interception) else None


def intercept_methods(run: AnyRun, handlers: Mapping[str, Handler]) -> Callable[[], None]:
    """Have methods of a run handled by a session, as often as somebody calls them on the run by itself.

    The methods of this very object are covered; its class stays as it is, and so do other runs. So is ``wandb.log``
    (and ``wandb.define_metric``) where ``wandb.run`` is this run; the former also where this process has no run.

    Args:
        run: The run, or a `NullRun`.
        handlers: By the name of a method what is called in its place, with the original method and the arguments.

    Returns:
        Takes it back. wandb's functions are then what they were, unless wandb has changed them meanwhile.
    """
    take_back = [take for name, handler in handlers.items() for take in _go_first(run, name, handler)]

    def take_all_back() -> None:
        for take in take_back:
            take()

    return take_all_back


def _go_first(run: AnyRun, name: str, handler: Handler) -> Iterator[Callable[[], None]]:
    if not _has_method(run, name):  # a stand-in for a run, in somebody's tests
        return
    interception, take_back = intercept(run, name, handler)
    yield take_back
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
    """Whether a run has a method that may be covered: a mock's `log` is looked at by who made the mock."""
    if not hasattr(run, "__dict__") or not hasattr(run, name):
        return False
    return isinstance(run, NullRun) or name == "finish" or callable(getattr(type(run), name, None))


def _restore(module: ModuleType, name: str, interception: Interception) -> None:
    """Have one of wandb's functions be that of its run again, unless wandb has changed it, or other sessions go on."""
    if interception.is_idle and vars(module).get(name) is interception.method:
        vars(module)[name] = interception.original
