from __future__ import annotations

import pytest

from dist_wandb.report.model import ConsoleTail, plain


def lines_of(*pieces: str) -> list[str]:
    tail = ConsoleTail()
    for piece in pieces:
        tail.add(piece)
    tail.end()
    return list(tail.lines)


def test_pieces_become_lines() -> None:
    assert lines_of("a", "b\nc", "\n", "d") == ["ab", "c", "d"]


def test_a_progress_bar_is_shown_in_its_last_state() -> None:
    assert lines_of("10 %\r50 %\r100 %\n", "done\r\n") == ["100 %", "done"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("a\x1bcb", "a\N{REPLACEMENT CHARACTER}cb"),
        ("bell\x07", "bell\N{REPLACEMENT CHARACTER}"),
        ("abc\u202etxt", "abc\N{REPLACEMENT CHARACTER}txt"),
        ("<b>&amp;", "<b>&amp;"),
    ],
)
def test_escape_sequences_are_removed(text: str, shown: str) -> None:
    assert plain(text) == shown


def test_the_last_lines_are_kept_and_all_are_counted() -> None:
    tail = ConsoleTail()
    tail.add("".join(f"{number}\n" for number in range(5000)))
    tail.add("x" * 10**6)
    tail.end()
    assert tail.count == 5001
    assert len(tail.lines) == 1000
    assert tail.lines[-2] == "4999"
    assert len(tail.lines[-1]) == 500
