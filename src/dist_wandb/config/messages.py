"""The messages about configs in the job's store: keys, and the types of their values."""

from __future__ import annotations

from typing import Any, TypedDict

GIVEN, VERDICT, SALT = "config/given", "config/verdict", "config/salt"
DIFFERS, REFUSED = "config/differs", "config/refused"  # claimed by the rank that warns for all
# Appended to the key of a `PublishedRun`: its `Digests`; how often it was published; set once its user has finished it.
OF_DIGESTS, OF_VERSION, OF_END = "/given", "/version", "/is over"


class Given(TypedDict):
    """The config that a rank was given, for others to compare."""

    salt: str
    values: dict[str, list[str]]


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
