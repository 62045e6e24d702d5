"""What a rank tells the others before a round: the calls that it offers, and its state. Pure.

Calls that follow each other with the same names form a block; so ranks that log the same send equal bytes, which a
group passes on once for all of them, and are one *party*. Names are numbered in the order in which all ranks have
learnt them.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, NamedTuple

from dist_wandb.exchange.protocol.calls import Call, Key, Names
from dist_wandb.exchange.protocol.contributors import NOBODY, Ranks
from dist_wandb.exchange.protocol.lanes import NOTHING

MOST_VALUES = 8192  # values that a rank offers in a round; the last call may exceed it


class Intent(IntEnum):
    """Whether this rank will contribute more; calls that wait are sent in any case."""

    OPEN = 0  # it may contribute more
    PAUSING = 1  # it waits until everything posted so far is finished
    CLOSING = 2  # it contributes nothing more, for good


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
        """Return one cell of one of the calls."""
        if self.step is None:
            return Key(self.names[name], None, self.occurrences[name] + index)
        return Key(self.names[name], self.step + index * self.stride, self.occurrences[name])

    def from_call(self, index: int) -> Block:
        """Return the block without its first calls."""
        names, occurrences, step, stride, x, x_stride, number = self
        if step is not None:
            step += index * stride
        elif index:
            occurrences = tuple([one + index for one in occurrences])
        return Block(names, occurrences, step, stride, x + index * x_stride, x_stride, number - index)


@dataclass(frozen=True)
class Offer:
    """The calls that a rank offers, and its state."""

    blocks: Sequence[Block] = ()  # the oldest calls of its outbox
    old: int = 0  # how many of them have waited so long that they are taken without other ranks
    more: int = 0  # how many further calls wait
    intent: Intent = Intent.OPEN
    give_up_new: float = NOTHING  # the round up to which it gives up cells of names that were never finished
    give_up_all: float = NOTHING  # the same for all cells
    regroup: bool = False  # whether it requests a new generation
    interleaved: bool = False  # whether its calls come from several threads or processes: their order proves nothing
    published: int = 0  # how often it has published something through the job's store
    new_names: Sequence[str | Sequence[str]] = ()  # names that it logs and that have no number yet, or their paths
    new_axes: Sequence[str] = ()  # names that it knows to be x axes of the user, and that the others do not
    counts: dict[str, int] = field(default_factory=dict)  # how often it logged each name without a step; when closing

    def encoded(self, numbers: dict[str, int]) -> bytes:
        """Return it as bytes, given the numbers of the names."""
        patience = [-1 if born == NOTHING else int(born) for born in (self.give_up_new, self.give_up_all)]
        flags = [int(self.intent), self.old, self.more, *patience, int(self.regroup), int(self.interleaved)]
        blocks = [
            [_spans([numbers[name] for name in block.names]), _same(block.occurrences), *block[2:]]
            for block in self.blocks
        ]
        rest = [self.published, [*self.new_names], [*self.new_axes], self.counts]
        while rest and not rest[-1]:
            rest.pop()
        return b"\n".join(json.dumps(part, separators=(",", ":")).encode() for part in ([flags, *rest], blocks))

    @classmethod
    def decoded(cls, data: bytes, names: Sequence[str], known: dict[bytes, list[Block]] | None = None) -> Offer:
        """Return the inverse of `encoded`, given the names by number. `known` keeps equal calls. Raises ValueError."""
        known = {} if known is None else known
        state, _, calls = data.partition(b"\n")
        try:
            (intent, old, more, new, every, regroup, interleaved), *rest = json.loads(state)
            defaults: list[Any] = [0, [], [], {}]
            published, new_names, new_axes, counts = rest + defaults[len(rest) :]
            if calls not in known:
                known[calls] = _blocks(names, json.loads(calls))
            of_new, of_all = (NOTHING if born < 0 else float(born) for born in (new, every))
            _check_type(int, old, more, published, *counts.values())
            _check_type(str, *chain.from_iterable([one] if type(one) is str else one for one in new_names), *new_axes)
            return cls(
                known[calls], old, more, Intent(intent), of_new, of_all, bool(regroup), bool(interleaved), published,
                new_names, new_axes, counts,
            )  # fmt: skip
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError(f"a rank sent {len(data)} bytes that are not an offer of calls") from error


def _spans(numbers: Iterable[int]) -> list[int]:
    """Return runs of consecutive numbers, in their order: the first number and the length of each run."""
    spans: list[int] = []
    for number in numbers:
        if spans and number == spans[-2] + spans[-1]:
            spans[-1] += 1
        else:
            spans += (number, 1)
    return spans


def _same(occurrences: tuple[int, ...]) -> int | tuple[int, ...]:
    """Return one number if all are equal."""
    return occurrences[0] if occurrences and occurrences.count(occurrences[0]) == len(occurrences) else occurrences


def _blocks(names: Sequence[str], blocks: Iterable[Sequence[Any]]) -> list[Block]:
    found = [_block(names, *block) for block in blocks]
    widest = max((len(block.names) for block in found), default=0)
    if sum(block.number * (len(block.names) or 1) for block in found) > MOST_VALUES + widest:
        raise ValueError("more values than any rank offers at once")
    return found


def _block(
    names: Sequence[str], spans: list[int], occurrences: Any, step: int | None, stride: int, x: int, x_stride: int,
    number: int,
) -> Block:  # fmt: skip
    own = tuple([name for at, length in zip(spans[::2], spans[1::2], strict=True) for name in names[at : at + length]])
    numbers = (occurrences,) * len(own) if isinstance(occurrences, int) else tuple(occurrences)
    _check_type(int, *numbers, *spans, stride, x, x_stride, number, 0 if step is None else step)
    if not len(numbers) == len(own) == len(set(own)) == sum(spans[1::2]) or min(number - 1, *spans, *numbers, 0) < 0:
        raise ValueError("a block without calls, or with unknown names")
    return Block(own, numbers, step, stride, x, x_stride, number)


def _check_type(kind: type, *values: object) -> None:
    if any(type(value) is not kind for value in values):
        raise TypeError(f"not a {kind.__name__}")


def blocks_of(calls: Iterable[Call]) -> list[Block]:
    """Return calls as blocks."""
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

    def __init__(self, ranks: Ranks, blocks: Sequence[Block], old: int) -> None:
        self.ranks = ranks
        self.lowest: int = min(ranks)
        self.old = old  # how many of the calls have waited long enough on one of the ranks
        self.taken: int = 0  # how many of the calls are taken
        self.left: deque[Block] = deque(blocks)  # the other calls
        self._blocks = blocks

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all calls, also of taken ones."""
        return frozenset[str]().union(*(block.names for block in self._blocks))

    def advance(self, number: int) -> None:
        """Take so many of the remaining calls."""
        self.taken += number
        while number:
            block = self.left.popleft()
            if number < block.number:
                self.left.appendleft(block.from_call(number))
            number -= min(number, block.number)


def parties_of(offers: Iterable[tuple[Ranks, Offer]]) -> list[Party]:
    """Return the parties of the ranks that have made these offers, ordered by their lowest ranks."""
    equal: dict[int, list[tuple[Ranks, Offer]]] = {}
    for ranks, offer in offers:
        equal.setdefault(id(offer.blocks), []).append((ranks, offer))
    parties = [
        Party(NOBODY.union(*(ranks for ranks, _ in those)), those[0][1].blocks, max(offer.old for _, offer in those))
        for those in equal.values()
    ]
    return sorted(parties, key=lambda party: party.lowest)


@lru_cache(maxsize=4096)
def cells_and_axes(names: Names, axes: frozenset[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return which names of a call are cells, and which are x axes of the user: cells only in calls of nothing else."""
    those = tuple([at for at, name in enumerate(names) if name in axes])
    return tuple([at for at, name in enumerate(names) if name not in axes]) or those, those
