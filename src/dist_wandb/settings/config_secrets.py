"""Which values of a config are classified as secrets, and how values are shown without them. Pure.

A value is classified by the words of its name, at any depth; text also by its content, such as an address with a
password. Numbers under words that trainings use for counts (`max_tokens`, `num_key_value_heads`) are not secrets. For
an object that W&B turns into text, the words of that text count.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from numbers import Number
from typing import Any

HIDDEN = "…"
"""Shown in place of a secret."""

DEEPEST = 50
"""Depth limit for nested values; a deeper value is assumed to contain itself."""

_LEVEL = re.compile(r"[./]")  # between the parts of a name
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


@functools.lru_cache(maxsize=1 << 15)
def _kind(name: str) -> int:
    """Classify a name: its value is not a secret, is a secret if it is text, or is always a secret."""
    kind = _NEVER
    for part in _LEVEL.split(name):
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
    if isinstance(value, (int, float, Number)) or hasattr(value, "dtype"):
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
        return _HIDDEN if _looks_secret(value) else value
    if depth < DEEPEST and isinstance(value, Mapping):
        old = dict(value.items())
        new = {name: _HIDDEN if is_secret(name, item) else redacted(item, depth + 1) for name, item in old.items()}
        return new if any(new[name] is not item for name, item in old.items()) else value
    if depth < DEEPEST and isinstance(value, (list, tuple, set, frozenset)):
        items = [(item, redacted(item, depth + 1)) for item in value]
        return [new for _, new in items] if any(new is not item for item, new in items) else value
    return _Shown(f"<{type(value).__name__} {HIDDEN}>") if _names_secret(value) else value


def _names_secret(value: object) -> bool:
    try:
        return _looks_secret(repr(value))
    except Exception:  # noqa: BLE001  # the caller that shows the value handles errors of its repr
        return False


def without_passwords(text: str) -> str:
    """Return text of a message without passwords in addresses and W&B's keys."""
    return _KEY.sub(HIDDEN, _ADDRESS.sub(HIDDEN, text))


def without_values(text: str) -> str:
    """Return a message without the values of wrong variables, unless numbers or plain words: they may be passwords."""
    return without_passwords(_GIVEN.sub(lambda found: found[0] if _PLAIN.fullmatch(found[0]) else HIDDEN, text))
