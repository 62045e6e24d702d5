"""Which values of a config are taken for secrets, by their names, and how others are shown. Pure.

By the words of a name, at any depth, and in text such as an address with a password. Numbers under words that trainings
use for counts (`max_tokens`, `num_key_value_heads`) are no secrets. A text that only W&B makes of an object counts by
its own words.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from numbers import Number
from typing import Any

HIDDEN = "…"
"""What is shown in the place of a secret."""

DEEPEST = 50
"""How deep values are looked into; beyond it, one is taken for one that holds itself."""

_LEVEL = re.compile(r"[./]")  # between the parts of a name
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # of hf_token, hfToken, HFToken, HF-TOKEN
# Words by which a value is a secret, be it text or a number.
_SECRETS = re.compile(
    r"\w*(secrets?|passwords?|passwd|passwort|passphrases?|passcodes?|credentials?|auth)"
    r"|pwd|creds?|auth[nz]|authori[sz]ation|authentication|auth(headers?|data|info)|bearer|jwt|cookies?"
)
# Words by which it is one if it is text. A number is one only where the word comes last, as in `hf_token`: what
# `max_tokens`, `num_key_value_heads` and `token_dim` say, all ranks need.
_DOUBTFUL = re.compile(r"\w*tokens?|\w*keys?|pass|pat|dsn|webhooks?")
_HARMLESS = re.compile(r"(monkey|turkey|donkey|hockey|whiskey|jockey|hotkey|turnkey|mickey)s?")
_IN_ONE = re.compile(r"password|passwd|passphrase|api_?key|private_?key", re.IGNORECASE)  # passWord, pass_word
# A name before a value in text, as the repr of an object has: Config(lr=0.1, password='x'), {'password': 'x'}
_NAMED = re.compile(r"(?<![\w.])([A-Za-z_][\w.-]{0,63})(?:\s{0,2}=|['\"]\s{0,2}[=:])")
_WITH_PASSWORD = re.compile(r"\s{0,9}[A-Za-z][A-Za-z0-9+.-]{0,30}://[^/?#\s@]{0,256}:[^/?#\s@]{1,256}@")
_ORDINARY, _IN_DOUBT, _SURE = range(3)


@functools.lru_cache(maxsize=1 << 15)
def _kind(name: str) -> int:
    """What a name reveals of its value: nothing, that it is a secret if it is text, or that it is one."""
    kind = _ORDINARY
    for part in _LEVEL.split(name):
        words = [word.lower() for word in _WORD.findall(part)]
        if any(_SECRETS.fullmatch(word) for word in words) or _IN_ONE.search(part.replace("-", "_")):
            return _SURE
        doubtful = [word for word in words if _DOUBTFUL.fullmatch(word) and not _HARMLESS.fullmatch(word)]
        if doubtful:
            is_one = doubtful[-1] == words[-1] and (words[-1] == "pass" or not words[-1].endswith("s"))
            kind = max(kind, _SURE if is_one else _IN_DOUBT)
    return kind


def is_secret(name: object, value: object) -> bool:
    """Whether a value of a config is taken for a secret: by its name, or as text with a password in it.

    Args:
        name: Its name, with or without those of what it is in.
        value: The value. `None`, truth values and empty text are no secrets. A list or dict under the name of a secret
            is one as a whole; what is in a dict under another name is judged by its own names.

    Example:
        ``is_secret("hf_token", "hf_1")``, ``is_secret("db.passWord", 1234)``, ``is_secret("auth", {"user": "me"})``,
        but not ``is_secret("max_tokens", 512)``, ``is_secret("use_auth", True)`` or ``is_secret("monkey", "x")``.
    """
    return _holds_secret(value, _kind(name) if isinstance(name, str) else _ORDINARY, 0)


def _holds_secret(value: object, kind: int, depth: int) -> bool:
    if value is None or isinstance(value, bool):
        return False
    if isinstance(value, str):
        return _looks_secret(value) or (kind > _ORDINARY and bool(value.strip()))
    if isinstance(value, (int, float, Number)) or hasattr(value, "dtype"):
        return kind == _SURE
    if depth < DEEPEST and isinstance(value, (list, tuple, set, frozenset)):
        return any(_holds_secret(item, kind, depth + 1) for item in value)
    if depth < DEEPEST and isinstance(value, Mapping):
        return kind > _ORDINARY and any(_holds_secret(item, kind, depth + 1) for item in value.values())
    return kind > _ORDINARY


def _looks_secret(text: str) -> bool:
    """Whether text has a secret in it: an address such as ``postgresql://user:password@host``, ``password='x'``."""
    if "://" in text and _WITH_PASSWORD.match(text) is not None:
        return True
    return ("=" in text or ":" in text) and any(_kind(name) == _SURE for name in _NAMED.findall(text))


class _Shown:
    """Something that is shown as a given text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


_HIDDEN = _Shown(HIDDEN)


def redacted(value: Any, depth: int = 0) -> Any:
    """Something whose repr is that of a value, but for the secrets in it, as far as names show.

    Args:
        value: Any value.
        depth: How deep in the config it is.

    Returns:
        The value itself if there is no secret in it. Otherwise something to be shown in its place, with `HIDDEN` for
        each; of an object whose repr has the name of a secret, the class alone.
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
    except Exception:  # noqa: BLE001  # whatever it raises, who shows it deals with it
        return False
