"""Values of a run's config, in forms that other ranks can show, compare and take over; and copies of a config. Pure.

The job's store does not authenticate clients: anyone who can connect reads all of it. So a value that is classified as
a secret (`config_secrets`) is never stored, not even as a digest, from which short secrets can be guessed. The message
names the values that lack a secret, and whether they are still those that the publishing rank was given. If so, a rank
that was given secrets at the same places uses its own.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import is_
from types import SimpleNamespace
from typing import Any, Final

from dist_wandb.settings.config_secrets import DEEPEST, is_secret, redacted

PAIRS = "__dist_wandb_pairs__"
"""Name under which `encoded` puts the pairs of a mapping whose names are not all text."""

MISSING: Final = object()
"""Marks a missing value."""

_CHANGED, _AS_GIVEN, _AS_TEXT = "changed", "as given", "as text"
_SCALARS = frozenset({bool, float, int, str})
_LONGEST_NUMBER = 10_000  # bits: Python refuses to print longer ones
_LONGEST_SHOWN = 40  # characters of a value in a message
_MOST_SHOWN = 10  # differences in a message
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LEVEL = re.compile(r"[./]")  # between the parts of a name
# Names of values that differ between ranks by nature. `-` counts as `_`; case is ignored.
_NAMES_OF_RANKS = frozenset(
    {
        *("rank", "local_rank", "global_rank", "world_rank", "node_rank", "group_rank", "machine_rank"),
        *("proc_id", "process_id", "process_index", "local_process_index", "node_id", "pid", "host", "hostname"),
        *("gpu", "gpu_id", "gpu_index", "local_gpu", "device", "device_id", "device_index", "cuda_device"),
        *("is_main_process", "is_local_main_process", "is_master", "master_process"),
    }
)


def given_values(config: object) -> dict[str, Any]:
    """Return the values of an argument `config` by name, as `plain` values."""
    config = _as_mapping(config)
    if hasattr(config, "keys") and hasattr(config, "__getitem__"):
        names = config.keys()  # wandb's config is not a mapping
        return {str(name): plain(config[name]) for name in names}
    if isinstance(config, (str, type)) or not hasattr(config, "__dict__"):  # such as a file that wandb reads itself
        return {}
    return {name: plain(value) for name, value in vars(config).items() if not name.startswith("__")}


def plain(value: Any, depth: int = 0) -> Any:
    """Return a value of a config with objects of values as dicts, at any depth; the same object if there are none."""
    if value is None or type(value) in _SCALARS or depth > DEEPEST:
        return value
    value = _as_mapping(value)
    if isinstance(value, dict):
        made = {name: plain(item, depth + 1) for name, item in value.items()}
        return value if all(made[name] is item for name, item in value.items()) else made
    if isinstance(value, (list, tuple)):
        items = [plain(item, depth + 1) for item in value]
        return value if all(map(is_, items, value)) else tuple(items) if type(value) is tuple else items
    return value


def _as_mapping(value: Any) -> Any:
    """Return an object of values as a dict or list: W&B would write the text of some. Any other value itself."""
    kind = type(value)
    if kind.__module__.startswith("omegaconf"):
        return _of_omegaconf(value)
    if isinstance(value, (Namespace, SimpleNamespace)):
        return dict(vars(value))
    named = fields(value) if is_dataclass(kind) else getattr(kind, "__attrs_attrs__", None)
    if named is not None:
        return {field.name: getattr(value, field.name) for field in named if hasattr(value, field.name)}
    if hasattr(kind, "model_fields") and callable(getattr(kind, "model_dump", None)):  # pydantic's
        return value.model_dump()
    has_dict = kind.__module__.startswith("ml_collections") and callable(getattr(kind, "to_dict", None))
    return value.to_dict() if has_dict else value


def _of_omegaconf(value: Any) -> Any:
    to_container = getattr(getattr(sys.modules.get("omegaconf"), "OmegaConf", None), "to_container", None)
    if to_container is None:
        return value
    for resolve in (True, False):  # an interpolation that leads nowhere, or a value that is missing, stays as it is
        with suppress(Exception):  # not one of its containers
            return to_container(value, resolve=resolve)
    return value


def encoded(value: Any, depth: int = 0) -> Any:
    """Return a value in a form for JSON that `decoded` turns into the value shown by W&B on the rank with the run.

    Values that JSON cannot hold become their repr. ``encoded({1: (2, 3), "of": int})`` is
    ``{"__dist_wandb_pairs__": [[1, [2, 3]], ["of", "<class 'int'>"]]}``.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str or kind is float:
        return value
    if kind is int and value.bit_length() <= _LONGEST_NUMBER:
        return value
    if depth < DEEPEST:
        if isinstance(value, Mapping):
            pairs = [
                [name if name is None or type(name) in _SCALARS else shown(name), encoded(item, depth + 1)]
                for name, item in value.items()
            ]
            return dict(pairs) if all(isinstance(name, str) and name != PAIRS for name, _ in pairs) else {PAIRS: pairs}
        if isinstance(value, (list, tuple)):
            return [encoded(item, depth + 1) for item in value]
        if isinstance(value, (set, frozenset)):  # their order differs between ranks
            return sorted((encoded(item, depth + 1) for item in value), key=repr)
    return _encoded_object(value)


def _encoded_object(value: Any) -> Any:
    if isinstance(value, Enum):  # as wandb does
        return value.name
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a NumPy scalar, or a tensor of no dimensions
        number = value.item()
        if type(number) in (bool, int, float):
            return number
    return shown(value)


def decoded(value: Any) -> Any:
    """Reverse `encoded`."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    pairs: Iterable[Any] = value[PAIRS] if PAIRS in value else value.items()
    return {name: decoded(item) for name, item in pairs}


def shown(value: object) -> str:
    """Return the repr of a value, or a placeholder if it raises, without secrets and without memory addresses."""
    try:
        return _ADDRESS.sub("", repr(redacted(value)))
    except Exception:  # noqa: BLE001  # no error of a repr may affect the training
        return f"<{type(value).__name__} without a repr>"


def is_plain(value: object, depth: int = 0) -> bool:
    """Return whether W&B is certain to accept a value: text, numbers, and lists and dicts of them."""
    if value is None or type(value) in (bool, str, float):
        return True
    if type(value) is int:
        return value.bit_length() <= _LONGEST_NUMBER
    if depth >= DEEPEST:
        return False
    if type(value) is dict:
        return all(type(name) is str and is_plain(item, depth + 1) for name, item in value.items())
    return type(value) in (list, tuple) and all(is_plain(item, depth + 1) for item in value)  # type: ignore[attr-defined]


def differs_by_rank(name: str) -> bool:
    """Return whether values of this name differ between ranks by nature: ``ddp.local-rank``, ``GPU``; not ``gpus``."""
    return _LEVEL.split(name)[-1].strip("-_").replace("-", "_").lower() in _NAMES_OF_RANKS


def comparable(
    values: Mapping[str, Any], given: Mapping[str, Any] | None = None, *, with_ranks: bool = False
) -> dict[str, list[str]]:
    """Return what other ranks need to compare values with their own: by name, the shortened repr and a digest.

    `values` has no secrets; `given` may have them, and is shown instead, without. Unless `with_ranks`, values that
    differ by rank by nature, such as ``local_rank``, are left out at any depth.
    """
    return {
        name: [
            _in_short(value if given is None else given[name]),
            _digest(encoded(value) if with_ranks else _without_ranks(encoded(value))),
        ]
        for name, value in values.items()
        if with_ranks or not differs_by_rank(name)
    }


def _without_ranks(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_ranks(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_ranks(item) for name, item in value.items() if not differs_by_rank(name)}
    return value


def _in_short(value: object) -> str:
    text = shown(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…"


def _digest(encoded_value: object) -> str:
    return hashlib.blake2b(json.dumps(encoded_value, sort_keys=True).encode(), digest_size=32).hexdigest()


def differences(
    mine: Mapping[str, list[str]], rank: int, theirs: Mapping[str, list[str]], other_rank: int
) -> list[str]:
    """Describe each differing name of two results of `comparable`: ``["'lr' is 0.2 on rank 1, but 0.1 on rank 0"]``."""
    return [
        f"{name!r} is {mine[name][0]} on rank {rank}, but {theirs[name][0]} on rank {other_rank}"
        for name in mine
        if name in theirs and mine[name][1] != theirs[name][1]
    ]


def listed(items: list[str]) -> str:
    """Join items of a message in one line, limited to the first ten."""
    more = f"; and {len(items) - _MOST_SHOWN} more" if len(items) > _MOST_SHOWN else ""
    return "; ".join(items[:_MOST_SHOWN]) + more


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


class ConfigCopy(dict[str, Any]):
    """The config of a run at the time of the copy. Names can be read as attributes; changes affect only the copy."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the config has no {name!r}") from None

    def as_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        return dict(self)

    def update(  # type: ignore[override]  # as W&B's config
        self, values: Any = (), allow_val_change: bool | None = None, **kwargs: Any
    ) -> None:
        """Change values, in this copy only."""
        del allow_val_change
        super().update(values, **kwargs)
