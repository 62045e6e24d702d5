"""Select runs by id or name and by conditions on their values, and sort them; and metrics of single ranks by name."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from operator import eq, ge, gt, le, lt, ne
from typing import Any, TypeVar

from dist_wandb.errors import ConfigurationError, suggest
from dist_wandb.settings.reduction import STEP, TIMES
from dist_wandb.wandb_files.finding import natural_order
from dist_wandb.wandb_files.reading import MetricHistory, mean_of
from dist_wandb.wandb_files.runs import LocalRun
from dist_wandb.wandb_files.stragglers import EXCESS, RANK, Timing

_CONDITION = re.compile(r"(.+?)\s*(!=|<=|>=|==?|<|>)\s*(.*)", re.DOTALL)
_OPERATORS: dict[str, Callable[[float, float], bool]]
_OPERATORS = {"=": eq, "==": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge}
_OWN = ("id", "name", "state", "project", "group", "job_type", "started", "rows")
_MOST_VALUES, _LONGEST_NAME = 1000, 200  # of a config that is compared, in characters

_T = TypeVar("_T")
_OF_RANK = re.compile(r"((?:worker-\d{1,7}-)?rank-\d{1,7})/(.+)", re.DOTALL)
SPREAD = ("min", "max", "std", "argmax_rank")  # last parts of names of statistics, below the name of a mean over ranks


def condition_of(text: str) -> Callable[[LocalRun], bool]:
    # A condition is such as ``lr>=0.1`` or ``name=night*``. Values are compared as numbers if both are numbers, else as
    # text. ``=`` and ``!=`` accept patterns. A run without the value fulfils only ``!=``.
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise ConfigurationError(f"{text!r} is not a condition. Write one such as lr=0.1, val/loss<0.5, name=night*")
    key, operator, given = found.groups()

    def holds(run: LocalRun) -> bool:
        value = value_of(run, key)
        if value is None:
            return operator == "!="
        number, operand = _as_number(value), _as_number(given)
        if number is not None and operand is not None:
            return _OPERATORS[operator](number, operand)
        text, wanted = _as_text(value), given.lower() if isinstance(value, bool) else given
        is_same = fnmatchcase(text, wanted) or text == wanted
        return is_same if operator in ("=", "==") else not is_same if operator == "!=" else False

    return holds


def value_of(run: LocalRun, key: str) -> Any:
    # `key` is one of `_OWN`, or a name in the config (with dots for nested ones), or a metric, for its last value.
    # ``config.KEY`` is never a metric.
    if key in _OWN:
        return getattr(run, key)
    name = key.removeprefix("config.")
    found = run.config[name] if name in run.config else dict(flattened(run.config)).get(name)
    if found is None and name == key and key in run.metrics:
        return run.metrics[key].last
    return found


def chosen(
    runs: Sequence[LocalRun], names: Sequence[str], conditions: Iterable[str], state: str | None = None
) -> list[LocalRun]:
    tests = list(map(condition_of, conditions))
    for name in names:
        if not any(_is_called(run, name) for run in runs):
            names_of_runs = dict.fromkeys(own for run in reversed(runs) for own in (run.id, run.name) if own)
            known = suggest(name, names_of_runs, "The last ones")
            raise ConfigurationError(f"No run has the id or the name {name!r}. {known}")
    return [
        run
        for run in runs
        if (not names or any(_is_called(run, name) for name in names))
        and all(holds(run) for holds in tests)
        and state in (None, run.state)
    ]


def ordered(runs: Iterable[LocalRun], key: str, *, reverse: bool = False) -> list[LocalRun]:
    """Sort runs by a value (`key` as for `value_of`): numbers before text, and runs without the value last."""
    values = [(run, value_of(run, key)) for run in runs]
    known = [(run, value) for run, value in values if value is not None]
    if values and not known:
        keys = (*_OWN, *(name for run, _ in values for name in (*dict(flattened(run.config)), *run.metrics)))
        raise ConfigurationError(
            f"No run has the value {key!r} to sort by. {suggest(key, dict.fromkeys(keys), 'Known')}"
        )

    def sort_key(pair: tuple[LocalRun, Any]) -> tuple[bool, float, list[str]]:
        number = _as_number(pair[1])
        if number is None or math.isnan(number):
            return True, 0.0, natural_order(_as_text(pair[1]))
        return False, number, []

    known.sort(key=sort_key, reverse=reverse)
    return [*(run for run, _ in known), *(run for run, value in values if value is None)]


def check_metrics(patterns: Iterable[str], found: Iterable[str], known: Callable[[], Iterable[str]]) -> None:
    """Raise `ConfigurationError` for a name or pattern that matches none of `found`, with the nearest `known` one."""
    names = set(found)
    for pattern in patterns:
        if pattern not in names and not any(fnmatchcase(name, pattern) for name in names):
            others = set(known())
            if "*" in pattern:
                others |= {f"{name.rpartition('/')[0]}/*" for name in others if "/" in name}
            near = suggest(pattern, sorted(others, key=natural_order), "Known")
            raise ConfigurationError(f"No run has a metric {pattern!r}. {near}")


def differing(runs: Sequence[LocalRun]) -> list[str]:
    """Return the names in configs whose values differ, or are missing; these come last. Nested names have dots."""
    given: dict[str, list[str]] = {}
    for run in runs:
        for name, value in dict(islice(flattened(run.config), _MOST_VALUES)).items():
            given.setdefault(name, []).append(_as_text(value))
    names = [name for name, values in given.items() if len(set(values)) > 1 or len(values) < len(runs)]
    return sorted(names, key=lambda name: (len(set(given[name])) == 1, -len(given[name]), natural_order(name)))


def spreads_among(metrics: Mapping[str, _T]) -> dict[str, dict[str, _T]]:
    """Return the spread over ranks (by kind, as in `SPREAD`) of each metric that was logged with a complete spread."""
    of_names = {name: {kind: metrics.get(f"{name}/{kind}") for kind in SPREAD} for name in metrics}
    return {name: found for name, found in of_names.items() if None not in found.values()}  # type: ignore[misc]


def timings_of(metrics: Mapping[str, MetricHistory]) -> dict[str, Timing]:
    found = {STEP: Timing(rows=metrics[STEP].count)} if STEP in metrics else {}
    if RANK in metrics:
        excess = mean_of(metrics[EXCESS].trend) if EXCESS in metrics else math.nan
        found[RANK] = Timing(_counts(metrics[RANK]), metrics[RANK].count)
        found[RANK].mean = metrics[RANK].count * excess if math.isfinite(excess) else 0.0
    for name, spread in spreads_among(metrics).items():
        if name.startswith(TIMES):
            rows = metrics[name].count
            sums = (rows * mean_of(metric.trend) for metric in (spread["max"], metrics[name], spread["min"]))
            found[name] = Timing(_counts(spread["argmax_rank"]), rows, *sums)
    return found


def _counts(ranks: MetricHistory) -> Counter[int]:
    return Counter({int(rank): count for rank, count in ranks.counts})


def by_rank(names: Iterable[str]) -> list[str]:
    """Sort names in natural order. Names of single ranks (``rank-1/loss``) follow the plain name."""

    def order(name: str) -> tuple[list[str], bool, list[str]]:
        found = of_rank(name)
        return (natural_order(found[1]), True, natural_order(name)) if found else (natural_order(name), False, [])

    return sorted(names, key=order)


def of_rank(name: str) -> tuple[str, str] | None:
    """Split the name of a metric of a single rank into label and plain name; `None` for other names."""
    found = _OF_RANK.fullmatch(name)
    return (found[1], found[2]) if found else None


def _is_called(run: LocalRun, name: str) -> bool:
    return any(own is not None and (own == name or fnmatchcase(own, name)) for own in (run.id, run.name))


def flattened(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values of a config. Names of nested configs are joined by dots, unless they are very long."""
    for name, value in config.items():
        if isinstance(value, dict) and value and len(prefix) + len(name) < _LONGEST_NAME:
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _as_number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
