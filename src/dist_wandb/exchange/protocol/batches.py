"""What waits on several ranks, as one list for one round. Pure.

Where many rows wait, each rank sends the others which cells it has something for, as runs of equal rows; all of them
make the same list of what they received, in an order that agrees with that of each rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Slot(NamedTuple):
    """A cell, in numbers.

    Args:
        counted: 0 where the user gave a step, else 1.
        step: The step.
        name: Position of the name among those the ranks have agreed on.
        occurrence: How often a rank had logged the name there before.
    """

    counted: int
    step: int
    name: int
    occurrence: int


Row = tuple[Slot, ...]


class Run(NamedTuple):
    """Rows that differ by their step, or by their count, alone; as JSON a list.

    Args:
        counted: As of the first row's slots.
        step: Likewise.
        stride: By how many steps each follows the one before it.
        number: How many there are.
        names: Of the first row's slots.
        occurrences: Likewise.
    """

    counted: int
    step: int
    stride: int
    number: int
    names: list[int]
    occurrences: list[int]


def encoded(rows: Iterable[Row]) -> list[Run]:
    """Rows as few numbers."""
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
    """By how many steps a row follows another one that is like it; `None` if it is not."""
    if len(before) != len(row):
        return None
    stride = row[0].step - before[0].step
    for old, new in zip(before, row, strict=True):
        if new != (old.counted, old.step + stride, old.name, old.occurrence + old.counted):
            return None
    return stride


def decoded(runs: Iterable[Run], most: int) -> list[Row]:
    """The inverse of `encoded`.

    Args:
        runs: What a rank sent.
        most: How many slots there may be, beside one row.

    Raises:
        ValueError: They are more, or no rows.
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
    """What some ranks have to say, each slot once, in an order that agrees with that of each rank.

    Where ranks contradict each other there is none. Of what may come next the smallest step does: so a rank that is
    behind catches up. Slots of one step stand together, as they are written as one row.

    Args:
        offers: By rank, its rows in their order.
        most: No more rows are begun after so many slots.
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
    """The lists as one; a slot comes after those before it in any list, but where lists contradict each other."""
    ahead = Counter(slot for slots in lists for slot in slots)  # in how many lists it is yet to come
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
    """Slots of one step together, where the first of them stood."""
    rows: dict[object, list[Slot]] = {}
    for slot in slots:
        rows.setdefault(slot if slot.counted else slot.step, []).append(slot)
    return [slot for row in rows.values() for slot in row]
