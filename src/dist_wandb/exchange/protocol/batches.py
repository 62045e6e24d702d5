"""The contributions that wait on several ranks, merged into one list for one round. Pure.

If many rows wait, each rank sends the others the cells that it has contributions for, as runs of similar rows. All
ranks merge what they received into the same list, in an order that agrees with the order on each rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Slot(NamedTuple):
    """A cell, in numbers."""

    counted: int  # 0 if the user gave a step, else 1
    step: int  # the step
    name: int  # position of the name in the list that the ranks have agreed on
    occurrence: int  # how often a rank had logged the name there before


Row = tuple[Slot, ...]


class Run(NamedTuple):
    """Rows that differ only by their step, or by their count; a list in JSON."""

    counted: int  # of the slots of the first row
    step: int  # of the slots of the first row
    stride: int  # difference between the steps of consecutive rows
    number: int  # number of rows
    names: list[int]  # of the slots of the first row
    occurrences: list[int]  # of the slots of the first row


def encoded(rows: Iterable[Row]) -> list[Run]:
    """Encode rows compactly."""
    runs: list[Run] = []
    before: Row = ()
    for row in rows:
        stride = _stride(before, row) if before else None
        if stride is not None and (runs[-1].number == 1 or runs[-1].stride == stride):
            runs[-1] = runs[-1]._replace(stride=stride, number=runs[-1].number + 1)
        else:
            first = row[0]
            runs.append(
                Run(first.counted, first.step, 0, 1, [slot.name for slot in row], [slot.occurrence for slot in row])
            )
        before = row
    return runs


def _stride(before: Row, row: Row) -> int | None:
    """Return the difference in steps between two rows of the same form; `None` if their forms differ."""
    if len(before) != len(row):
        return None
    stride = row[0].step - before[0].step
    for old, new in zip(before, row, strict=True):
        if new != (old.counted, old.step + stride, old.name, old.occurrence + old.counted):
            return None
    return stride


def decoded(runs: Iterable[Run], most: int) -> list[Row]:
    """Return the inverse of `encoded`.

    Args:
        runs: What a rank sent.
        most: Maximum number of slots, not counting one row.

    Raises:
        ValueError: There are more slots than that, or the runs are invalid.
    """
    runs = list(runs)
    if any(type(run.number) is not int or run.number < 0 or not run.names for run in runs):
        raise ValueError("a rank sent runs that are no rows")
    sent = sum(run.number * len(run.names) for run in runs)
    if sent > most + max((len(run.names) for run in runs), default=0):
        raise ValueError("a rank sent more values at once than any rank has")
    return [
        tuple(
            Slot(run.counted, run.step + index * run.stride, name, occurrence + index * run.counted)
            for name, occurrence in zip(run.names, run.occurrences, strict=True)
        )
        for run in runs
        for index in range(run.number)
    ]


def merged(offers: Sequence[Sequence[Row]], most: int) -> list[Slot]:
    """Merge the offers of several ranks: each slot once, in an order that agrees with the order on each rank.

    If ranks contradict each other, no such order exists. Among the slots that may come next, the one with the smallest
    step is chosen, so that a rank that is behind catches up. Slots of one step stay together, because they are written
    as one row.

    Args:
        offers: By rank, its rows in their order.
        most: Number of slots after which no further row is begun.
    """
    starts = {row[0] for rows in offers for row in rows}
    each = [dict.fromkeys(slot for row in rows for slot in row) for rows in offers if rows]
    lists = list(dict.fromkeys(map(tuple, each)))
    slots = list(lists[0]) if len(lists) == 1 else _by_step(_in_order(lists))
    for number, slot in enumerate(slots):
        begins = slot.counted or slots[number - 1][:2] != slot[:2]
        if number >= most and slot in starts and begins:
            return slots[:number]
    return slots


def _in_order(lists: Sequence[Sequence[Slot]]) -> list[Slot]:
    """Merge lists; a slot comes after its predecessors in every list, unless lists contradict each other."""
    ahead = Counter(slot for slots in lists for slot in slots)  # number of lists in which it is still ahead
    at = [0] * len(lists)
    order: dict[Slot, None] = {}
    while True:
        heads = Counter[Slot]()
        for number, slots in enumerate(lists):
            while at[number] < len(slots) and slots[at[number]] in order:
                at[number] += 1
            if at[number] < len(slots):
                heads[slots[at[number]]] += 1
        if not heads:
            return list(order)
        free = [slot for slot, number in heads.items() if number == ahead[slot]]
        order[min(free or heads)] = None


def _by_step(slots: Sequence[Slot]) -> list[Slot]:
    """Group the slots of one step at the position of the first of them."""
    rows: dict[object, list[Slot]] = {}
    for slot in slots:
        rows.setdefault(slot if slot.counted else slot.step, []).append(slot)
    return [slot for row in rows.values() for slot in row]
