"""How Accelerate and scripts reach the tracker: by names in `log_with`, and by wrapped methods of `Accelerator`.

The names are ``"dist_wandb"``, ``"all"``, and ``"wandb"`` where the tracker stands in for Accelerate's own. The methods
are those that act on the main process only, so that trackers are called on all ranks. They are wrapped once, at class
level, as are the methods that timings need (`timings`). Accelerators without a tracker of ours in `log_with` are not
affected.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import accelerate
from accelerate import Accelerator, tracking
from accelerate import accelerator as accelerators
from accelerate.tracking import GeneralTracker

from dist_wandb.errors import ConfigurationError, UnsupportedVersionError
from dist_wandb.runs.interception import intercept, intercepted
from dist_wandb.settings.config_values import given_values

if TYPE_CHECKING:
    from dist_wandb.accelerate.tracker import DistWandbTracker

NAME = "dist_wandb"
STOCK_NAME = "wandb"
_ALL = "all"
_FILTER = "filter_trackers"
_KNOWN = ("log_with", "logging_dir")
_classes: list[type[DistWandbTracker]] = []  # that of our tracker, once it is registered


class StandInName(str):
    """The name of our tracker if it replaces Accelerate's own: ``"dist_wandb"``, which also equals ``"wandb"``.

    Published scripts log media for W&B under ``if tracker.name == "wandb"``. As a key and as text the name is
    ``"dist_wandb"``.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == STOCK_NAME or str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return str.__hash__(self)


def stands_in(log_with: Iterable[Any]) -> bool:
    """Whether `log_with` has our tracker, and not Accelerate's own for wandb: scripts then still call it "wandb"."""
    names = [tracker.name if isinstance(tracker, GeneralTracker) else str(tracker) for tracker in log_with]
    return NAME in names and STOCK_NAME not in [str(name) for name in names]


def register(tracker_class: type[DistWandbTracker]) -> None:
    """Make ``log_with="dist_wandb"`` work, and let ``"all"`` mean our tracker instead of Accelerate's own for wandb."""
    _classes[:] = [tracker_class]
    if hasattr(tracking, "register_tracker_class"):
        tracking.register_tracker_class(tracker_class)
    else:  # before 1.15
        tracking.LOGGER_TYPE_TO_CLASS[NAME] = tracker_class
    # `Accelerator` resolves `log_with` by this function. It is replaced by one that does the same for all other values.
    # In a version in which it differs, only that version's own means work.
    original: Any = getattr(accelerators, _FILTER, None)
    is_new = original is not None and intercepted(accelerators, _FILTER) is None
    if is_new and tuple(inspect.signature(original).parameters) == _KNOWN:
        intercept(accelerators, _FILTER, _filter_trackers)


def _filter_trackers(original: Callable[..., list[Any]], log_with: Any, logging_dir: Any = None) -> list[Any]:
    requested = list(log_with) if isinstance(log_with, (list, tuple)) else [log_with]
    for item in requested:
        if isinstance(item, type) and getattr(item, "name", None) == NAME:
            raise ConfigurationError(
                f"log_with has the class {item.__name__} instead of an object. Write {item.__name__}(), for "
                f"example Accelerator(log_with={item.__name__}())."
            )
    names = [None if isinstance(item, GeneralTracker) else str(item) for item in requested]
    if _ALL in names:
        found = [item for item in original(requested, logging_dir) if str(item) not in (NAME, STOCK_NAME)]
        has_ours = any(isinstance(item, GeneralTracker) and item.name == NAME for item in found)
        return found if has_ours else [*found, NAME]
    if NAME in names:
        others = [item for item, name in zip(requested, names, strict=True) if name != NAME]
        return [*original(others, logging_dir), NAME]
    return original(log_with, logging_dir)


def tracker_of(accelerator: Accelerator) -> DistWandbTracker | None:
    held = (*accelerator.log_with, *accelerator.trackers)
    return next((tracker for tracker in held if isinstance(tracker, _classes[0])), None)


def _has(accelerator: Accelerator) -> bool:
    return NAME in accelerator.log_with or tracker_of(accelerator) is not None


def _off_main(accelerator: Accelerator) -> DistWandbTracker | None:
    """Return the tracker of a rank that Accelerate does not call. Create it if `log_with` has only its name."""
    if accelerator.is_main_process or not _has(accelerator):
        return None
    tracker = tracker_of(accelerator) or _replace_name(accelerator, _classes[0]())
    return tracker if tracker.wraps else None


def _to_start(accelerator: Accelerator, project: str, arguments: Mapping[str, Any]) -> DistWandbTracker:
    """Return the tracker that `init_trackers` starts, with its arguments: for a name, the constructor's."""
    tracker = tracker_of(accelerator)
    if tracker is None or (tracker.is_for_name and not tracker.is_open):
        if arguments.get("timings"):
            raise ConfigurationError(
                f"timings={arguments['timings']!r} in init_kwargs comes too late: the objects that "
                "Accelerator.prepare returns are measured. Pass log_with=DistWandbTracker(timings=True) instead "
                f"of the name {NAME!r}."
            )
        tracker = _replace_name(accelerator, _classes[0](project, **arguments))
        tracker.late_join.requested = {"project": project, **arguments}
    else:
        tracker.late_join.set_requested(project, arguments, is_open=tracker.is_open)
    return tracker


def _replace_name(accelerator: Accelerator, tracker: DistWandbTracker) -> DistWandbTracker:
    """Put a tracker in the position of its name, or of an earlier tracker, whose rows it takes over."""
    tracker.is_for_name = True
    before = tracker_of(accelerator)
    if before is not None:
        tracker.late_join.rows, before.late_join.rows = before.late_join.rows, tracker.late_join.rows
        accelerator.trackers[:] = [held for held in accelerator.trackers if held is not before]
    accelerator.log_with = [tracker if held is before or held == NAME else held for held in accelerator.log_with]
    return tracker


def name_as_scripts_do(tracker: DistWandbTracker, accelerator: Accelerator) -> None:
    """Let scripts find a tracker under the name of Accelerate's own for wandb, if it replaces that."""
    if stands_in([tracker, *accelerator.log_with]):
        tracker.name = StandInName(NAME)


def _own_arguments(accelerator: Accelerator, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    stock = (kwargs or {}).get(STOCK_NAME, {}) if stands_in(accelerator.log_with) else {}
    return {**stock, **(kwargs or {}).get(NAME, {})}


def _init_trackers(
    original: Callable[..., None],
    self: Accelerator,
    project_name: str,
    config: dict[str, Any] | None = None,
    init_kwargs: Any = None,
) -> None:
    if not _has(self):
        original(self, project_name, config, init_kwargs or {})  # before 1.14 it takes no None
        return
    ours = _own_arguments(self, init_kwargs)
    if config is not None:  # published for ranks that join later; it is set again below
        first = ours.setdefault("config", config)
        if first is not config and not isinstance(first, str):  # a file, which wandb reads
            ours["config"] = {**given_values(first), **given_values(config)}
    tracker = _to_start(self, project_name, ours)
    name_as_scripts_do(tracker, self)
    if self.is_main_process:
        tracker.start()  # Accelerate before 1.8 expects the constructor to do so
    elif tracker.wraps:
        tracker.start()
        if tracker.session.plan.primary:  # with the values given on all ranks
            tracker.store_init_configuration(config or {})
    original(self, project_name, config, init_kwargs or {})
    others = [held for held in self.trackers if held is not tracker]
    if len(others) + 1 < len(self.trackers):  # a tracker that is started again is in the list twice
        self.trackers[:] = [*others, tracker]


def _log(
    original: Callable[..., None],
    self: Accelerator,
    values: dict[str, Any],
    step: int | None = None,
    log_kwargs: Any = None,
) -> None:
    if not _has(self):
        return original(self, values, step, log_kwargs or {})
    ours = _own_arguments(self, log_kwargs)
    tracker = _off_main(self)
    if tracker is not None:
        tracker.log(values, step, **ours)
    return original(self, values, step, {**(log_kwargs or {}), NAME: ours})


def _get_tracker(original: Callable[..., Any], self: Accelerator, name: str, unwrap: bool = False) -> Any:
    if name == STOCK_NAME and stands_in(self.log_with):
        name = NAME
    tracker = _off_main(self) if name == NAME else None
    if tracker is None:
        return original(self, name, unwrap)
    return tracker.tracker if unwrap else tracker


def _end_training(original: Callable[..., None], self: Accelerator) -> None:
    tracker = _off_main(self) or tracker_of(self)
    if tracker is not None:
        tracker.ends_training = True
        tracker.finish()
        tracker.ends_training = False
    original(self)


# By name, methods of `Accelerator` to wrap: the known parameters, and what is called instead, with the original first.
Wrapped: TypeAlias = "Mapping[str, tuple[tuple[str, ...], Callable[..., Any]]]"
_WRAPPED: Wrapped = {
    "init_trackers": (("self", "project_name", "config", "init_kwargs"), _init_trackers),
    "log": (("self", "values", "step", "log_kwargs"), _log),
    "get_tracker": (("self", "name", "unwrap"), _get_tracker),
    "end_training": (("self",), _end_training),
}
_REMEDY = (
    "wraps it to reach all ranks. Pass wrap=False and call DistWandbTracker.attach(accelerator) on every rank instead"
)


def wrap_accelerator(
    methods: Wrapped = _WRAPPED,
    remedy: str = _REMEDY,  # why a method is wrapped, and what to do without wrapping; the end of the error's sentence
) -> None:
    """Wrap methods of `Accelerator`, each once; raise `UnsupportedVersionError` for unknown ones."""
    left = [name for name in methods if intercepted(Accelerator, name) is None]
    for name in left:
        method, known = getattr(Accelerator, name, None), methods[name][0]
        found: tuple[str, ...] = ()
        if method is not None:  # of the decorated function, if Accelerate's decorator hides the parameters
            decorated = inspect.getclosurevars(method).nonlocals.get("function", method)
            found = tuple(inspect.signature(decorated).parameters)
        if found != known:
            raise UnsupportedVersionError(
                f"Accelerator.{name} of accelerate {accelerate.__version__} has the parameters {found}, but "
                f"DistWandbTracker knows it with {known}, and {remedy}."
            )
    for name in left:
        intercept(Accelerator, name, methods[name][1])
