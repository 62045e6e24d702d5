"""Names by which Accelerate and scripts find the tracker: in `log_with`, in ``"all"``, and in place of ``"wandb"``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from accelerate import accelerator as accelerators
from accelerate import tracking
from accelerate.tracking import GeneralTracker

NAME = "dist_wandb"
STOCK_NAME = "wandb"
_ALL = "all"
_FILTER = "filter_trackers"
_KNOWN = ("log_with", "logging_dir")
_MARK = "__knows_dist_wandb__"


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


def register(tracker_class: type[Any]) -> None:
    """Make ``log_with="dist_wandb"`` work, and let ``"all"`` mean our tracker instead of Accelerate's own for wandb."""
    if hasattr(tracking, "register_tracker_class"):
        tracking.register_tracker_class(tracker_class)
    else:  # before 1.15
        tracking.LOGGER_TYPE_TO_CLASS[NAME] = tracker_class
    # `Accelerator` resolves `log_with` by this function. It is replaced by one that does the same for all other values.
    # In a version in which it differs, only that version's own means work.
    original = getattr(accelerators, _FILTER, None)
    if original is None or hasattr(original, _MARK):
        return
    if tuple(inspect.signature(original).parameters) == _KNOWN:
        setattr(accelerators, _FILTER, _filter_trackers(original))


def _filter_trackers(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    @functools.wraps(original)
    def filter_trackers(log_with: Any, logging_dir: Any = None) -> list[Any]:
        requested = list(log_with) if isinstance(log_with, (list, tuple)) else [log_with]
        names = [None if isinstance(item, GeneralTracker) else str(item) for item in requested]
        if _ALL in names:
            found = [item for item in original(requested, logging_dir) if str(item) not in (NAME, STOCK_NAME)]
            has_ours = any(isinstance(item, GeneralTracker) and item.name == NAME for item in found)
            return found if has_ours else [*found, NAME]
        if NAME in names:
            others = [item for item, name in zip(requested, names, strict=True) if name != NAME]
            return [*original(others, logging_dir), NAME]
        return original(log_with, logging_dir)

    setattr(filter_trackers, _MARK, True)
    return filter_trackers
