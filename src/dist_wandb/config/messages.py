"""What ranks tell each other of their configs through the job's store: keys, and the kinds of values under them."""

from __future__ import annotations

from typing import Any, TypedDict

GIVEN, VERDICT, SALT = "config/given", "config/verdict", "config/salt"
DIFFERS, REFUSED = "config/differs", "config/refused"  # claimed by the rank that warns for all


class Given(TypedDict):
    """What a rank was given, for others to compare."""

    salt: str
    values: dict[str, list[str]]


class Verdict(TypedDict):
    """What was found with ``config_sync="check"``."""

    differences: list[str]


class Digests(TypedDict):
    """What a primary was given, for the followers to know which of their values are theirs alone."""

    salt: str
    digests: dict[str, str]


class PublishedRun(TypedDict):
    """The run of a primary.

    Attributes:
        values: Its config, as JSON without secrets.
        imposed: Names whose values are a sweep's, which win over what any rank was given.
        metadata: What else is known of it.
    """

    values: str
    imposed: list[str]
    metadata: dict[str, Any]


def run_key(unit: str) -> str:
    """The key of a `PublishedRun`.

    Args:
        unit: Name of the unit whose primary publishes it; none for the run of the coordinator.
    """
    return f"config/of/{unit}"


def digests_key(key: str) -> str:
    """The key of the `Digests` that belong to a `PublishedRun`."""
    return f"{key}/given"


def version_key(key: str) -> str:
    """The key of the number that counts how often a `PublishedRun` was published."""
    return f"{key}/version"


def end_key(key: str) -> str:
    """The key that is set once the user has finished the run of a `PublishedRun`."""
    return f"{key}/is over"
