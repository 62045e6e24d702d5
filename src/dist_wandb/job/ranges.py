"""Compact forms of many ranks: ranges for messages, and spans and blocks for the job's store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

_MOST_PARTS = 4  # maximum number of listed ranges; of more, the first ones and the last
_LEAST = 3  # minimum number of consecutive ranks in a range
_MOST = 20  # maximum number of ranges in a message


def spans_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the last number of each run: [(0, 2), (9, 9)] for [9, 0, 1, 2]."""
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


def numbers_in(spans: Iterable[Sequence[int]]) -> list[int]:
    """Return the numbers of spans: the inverse of `spans_of`."""
    return [number for first, last in spans for number in range(first, last + 1)]


def blocks_of(values: Iterable[int]) -> list[list[int]]:
    """Compress numbers that grow in steps, such as the node ranks of all ranks: [0, 0, 1, 1, 2, 2, 0].

    Returns blocks of [first number, repetitions of each number, count of numbers]: [[0, 2, 3], [0, 1, 1]].
    """
    found: list[list[int]] = []
    for value, times in ((value, sum(1 for _ in same)) for value, same in groupby(values)):
        if found and found[-1][0] + found[-1][2] == value and found[-1][1] == times:
            found[-1][2] += 1
        else:
            found.append([value, times, 1])
    return found


def values_in(blocks: Iterable[Sequence[int]]) -> list[int]:
    """Return the numbers of blocks: the inverse of `blocks_of`."""
    return [value for first, times, many in blocks for value in range(first, first + many) for _ in range(times)]


def ranges_of(ranks: Iterable[int]) -> str:
    """Format any number of ranks as a short text: "3", "0-3, 8", "none", or "0, 8, 16, ..., 16376"."""
    words = [str(first) if first == last else f"{first}-{last}" for first, last in spans_of(ranks)]
    if len(words) > _MOST_PARTS:
        words = [*words[: _MOST_PARTS - 1], "...", words[-1]]
    return ", ".join(words) or "none"


def named(ranks: Iterable[int], ranks_per_node: int | None = None) -> str:
    """Format global ranks for a message: "rank 3", "ranks 1, 8-11", or "ranks 8-23 (nodes 1-2)" with 8 on each node."""
    found = spans_of(ranks)
    texts = [text for first, last in found[:_MOST] for text in _texts(first, last, ranks_per_node)]
    if rest := sum(last - first + 1 for first, last in found[_MOST:]):
        texts.append(f"and {rest} more")
    return f"{'rank' if found and found[0][0] == found[-1][1] else 'ranks'} {', '.join(texts)}"


def _texts(first: int, last: int, ranks_per_node: int | None) -> list[str]:
    size = ranks_per_node or 1
    if size > 1 and first % size == (last + 1) % size == 0:  # whole nodes of several ranks
        node, last_node = first // size, last // size
        return [f"{first}-{last} (node {node})" if node == last_node else f"{first}-{last} (nodes {node}-{last_node})"]
    if last - first + 1 < _LEAST:
        return [str(rank) for rank in range(first, last + 1)]
    return [f"{first}-{last}"]
