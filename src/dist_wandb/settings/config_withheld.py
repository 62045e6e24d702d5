"""Configs without their secrets, for the job's store, and their completion on ranks that have the secrets. Pure.

The job's store does not authenticate clients: anyone who can connect reads all of it. So a value that is classified as
a secret (`config_secrets`) is never stored, not even as a digest, from which short secrets can be guessed. The message
names the values that lack a secret, and whether they are still those that the publishing rank was given. If so, a rank
that was given secrets at the same places uses its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dist_wandb.settings.config_secrets import DEEPEST, is_secret
from dist_wandb.settings.config_values import decoded, encoded, shown

MISSING: Final = object()
"""Marks a missing value."""

_CHANGED, _AS_GIVEN, _AS_TEXT = "changed", "as given", "as text"


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values without secrets, at any depth. Values that contain none are not copied."""
    return {name: _without(value, 0) for name, value in values.items() if not is_secret(name, value)}


def _without(value: Any, depth: int) -> Any:
    if depth >= DEEPEST or not isinstance(value, (Mapping, list, tuple)):
        return value
    if isinstance(value, Mapping):
        old = dict(value.items())
        new = {name: _without(item, depth + 1) for name, item in old.items() if not is_secret(name, item)}
        return new if any(new.get(name, MISSING) is not item for name, item in old.items()) else value
    items = [_without(item, depth + 1) for item in value]
    return items if any(new is not item for new, item in zip(items, value, strict=True)) else value


def state(value: Any, given: Any) -> str:
    """Return whether a value is what this rank was given, or its text: W&B stores the repr of what it cannot hold."""
    if given is MISSING:
        return _CHANGED
    return _AS_GIVEN if encoded(value) == encoded(given) else _AS_TEXT if value == shown(given) else _CHANGED


def filled(
    values: Mapping[str, Any], withheld: Mapping[str, str], own: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return published values, the `encoded` results of `without_secrets`, with the secrets that this rank has.

    `withheld` has the result of `state` for each value that lacks secrets. Values that are secrets as a whole are
    published as `None`, and are `MISSING` in the result if this rank does not have them. `own` is what it was given.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        kind, mine = withheld.get(name), (own or {}).get(name, MISSING)
        if mine is MISSING or kind not in (_AS_GIVEN, _AS_TEXT):
            found[name] = MISSING if name in withheld and value is None else decoded(value)
        elif kind == _AS_TEXT:
            found[name] = shown(mine)
        elif value is None:
            found[name] = decoded(encoded(mine)) if is_secret(name, mine) else MISSING
        else:
            found[name] = _with_secrets(decoded(value), decoded(encoded(mine)))
    return found


def _with_secrets(value: Any, own: Any) -> Any:
    """Add the secrets that this rank has at the same places."""
    if isinstance(value, dict) and isinstance(own, dict):
        secrets = {name: item for name, item in own.items() if name not in value and is_secret(name, item)}
        return {**{name: _with_secrets(item, own.get(name)) for name, item in value.items()}, **secrets}
    if isinstance(value, list) and isinstance(own, list) and len(value) == len(own):
        return [_with_secrets(*items) for items in zip(value, own, strict=True)]
    return value


class Known(dict[str, Any]):
    """A config as known to a rank without a run; `hidden` are names of secrets that this rank does not have."""

    def __init__(self, values: Mapping[str, Any] = {}, hidden: frozenset[str] = frozenset()) -> None:
        super().__init__(values)
        self.hidden = hidden

    def __missing__(self, name: str) -> Any:
        raise KeyError(self.why_not(name))

    def why_not(self, name: str) -> str:
        """Return why a name has no value, as text: the name alone if no rank has a value."""
        if name not in self.hidden:
            return name
        return (
            f"{name!r} is in the config of the run, but by its name or its text it is a secret. Anyone who can connect "
            "to the job's store can read it, so secrets are not sent to other ranks. Pass it to this rank in config= "
            "as well, or read it from the same source as the rank that opened the run"
        )
