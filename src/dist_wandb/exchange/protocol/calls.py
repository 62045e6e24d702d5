"""The calls of `log`: those of one rank that wait for a round, and those that ranks offer each other in one. Pure.

A *cell* is one name at one step, for the same occurrence: how often the rank had logged the name at that step before.
Without a step, the occurrence is how often it had logged the name without a step. The occurrence is counted when a call
is posted, so ranks that log names in different orders still contribute to the same cells.

A *series* is what ranks agree on before they contribute: a number under a name, or an attachment, which is a value that
the ranks combine by an exchange of its own: states of a metric, a table, images. The rounds treat an attachment as a
series without numbers, to find out which ranks have one, and when all of them do. Ranks agree on series as texts. The
text of a number is its name; the text of an attachment also contains its kind.

Before a round, a rank tells the others which calls it offers, and its state (`Offer`). Calls that follow each other
with the same names form a block; so ranks that log the same send equal bytes, which a group passes on once for all of
them, and are one *party*. Names are numbered in the order in which all ranks have learnt them.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cached_property, lru_cache
from itertools import chain, islice
from typing import Any, NamedTuple

from dist_wandb.exchange.protocol.contributors import NEVER, NOBODY, Ranks
from dist_wandb.exchange.protocol.lanes import Lanes, lanes_of, number_at

NUMBER = "number"
_SEPARATOR = "\0"  # in no name that a user may give
_STEPS_PER_CELL = 2  # a cell must be forgotten long before a rank restarts the count of its occurrences
_MOST_SHAPES = 4096  # tuples of names that are kept, so that equal ones are one object
MOST_VALUES = 8192  # values that a rank offers in a round; the last call may exceed it
_as_text = json.JSONEncoder(separators=(",", ":")).encode

Names = tuple[str, ...]  # the series of a call, in its order


class Series(NamedTuple):
    """The common series of the ranks' contributions."""

    name: str  # as the user gave it
    kind: str = NUMBER  # `NUMBER`, or the kind of the attachment

    @property
    def text(self) -> str:
        return self.name if self.kind == NUMBER else _SEPARATOR.join(self)


@lru_cache(maxsize=4096)
def series_of(text: str) -> Series:
    name, _, kind = text.partition(_SEPARATOR)
    return Series(name, kind or NUMBER)


def is_attached(text: str) -> bool:
    return _SEPARATOR in text


@lru_cache(maxsize=4096)
def attached_among(names: Names) -> list[int]:
    return [at for at, name in enumerate(names) if is_attached(name)]


class Key(NamedTuple):
    """A cell: the contributions of all ranks to one name at one step, for the same occurrence."""

    name: str  # the text of the series; for a number, its name
    step: int | None  # the step that the user gave
    occurrence: int  # how often a rank had logged the series there before

    @property
    def series(self) -> Series:
        return series_of(self.name)


class Call(NamedTuple):
    """The values of one call of `log`."""

    names: Names
    occurrences: tuple[int, ...]
    step: int | None
    x: int  # its position: its step, or the last one of its rank; `-1 - calls` before any, with so many earlier calls
    lanes: Lanes
    at: float  # when it was posted
    # what its rank alone needs to write its row, after so many names: calls that were joined may stand in several rows
    own: Sequence[tuple[int, Any]] = ()

    def cells(self) -> list[Key]:
        return [Key(name, self.step, number) for name, number in zip(self.names, self.occurrences, strict=True)]


class Outbox:
    """The calls of one rank that wait for a round, in their order."""

    def __init__(self, remembered: int) -> None:
        self.waiting: deque[Call] = deque()
        self.may_grow: bool = False  # whether the last call may be extended
        self.offered: list[Call] = []  # those that were offered last
        self.last: Sequence[Call] = ()  # those that were taken last
        self.without_step: dict[str, int] = {}  # how often each name was logged without a step
        self._remembered = remembered  # number of finished cells that are kept; limits the steps with counts
        self._at_step: OrderedDict[int, Names | dict[str, int]] = OrderedDict()  # names of a first call, then counts
        self._shape = lru_cache(_MOST_SHAPES)(tuple[str, ...])  # returns the first of equal tuples

    def post(self, names: Iterable[str], lanes: Lanes, step: int | None, x: int, at: float, own: Any = None) -> Call:
        names = self._shape(tuple(names))
        call = Call(names, self._count(step, names), step, x, lanes, at, ((0, own),) if own else ())
        self.waiting.append(call)
        return call

    def extend(self, names: Names, lanes: Lanes, own: Any = None) -> Call:
        last = self.waiting[-1]
        owns = last.own if own is None else (*last.own, (len(last.names), own))
        occurrences = (*last.occurrences, *self._count(last.step, names)) if names else last.occurrences
        numbers = [
            number_at(*those, at, len(part))
            for part, those in ((last.names, last.lanes), (names, lanes))
            for at in range(len(part))
        ]
        whole = self._shape((*last.names, *names))
        call = last._replace(names=whole, occurrences=occurrences, lanes=lanes_of(numbers), own=owns)
        self.waiting[-1] = call
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

    def take(self, number: int) -> Sequence[Call]:
        self.last = list(islice(self.waiting, number))
        for _ in self.last:
            self.waiting.popleft()
        return self.last

    def names(self, most: int | None = None) -> list[str]:
        """Return the names of all calls, or of the oldest ones, in the order in which they were logged."""
        shapes = dict.fromkeys(call.names for call in islice(self.waiting, most))
        return list(dict.fromkeys(name for shape in shapes for name in shape))


class Intent(IntEnum):
    """Whether this rank will contribute more; calls that wait are sent in any case."""

    OPEN = 0  # it may contribute more
    PAUSING = 1  # it waits until everything posted so far is finished
    CLOSING = 2  # it contributes nothing more, for good
    FAILING = 3  # as `PAUSING`, but it contributes nothing more: what it usually logs lacks it


class Block(NamedTuple):
    """Consecutive calls of one rank with the same names."""

    names: Names
    occurrences: tuple[int, ...]  # of the first call; without a step they grow by 1 with each call
    step: int | None  # of the first call
    stride: int  # difference of the steps of two calls
    x: int  # position of the first call, as in `Call`
    x_stride: int
    number: int  # of calls

    def key(self, name: int, index: int) -> Key:
        if self.step is None:
            return Key(self.names[name], None, self.occurrences[name] + index)
        return Key(self.names[name], self.step + index * self.stride, self.occurrences[name])

    def cells(self, axes: frozenset[str]) -> list[Key]:
        """Return the cells of the first call; see `cells_and_axes`."""
        return [Key(self.names[at], self.step, self.occurrences[at]) for at in cells_and_axes(self.names, axes)[0]]

    def from_call(self, index: int) -> Block:
        """Return the block without its first calls."""
        names, occurrences, step, stride, x, x_stride, number = self
        if step is not None:
            step += index * stride
        elif index:
            occurrences = tuple([one + index for one in occurrences])
        return Block(names, occurrences, step, stride, x + index * x_stride, x_stride, number - index)


class Offer(NamedTuple):
    """The calls that a rank offers, and its state."""

    blocks: Sequence[Block] = ()  # the oldest calls of its outbox
    old: int = 0  # how many of them have waited so long that they are taken without other ranks
    more: int = 0  # how many further calls wait
    intent: Intent = Intent.OPEN
    give_up_new: int = NEVER  # the round up to which it gives up cells of names that were never finished
    give_up_all: int = NEVER  # the same for all cells
    regroup: bool = False  # whether it requests a new generation
    interleaved: bool = False  # whether its calls come from several threads or processes: their order proves nothing
    published: int = 0  # how often it has published something through the job's store
    new_names: Sequence[Sequence[str]] = ()  # names that it logs and that have no number yet, as paths
    new_axes: Sequence[str] = ()  # names that it knows to be x axes of the user, and that the others do not
    # when closing: how often it logged each name without a step; 0 for names of values that only the primary writes
    counts: Mapping[str, int] = {}

    def encoded(self, numbers: dict[str, int]) -> bytes:
        blocks = [([*map(numbers.__getitem__, names)], *rest) for names, *rest in self.blocks]
        return f"{_as_text(self[1:])}\n{_as_text(blocks)}".encode()

    @classmethod
    def decoded(cls, data: bytes, names: Sequence[str], known: dict[bytes, list[Block]]) -> Offer:
        """Return the inverse of `encoded`, given the names by number. `known` keeps equal calls. Raises ValueError."""
        state, _, calls = data.partition(b"\n")
        try:
            if calls not in known:
                known[calls] = list(_blocks(names, json.loads(calls)))
            offer = cls._make((known[calls], *json.loads(state)))
            patience, counts = (offer.give_up_new, offer.give_up_all), offer.counts.values()
            _check_type(int, offer.old, offer.more, *patience, offer.published, *counts)
            _check_type(bool, offer.regroup, offer.interleaved)
            _check_type(list, *offer.new_names)
            _check_type(str, *chain(*offer.new_names), *offer.new_axes)
            return offer._replace(intent=Intent(offer.intent))
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError(f"a rank sent {len(data)} bytes that are not an offer of calls") from error


def _blocks(names: Sequence[str], blocks: Iterable[Sequence[Any]]) -> Iterator[Block]:
    values = widest = 0
    for own, occurrences, step, stride, x, x_stride, number in blocks:
        _check_type(int, *own, *occurrences, stride, x, x_stride, number, 0 if step is None else step)
        if not len(own) == len(occurrences) == len(set(own)) or min(number - 1, *own, *occurrences, 0) < 0:
            raise ValueError("a block without calls, or with unknown names")
        yield Block(tuple(map(names.__getitem__, own)), tuple(occurrences), step, stride, x, x_stride, number)
        values += number * (len(own) or 1)
        widest = max(widest, len(own))
    if values > MOST_VALUES + widest:
        raise ValueError("more values than any rank offers at once")


def _check_type(kind: type, *values: object) -> None:
    if not {kind}.issuperset(map(type, values)):
        raise TypeError(f"not a {kind.__name__}")


def blocks_of(calls: Iterable[Call]) -> list[Block]:
    blocks: list[Block] = []
    for call in calls:
        if blocks and call.names is blocks[-1].names:
            block = blocks[-1]
            if block.number == 1:
                stride = 0 if block.step is None or call.step is None else call.step - block.step
                block = block._replace(stride=stride, x_stride=call.x - block.x)
            follows = block.from_call(block.number)
            if (follows.x, follows.step, follows.occurrences) == (call.x, call.step, call.occurrences):
                blocks[-1] = Block(*block[:-1], block.number + 1)
                continue
        blocks.append(Block(call.names, call.occurrences, call.step, 0, call.x, 0, 1))
    return blocks


class Party:
    """Ranks that offer the same calls."""

    def __init__(self, blocks: Sequence[Block], lowest: int) -> None:
        self.ranks: Ranks = NOBODY
        self.lowest = lowest  # of the ranks
        self.old: int = 0  # how many of the calls have waited long enough on one of the ranks
        self.taken: int = 0  # how many of the calls are taken
        self.left: deque[Block] = deque(blocks)  # the other calls
        self._blocks = blocks

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset[str]().union(*(block.names for block in self._blocks))

    def advance(self, number: int) -> None:
        self.taken += number
        while number:
            block = self.left.popleft()
            if number < block.number:
                self.left.appendleft(block.from_call(number))
            number -= min(number, block.number)


@lru_cache(maxsize=4096)
def cells_and_axes(names: Names, axes: frozenset[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return which names of a call are cells, and which are x axes of the user: cells only in calls of nothing else."""
    those = tuple([at for at, name in enumerate(names) if name in axes])
    return tuple([at for at, name in enumerate(names) if name not in axes]) or those, those
