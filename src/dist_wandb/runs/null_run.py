"""What stands in for a W&B run on a rank that opens none."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dist_wandb.runs.run_metadata import FACTS

if TYPE_CHECKING:
    import wandb
    from typing_extensions import Self

    Run: TypeAlias = wandb.Run
    AnyRun: TypeAlias = "wandb.Run | NullRun"

_log = logging.getLogger("dist_wandb")

_METHODS = frozenset({"alert", "config", "define_metric", "finish", "log", "log_artifact", "save", "summary", "watch"})
_has_told_of_unknown = False


class NullRun:
    """Stands in for a W&B run on a rank that opens none.

    Every call on it is accepted and does nothing, at any depth of attributes and items, so that the same script runs
    on all ranks: ``run.config.update({...})``, ``run.summary["best"] = 0.9``. It is falsy, so ``if run:`` tells.

    Its `summary` reads what was written into it on this rank, else the defaults of `get`; what is logged does not show
    in it.

    What its primary tells of the run that this rank's numbers go to, it tells too: `id`, `name`, `url`, `entity`,
    `project`, `project_url`, `path`, `group`, `job_type`, `tags`, `notes`, `dir` (on the primary's node), `start_time`,
    `sweep_id`, `offline`, `disabled`, `resumed` and `config`. The first look waits for the primary to open its run,
    up to `join_timeout`; what the primary changes later shows within a heartbeat.

    Args:
        id: Id of the run that this rank's numbers go to, as far as it is known.
        name: Display name of that run.
        url: Address of that run.

    Example:
        With ``run_mode="auto"`` on two ranks::

            run = dist_wandb.init(run_mode="auto").run
            bool(run)  # rank 0: True; rank 1: False
            run.alert("done")  # rank 0: sends an alert; rank 1: does nothing
            run.id, run.project  # the same on both ranks
    """

    def __init__(self, id: str | None = None, name: str | None = None, url: str | None = None) -> None:  # noqa: A002
        self.__dict__["_known"] = {"id": id, "name": name, "url": url}
        self.__dict__["_ask"] = None

    @property
    def id(self) -> str | None:
        """Id of the run that this rank's numbers go to, as far as it is known."""
        found: str | None = self._fact("id")
        return found

    @property
    def name(self) -> str | None:
        """Display name of that run, as far as it is known."""
        found: str | None = self._fact("name")
        return found

    @name.setter
    def name(self, name: str) -> None:
        """Accept and forget."""

    @property
    def url(self) -> str | None:
        """Address of that run; `None` offline, and as far as it is not known."""
        found: str | None = self._fact("url")
        return found

    @property
    def summary(self) -> NullSummary:
        """What was written into the summary on this rank, so that ranks which write the same read the same."""
        summary: NullSummary = self.__dict__.setdefault("_summary", NullSummary())
        return summary

    @summary.setter
    def summary(self, summary: object) -> None:
        """Accept and forget."""

    def show_config(self, config: object) -> None:
        """Have `config` read as the config of the run that this rank's numbers go to."""
        self.__dict__["config"] = config

    def show_facts(self, ask: Callable[[], Mapping[str, Any]], planned_id: str | None) -> None:
        """Have what `ask` returns, by name, read as what is known of the run that this rank's numbers go to.

        Args:
            ask: Tells what is known.
            planned_id: Id of the run as long as nothing is told.
        """
        self.__dict__["_ask"] = ask
        self.__dict__["_known"] = {**self.__dict__["_known"], "id": planned_id}

    def facts(self) -> Mapping[str, Any]:
        """What is known of the run that this rank's numbers go to, by the names that a `wandb.Run` has for it."""
        ask: Callable[[], Mapping[str, Any]] | None = self.__dict__["_ask"]
        told = ask() if ask is not None else {}
        return {**self.__dict__["_known"], **told}

    def _fact(self, name: str) -> Any:
        return self.facts().get(name)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what another process gets, knows what was known then."""
        own = {name: value for name, value in self.__dict__.items() if name not in ("finish", "log")}  # see go_first
        return {**own, "_known": dict(self.facts()), "_ask": None}

    def __bool__(self) -> Literal[False]:
        return False

    def __call__(self, *_args: Any, **_kwargs: Any) -> NullRun:
        """Accept a call of anything."""
        return NullPart()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols like copy and pickle must see that they are not implemented
            raise AttributeError(name)
        if name in FACTS and "_ask" in self.__dict__:
            facts = self.facts()
            if name in facts:
                return facts[name]
        return NullPart()

    def __setattr__(self, name: str, value: Any) -> None:
        """Accept and forget."""

    def __getitem__(self, key: Any) -> NullRun:
        return NullPart()

    def __setitem__(self, key: Any, value: Any) -> None:
        """Accept and forget."""

    def __delitem__(self, key: Any) -> None:
        """Accept and forget."""

    def __contains__(self, key: object) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Let exceptions through."""

    def __dir__(self) -> list[str]:
        return sorted(public_names(self))

    def __repr__(self) -> str:
        return "NullRun()"


class NullPart(NullRun):
    """Stands in for a part of a run, such as an artifact: all of it is of this kind, names included.

    As a number it is NaN: it can be computed with, and no comparison with it is true.
    """

    def get(self, name: object, default: Any = None) -> Any:  # noqa: ARG002  # of a part nothing is known
        """The default; without one, what accepts every use."""
        return NullPart() if default is None else default

    def keys(self) -> tuple[Any, ...]:
        """No names."""
        return ()

    def values(self) -> tuple[Any, ...]:
        """No values."""
        return ()

    def items(self) -> tuple[Any, ...]:
        """No names and values."""
        return ()

    def _fact(self, name: str) -> Any:  # noqa: ARG002  # of a part nothing is known
        return NullPart()

    def _computed(self, *_others: object) -> NullPart:
        return NullPart()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _computed
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _computed
    __neg__ = __pos__ = __abs__ = __round__ = _computed

    def _compared(self, _other: object) -> bool:
        _tell_of_unknown()
        return False

    __lt__ = __le__ = __gt__ = __ge__ = _compared

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (int, float, str)):
            _tell_of_unknown()
        return self is other

    __hash__ = object.__hash__

    def __float__(self) -> float:
        _tell_of_unknown()
        return math.nan

    def __int__(self) -> int:
        _tell_of_unknown()
        return 0

    def __format__(self, spec: str) -> str:
        try:
            return format(math.nan, spec) if spec else repr(self)
        except ValueError:  # one for text, or for whole numbers
            return repr(self)


class NullSummary(NullPart):
    """The summary of a run on a rank without it: what is written there can be read there."""

    def get(self, name: object, default: Any = None) -> Any:
        """What this rank has written under a name, else the default."""
        return self._own().get(name, default)

    def keys(self) -> Any:
        """Names that this rank has written."""
        return self._own().keys()

    def values(self) -> Any:
        """What this rank has written."""
        return self._own().values()

    def items(self) -> Any:
        """Names and values that this rank has written."""
        return self._own().items()

    def update(self, *values: Any, **others: Any) -> None:
        """Write values, here alone."""
        self._own().update(*values, **others)

    def _own(self) -> dict[Any, Any]:
        own: dict[Any, Any] = self.__dict__.setdefault("_written", {})
        return own

    def __getattr__(self, name: str) -> Any:
        own = self._own()
        return own[name] if name in own else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._own()[name] = value

    def __getitem__(self, key: Any) -> Any:
        return self._own()[key] if key in self else NullPart()

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own()[key] = value

    def __delitem__(self, key: Any) -> None:
        self._own().pop(key, None)

    def __contains__(self, key: object) -> bool:
        return key in self._own()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())


def _tell_of_unknown() -> None:
    """Say once that a script goes by what this rank cannot know: other ranks may go another way."""
    global _has_told_of_unknown  # noqa: PLW0603  # once in a process
    if not _has_told_of_unknown:
        _has_told_of_unknown = True
        _log.warning(
            "dist_wandb: a value of the run, such as one of its summary, was compared or used as a number on a rank "
            "without a run, which does not have it: it counts as NaN there. Ranks that go different ways by it may "
            "wait for each other. Read it with a default, as in run.summary.get(name, 0), and write it on all ranks.",
        )


def public_names(run: AnyRun) -> set[str]:
    """The names that a W&B run has for its users; of a stand-in as well, as far as wandb is known."""
    if run or not isinstance(run, NullRun):
        return {name for name in dir(run) if not name.startswith("_")}
    kind = getattr(getattr(sys.modules.get("wandb.sdk"), "wandb_run", None), "Run", None)
    return {name for name in (*FACTS, *_METHODS, *dir(kind)) if not name.startswith("_")}
