"""`docs/troubleshooting.md` has an entry for every warning and error of the package, and no other entries."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from messages import Message, messages

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
def test_every_message_has_an_entry() -> None:
    known = parts()
    missing = [f"{one.place}: {one.text}" for one in messages() if not any(has(part, one) for part in known)]
    assert missing == [], f"{len(missing)} messages have no entry in docs/troubleshooting.md"


@pytest.mark.source
def test_every_entry_has_a_message() -> None:
    found = messages()
    assert [part for part in parts() if not any(has(part, one) for one in found)] == []


@pytest.mark.source
def test_messages_are_found_in_the_source() -> None:
    texts = [one.text for one in messages()]
    assert len(texts) > 250
    assert any("is a DTensor of which rank … has only a part" in text for text in texts)  # from an f-string
    assert any(text.startswith("dist_wandb: rank … could not open its run: ….") for text in texts)  # from logging
    assert any("returned after the other ranks had ended" in text for text in texts)  # from a variable


@pytest.mark.slow
@pytest.mark.source
def test_no_fragment_matches_too_many_messages() -> None:
    """Such a fragment would match all of them, and hide a missing entry."""
    found = messages()
    assert [part for part in parts() if sum(has(part, one) for one in found) > MOST] == []
