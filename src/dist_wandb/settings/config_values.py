"""Values of a run's config: which are secrets, and forms that other ranks can show, compare and take over. Pure.

A value is classified as a secret by the words of its name, at any depth; text also by its content, such as an address
with a password. Numbers under words that trainings use for counts (`max_tokens`, `num_key_value_heads`) are not
secrets. For an object that W&B turns into text, the words of that text count.

The job's store does not authenticate clients: anyone who can connect reads all of it. So a secret is never stored, not
even as a digest, from which short secrets can be guessed. The message names the values that lack a secret, and whether
they are still those that the publishing rank was given. If so, a rank that was given the same apart from secrets uses
its own.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import date
from enum import Enum
from numbers import Number
from operator import is_
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

PAIRS = "__dist_wandb_pairs__"  # where `encoded` puts the pairs of a mapping whose names are not all text
MISSING: Final = object()
_SCALARS = frozenset({bool, float, int, str})
_LONGEST_ARRAY = 32  # numbers: wandb writes those of longer arrays differently
_LONGEST_NUMBER = 10_000  # bits: Python refuses to print longer ones
_MEMORY_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
HIDDEN = "…"  # shown in place of a secret
DEEPEST = 50  # depth limit for nested values; a deeper value is assumed to contain itself
LEVEL = re.compile(r"[./]")  # between the parts of a name
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # of hf_token, hfToken, HFToken, HF-TOKEN
# Words that mark a value as a secret, whether it is text or a number.
_SECRETS = re.compile(
    r"\w*(secrets?|passwords?|passwd|passwort|passphrases?|passcodes?|credentials?|auth)"
    r"|pwd|creds?|auth[nz]|authori[sz]ation|authentication|auth(headers?|data|info)|bearer|jwt|cookies?"
)
# Words that mark text as a secret. They mark a number only if the word comes last, as in `hf_token`: all ranks need the
# values of `max_tokens`, `num_key_value_heads` and `token_dim`.
_DOUBTFUL = re.compile(r"\w*tokens?|\w*keys?|pass|pat|dsn|webhooks?")
_HARMLESS = re.compile(r"(monkey|turkey|donkey|hockey|whiskey|jockey|hotkey|turnkey|mickey)s?")
_IN_ONE = re.compile(r"password|passwd|passphrase|api_?key|private_?key", re.IGNORECASE)  # passWord, pass_word
# A name before a value in text, as in the repr of an object: Config(lr=0.1, password='x'), {'password': 'x'}
_NAMED = re.compile(r"(?<![\w.])([A-Za-z_][\w.-]{0,63})(?:\s{0,2}=|['\"]\s{0,2}[=:])")
_WITH_PASSWORD = re.compile(r"\s{0,9}[A-Za-z][A-Za-z0-9+.-]{0,30}://[^/?#\s@]{0,256}:[^/?#\s@]{1,256}@")
_ADDRESS = re.compile(r"(?<=://)[^/?#\s@]{0,256}:[^/?#\s@]{1,256}(?=@)")
_KEY = re.compile(r"\b(?:[0-9a-f]{40}|wandb_v\d_\w{20,})\b")  # of W&B
# A value of a variable, as messages show it: in quotes, or after the variable's name.
_GIVEN = re.compile(r"""(?<!\w)'[^']*'|(?<!\w)"[^"]*"|(?<=[A-Z0-9_]=)[^\s,;'"()]+""")
_PLAIN = re.compile(r"\W*|\W?[a-z_. -]{0,24}\W?|\W?[-+.:,()x*0-9 ]*\W?|\W/[^@:]*")  # words, numbers, paths
_NEVER, _IF_TEXT, _ALWAYS = range(3)


# --- secrets ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1 << 15)
def _kind(name: str) -> int:
    """Classify a name: its value is not a secret, is a secret if it is text, or is always a secret."""
    kind = _NEVER
    for part in LEVEL.split(name):
        words = [word.lower() for word in _WORD.findall(part)]
        if any(_SECRETS.fullmatch(word) for word in words) or _IN_ONE.search(part.replace("-", "_")):
            return _ALWAYS
        doubtful = [word for word in words if _DOUBTFUL.fullmatch(word) and not _HARMLESS.fullmatch(word)]
        if doubtful:
            is_one = doubtful[-1] == words[-1] and (words[-1] == "pass" or not words[-1].endswith("s"))
            kind = max(kind, _ALWAYS if is_one else _IF_TEXT)
    return kind


def is_secret(name: object, value: object) -> bool:
    """Return whether a value of a config is classified as a secret: by its name, or as text that contains a password.

    A list or dict under the name of a secret is a secret as a whole; the items of a dict under another name are
    classified by their own names. ``hf_token="hf_1"``, ``db.passWord=1234`` and ``auth={"user": "me"}`` are secrets,
    but not ``max_tokens=512``, ``use_auth=True`` or ``monkey="x"``.
    """
    return _holds_secret(value, _kind(name) if isinstance(name, str) else _NEVER, 0)


def _holds_secret(value: object, kind: int, depth: int) -> bool:
    if value is None or isinstance(value, bool):
        return False
    if isinstance(value, str):
        return _looks_secret(value) or (kind > _NEVER and bool(value.strip()))
    if isinstance(value, (int, float, Number)) or hasattr(type(value), "dtype"):  # a dict may answer for any attribute
        return kind == _ALWAYS
    if depth < DEEPEST and isinstance(value, (list, tuple, set, frozenset)):
        return any(_holds_secret(item, kind, depth + 1) for item in value)
    if depth < DEEPEST and isinstance(value, Mapping):
        return kind > _NEVER and any(_holds_secret(item, kind, depth + 1) for item in value.values())
    return kind > _NEVER


def _looks_secret(text: str) -> bool:
    """Return whether text contains a secret, as ``postgresql://user:password@host`` and ``password='x'`` do."""
    if "://" in text and _WITH_PASSWORD.match(text) is not None:
        return True
    return ("=" in text or ":" in text) and any(_kind(name) == _ALWAYS for name in _NAMED.findall(text))


class _Shown(str):
    """A text that is its own repr; in JSON it is a text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


_HIDDEN = _Shown(HIDDEN)


def redacted(value: Any, depth: int = 0) -> Any:
    """Return an object to show in place of a value: the value itself if names and text in it reveal no secret.

    Otherwise its repr is that of the value, with `HIDDEN` for each secret. `depth` is the nesting depth in the config.
    """
    if value is None or isinstance(value, (bool, int, float, bytes)):
        return value
    if isinstance(value, str):
        return _HIDDEN if value == HIDDEN or _looks_secret(value) else value
    if depth < DEEPEST and isinstance(value, Mapping):
        old = dict(value.items())
        new = {name: _HIDDEN if is_secret(name, item) else redacted(item, depth + 1) for name, item in old.items()}
        return new if any(new[name] is not item for name, item in old.items()) else value
    if depth < DEEPEST and isinstance(value, (list, tuple, set, frozenset)):
        items = [(item, redacted(item, depth + 1)) for item in value]
        return [new for _, new in items] if any(new is not item for item, new in items) else value
    with suppress(Exception):  # the caller that shows the value handles errors of its repr
        if _looks_secret(repr(value)):
            return _Shown(f"<{type(value).__name__} {HIDDEN}>")
    return value


def without_passwords(text: str) -> str:
    """Return text of a message without passwords in addresses and W&B's keys."""
    return _KEY.sub(HIDDEN, _ADDRESS.sub(HIDDEN, text))


def without_values(text: str) -> str:
    """Return a message without the values of wrong variables, unless numbers or plain words: they may be passwords."""
    return without_passwords(_GIVEN.sub(lambda found: found[0] if _PLAIN.fullmatch(found[0]) else HIDDEN, text))


# --- values -----------------------------------------------------------------------------------------------------------


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

    Values that JSON cannot hold become their text. ``encoded({1: (2, 3), "of": int})`` is
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
    with suppress(Exception):  # of the value's own code
        return _encoded_object(value)
    return shown(value, str)


def is_scalar(value: Any) -> bool:  # of NumPy, or a tensor without dimensions; a dict may answer for any attribute
    return hasattr(type(value), "item") and getattr(value, "shape", None) == ()


def _encoded_object(value: Any) -> Any:
    """Return what wandb makes of a value that is no number, text or container."""
    if isinstance(value, Enum):  # as wandb does
        return value.name
    if is_scalar(value):
        number = value.item()
        if type(number) in (bool, int, float):
            return number
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, date):
        return value.isoformat()
    if hasattr(type(value), "detach"):  # a tensor
        with suppress(Exception):  # as of bfloat16, which numpy does not know
            value = value.detach().cpu().numpy()
    if type(value).__name__ == "ndarray" and 0 < value.size <= _LONGEST_ARRAY:
        return encoded(value.tolist()) if value.size > 1 else str(value.item())
    is_named = callable(value) and hasattr(value, "__qualname__") and hasattr(value, "__module__")
    return f"{value.__module__}.{value.__qualname__}" if is_named else shown(value, str)


def decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    pairs: Iterable[Any] = value[PAIRS] if PAIRS in value else value.items()
    return {name: decoded(item) for name, item in pairs}


def shown(value: object, text: Callable[[object], str] = repr) -> str:
    """Return the text of a value, or a placeholder if it raises, without secrets and without memory addresses."""
    try:
        return _MEMORY_ADDRESS.sub("", text(redacted(value)))
    except Exception:  # noqa: BLE001  # no error of a repr may affect the training
        return f"<{type(value).__name__} without a repr>"


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


def publishable(values: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, bool]]:
    """Return values for the job's store, `encoded` and without secrets, and those that lack one, by name.

    The latter are told to be what this rank was `given`, or not. A value that is a secret as a whole is `None`.
    """
    rest, withheld = without_secrets(values), dict[str, bool]()
    for name, value in values.items():
        if rest.get(name, MISSING) is not value:
            own = given.get(name)
            if value == shown(own) and not is_secret(name, own):  # what W&B has of it if it cannot hold the value
                rest[name] = value
            else:
                withheld[name] = encoded(value) == encoded(own)
    return {name: encoded(rest.get(name)) for name in values}, withheld


def filled(
    values: Mapping[str, Any], withheld: Mapping[str, bool], own: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return values that were `publishable` on another rank, or what this rank was given, if only secrets differ.

    Secrets that this rank does not have are `MISSING`.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        mine = own.get(name)
        if withheld.get(name) and (is_secret(name, mine) if value is None else encoded(_without(mine, 0)) == value):
            found[name] = decoded(encoded(mine))
        else:
            found[name] = MISSING if name in withheld and value is None else decoded(value)
    return found


class KnownConfig(dict[str, Any]):
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
        return dict(self)

    def update(  # type: ignore[override]  # as W&B's config
        self, values: Any = (), allow_val_change: bool | None = None, **kwargs: Any
    ) -> None:
        del allow_val_change
        super().update(values, **kwargs)
