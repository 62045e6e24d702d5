"""The calls of `log` of one rank that wait for a round, the cells of their values, and the series they belong to. Pure.

A *cell* is one name at one step, for the same occurrence: how often the rank had logged the name at that step before.
Without a step, the occurrence is how often it had logged the name without a step. The occurrence is counted when a call
is posted, so ranks that log names in different orders still contribute to the same cells.

A *series* is what ranks agree on before they contribute: a number under a name, or an attachment, which is a value that
the ranks combine by an exchange of its own: states of a metric, a table, images. The rounds treat an attachment as a
series without numbers, to find out which ranks have one, and when all of them do. Ranks agree on series as texts. The
text of a number is its name; the text of an attachment also contains its kind and layout, because ranks whose metrics
have different states cannot combine them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from dist_wandb.exchange.protocol.lanes import Lanes

NUMBER = "number"
_SEPARATOR = "\0"  # in no name that a user may give
_STEPS_PER_CELL = 2  # a cell must be forgotten long before a rank restarts the count of its occurrences
_MOST_SHAPES = 4096  # tuples of names that are kept, so that equal ones are one object

Names = tuple[str, ...]
"""The series of a call, in its order."""


class Series(NamedTuple):
    """The common series of the ranks' contributions."""

    name: str  # as the user gave it
    kind: str = NUMBER  # `NUMBER`, or the kind of the attachment
    layout: str = ""  # its structure, if ranks have to agree on it

    @property
    def text(self) -> str:
        """The text on which ranks agree."""
        return self.name if self.kind == NUMBER else _SEPARATOR.join(self)


@lru_cache(maxsize=4096)
def series_of(text: str) -> Series:
    """Return the series of a text; a text without a kind is the name of a number."""
    name, _, rest = text.partition(_SEPARATOR)
    kind, separator, layout = rest.partition(_SEPARATOR)
    return Series(name, kind, layout) if separator else Series(text)


def is_attached(text: str) -> bool:
    """Return whether the series of a text is an attachment."""
    return _SEPARATOR in text


class Key(NamedTuple):
    """A cell: the contributions of all ranks to one name at one step, for the same occurrence."""

    name: str  # the text of the series; for a number, its name
    step: int | None  # the step that the user gave
    occurrence: int  # how often a rank had logged the series there before

    @property
    def series(self) -> Series:
        """The series that `name` is the text of."""
        return series_of(self.name)


class Call(NamedTuple):
    """The values of one call of `log`."""

    names: Names
    occurrences: tuple[int, ...]
    step: int | None
    x: int  # its position: its step, or the last one of its rank; `-1 - calls` before any, with so many earlier calls
    lanes: Lanes
    at: float  # when it was posted
    own: Any = None  # what its rank alone needs to write its row

    def cells(self) -> list[Key]:
        """Return its cells."""
        return [Key(name, self.step, number) for name, number in zip(self.names, self.occurrences, strict=True)]


class Outbox:
    """The calls of one rank that wait for a round, in their order."""

    def __init__(self, remembered: int) -> None:
        self.waiting: deque[Call] = deque()
        self.offered: list[Call] = []  # those that were offered last
        self.last: Sequence[Call] = ()  # those that were taken last
        self.without_step: dict[str, int] = {}  # how often each name was logged without a step
        self._remembered = remembered  # number of finished cells that are kept; limits the steps with counts
        self._at_step: OrderedDict[int, Names | dict[str, int]] = OrderedDict()  # names of a first call, then counts
        self._shapes: dict[Names, Names] = {}

    def post(self, names: Iterable[str], lanes: Lanes, step: int | None, x: int, at: float, own: Any = None) -> Call:
        """Add a call."""
        names = tuple(names)
        if len(self._shapes) >= _MOST_SHAPES:
            self._shapes.clear()
        names = self._shapes.setdefault(names, names)
        call = Call(names, self._count(step, names), step, x, lanes, at, own)
        self.waiting.append(call)
        return call

    def _count(self, step: int | None, names: Names) -> tuple[int, ...]:
        """Count an occurrence of each name; return the counts before. The counts of the oldest steps are forgotten."""
        if step is None:
            counts: dict[str, int] = self.without_step
        else:
            before = self._at_step.get(step)
            if before is None:
                self._at_step[step] = names
                if len(self._at_step) > _STEPS_PER_CELL * self._remembered:
                    self._at_step.popitem(last=False)
                return (0,) * len(names)
            if isinstance(before, tuple):
                before = self._at_step[step] = dict.fromkeys(before, 1)
            self._at_step.move_to_end(step)
            counts = before
        occurrences = tuple([counts.get(name, 0) for name in names])
        counts.update((name, number + 1) for name, number in zip(names, occurrences, strict=True))
        return occurrences

    def rename(self, old: str, new: str) -> list[tuple[Key, Key]]:
        """Move values that wait under a name to another name; return the former and the new cell of each value."""
        renamed = []
        for index, call in enumerate(self.waiting):
            if old in call.names:
                at = call.names.index(old)
                (number,) = self._count(call.step, (new,))
                names = (*call.names[:at], new, *call.names[at + 1 :])
                numbers = (*call.occurrences[:at], number, *call.occurrences[at + 1 :])
                self.waiting[index] = call._replace(names=names, occurrences=numbers)
                renamed.append((Key(old, call.step, call.occurrences[at]), Key(new, call.step, number)))
        return renamed

    def take(self, number: int) -> Sequence[Call]:
        """Remove and return the oldest calls."""
        self.last = [self.waiting.popleft() for _ in range(number)]
        return self.last

    def put_back(self) -> None:
        """Put the calls that were taken last back in front."""
        self.waiting.extendleft(reversed(self.last))
        self.last = ()

    def names(self, most: int | None = None) -> list[str]:
        """Return the names of all calls, or of the oldest ones, in the order in which they were logged."""
        shapes = dict.fromkeys(call.names for call in islice(self.waiting, most))
        return list(dict.fromkeys(name for shape in shapes for name in shape))

    def known(self, names: Collection[str], most: int) -> list[Call]:
        """Return the oldest calls before the first one with an unknown name: no further one after `most` values."""
        calls, values = [], 0
        checked: set[int] = set()
        for call in self.waiting:
            if id(call.names) not in checked:
                if not all(name in names for name in call.names):
                    break
                checked.add(id(call.names))
            calls.append(call)
            values += len(call.names) or 1
            if values >= most:
                break
        return calls
