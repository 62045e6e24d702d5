"""Configs without their secrets, for the job's store, and their completion on ranks that have the secrets. Pure.

The job's store does not authenticate clients: anyone who can connect reads all of it. So a value that is classified as
a secret (`config_secrets`) is never stored, not even as a digest, from which short secrets can be guessed. A note takes
its place, and records whether the value is still the one that the publishing rank was given. If so, a rank that was
given a value of the same name uses its own; no rank silently uses a value that is outdated or differs from the run's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from dist_wandb.settings.config_secrets import DEEPEST, HIDDEN, is_secret
from dist_wandb.settings.config_values import PAIRS, decoded, encoded, shown

MISSING: Final = object()
"""Marks a missing value."""

_NOTE = "__dist_wandb_withheld__"
_SINGLE = (str, int, float, type(None))  # types that hold no other values: most of a config
_ANOTHER, _AS_GIVEN, _AS_TEXT = range(3)  # kinds of notes: W&B stores the repr of values that it cannot hold


class _Note(dict[str, int]):
    """Replaces a secret, and records whether the value is the one that the publishing rank was given."""

    def __repr__(self) -> str:
        return HIDDEN


def withheld(name: object, value: Any, given: Any = MISSING) -> Any:
    """Return a config value with notes in place of secrets; `given` is what this rank was given under its name."""
    if is_secret(name, value):
        return _Note({_NOTE: _compared(value, given)})
    return value if isinstance(value, _SINGLE) else _withheld_inside(value, given, 0)


def _compared(value: Any, given: Any) -> int:
    if given is MISSING:
        return _ANOTHER
    if value is given or encoded(value) == encoded(given):
        return _AS_GIVEN
    return _AS_TEXT if isinstance(value, str) and value == shown(given) else _ANOTHER


def _withheld_inside(value: Any, given: Any, depth: int) -> Any:
    if depth >= DEEPEST or not isinstance(value, (Mapping, list, tuple)):
        return value
    if isinstance(value, Mapping):
        own: Mapping[Any, Any] = given if isinstance(given, Mapping) else {}
        old = dict(value.items())
        new = {}
        for name, item in old.items():
            mine = own.get(name, MISSING)
            is_hidden = is_secret(name, item)
            new[name] = withheld(name, item, mine) if is_hidden else _withheld_inside(item, mine, depth + 1)
        return new if any(new[name] is not item for name, item in old.items()) else value
    owns = given if isinstance(given, (list, tuple)) and len(given) == len(value) else [MISSING] * len(value)
    items = [_withheld_inside(item, mine, depth + 1) for item, mine in zip(value, owns, strict=True)]
    return items if any(new is not item for new, item in zip(items, value, strict=True)) else value


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for a comparison between ranks: without secrets, and with notes in place of nested secrets."""
    return {name: withheld(name, value, value) for name, value in values.items() if not is_secret(name, value)}


def without_notes(value: Any) -> Any:
    """Return a result of `withheld` with blank notes, so that it does not depend on the secrets."""
    if isinstance(value, list):
        return [without_notes(item) for item in value]
    if isinstance(value, dict):
        return {_NOTE: None} if _NOTE in value else {name: without_notes(item) for name, item in value.items()}
    return value


def filled(value: Any, own: Any = MISSING) -> Any:
    """Complete a published value (the result of `encoded`, applied to that of `withheld`) with this rank's own secrets.

    The result is as returned by `decoded`. A nested secret is left out if this rank was not given it, or if the other
    rank has changed it since; `MISSING` if the whole value is such a secret. `own` is what this rank was given.
    """
    if own is not MISSING and isinstance(value, dict) and value.get(_NOTE) == _AS_TEXT:
        return shown(own)
    return _filled(value, MISSING if own is MISSING else encoded(own))


def _filled(value: Any, own: Any) -> Any:
    if isinstance(value, list):
        owns = own if isinstance(own, list) and len(own) == len(value) else [MISSING] * len(value)
        items = [_filled(item, mine) for item, mine in zip(value, owns, strict=True)]
        return [HIDDEN if item is MISSING else item for item in items]
    if not isinstance(value, dict):
        return value
    if _NOTE in value:
        return decoded(own) if value[_NOTE] == _AS_GIVEN and own is not MISSING else MISSING
    mine = _by_name(own)
    items_by_name = {name: _filled(item, mine.get(name, MISSING)) for name, item in _by_name(value).items()}
    return {name: item for name, item in items_by_name.items() if item is not MISSING}


def _by_name(value: Any) -> dict[Any, Any]:
    """Return the items of a mapping in the form of `encoded`; none for any other value."""
    if not isinstance(value, dict):
        return {}
    pairs: Iterable[Any] = value[PAIRS] if PAIRS in value else value.items()
    return dict(pairs)


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
