from __future__ import annotations

from pathlib import Path

import pytest

import dist_wandb
from dist_wandb import errors
from dist_wandb.errors import (
    ConfigurationError,
    DistWandbError,
    MissingExtraError,
    ReadError,
    in_words,
    suggest,
    visible,
)


def test_every_kind_of_error_is_public() -> None:
    defined = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DistWandbError)}
    assert len(defined) == 9
    assert {kind.__name__ for kind in defined} <= set(dist_wandb.__all__)
    assert issubclass(ConfigurationError, ValueError)
    assert issubclass(MissingExtraError, ImportError)


@pytest.mark.parametrize("value", ["everything", None, 7, ["auto"]])
def test_nothing_is_suggested_without_a_similar_value(value: object) -> None:
    assert suggest(value, ("shared", "new")) == "Allowed: 'shared', 'new'."


def test_error_texts_escape_control_characters_and_shorten_long_ones() -> None:
    text = "a\x1b]0;title\x07b\x9b2J\u202ec\nd \ud800 é"
    for kind in (DistWandbError, ReadError, MissingExtraError):
        assert str(kind(text)) == "a\\x1b]0;title\\x07b\\x9b2J\\u202ec\\nd \\ud800 é"
    assert visible("\x1b" * 1_000_000) == r"\x1b" * 20_000 + "... (980000 more characters)"
    assert visible("x" * 20_000) == "x" * 20_000
    assert in_words(ReadError(f"{Path(text)}: x"), Path(text)) == str(ReadError(f"{text}: x"))


def test_an_error_names_the_path_of_its_file_once(tmp_path: Path) -> None:
    path = tmp_path / "run-a.wandb"
    assert in_words(ReadError(f"{path} is a directory"), path) == f"{path} is a directory"
    assert in_words(ReadError("is empty"), path) == f"{path}: is empty"
    assert in_words(ValueError("embedded null byte"), path) == f"{path}: ValueError: embedded null byte"
    assert in_words(MemoryError(), path) == f"{path}: MemoryError"
