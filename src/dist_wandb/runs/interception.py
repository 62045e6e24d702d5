"""Interception of methods of one object, a run or a module, by a session's handlers; its class is unchanged.

While a session is open, `run.log` and `wandb.log`, also in libraries, pass through it, and `run.finish` ends it.
Together with `log` of a run, ``wandb.log`` is intercepted if ``wandb.run`` is that run; on a rank without a run,
wandb's functions are those of the stand-in. `RunWriter` calls the original. If several sessions share a run, the
last one is called. Only while a run is opened on another thread than the training's, its class passes on what is logged
(`new_runs_log`). `AsRun` lets a session stand for its run.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from dist_wandb.runs.null_run import SETTABLE, AnyRun, LikeRun, NullPart, NullRun, is_private_name, public_names
from dist_wandb.runs.requested import reinit
from dist_wandb.runs.run_metadata import running_run
from dist_wandb.settings.options import Current

if TYPE_CHECKING:
    from typing_extensions import Self

_FOR_USERS = ("config", "finish", "flush", "group_url", "id", "log", "plan", "run", "timed", "topology", "url")
_MODULE_FUNCTIONS = frozenset({"alert", "define_metric", "log"})  # module functions of wandb that act on `wandb.run`

# Those that a rank without a run passes to its stand-in, besides `init`.
_SERVED = (
    *("alert", "define_metric", "finish", "link_model", "log", "log_artifact", "log_model", "mark_preempting", "save"),
    *("unwatch", "use_artifact", "use_model", "watch"),
)

Handler: TypeAlias = Callable[..., Any]
"""Called in place of a method, with the original method and the arguments of the call."""


class Interception:
    """Replaces a method of one object, which must have a `__dict__`, by the handler that was added last."""

    def __init__(self, owner: object, name: str) -> None:
        self.original: Callable[..., Any] = getattr(owner, name)
        self.owner = owner
        self._name = name
        self._own = vars(owner).get(name)  # a module's function; a method of a disabled run in older versions
        self.handlers: list[Handler] = []

        def method(*args: Any, **kwargs: Any) -> Any:
            handlers = self.handlers  # without handlers, an old reference to this method calls the original
            if not handlers or (id(self.owner), self._name) in _bypassed():
                return self.original(*args, **kwargs)
            return handlers[-1](self.original, *args, **kwargs)

        if inspect.isroutine(self.original):
            functools.update_wrapper(method, self.original)
        vars(method)[_MARK] = self
        self.method: Callable[..., Any] = method
        _put(owner, name, method)

    def add(self, handler: Handler) -> Callable[[], None]:
        self.handlers.append(handler)

        def remove() -> None:
            if handler in self.handlers:
                self.handlers.remove(handler)
            if not self.handlers and vars(self.owner).get(self._name) is self.method:
                _put(self.owner, self._name, self._own)

        return remove


def _put(owner: object, name: str, value: Any) -> None:
    if isinstance(owner, type):
        setattr(owner, name, value)  # a class that has the method itself
    elif value is None:
        del vars(owner)[name]
    else:
        vars(owner)[name] = value  # setattr does nothing on a NullRun


_MARK = "__intercepted_by_dist_wandb__"
_NONE: tuple[tuple[int, str], ...] = ()
_bypassed = Current("bypassed", _NONE)  # methods of objects whose handlers are skipped in this thread


def intercept(owner: object, name: str, handler: Handler) -> Callable[[], None]:
    """Call `handler` in place of a method of this object only, until the returned function is called."""
    return (intercepted(owner, name) or Interception(owner, name)).add(handler)


def intercept_all(handlers: Iterable[tuple[Any, str, Handler]]) -> list[Callable[[], None]]:
    return [intercept(owner, name, handler) for owner, name, handler in handlers if hasattr(owner, name)]


def original(owner: Any, name: str) -> Callable[..., Any]:
    """Return the method of an object without our handlers; if others have replaced it, their replacement."""
    interception = intercepted(owner, name)
    if interception is not None:
        return interception.original
    method: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(method)
    def bypass(*args: Any, **kwargs: Any) -> Any:
        with _bypassed.by((*_bypassed(), (id(owner), name))):
            return method(*args, **kwargs)

    return bypass


def intercepted(owner: object, name: str) -> Interception | None:
    method = getattr(owner, "__dict__", {}).get(name)
    found = getattr(method, "__dict__", {}).get(_MARK)
    # wandb's functions are methods of its run, which may be intercepted itself, or its class.
    return found if isinstance(found, Interception) and found.owner is owner else None


def intercept_methods(run: AnyRun, handlers: Mapping[str, Handler], *, is_current: bool = True) -> Callable[[], None]:
    """Call a session's handlers, by method name, when methods of its run are called directly; return what removes them.

    Only the methods of this object are replaced, not those of its class. If ``wandb.run`` is this run, wandb's `log`,
    `define_metric` and `alert` are replaced as well, unless wandb replaces them meanwhile. If this process has no run,
    ``wandb.log`` is that of the run that `is_current`, such as an attached one; all names of wandb use a stand-in.
    """
    module, running = sys.modules.get("wandb"), running_run()
    stand_in = run if isinstance(run, NullRun) else None
    is_used, removals = is_current and running is None, ExitStack()
    for name, handler in handlers.items():
        is_own = stand_in is not None or name == "finish" or callable(getattr(type(run), name, None))
        if not (is_own and hasattr(run, "__dict__") and hasattr(run, name)):  # a mock of a run, which a test inspects
            continue
        removals.callback(intercept(run, name, handler))
        is_modules = running is run or (is_used and stand_in is None and name == "log")
        if is_modules and name in _MODULE_FUNCTIONS and hasattr(module, name):
            removals.callback(intercept(module, name, handler))
    if is_used and stand_in is not None:
        removals.callback(_serve(stand_in))
    return removals.close


def logs_first(log: Callable[..., None]) -> Handler:
    def log_first(_log: Any, data: Any, step: Any = None, commit: bool | None = None, **_of_old: Any) -> None:
        log(data, step, commit=commit)

    return log_first


@contextmanager
def new_runs_log(log: Callable[..., None]) -> Iterator[None]:
    """Pass on what other threads log to a run that begins meanwhile: wandb shows it to them before `init` returns."""
    import wandb
    from wandb.wandb_run import Run

    before, opens, handler = wandb.run, threading.get_ident(), logs_first(log)

    def log_of_new(original: Handler, run: Any, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == opens or run is before or run is not wandb.run:
            original(run, *args, **kwargs)
        else:
            handler(original, *args, **kwargs)

    with ExitStack() as until_open:
        until_open.callback(intercept(Run, "log", log_of_new))
        yield


_values: list[dict[str, Any]] = []  # wandb's own values of the names, and those of the stand-ins of open sessions
_turn = threading.RLock()  # a signal handler may end a session on the thread that has it


def _serve(run: NullRun) -> Callable[[], None]:
    """Let wandb's functions, ``wandb.run``, ``config`` and ``summary`` use the stand-in, in a process that has no run.

    Without it they raise an error, so that a script or library that imports wandb itself would need a guard, and
    ``wandb.init`` opens a second run. The returned function undoes it, unless wandb has set the names anew meanwhile.
    """
    import wandb as module

    process = os.getpid()

    def is_current() -> bool:  # not beside the script's own run, nor in a fork
        return running_run() is None and os.getpid() == process

    def pass_on(name: str, original: Handler, *args: Any, **kwargs: Any) -> Any:
        return (original if name == "finish" and not is_current() else getattr(run, name))(*args, **kwargs)

    def init(original: Handler, *args: Any, **kwargs: Any) -> Any:
        """Do what wandb's `init` does while a run is open."""
        returns = kwargs.get("mode") != "disabled" and reinit(kwargs) in ("default", "return_previous")
        return run if returns and is_current() else original(*args, **kwargs)

    def instead(act: Callable[[Any], Any]) -> Handler:
        """Return a handler for what a new artifact does itself, where wandb would open a run, or find nothing sent."""

        def handler(original: Handler, artifact: Any, *args: Any, **kwargs: Any) -> Any:
            return act(artifact) if is_current() and artifact.is_draft() else original(artifact, *args, **kwargs)

        return handler

    def trace_handler(original: Handler) -> Callable[..., Any]:
        # wandb's own creates a directory in that of the run, which is another rank's.
        return (lambda _profile: None) if is_current() else original()

    names, artifact = vars(module), getattr(module, "Artifact", None)
    handlers: list[tuple[Any, str, Handler]] = [
        (module, "init", init),
        *((module, name, functools.partial(pass_on, name)) for name in _SERVED),
        (artifact, "link", instead(run.link_artifact)),
        (artifact, "save", instead(run.log_artifact)),  # wandb finishes the run that it opens
        (artifact, "wait", instead(lambda artifact: artifact)),
        (getattr(module, "profiler", None), "torch_trace_handler", trace_handler),
    ]
    with _turn:  # functions and names are those of the same stand-in
        removals = intercept_all(handlers)
        found: dict[str, Any] = {name: names[name] for name in ("config", "run", "summary") if name in names}
        before = _values[0] if _values else found
        mine = {name: run if name == "run" else getattr(run, name) for name in before}
        _values.extend([mine] if _values else [before, mine])
        names.update(mine)

    def restore() -> None:
        with _turn:
            for remove in removals:
                remove()
            _values[:] = [values for values in _values if values is not mine]
            names.update({name: _values[-1][name] for name in mine if names.get(name) is mine[name]})
            if len(_values) == 1:
                _values.clear()

    return restore


class AsRun(LikeRun):
    """Looks up undefined attributes on the run, and sets on it what users set of a run."""

    if TYPE_CHECKING:
        log: Callable[..., None]
        run: property

    def _log(self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.log(data, step, commit=commit)  # W&B's own integrations call it

    def __copy__(self) -> Self:
        return self

    def __getattr__(self, name: str) -> Any:
        is_private = name.startswith("_")
        if "_own" not in self.__dict__ or (is_private and not is_private_name(name)):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.run, name, NullPart()) if is_private else getattr(self.run, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SETTABLE:
            setattr(self.run, name, value)  # on a rank without a run it is only read back: the primary sets it
        else:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*_FOR_USERS, *public_names(self.run)})
