"""How the numbers of several ranks become one: the arguments that select it, checked. Pure.

The default ``"auto"`` is the mean, except with ``run_mode="new"``: there each rank's run keeps its own numbers unless
the user requests a reduction. A default of ``"mean"`` could not be distinguished from a requested ``"mean"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from dist_wandb.errors import ConfigurationError, suggest

Reduction = Literal["mean", "sum", "min", "max", "first", "nanmean", "nansum"]
Reduce = Reduction | Literal["auto"] | Mapping[str, Reduction] | None
Spread = bool | str | Sequence[str]
PerRank = bool | str | Sequence[str]

REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum", "min", "max", "first", "nanmean", "nansum")
WITHOUT_NANS = frozenset({"nanmean", "nansum"})  # these ignore ranks whose number is NaN

# Numbers that are equal on all ranks by nature, also after a slash (`trainer/global_step`): counters and schedules.
EQUAL_BY_NATURE = (
    *("epoch", "iter", "iteration", "step", "global_step", "tokens"),
    *("lr", "lr-*", "learning_rate"),
)
# The Hugging Face Trainer's numbers that are the same on all ranks or include all of them: `transformers` adds
# these patterns to those of the user.
ALREADY_REDUCED = (
    *("train/loss", "train/grad_norm", "train/learning_rate", "train/epoch", "train/global_step"),
    *("train/num_input_tokens_seen", "train/train_*", "eval/*", "test/*"),
)
LARGEST_EXACT_INTEGER = 2**53


def check_reduce(reduce: object) -> dict[str, Reduction] | None:
    """Return the checked argument `reduce` of an integration as a mapping of name patterns to reductions, in its order.

    The first matching pattern (as in `fnmatch`) applies. `None` is no reduction at all.

    >>> check_reduce("mean"), check_reduce({"tokens": "sum", "*": "mean"})
    ({'*': 'mean'}, {'tokens': 'sum', '*': 'mean'})
    """
    if reduce is None:
        return None
    if isinstance(reduce, str) and reduce == "auto":
        reduce = "mean"
    if not isinstance(reduce, Mapping):
        return {"*": _check_reduction(reduce, "reduce")}
    for pattern in reduce:
        if not isinstance(pattern, str):
            raise ConfigurationError(f"reduce has {pattern!r} as a name pattern, which is not text. Use e.g. 'loss/*'.")
    return {pattern: _check_reduction(value, f"reduce[{pattern!r}]") for pattern, value in reduce.items()}


TIMES = "time/"  # prefix of the names of timings; their mean over ranks and their spread are always written
# Seconds since the last row with timings, and the fraction of that time for which a rank was busy.
STEP, BUSY = f"{TIMES}step", f"{TIMES}busy"
DEGRADED = "dist_wandb/degraded"  # name of the number of ranks that a row lacks


def check_patterns(argument: str, given: object) -> tuple[str, ...]:
    """Return the patterns of an argument that selects names: `True` for all, `False` for none, or its own patterns."""
    if isinstance(given, bool):
        return ("*",) if given else ()
    if isinstance(given, str):
        return (given,)
    if isinstance(given, Sequence) and all(isinstance(pattern, str) for pattern in given):
        return tuple(given)
    raise ConfigurationError(f"{argument}={given!r} is neither a bool nor name patterns. Pass e.g. ['loss', 'grad/*'].")


class PerRankNames(NamedTuple):
    """The names that each rank of a shared run also writes under its label."""

    patterns: tuple[str, ...] = ("*",)
    skips_equal: bool = True  # whether to leave out numbers that are equal on all ranks by nature

    def has(self, name: str, *, is_number: bool) -> bool:
        if is_number and self.skips_equal and _is_equal_by_nature(name):
            return False
        return matches_any(name, self.patterns)


def check_per_rank(per_rank: object) -> PerRankNames:
    """Check the argument `per_rank` of an integration.

    `"auto"` is for all names except those of numbers that are equal on all ranks by nature (`EQUAL_BY_NATURE`); other
    values as in `check_patterns`.
    """
    if isinstance(per_rank, str) and per_rank == "auto":
        return PerRankNames()
    return PerRankNames(check_patterns("per_rank", per_rank), skips_equal=False)


@lru_cache(maxsize=4096)
def _is_equal_by_nature(name: str) -> bool:
    return matches_any(name, EQUAL_BY_NATURE) or matches_any(name, (f"*/{pattern}" for pattern in EQUAL_BY_NATURE))


def _check_reduction(value: object, argument: str) -> Reduction:
    for known in REDUCTIONS:
        if value == known:
            return known
    raise ConfigurationError(
        f"{argument}={value!r} is not a reduction. {suggest(value, REDUCTIONS)} Pass None for no reduction."
    )


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches any of the patterns, as in `fnmatch`, case-sensitively."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def longest_pattern(name: str, patterns: Iterable[str]) -> str | None:
    """Return the longest pattern, a start of names with a star, that a name matches: W&B's rule for definitions."""
    matching = [pattern for pattern in patterns if pattern[-1:] == "*" and name.startswith(pattern[:-1])]
    return max(matching, key=len, default=None)


def reduction_of(name: str, reduce: Mapping[str, Reduction]) -> tuple[str, Reduction]:
    """Return the first pattern that a name matches, and its reduction; `("", "mean")` if it matches none."""
    return next(((pattern, reduce[pattern]) for pattern in reduce if fnmatchcase(name, pattern)), ("", "mean"))


@dataclass(frozen=True)
class Definitions:
    """The user's definitions of metrics, as W&B combines them."""

    ours: str | None = None  # the x axis of the session, which is none of the user's
    given: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by name or pattern
    # The user's x axes: how much of what the script did, as `exchange.rows` counts it, preceded each
    axes: Mapping[str, int] = field(default_factory=dict)

    def followed_by(self, name: str, given: Mapping[str, Any], since: int = 0) -> Definitions:
        """Return the definitions with a further one, which adds to an earlier one of this name, as in W&B."""
        axis: Any = getattr(given.get("step_metric"), "name", given.get("step_metric"))  # or a metric
        given = {argument: value for argument, value in {**given, "step_metric": axis}.items() if value is not None}
        before: Mapping[str, Any] = {} if given.get("overwrite") else self.given.get(name, {})
        both = {**before, **given}
        summaries = [one["summary"] for one in (before, given) if isinstance(one.get("summary"), str)]
        if summaries:
            both["summary"] = ",".join(dict.fromkeys(summaries))
        if both.get("step_sync") is False and (_adds(before) or _adds(given)):
            del both["step_sync"]
        is_new = isinstance(axis, str) and axis not in (self.ours, *self.axes)
        axes = {**self.axes, axis: since} if is_new else self.axes
        return replace(self, given={**self.given, name: both}, axes=axes)

    def of(self, metric: str) -> Mapping[str, Any]:
        """Return the definition of a metric: its own, else that of the longest pattern; empty without any."""
        name = metric if metric in self.given else longest_pattern(metric, self.given)
        return {} if name is None else self.given[name]

    def axis_of(self, metric: str) -> str | None:
        """Return the axis that W&B adds to rows with a metric, or with what matches a pattern."""
        definition = self.of(metric)
        return definition["step_metric"] if _adds(definition) else None

    def summary_of(self, metric: str) -> tuple[str, ...]:
        """Return what the summary has of a metric, such as `("max",)`; nothing for the last value itself."""
        if not self._has_summaries:  # `log` asks for each name
            return ()
        shown = tuple(filter(None, str(self.of(metric).get("summary") or "").lower().split(",")))
        return () if "copy" in shown else shown

    @cached_property
    def _has_summaries(self) -> bool:
        return any(one.get("summary") for one in self.given.values())


def _adds(definition: Mapping[str, Any]) -> bool:
    return definition.get("step_metric") is not None and definition.get("step_sync") is not False
