"""`NullRun`: the stand-in for a W&B run on a rank without a run, with its summary and its parts.

The primary publishes the run's metadata and config in one message, so both are equally recent here.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dist_wandb.notices import Notices
from dist_wandb.payloads.devices import known
from dist_wandb.payloads.scalars import Paths, nested
from dist_wandb.runs.run_metadata import METADATA, SUMMARY, settings_of
from dist_wandb.runs.wandb_media import as_written, shown_values

if TYPE_CHECKING:
    import wandb
    from typing_extensions import Self

    from dist_wandb.runs.summary import Statistics

Run: TypeAlias = "wandb.Run"
AnyRun: TypeAlias = "wandb.Run | NullRun"

_METHODS = frozenset({"alert", "config", "define_metric", "finish", "log", "log_artifact", "save", "summary", "watch"})
# Private names of runs of some version that integrations use.
_USED = frozenset(
    {
        *("_add_singleton", "_backend", "_config", "_config_callback", "_interface", "_is_finished", "_label"),
        *("_publish_file", "_set_library", "_settings", "_telemetry", "_telemetry_callback", "_telemetry_obj"),
        *("_tensorboard_callback", "_torch", "_torch_history"),
    }
)
SETTABLE = ("name", "notes", "tags")  # of a run
_notices = Notices()


class StandIn:
    """Accepts any use, at any depth of attributes and items, and does nothing. It is empty and falsy."""

    def __bool__(self) -> Literal[False]:
        return False

    def __call__(self, *args: Any, **_kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and inspect.isroutine(args[0]) else NullPart()  # as a decorator: `timed`

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols such as copy and pickle must detect that they are not implemented
            raise AttributeError(name)
        return NullPart()

    def __setattr__(self, *_: Any) -> None:
        """Accept and discard."""

    __setitem__ = __delitem__ = __setattr__

    def __getitem__(self, key: Any) -> Any:
        return NullPart()

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

    def __repr__(self) -> str:
        return "NullRun()"


def class_of(name: Literal["Config", "Run"]) -> type | None:
    return getattr(sys.modules.get(f"wandb.sdk.wandb_{name.lower()}"), name, None)


class LikeRun:
    """Counts as a `wandb.Run` in `isinstance`, as code that was written for wandb expects of what it logs to."""

    @property  # type: ignore[misc]  # not assigned
    def __class__(self) -> type:
        return class_of("Run") or type(self)

    def __deepcopy__(self, _memo: object) -> Self:
        return self  # as wandb does: models that hold it are copied


class NullRun(LikeRun, StandIn):
    """Stands in for a W&B run on a rank that opens none.

    It accepts every call, at any depth of attributes and items, and does nothing, so that the same script runs on all
    ranks: ``run.config.update({...})``, ``run.summary["best"] = 0.9``. It is falsy: test it with ``if run:``.

    Its `summary` returns what this rank has written into it or logged last, else what a resumed run had, else the
    defaults of `get`: ranks with the same values read the same values. `step` is that of the next row of this rank.

    It has the metadata of the run that receives this rank's numbers, as published by the primary of that run: `id`,
    `name`, `url`, `entity`, `project`, `project_url`, `path`, `group`, `job_type`, `tags`, `notes`, `dir` and
    `sync_dir` (on the primary's node), `start_time`, `sweep_id`, `sweep_url`, `offline`, `disabled`, `resumed`,
    `starting_step` and `config`; `settings` has these, and others as they are in this process. The first read waits
    for the primary to open its run, up to `join_timeout`; later changes by the primary appear within a heartbeat.

    Args:
        id: Id of the run that receives this rank's numbers, if known.
        name: Display name of that run, if known.
        url: Address of that run, if known.

    Example:
        With ``run_mode="auto"`` on two ranks::

            run = dist_wandb.init(run_mode="auto").run
            bool(run)  # rank 0: True; rank 1: False
            run.log_code()  # rank 0: uploads code; rank 1: does nothing
            run.id, run.project  # the same on both ranks
    """

    READ_AS_SET = 10.0  # s; a change by the primary is known by then

    id: str | None
    name: str | None
    url: str | None
    summary: NullSummary
    step: int
    starting_step: int

    def __init__(self, id: str | None = None, name: str | None = None, url: str | None = None) -> None:  # noqa: A002
        self.show(_known={"id": id, "name": name, "url": url, "starting_step": 0}, _read=dict)

    def show(self, **parts: object) -> None:
        """Set the `config` of the run that receives this rank's numbers, or functions for `step` and `_is_finished`.

        With `_successor`, which returns a run or a session, that does what is asked of this once there is one.
        """
        self.__dict__.update(parts)

    @property
    def _follows(self) -> Any:
        return self.__dict__.get("_successor", lambda: None)()  # a copy has none

    def show_metadata(self, read: Callable[[], Mapping[str, Any]], planned_id: str | None) -> None:
        """Set the source of the metadata of the run that receives the numbers; the id is planned until it has one."""
        self.show(_read=read, _known={**self.__dict__["_known"], "id": planned_id})

    def metadata(self) -> Mapping[str, Any]:
        if isinstance(run := self._follows, NullRun):
            return run.metadata()
        return {**self.__dict__["_known"], **self.__dict__["_read"]()}

    def __reduce__(self) -> tuple[Any, ...]:  # pickle's own way wants `__class__` to be the class
        return object.__new__, (type(self),), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        """Keep the current metadata in a copy, also in another process, without the intercepted methods."""
        own = {name: value for name, value in self.__dict__.items() if not inspect.isfunction(value)}
        return {**own, "_known": dict(self.metadata()), "_read": dict}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and (run := self._follows) is not None:
            return getattr(run, name)
        if name == "summary":
            return self.__dict__.setdefault("_summary", NullSummary(earlier=self.metadata))
        if name == "step":
            return int(self.__dict__.get("_step", int)())
        if name == "_is_finished":
            return self.__dict__.get("_is_over", bool)()
        if name in ("settings", "_settings"):
            found = NullPart()
            found.__dict__.update(settings_of(self.metadata(), self.__dict__.get("_given", {})))
            return found
        if name in METADATA and "_read" in self.__dict__:
            metadata = self.metadata()
            if name in self.__dict__.get("_own", ()):
                value, since, before = self.__dict__["_own"][name]  # `...`: not read since it was set
                before = metadata.get(name) if before is ... else before
                self.__dict__["_own"][name] = value, since, before
                if before == metadata.get(name) and monotonic() - since < self.READ_AS_SET:
                    return value
            if name in metadata:
                return metadata[name]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Accept. `name`, `tags` and `notes` read as set on this rank until the primary's change of them is known."""
        if (run := self._follows) is not None:
            setattr(run, name, value)
        elif name in SETTABLE:
            value = tuple(dict.fromkeys(value or ())) if name == "tags" else value  # added on all ranks, perhaps
            self.__dict__.setdefault("_own", {})[name] = value, monotonic(), ...

    def __exit__(self, kind: object = None, *_: object) -> None:
        """End this rank's part, as the run ends on the rank that has it; let exceptions through."""
        self.finish(exit_code=int(kind is not None))

    def __dir__(self) -> list[str]:
        return sorted(public_names(self))


class NullPart(StandIn):
    """Stands in for a part of a run, such as an artifact, with all its attributes and items. As a number it is NaN."""

    def get(self, name: object, default: Any = None) -> Any:  # noqa: ARG002  # nothing is known of a part
        return NullPart() if default is None else default

    def keys(self) -> tuple[Any, ...]:
        return ()

    values = items = keys

    def _compared(self, _other: object) -> bool:
        _warn_of_unknown()
        return False

    __lt__ = __le__ = __gt__ = __ge__ = _compared

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (int, float, str)):
            _warn_of_unknown()
        return self is other

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __float__(self) -> float:
        _warn_of_unknown()
        return math.nan

    def __int__(self) -> int:
        _warn_of_unknown()
        return 0

    def __format__(self, spec: str) -> str:
        try:
            return format(math.nan, spec) if spec else repr(self)
        except ValueError:  # a spec for text, or for integers
            return repr(self)


class NullSummary(MutableMapping[Any, Any], StandIn):
    """The summary of a run on a rank without it: what this rank has written or logged last, by name.

    Else what a resumed run had when it was opened, for which a read waits as for the run's metadata (`earlier`). A
    mapping in it is one, too, as of wandb's: writes into that are writes into the summary.
    """

    _written: dict[Any, Any]
    _note: Callable[[Any, Any], None]
    _earlier: Callable[[], Mapping[str, Any]]

    def __init__(
        self, values: Mapping[Any, Any] | None = None, earlier: Callable[[], Mapping[str, Any]] = dict
    ) -> None:
        self.__dict__.update(_written=dict(values or {}), _note=lambda *_: None, _earlier=earlier)

    def _all(self) -> dict[Any, Any]:
        metadata = self._earlier()
        if metadata.get("resumed") is not None:  # it is known
            self.__dict__["_earlier"] = dict
            for name, value in (metadata.get(SUMMARY) or {}).items():
                self._written.setdefault(name, value)
        return self._written

    def note_by(self, note: Callable[[Any, Any], None]) -> None:
        self.__dict__["_note"] = note

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the values in a copy, also in another process; its writes concern nobody."""
        return NullSummary, (self._written,)

    def show(self, values: Mapping[str, Any], paths: Paths, combined: Mapping[str, Statistics]) -> None:
        """Take over the values of a call of `log`; of some names what the summary has `combined`."""
        shown = {**shown_values(values), **combined}
        self._written.update(nested(shown, paths, self._written) if paths else shown)

    def get(self, name: object, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  # it is this method

    def _as_dict(self) -> dict[str, Any]:  # of W&B's, which scripts write to JSON
        return dict(known(self._all()))

    def __bool__(self) -> bool:  # type: ignore[override]  # of a part of a run, never true
        return bool(self._all())

    def __repr__(self) -> str:
        return repr(self._written)

    def __getattr__(self, name: str) -> Any:
        return self[name] if name in self else super().__getattr__(name)

    def __getitem__(self, key: Any) -> Any:
        if key not in self:
            return NullPart()
        value = known({key: self._written[key]})[key]
        if type(value) is not dict:
            return value
        part = NullSummary(value)
        part.note_by(lambda *_: self.__setitem__(key, part._written))  # of this class
        return part

    def __setitem__(self, key: Any, value: Any) -> None:
        self._written[key] = as_written(value)
        self._note(key, value)

    __setattr__ = __setitem__

    def __delitem__(self, key: Any) -> None:
        self._all().pop(key, None)

    def __contains__(self, key: object) -> bool:
        return key in self._written or key in self._all()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


def _warn_of_unknown() -> None:
    _notices.warn(  # once; other ranks may branch differently
        "unknown",
        "a value of the run, for example of its summary, was compared or used as a number on a rank without a run, "
        "where it is NaN. Ranks that branch differently on it may wait for each other. Read it with a default, as in "
        "run.summary.get(name, 0), and write it on all ranks.",
    )


def is_private_name(name: str) -> bool:
    """Return whether a private name is one of a run's that integrations use, W&B's own and those of libraries."""
    kind = class_of("Run")
    is_wandbs = hasattr(kind, name) or name in getattr(kind, "__annotations__", ())
    return name in _USED or (is_wandbs and not name.startswith(("__", "_repr_")))


def public_names(run: AnyRun) -> set[str]:
    """Return the public names of a W&B run; also for a stand-in, provided that wandb is imported."""
    if run or not isinstance(run, NullRun):
        return {name for name in dir(run) if not name.startswith("_")}
    return {name for name in (*METADATA, *_METHODS, *dir(class_of("Run"))) if not name.startswith("_")}
