"""The decorator `wandb_init`, which makes each call of a function one session."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, overload

from dist_wandb.errors import ConfigurationError
from dist_wandb.session.api import InitArguments, check_init, init
from dist_wandb.session.registry import is_nested_on_purpose, outer_session
from dist_wandb.session.session import Session
from dist_wandb.settings.options import outer_arguments
from dist_wandb.settings.plan import RankScope, RunMode

if TYPE_CHECKING:
    from typing_extensions import Unpack

_P = ParamSpec("_P")
_R = TypeVar("_R")


@overload
def wandb_init(function: Callable[_P, _R], /) -> Callable[_P, _R]: ...


@overload
def wandb_init(
    function: None = None, /, **arguments: Unpack[InitArguments]
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...


def wandb_init(
    function: Callable[..., Any] | None = None,
    /,
    *,
    run_mode: RunMode | None = None,
    rank_scope: RankScope | None = None,
    **arguments: Any,
) -> Callable[..., Any]:
    """Decorate a function so that each call of it is one session: opened before and finished after it, on every rank.

    Works with and without parentheses, on functions, methods, coroutine functions, generators and asynchronous
    generators. Inside, `get_run` returns the session. A decorated function that is called by another one joins its
    session. An exception ends the run with exit code 1, `SystemExit` with its own code. A generator that is not
    exhausted ends successfully.

    Args:
        function: The function, if the decorator is used without parentheses.
        run_mode: As in `dist_wandb.init`.
        rank_scope: As in `dist_wandb.init`.
        **arguments: Further arguments of `dist_wandb.init` and thus of `wandb.init`.

    Returns:
        The decorated function, or the decorator.

    Raises:
        ConfigurationError: An argument is not supported, which is checked at once, or the decorated object is not a
            function.

    Note:
        Precedence of `run_mode` and `rank_scope`: arguments of `dist_wandb.init` itself, then those of the enclosing
        decorator, then the environment (`DIST_WANDB_RUN_MODE`, `DIST_WANDB_RANK_SCOPE`), then the defaults. W&B's own
        arguments precede W&B's own variables (`WANDB_PROJECT` and so on), as usual.

        The ranks must be known when the function is called: from the launcher, or from an initialised
        torch.distributed. With `torch.multiprocessing.spawn`, decorate the function that is called after
        `init_process_group`.

        In a coroutine, opening and finishing the run block the event loop, as in wandb.

    Example:
        Two processes under torchrun::

            @dist_wandb.wandb_init(run_mode="shared", project="digits")
            def train(lr):
                dist_wandb.get_run().log({"loss": 0.4}, step=1)  # rank 0: loss and rank-0/loss; rank 1: rank-1/loss


            train(lr=0.1)
    """
    given = {"run_mode": run_mode, "rank_scope": rank_scope, **arguments}
    check_init(given)
    decorate = functools.partial(_decorated, given=given)
    return decorate if function is None else decorate(function)


def _decorated(function: Callable[..., Any], given: Mapping[str, Any]) -> Callable[..., Any]:
    if isinstance(function, (staticmethod, classmethod)) or not inspect.isroutine(function):
        raise ConfigurationError(
            f"wandb_init decorates functions and methods, but was given {function!r}. Put it below @staticmethod or "
            "@classmethod, on a method rather than on a class, and pass project and other arguments by keyword."
        )
    wrap = next((wrap for is_kind, wrap in _WRAPPERS if is_kind(function)), _function)
    return functools.update_wrapper(wrap(function, given), function)


_Context: TypeAlias = Callable[[], AbstractContextManager[None]]


@contextmanager
def _session(given: Mapping[str, Any]) -> Iterator[_Context]:
    """Use the enclosing decorated function's session or open one; yield the context in which the function runs."""
    outer = outer_session()
    if outer is None:
        with is_nested_on_purpose.by(True):
            opened = init(**given)
        with opened as session:
            yield functools.partial(_inside, session, given)
    else:
        own = {name: value for name, value in given.items() if value is not None}
        theirs = outer_arguments()
        other = [name for name, value in own.items() if repr(value) != repr(theirs.get(name))]
        if other:
            warnings.warn(
                f"A decorated function was called inside another one and joins its run, so {', '.join(other)} of its "
                "own wandb_init is ignored. To open a separate run, call dist_wandb.init(reinit='create_new') in it.",
                stacklevel=4,
            )
        yield functools.partial(_inside, outer, {**outer_arguments(), **own})


@contextmanager
def _inside(session: Session, arguments: Mapping[str, Any]) -> Iterator[None]:
    with outer_session.by(session), outer_arguments.by(arguments):
        yield


def _function(function: Callable[..., _R], given: Mapping[str, Any]) -> Callable[..., _R]:
    def call(*args: Any, **kwargs: Any) -> _R:
        with _session(given) as inside, inside():
            return function(*args, **kwargs)

    return call


def _coroutine(function: Callable[..., Awaitable[_R]], given: Mapping[str, Any]) -> Callable[..., Awaitable[_R]]:
    async def call(*args: Any, **kwargs: Any) -> _R:
        with _session(given) as inside, inside():
            return await function(*args, **kwargs)

    return call


def _generator(
    function: Callable[..., Generator[Any, Any, _R]], given: Mapping[str, Any]
) -> Callable[..., Generator[Any, Any, _R]]:
    def call(*args: Any, **kwargs: Any) -> Generator[Any, Any, _R]:
        with _session(given) as inside:
            return (yield from _Inside(function(*args, **kwargs), inside))

    return call


class _Inside(Generator[Any, Any, _R]):
    """A generator that runs in a context, which it leaves whenever it yields."""

    def __init__(self, generator: Generator[Any, Any, _R], inside: _Context) -> None:
        self._generator, self._inside = generator, inside

    def send(self, value: Any) -> Any:
        with self._inside():
            return self._generator.send(value)

    def throw(self, *error: Any) -> Any:
        with self._inside():
            return self._generator.throw(*error)


def _async_generator(
    function: Callable[..., AsyncGenerator[Any, Any]], given: Mapping[str, Any]
) -> Callable[..., AsyncGenerator[Any, Any]]:
    async def call(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        with _session(given) as inside:
            generator = function(*args, **kwargs)
            resume: Callable[[], Awaitable[Any]] = functools.partial(anext, generator)
            while True:
                try:
                    with inside():
                        item = await resume()
                except StopAsyncIteration:
                    return
                try:
                    sent = yield item
                except GeneratorExit:
                    with inside():
                        await generator.aclose()
                    raise
                except BaseException as error:  # noqa: BLE001  # for the generator to handle
                    resume = functools.partial(generator.athrow, error)
                else:
                    resume = functools.partial(generator.asend, sent)

    return call


_WRAPPERS: tuple[tuple[Callable[[Any], bool], Callable[..., Callable[..., Any]]], ...] = (
    (inspect.iscoroutinefunction, _coroutine),
    (inspect.isasyncgenfunction, _async_generator),
    (inspect.isgeneratorfunction, _generator),
)
