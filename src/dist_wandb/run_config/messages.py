"""The messages about configs in the job's store: keys, and the types of their values."""

from __future__ import annotations

from typing import Any, TypedDict

GIVEN, VERDICT, SALT = "config/given", "config/verdict", "config/salt"
ALL_GIVEN = "config/given by all"  # a list of what all ranks were given
DIFFERS, REFUSED = "config/differs", "config/refused"  # claimed by the rank that warns for all
# Appended to the key of a `PublishedRun`: its `Digests`, and its `Version`.
OF_DIGESTS, OF_VERSION = "/given", "/version"


class Given(TypedDict):
    """The config that a rank was given, for others to compare."""

    salt: str
    values: dict[str, list[str]]


class Version(TypedDict):
    """How often a run was published, and whether its user has finished it: all that followers look at."""

    number: int
    is_over: bool


class Verdict(TypedDict):
    """The result of the comparison with ``config_sync="check"``."""

    differences: list[str]


class Digests(TypedDict):
    """Digests of the config that a primary was given, so that followers find which of their values differ."""

    salt: str
    digests: dict[str, str]


class PublishedRun(TypedDict):
    """The run of a primary.

    Attributes:
        values: Its config, as JSON without secrets.
        imposed: Names whose values are a sweep's; these replace what any rank was given.
        metadata: Its metadata.
    """

    values: str
    imposed: list[str]
    metadata: dict[str, Any]


def run_key(unit: str) -> str:
    """The key of a `PublishedRun`: of the primary of a unit; without a name, of the coordinator."""
    return f"config/of/{unit}"
