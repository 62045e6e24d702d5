"""Many ranks in few words."""

from __future__ import annotations

from collections.abc import Iterable

_MOST_PARTS = 4  # ranges that are listed; of more, the first, the last and how many ranks they are


def ranges_of(ranks: Iterable[int]) -> str:
    """Ranks as ranges, in few words however many there are.

    Args:
        ranks: Indices, in any order.

    Example:
        ``"3"``, ``"0-3, 8"``, ``"0, 8, 16, ..., 16376"`` for every eighth of 16,384 ranks, and ``"none"``.
    """
    ordered = sorted(set(ranks))
    parts: list[list[int]] = []
    for rank in ordered:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in parts]
    if len(words) > _MOST_PARTS:
        words = [*words[: _MOST_PARTS - 1], "...", words[-1]]
    return ", ".join(words) or "none"
