"""The messages about configs in the job's store: keys, and the types of their values."""

from __future__ import annotations

from typing import Any, TypedDict

GIVEN, RESULT, SALT = "config/given", "config/result", "config/salt"
ALL_GIVEN = "config/given by all"  # a list of the configs that all ranks were given
DIFFERS, REFUSED = "config/differs", "config/refused"  # claimed by the rank that warns for all
# Appended to the key of a `PublishedRun`: its `Digests`, and its `Version`.
OF_DIGESTS, OF_VERSION = "/given", "/version"


class GivenConfig(TypedDict):
    """The config that a rank was given, for other ranks to compare."""

    salt: str
    values: dict[str, list[str]]


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
    """The run of a primary.

    Attributes:
        values: Its config, as JSON without secrets.
        imposed: Names whose values come from a sweep, and replace those that any rank was given.
        metadata: Its metadata.
    """

    values: str
    imposed: list[str]
    metadata: dict[str, Any]


def run_key(unit: str) -> str:
    """Return the key of a `PublishedRun`: of a unit's primary or, for an empty name, of the coordinator."""
    return f"config/of/{unit}"
