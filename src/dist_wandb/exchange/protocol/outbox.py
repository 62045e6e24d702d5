"""The contributions of one rank that wait for a round. Pure.

Contributions wait by position, in the order in which the positions were first logged; at one position they wait by
name, each name in its own queue. The occurrence of a contribution is counted once, when it is posted, so a rank that
logs in a different order than the others still contributes to the same cells.

A contribution that joins a position that already waits, but is not the newest one, overtakes those in between. As long
as it waits, the order of this rank's contributions does not show what it has logged (`overtaking`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from dist_wandb.exchange.protocol.aggregates import Totals
from dist_wandb.exchange.protocol.cells import CALLS, Contributed, Key, Position

_STEPS_PER_CELL = 2  # a cell must be forgotten long before a rank restarts the count of its occurrences
_WITHOUT_STEP = Position(1, 0)

_new = tuple.__new__  # of named tuples, without a call in between: it is called for every number
_Counts = tuple[tuple[str, int], ...]
_Queue = list[Contributed] | deque[Contributed]  # with a step a list, because it is short


class Outbox:
    """The contributions of one rank that wait for a round.

    Args:
        rank: Index of this rank in the unit.
        remembered: Number of finished cells that are kept; it limits the number of steps with counted occurrences.
    """

    def __init__(self, rank: int, remembered: int) -> None:
        self.waiting: OrderedDict[Position, dict[str, _Queue]] = OrderedDict()
        self.contributions: int = 0  # number of those that wait
        self.overtaking: set[Key] = set()  # cells of those that may be sent before earlier ones
        self._rank = rank
        self._remembered = remembered
        self._occurrences: OrderedDict[int, _Counts] = OrderedDict()  # by step: how often each name was logged
        self._calls: dict[str, int] = {}  # how often each name was logged without a step
        self._same: dict[_Counts, _Counts] = {}  # most steps have equal counts, which are stored once

    def post(self, values: Mapping[str, Totals], step: int | None, calls: int) -> list[Key]:
        """Add the values of one `log` call; see `Rounds.post`."""
        position = _WITHOUT_STEP if step is None else Position(0, step)
        origin = -float(self._rank * CALLS + calls)
        if not values:
            return []
        self.contributions += len(values)
        waiting = self.waiting.get(position)
        overtakes = waiting is not None and next(reversed(self.waiting)) != position
        if waiting is None:
            waiting = self.waiting[position] = {}
        keys = []
        for (name, totals), occurrence in zip(values.items(), self._count(step, values), strict=True):
            key = _new(Key, (position, name, occurrence))
            keys.append(key)
            contributed = _new(Contributed, (key, totals, origin))
            if name in waiting:
                waiting[name].append(contributed)
            else:
                waiting[name] = deque((contributed,)) if position.counted else [contributed]
        if overtakes:
            self.overtaking.update(keys)
        return keys

    def _count(self, step: int | None, names: Iterable[str]) -> list[int]:
        """Count an occurrence of each name at a step; return the counts before. The oldest counts are forgotten."""
        counts = self._calls if step is None else dict(self._occurrences.pop(step, ()))
        occurrences = [counts.get(name, 0) for name in names]
        counts.update((name, occurrence + 1) for name, occurrence in zip(names, occurrences, strict=True))
        if step is not None:
            items = tuple(counts.items())
            self._occurrences[step] = self._same.setdefault(items, items)
            if len(self._same) > self._remembered:
                self._same.clear()
            if len(self._occurrences) > _STEPS_PER_CELL * self._remembered:
                self._occurrences.popitem(last=False)
        return occurrences

    def rename(self, old: str, new: str) -> list[tuple[Key, Key]]:
        """Move contributions that wait under a name to another name.

        Returns:
            The former and the new cell of each contribution.
        """
        renamed = []
        for position, values in self.waiting.items():
            step = None if position.counted else position.step
            for contributed in values.pop(old, ()):
                (occurrence,) = self._count(step, (new,))
                key = Key(position, new, occurrence)
                values.setdefault(new, deque()).append(contributed._replace(key=key))
                if contributed.key in self.overtaking:
                    self.overtaking.remove(contributed.key)
                    self.overtaking.add(key)
                renamed.append((contributed.key, key))
        return renamed

    def remove(self, contributions: Sequence[Contributed]) -> None:
        """Remove contributions after a round."""
        self.contributions -= len(contributions)
        if self.overtaking:
            self.overtaking.difference_update([key for key, *_ in contributions])
        for contributed in contributions:
            position, name, _ = contributed.key
            values = self.waiting[position]
            queue = values[name]
            queue.remove(contributed)  # the first one, unless ranks contradict each other in their order
            if not queue:
                del values[name]
                if not values:
                    del self.waiting[position]

    def put_back(self, contributions: Iterable[Contributed]) -> None:
        """Put the contributions that were removed last back in front, given in the order of removal."""
        for contributed in reversed([*contributions]):
            key = contributed.key
            values = self.waiting.setdefault(key.position, {})
            queue = values.setdefault(key.name, deque() if key.position.counted else [])
            queue.insert(0, contributed)
            self.contributions += 1
            self.overtaking.add(key)  # it may have been before
            self.waiting.move_to_end(key.position, last=False)

    # Queries

    @property
    def pending(self) -> int:
        """Number of waiting rows."""
        without_step = self.waiting.get(_WITHOUT_STEP)
        return len(self.waiting) + (max(map(len, without_step.values())) - 1 if without_step else 0)

    @property
    def names(self) -> list[str]:
        """Waiting names, in the order in which they were logged."""
        return list(dict.fromkeys(name for values in self.waiting.values() for name in values))

    def unknown(self, known: Container[str]) -> list[str]:
        """Return the waiting names that are not in `known`, in the order in which they were logged."""
        return [name for name in self.names if name not in known]

    def next_position(self, focus: tuple[int, ...]) -> Position | None:
        """Return the oldest position that begins with `focus`, which is empty unless ranks are looking for a row."""
        return next((position for position in self.waiting if position[: len(focus)] == focus), None)

    def due(self, position: Position, turns: Mapping[tuple[Position, str], int]) -> dict[str, Contributed]:
        """Return the oldest contribution of each name at a position, unless it is an earlier occurrence's turn."""
        due = {
            name: queue[0]
            for name, queue in self.waiting[position].items()
            if turns.get((position, name), queue[0].key.occurrence) == queue[0].key.occurrence
        }
        return _oldest(due) if position.counted and due else due

    def is_oldest(self, position: Position, due: Mapping[str, Contributed]) -> bool:
        """Return whether contributions are those of the oldest waiting row, or some of them."""
        if position != next(iter(self.waiting)):
            return False
        if not position.counted:
            return True
        oldest = max(queue[0].origin for queue in self.waiting[position].values())
        return all(contributed.origin == oldest for contributed in due.values())

    def rows(self, known: Container[str]) -> Iterator[tuple[Position, dict[str, Contributed]] | None]:
        """Yield rows in the order in which they are contributed; `None`, at the end, for a row with an unknown name."""
        for position, values in self.waiting.items():
            if not all(name in known for name in values):
                yield None
                return
            queues = {name: iter(queue) for name, queue in values.items()}
            heads = {name: next(queue) for name, queue in queues.items()}
            while heads:
                row = _oldest(heads) if position.counted else dict(heads)
                yield position, row
                for name in row:
                    following = next(queues[name], None)
                    if following is None:
                        del heads[name]
                    else:
                        heads[name] = following


def _oldest(due: Mapping[str, Contributed]) -> dict[str, Contributed]:
    """Return the values of the oldest call among values without a step: each call is a row of its own."""
    oldest = max(contributed.origin for contributed in due.values())
    return {name: contributed for name, contributed in due.items() if contributed.origin == oldest}
