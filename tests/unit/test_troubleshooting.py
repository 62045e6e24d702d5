"""`docs/troubleshooting.md` has an entry for every warning and error of the package, and no other entries."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from messages import Message, messages

TESTS = Path(__file__).parents[1]
PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
MOST = 6  # messages that one fragment may match
_ENTRY = re.compile(r"^- ((?:`[^`\n]+`<br>\n  )+)", re.MULTILINE)


def parts() -> list[str]:
    """Return the first words of messages, as the page lists them."""
    return [
        part for entry in _ENTRY.findall(PAGE.read_text(encoding="utf-8")) for part in re.findall("`([^`]+)`", entry)
    ]


def has(part: str, message: Message) -> bool:
    """Return whether a message begins with these words, so that readers find it by them; `…` is any value.

    If the message begins with a value, the page may show the words of this value as well.
    """
    text = message.text.removeprefix("dist_wandb: ").strip().replace("`", "")
    if _pattern(part).match(text):
        return True
    rest = text.lstrip("…")
    return rest != text and any(end.match(rest) for end in _patterns_of_ends(part, rest[:1]))


@cache
def _patterns_of_ends(part: str, first: str) -> list[re.Pattern[str]]:
    """Return the patterns of all ends of a fragment that begin with a character, and have more than one word."""
    ends = [part[index:] for index in range(1, len(part)) if part[index] == first]
    return [_pattern(end) for end in ends if len(re.findall(r"\w{2,}", end)) > 1]


@cache
def _pattern(part: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, part.split("…"))), re.DOTALL)


@pytest.mark.source
def test_every_message_has_an_entry_and_every_entry_a_message() -> None:
    known, found = parts(), messages()
    missing = [f"{one.place}: {one.text}" for one in found if not any(has(part, one) for part in known)]
    assert missing == [], f"{len(missing)} messages have no entry in docs/troubleshooting.md"
    assert [part for part in known if not any(has(part, one) for one in found)] == []
    texts = [one.text for one in found]
    assert len(texts) > 250
    assert any("is a DTensor of which rank … has only a part" in text for text in texts)  # from an f-string
    assert any(text.startswith("dist_wandb: rank … has lost values: ….") for text in texts)  # from logging
    assert any("returned after the other ranks had ended" in text for text in texts)  # from a variable


@pytest.mark.slow
@pytest.mark.source
def test_no_fragment_matches_too_many_messages() -> None:
    """Such a fragment would match all of them, and hide a missing entry."""
    found = messages()
    assert [part for part in parts() if sum(has(part, one) for one in found) > MOST] == []


# --- messages that a test expects -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.source
def test_every_message_is_expected_by_a_test() -> None:
    """Three words that only this message has, or one more, are in a string of a test, perhaps around a value."""
    texts = [_words(text) for text in _strings()]
    tested = {tuple(words[begin : begin + 3]) for words in texts for begin in range(len(words) - 2)}
    joined = "\n".join(sorted({" ".join(words) for words in texts if len(words) > 3}))
    found = messages()
    counts = Counter(form for text in {message.text for message in found} for form in set(_forms(text)))

    def is_expected(text: str) -> bool:
        own = [form for form in _forms(text) if counts[form] <= 2]
        around = [" ".join(form).replace("… ", r"(?:\w+ ){0,6}") for form in own if "…" in form]
        return any(form in tested for form in own) or any(re.search(rf"\b{form}\b", joined) for form in around)

    assert [one.text[:60] for one in found if not is_expected(one.text)] == []


def _strings() -> Iterator[str]:
    """Yield the parts of the strings of all tests, also of patterns, but not docstrings."""
    for path in sorted(TESTS.rglob("*.py")):
        if path.name not in (Path(__file__).name, "messages.py"):
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            for node in nodes:
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
                    yield node.value


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", re.sub(r"\\[dwsSbB][+*]?|\\", "", text).lower())


def _forms(text: str) -> Iterator[tuple[str, ...]]:
    """Yield three words that follow each other in a message, or have one value among them."""
    words = re.findall(r"\w+|…", text.removeprefix("dist_wandb: ").lower())
    for begin in range(len(words)):
        for length in (3, 4):
            form = tuple(words[begin : begin + length])
            if len(form) == length and form.count("…") == length - 3 and "…" not in (form[0], form[-1]):
                yield form
