"""The replicated state as JSON values and back, for ranks that join late: plain objects, by their attributes. Pure."""

from __future__ import annotations

import base64
from typing import Any

from dist_wandb.exchange.protocol.calls import Key
from dist_wandb.exchange.protocol.contributors import Contributors, Progress
from dist_wandb.exchange.protocol.lanes import Number
from dist_wandb.exchange.protocol.memory import Memory
from dist_wandb.exchange.protocol.placing import Cell, Known, Placing
from dist_wandb.exchange.protocol.table import Table

_TUPLES = {kind.__name__: kind for kind in (Key, Known, Number)}
_OBJECTS = {kind.__name__: kind for kind in (Cell, Contributors, Memory, Placing, Progress, Table)}


def encoded(value: Any) -> Any:
    """Return a value as JSON values: a list with the name of its type and its items, or an object of its attributes."""
    kind = type(value).__name__
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return [kind, base64.b64encode(value).decode()]
    if isinstance(value, frozenset):
        return [kind, *sorted(value)]
    if isinstance(value, (list, tuple)):
        return [kind, *map(encoded, value)]
    if isinstance(value, dict):
        return [kind, *([encoded(key), encoded(item)] for key, item in value.items())]
    names = getattr(value, "__slots__", None) or vars(value)
    return {"": kind, **{name: encoded(getattr(value, name)) for name in names}}


def decoded(value: Any) -> Any:
    """Return the inverse of `encoded`."""
    if isinstance(value, dict):
        made = object.__new__(_OBJECTS[value[""]])
        for name, item in value.items():
            if name:
                setattr(made, name, decoded(item))
        return made
    if not isinstance(value, list):
        return value
    kind, *items = value
    if kind == "bytes":
        return base64.b64decode(items[0])
    if kind == "dict":
        return {decoded(key): decoded(item) for key, item in items}
    if kind in _TUPLES:
        return _TUPLES[kind](*map(decoded, items))
    return {"list": list, "tuple": tuple, "frozenset": frozenset}[kind](map(decoded, items))
