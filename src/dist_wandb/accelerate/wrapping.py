"""The methods of `Accelerator` that act on the main process only, wrapped so that trackers are called on all ranks.

They are wrapped once, at class level, as are those that timings need (`timings`). Accelerators without a tracker of
ours in `log_with` are not affected.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import accelerate
from accelerate import Accelerator

from dist_wandb.accelerate.names import NAME, STOCK_NAME, StandInName, stands_in
from dist_wandb.errors import ConfigurationError, UnsupportedVersionError

if TYPE_CHECKING:
    from dist_wandb.accelerate.tracker import DistWandbTracker


class Trackers:
    """Finds the tracker of an accelerator, and creates it if `log_with` has only its name.

    Args:
        tracker_class: `DistWandbTracker`.
    """

    def __init__(self, tracker_class: type[DistWandbTracker]) -> None:
        self._class = tracker_class

    def find(self, accelerator: Accelerator) -> DistWandbTracker | None:
        """The tracker that an accelerator holds, if there is one."""
        held = (*accelerator.log_with, *accelerator.trackers)
        return next((tracker for tracker in held if isinstance(tracker, self._class)), None)

    def has(self, accelerator: Accelerator) -> bool:
        """Whether `log_with` has a tracker of ours, or its name."""
        return NAME in accelerator.log_with or self.find(accelerator) is not None

    def off_main(self, accelerator: Accelerator) -> DistWandbTracker | None:
        """The tracker of a rank that Accelerate does not call; created here, if `log_with` has only its name."""
        if accelerator.is_main_process or not self.has(accelerator):
            return None
        tracker = self.find(accelerator) or self._put_for_name(accelerator, self._class())
        return tracker if tracker.wraps else None

    def to_start(self, accelerator: Accelerator, project: str, arguments: Mapping[str, Any]) -> DistWandbTracker:
        """The tracker that `init_trackers` is to start, with its arguments; for a name these are the constructor's."""
        tracker = self.find(accelerator)
        if tracker is None or (tracker.is_for_name and not tracker.is_open):
            if arguments.get("timings"):
                raise ConfigurationError(
                    f"timings={arguments['timings']!r} in init_kwargs comes too late: what Accelerator.prepare returns "
                    f"is measured. Pass log_with=DistWandbTracker(timings=True) in place of the name {NAME!r}."
                )
            tracker = self._put_for_name(accelerator, self._class(project, **arguments))
            tracker.arguments.asked = {"project": project, **arguments}
        else:
            tracker.arguments.take(project, arguments, is_open=tracker.is_open)
        return tracker

    def _put_for_name(self, accelerator: Accelerator, tracker: DistWandbTracker) -> DistWandbTracker:
        """Replace its name in `log_with`, or the tracker that replaced it, by a tracker, which takes over its rows."""
        tracker.is_for_name = True
        before = self.find(accelerator)
        if before is not None:
            tracker.late_join.take_over(before.late_join)
            accelerator.trackers[:] = [held for held in accelerator.trackers if held is not before]
        accelerator.log_with = [tracker if held is before or _is_name(held) else held for held in accelerator.log_with]
        return tracker


def _is_name(held: object) -> bool:
    return isinstance(held, str) and held == NAME


def name_as_scripts_do(tracker: DistWandbTracker, accelerator: Accelerator) -> None:
    """Let scripts find a tracker that replaces Accelerate's own for wandb under that one's name."""
    if stands_in([tracker, *accelerator.log_with]):
        tracker.name = StandInName(NAME)


def store_given_configuration(tracker: DistWandbTracker, values: Mapping[str, Any]) -> None:
    """Write the values given on all ranks into the config, on a primary."""
    if tracker.session.plan.primary:
        tracker.store_init_configuration(values)


def _meant_for_us(accelerator: Accelerator, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments given by tracker name: those for ours, and those for wandb's if ours replaces it."""
    stock = (kwargs or {}).get(STOCK_NAME, {}) if stands_in(accelerator.log_with) else {}
    return {**stock, **(kwargs or {}).get(NAME, {})}


def _init_trackers(original: Callable[..., None], trackers: Trackers) -> Callable[..., None]:
    @functools.wraps(original)
    def init_trackers(
        self: Accelerator, project_name: str, config: dict[str, Any] | None = None, init_kwargs: Any = None
    ) -> None:
        if not trackers.has(self):
            original(self, project_name, config, init_kwargs or {})  # before 1.14 it takes no None
            return
        ours = _meant_for_us(self, init_kwargs)
        if config is not None:
            ours = {"config": config, **ours}  # published for ranks that come later; it is set again below
        tracker = trackers.to_start(self, project_name, ours)
        name_as_scripts_do(tracker, self)
        if self.is_main_process:
            tracker.start()  # Accelerate before 1.8 leaves that to the constructor
        elif tracker.wraps:
            tracker.start()
            store_given_configuration(tracker, config or {})
        original(self, project_name, config, init_kwargs or {})
        others = [held for held in self.trackers if held is not tracker]
        if len(others) + 1 < len(self.trackers):  # started again, it is there twice, and would log all twice
            self.trackers[:] = [*others, tracker]

    return init_trackers


def _log(original: Callable[..., None], trackers: Trackers) -> Callable[..., None]:
    @functools.wraps(original)
    def log(self: Accelerator, values: dict[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        if not trackers.has(self):
            return original(self, values, step, log_kwargs or {})
        ours = _meant_for_us(self, log_kwargs)
        tracker = trackers.off_main(self)
        if tracker is not None:
            tracker.log(values, step, **ours)
        return original(self, values, step, {**(log_kwargs or {}), NAME: ours})

    return log


def _get_tracker(original: Callable[..., Any], trackers: Trackers) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_tracker(self: Accelerator, name: str, unwrap: bool = False) -> Any:
        if name == STOCK_NAME and stands_in(self.log_with):
            name = NAME
        tracker = trackers.off_main(self) if name == NAME else None
        if tracker is None:
            return original(self, name, unwrap)
        return tracker.tracker if unwrap else tracker

    return get_tracker


def _end_training(original: Callable[..., None], trackers: Trackers) -> Callable[..., None]:
    @functools.wraps(original)
    def end_training(self: Accelerator) -> None:
        tracker = trackers.off_main(self)
        if tracker is not None:
            tracker.finish()
        original(self)

    return end_training


class Wrapped(NamedTuple):
    """A method of `Accelerator` that is wrapped.

    Args:
        name: Its name.
        parameters: Those that it is known to have.
        wrapper: Makes what replaces it, of it and of what finds an accelerator's tracker.
    """

    name: str
    parameters: tuple[str, ...]
    wrapper: Callable[[Callable[..., Any], Trackers], Callable[..., Any]]


_WRAPPED = (
    Wrapped("init_trackers", ("self", "project_name", "config", "init_kwargs"), _init_trackers),
    Wrapped("log", ("self", "values", "step", "log_kwargs"), _log),
    Wrapped("get_tracker", ("self", "name", "unwrap"), _get_tracker),
    Wrapped("end_training", ("self",), _end_training),
)
_MARK = "__wrapped_by_dist_wandb__"
_REMEDY = (
    "wraps it to reach all ranks. Pass wrap=False and call DistWandbTracker.attach(accelerator) on every rank instead"
)


def wrap_accelerator(
    tracker_class: type[DistWandbTracker],
    methods: Sequence[Wrapped] = _WRAPPED,
    mark: str = _MARK,
    remedy: str = _REMEDY,
) -> None:
    """Wrap methods of `Accelerator`, once in a process; by default those that act on the main process only.

    Args:
        tracker_class: `DistWandbTracker`.
        methods: The methods.
        mark: Attribute of `Accelerator` that says that they are wrapped.
        remedy: What a method is wrapped for, and what to do without; a part of a sentence.

    Raises:
        UnsupportedVersionError: A method is missing, or its parameters are not those of any version that is known.
    """
    if getattr(Accelerator, mark, False):
        return
    for name, known, _ in methods:
        found = _parameters(getattr(Accelerator, name, None))
        if found != known:
            raise UnsupportedVersionError(
                f"Accelerator.{name} of accelerate {accelerate.__version__} has the parameters {found}, but "
                f"DistWandbTracker knows it with {known}, and {remedy}."
            )
    trackers = Trackers(tracker_class)
    for name, _, wrapper in methods:
        setattr(Accelerator, name, wrapper(getattr(Accelerator, name), trackers))
    setattr(Accelerator, mark, True)


def _parameters(method: Callable[..., Any] | None) -> tuple[str, ...]:
    """Names of a method's parameters; of the decorated function, where Accelerate's decorator does not show them."""
    if method is None:
        return ()
    decorated = inspect.getclosurevars(method).nonlocals.get("function", method)
    return tuple(inspect.signature(decorated).parameters)
