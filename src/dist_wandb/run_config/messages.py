"""The messages about configs in the job's store: keys, and the types of their values."""

from __future__ import annotations

import json
from typing import Any, TypedDict, TypeVar, get_args, get_origin, get_type_hints, is_typeddict

from dist_wandb.errors import ConfigurationError

GIVEN, RESULT, SALT = "config/given", "config/result", "config/salt"
ALL_GIVEN = "config/given by all"  # a list of the configs that all ranks were given
DIFFERS, OTHER_RUNS, REFUSED = (
    "config/differs",
    "config/other runs",
    "config/refused",
)  # claimed by the rank that warns for all
# Appended to the key of a `PublishedRun`: its `Digests`, and its `Version`.
OF_DIGESTS, OF_VERSION = "/given", "/version"


_PAIR = 2  # text and digest of a value
_T = TypeVar("_T")


class GivenConfig(TypedDict):
    """The config that a rank was given, and the run that it was asked for, for other ranks to compare."""

    salt: str
    values: dict[str, list[str]]
    run: dict[str, list[str]]


class Version(TypedDict):
    """How often a run was published, and whether its user has finished it: the only key that followers poll."""

    number: int
    is_over: bool


class ComparisonResult(TypedDict):
    """The result of the comparison with ``config_sync="check"``."""

    differences: list[str]


class Digests(TypedDict):
    """Digests of the config that a primary was given, by which followers find the values that differ from theirs."""

    salt: str
    digests: dict[str, str]


class PublishedRun(TypedDict):
    """The run of a primary."""

    values: str  # its config, as JSON without secrets
    imposed: list[str]  # names whose values come from a sweep, and replace those that any rank was given
    metadata: dict[str, Any]


def checked(message: Any, kind: type[_T], key: str) -> _T:
    """Return a message from the job's store; raise `ConfigurationError` if it is not of this `kind`."""
    if not fits(message, kind):
        raise ConfigurationError(
            f"The job's store holds {str(message)[:100]!r} as {key!r}, which is not a {kind.__name__}. Something else "
            "writes to the store, or a rank has another version of dist_wandb: install the same one on all ranks."
        )
    return message  # type: ignore[no-any-return]  # just checked


def fits(message: Any, kind: Any) -> bool:
    """Return whether a message is of a kind."""
    if not _is_a(message, kind):
        return False
    pairs = [*message["values"].values(), *message["run"].values()] if kind is GivenConfig else []
    return all(len(pair) == _PAIR for pair in pairs)


def _is_a(value: Any, kind: Any) -> bool:
    """Return whether a value decoded from JSON has a type, at any depth."""
    origin, of = get_origin(kind) or kind, get_args(kind)
    if origin is dict:
        return isinstance(value, dict) and all(_is_a(item, of[1]) for item in value.values())
    if origin is list:
        return isinstance(value, list) and all(_is_a(item, of[0]) for item in value)
    if is_typeddict(kind):
        fields = get_type_hints(kind).items()
        return isinstance(value, dict) and all(name in value and _is_a(value[name], field) for name, field in fields)
    return kind is Any or type(value) is kind


def values_of(run: PublishedRun) -> dict[str, Any]:
    """Return the config in a message; raise `ConfigurationError` if it has none."""
    try:
        return checked(json.loads(run["values"]), dict[str, Any], "values")
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"A config in the job's store cannot be read: {error}.") from error


def run_key(unit: str) -> str:
    """Return the key of a `PublishedRun`: of a unit's primary or, for an empty name, of the coordinator."""
    return f"config/of/{unit}"
