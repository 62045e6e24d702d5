"""Values of a run's config, for ranks that have to show or compare what another rank has. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from dist_wandb.settings.config_secrets import DEEPEST, redacted

PAIRS = "__dist_wandb_pairs__"
"""Name under which `encoded` puts the pairs of a mapping whose names are not all text."""

_LONGEST_NUMBER = 10_000  # bits: Python refuses to write longer ones
_LONGEST_SHOWN = 40  # characters of a value in a message
_MOST_SHOWN = 10  # differences in a message
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LEVEL = re.compile(r"[./]")  # between the parts of a name
# What differs between ranks by nature. `-` counts as `_`, and capital letters as small ones.
_NAMES_OF_RANKS = frozenset(
    {
        *("rank", "local_rank", "global_rank", "world_rank", "node_rank", "group_rank", "machine_rank"),
        *("proc_id", "process_id", "process_index", "local_process_index", "node_id", "pid", "host", "hostname"),
        *("gpu", "gpu_id", "gpu_index", "local_gpu", "device", "device_id", "device_index", "cuda_device"),
        *("is_main_process", "is_local_main_process", "is_master", "master_process"),
    }
)


def given_values(config: object) -> dict[str, Any]:
    """Names and values of what was passed as `config`.

    Args:
        config: A mapping, a config of a run, a namespace of an argument parser, or anything else.

    Returns:
        Values by name; none for what wandb reads by itself, such as the name of a file.
    """
    if hasattr(config, "keys") and hasattr(config, "__getitem__"):
        return {str(name): config[name] for name in config.keys()}  # noqa: SIM118  # wandb's config is no mapping
    if isinstance(config, (str, type)) or not hasattr(config, "__dict__"):
        return {}
    return {name: value for name, value in vars(config).items() if not name.startswith("__")}


def encoded(value: Any, depth: int = 0) -> Any:
    """A value as JSON can hold it, so that `decoded` makes of it what W&B shows on the rank that has the run.

    Args:
        value: Anything; what JSON cannot hold becomes its repr.
        depth: How deep in the config it is.

    Returns:
        Text, numbers, `None`, and lists and dicts of them.

    Example:
        ``encoded({1: (2, 3), "of": int})`` is ``{"__dist_wandb_pairs__": [[1, [2, 3]], ["of", "<class 'int'>"]]}``.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str or kind is float:
        return value
    if kind is int and value.bit_length() <= _LONGEST_NUMBER:
        return value
    if depth < DEEPEST:
        if isinstance(value, Mapping):
            return _encoded_mapping(value, depth)
        if isinstance(value, (list, tuple)):
            return [encoded(item, depth + 1) for item in value]
        if isinstance(value, (set, frozenset)):  # their order is another one on each rank
            return sorted((encoded(item, depth + 1) for item in value), key=repr)
    return _encoded_object(value)


def _encoded_mapping(value: Mapping[Any, Any], depth: int) -> Any:
    pairs = [[_encoded_name(name), encoded(item, depth + 1)] for name, item in value.items()]
    if all(isinstance(name, str) and name != PAIRS for name, _ in pairs):
        return dict(pairs)
    return {PAIRS: pairs}


def _encoded_name(name: object) -> object:
    return name if name is None or type(name) in (str, int, float, bool) else shown(name)


def _encoded_object(value: Any) -> Any:
    if isinstance(value, Enum):  # as wandb does
        return value.name
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of numpy, or a tensor of one
        number = value.item()
        if type(number) in (bool, int, float):
            return number
    return shown(value)


def decoded(value: Any) -> Any:
    """The opposite of `encoded`."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    pairs: Iterable[Any] = value[PAIRS] if PAIRS in value else value.items()
    return {name: decoded(item) for name, item in pairs}


def shown(value: object) -> str:
    """The repr of a value, also of one that has none, without secrets and without addresses in memory."""
    try:
        return _ADDRESS.sub("", repr(redacted(value)))
    except Exception:  # noqa: BLE001  # whatever it raises, the training must not suffer
        return f"<{type(value).__name__} without a repr>"


def is_plain(value: object, depth: int = 0) -> bool:
    """Whether W&B surely takes a value: text, numbers, and lists and dicts of them."""
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
    """Whether what has this name differs between ranks by nature.

    Args:
        name: A name in a config, with or without those of what it is in.

    Example:
        ``differs_by_rank("ddp.local-rank")`` and ``differs_by_rank("GPU")``, but not ``differs_by_rank("gpus")``.
    """
    return _LEVEL.split(name)[-1].strip("-_").replace("-", "_").lower() in _NAMES_OF_RANKS


def comparable(values: Mapping[str, Any], salt: str = "") -> dict[str, list[str]]:
    """What other ranks need to compare values with theirs: for each name how it is shown, and what has to be equal.

    Args:
        values: Values by name, without secrets.
        salt: Makes the digests say nothing about values elsewhere; the same on all ranks that compare theirs.
    """
    return {name: [_in_short(value), _digest(encoded(value), salt)] for name, value in values.items()}


def without_ranks(values: Mapping[str, Any], made: Mapping[str, list[str]], salt: str = "") -> dict[str, list[str]]:
    """What `comparable` made of values, without what differs between ranks by nature, such as ``local_rank``."""
    return {
        name: [made[name][0], _digest(_without_ranks(encoded(value)), salt)]
        if isinstance(value, (Mapping, list, tuple))
        else made[name]
        for name, value in values.items()
        if not differs_by_rank(name)
    }


def _without_ranks(value: Any) -> Any:
    """What `encoded` made of a value, without what differs between ranks by nature."""
    if isinstance(value, list):
        return [_without_ranks(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_ranks(item) for name, item in value.items() if not differs_by_rank(name)}
    return value


def _in_short(value: object) -> str:
    text = shown(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…"


def _digest(told_value: object, salt: str) -> str:
    text = json.dumps(told_value, sort_keys=True)
    return hashlib.blake2b(text.encode(), key=salt.encode(), digest_size=32).hexdigest()


def differences(
    mine: Mapping[str, list[str]], rank: int, theirs: Mapping[str, list[str]], other_rank: int
) -> list[str]:
    """Say for each name that two ranks were given with different values what they are.

    Args:
        mine: What `comparable` made of the config of `rank`.
        rank: A rank.
        theirs: What it made of the config of `other_rank`.
        other_rank: The rank whose values hold.

    Returns:
        For example ``["'lr' is 0.2 on rank 1, but 0.1 on rank 0"]``.
    """
    return [
        f"{name!r} is {mine[name][0]} on rank {rank}, but {theirs[name][0]} on rank {other_rank}"
        for name in mine
        if name in theirs and mine[name][1] != theirs[name][1]
    ]


def listed(items: list[str]) -> str:
    """Items of a message in one line, not too many of them."""
    more = f"; and {len(items) - _MOST_SHOWN} more" if len(items) > _MOST_SHOWN else ""
    return "; ".join(items[:_MOST_SHOWN]) + more
