"""The exchange of a unit's numbers as a state machine. Pure: no threads, clocks, sockets, torch or wandb.

Every rank of the unit has one `Rounds`. All of them go through the same sequence of rounds: each packs what it has to
say into two lists of numbers (`pack`); elsewhere these are reduced over the ranks, one by sum and one by maximum; and
each takes the same reduced lists (`take`). What the ranks know together (`names`, open cells, what is usual) changes by
reduced numbers alone. So it is equal on all ranks after every round, and all draw the same conclusions unasked.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from dist_wandb.exchange.protocol.batches import Row, Run, Slot, decoded, encoded, merged
from dist_wandb.settings.reduction import MAX_LANES, SUM_LANES, Totals, matches_any

_NOTHING = -math.inf
_CALLS = 2**32  # more than a rank ever logs; with ranks below 2**20, origins are exact in float64

# The second list begins with a header. Pairs hold (x, -x): their maxima are the largest and, negated, the smallest x.
_COUNTED, _STEP = slice(0, 2), slice(2, 4)
_ORIGIN, _UNKNOWN, _BUSY, _GIVE_UP_NEW, _GIVE_UP_ALL, _MORE, _REGROUP, _SPEAKING, _BACKLOG, _MINGLED = range(4, 14)
_HEADER = 14
# Then come the numbers of each name: the totals', its occurrence as a pair, and where its largest number is.
_PER_NAME = MAX_LANES + 3
_SUMS_PER_NAME = SUM_LANES + 1  # the totals', and the sum of squares for the spread
# In a round for many rows there come the numbers of each cell instead: the totals', and its origin. Then, of each value
# that awaits its spread, the sum of squares, and where its largest number is.
_PER_CELL = MAX_LANES + 1
_MANY = 8  # rows that wait on some rank, from which on the next round is for many: it costs three collectives, or four
_MOST_CELLS = 1024  # that a rank tells in a round for many; a row that was begun is told whole
_APART = "\0"  # in names that stand for what has an exchange of its own: each once in a round for many
_STEPS_PER_CELL = 2  # a cell must be forgotten long before a rank counts its occurrences anew
_STALE_NOTED = 65_536  # of how many names and occurrences it is noted what was forgotten
_MOST_ASSUMED = 4  # times as many finished cells as are remembered: of how many it is known that they rest on a guess
_VOICES = 3  # where a name's numbers of the first list tell how many ranks spoke


class Place(NamedTuple):
    """Where a row belongs.

    Args:
        counted: 0 where the user gave a step; 1 where none was given: contributions are then counted by name.
        step: The step; 0 where none was given.
    """

    counted: int
    step: int


class Key(NamedTuple):
    """A cell: what all ranks say of one name at one place, each for the same time.

    Args:
        place: Where it belongs.
        name: The name.
        occurrence: How often a rank had logged the name there before.
    """

    place: Place
    name: str
    occurrence: int

    @classmethod
    def of(cls, told: Sequence[Any]) -> Key:
        """The key that was told as JSON."""
        (counted, step), name, occurrence = told
        return cls(Place(counted, step), name, occurrence)


class _Said(NamedTuple):
    """What one rank says in one cell."""

    occurrence: int
    totals: Totals
    origin: float


class _Heard(NamedTuple):
    """What all ranks together say in one cell.

    Args:
        key: The cell.
        totals: What they contribute.
        origin: As in `Cell`.
    """

    key: Key
    totals: Totals
    origin: float


_Counts = tuple[tuple[str, int], ...]
_Queue = list[_Said] | deque[_Said]  # short where steps are given

_WITHOUT_STEP = Place(1, 0)
_NOTHING_SAID = Totals()
_NO_SUMS = (0.0,) * _SUMS_PER_NAME
_NO_MAXIMA = (_NOTHING,) * _PER_NAME


@dataclass(slots=True)
class Cell:
    """What the unit knows of one name at one place while it is open.

    Args:
        born: The round in which it was opened.
        totals: What was contributed.
        origin: Who contributed first in the order of ranks, and its count of calls: -(rank * 2**32 + calls).
        corrects: Whether it was finished before.
        number: How many were opened before it.
        gone: How many of its voices are of ranks that are gone, so that others have yet to speak.
    """

    born: int
    totals: Totals = _NOTHING_SAID
    origin: float = _NOTHING
    corrects: bool = False
    number: int = 0
    gone: int = 0


@dataclass(slots=True)
class Spread:
    """How a name's numbers spread over the ranks; known one round after its cell is finished.

    Args:
        squares: Sum of w * (x - mean)**2.
        largest_at: The lowest rank that has the largest number, or a NaN where there is one.
    """

    squares: float = 0.0
    largest_at: int = -1


class _Assumed(NamedTuple):
    """Of a cell that was finished as if the silent ranks never logged its name.

    Args:
        number: How many cells were opened before it.
        origin: As of the cell.
        voices: How many ranks had spoken in it.
    """

    number: int
    origin: float
    voices: int


class _Ready(NamedTuple):
    """A cell that is to be finished.

    Args:
        key: The cell.
        gave_up: Whether only because patience ran out with ranks that usually speak.
        sure: Whether it is known that the silent ranks have passed it.
        if_complete: Whether only if it still is complete when those before it are finished.
    """

    key: Key
    gave_up: bool = False
    sure: bool = False
    if_complete: bool = False


class Finished(NamedTuple):
    """A value to be written: all that was contributed to one cell.

    Args:
        key: The cell.
        totals: What was contributed; of no rank where a value that was written, and is forgotten, is flagged.
        calls: Count of `log` calls of the lowest rank that contributed: the x axis of rows without a step.
        corrects: Whether a value of this cell was finished before; this one takes its place.
        missing: How many ranks are missing that usually contribute: they have left without a word, or patience ran out.
        spread: The spread over ranks, for names of which it is wanted.
    """

    key: Key
    totals: Totals
    calls: int
    corrects: bool
    missing: int
    spread: Spread | None = None

    def without_spread(self) -> Finished:
        """The value, of which the spread cannot be known, as a rank that contributed is gone."""
        return self._replace(spread=None)

    def as_list(self) -> list[Any]:
        """As JSON can hold it."""
        spread = None if self.spread is None else [self.spread.squares, self.spread.largest_at]
        return [*self.key.place, *self.key[1:], list(self.totals), self.calls, self.corrects, self.missing, spread]

    @classmethod
    def from_list(cls, told: Sequence[Any]) -> Finished:
        """The inverse of `as_list`."""
        counted, step, name, occurrence, totals, calls, corrects, missing, spread = told
        key = Key(Place(counted, step), name, occurrence)
        return cls(key, Totals(*totals), calls, corrects, missing, None if spread is None else Spread(*spread))


@dataclass(frozen=True)
class Outcome:
    """What a round led to; the same on all ranks.

    Args:
        finished: Values to be written, in this order. Those of one place belong into one row.
        needs_names: Whether names must be exchanged before the next round: `unknown` on every rank, then `learn`.
        closed: Whether all ranks are closing and nothing is left: no further round takes place.
        paused: Whether all ranks have paused: all that any of them said is finished.
        more: Whether some rank has more to say at once: the next round need not wait for anything.
        regroup: Whether a rank asked for the ranks that take part to be agreed on anew before the next round.
        late: Of what this rank contributed in this round, what came after its value was finished.
        lost: What this rank contributed so late that the others' part is forgotten: it is not written.
    """

    finished: tuple[Finished, ...] = ()
    needs_names: bool = False
    closed: bool = False
    paused: bool = False
    more: bool = False
    regroup: bool = False
    late: tuple[Key, ...] = field(default=(), compare=False)
    lost: tuple[Key, ...] = field(default=(), compare=False)


class Rounds:
    """One rank's part in the rounds of its unit.

    Args:
        rank: Index of this rank in the unit; the primary is 0.
        size: Number of ranks in the unit.
        spread: Patterns of names whose spread over ranks is wanted.
        needs_primary: Tells of a name whether only the primary can make anything of it, and not without its own part.
        remembered: How many finished cells are kept for contributions that come late.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        spread: Sequence[str] = (),
        needs_primary: Callable[[str], bool] = lambda _: False,
        remembered: int = 32_768,
    ) -> None:
        self.size = size
        self.absent = 0
        self.round = 0
        self.closing = False  # this rank will say nothing more
        self.pausing = False  # this rank waits until all that was said so far is finished
        self.mingles = False  # what this rank says comes from several threads or processes, each in its order
        self.names: list[str] = []
        self.cells: OrderedDict[Key, Cell] = OrderedDict()
        self._rank = rank
        self._spread = tuple(spread)
        self._needs_primary = needs_primary
        self._remembered = remembered
        self._positions: dict[str, int] = {}
        self._usual: dict[str, int] = {}  # by name: how many ranks spoke when it was finished last
        self._whole: dict[str, int] = {}  # and when it was finished last with none missing
        self._most: dict[str, int] = {}  # and the most that ever spoke
        self._lacking: set[str] = set()  # names that were given up, and not whole since
        self._by_name: dict[str, dict[Key, Cell]] = {}  # open cells
        self._opened = 0
        self._assumed: OrderedDict[Key, _Assumed] = (
            OrderedDict()
        )  # finished cells which silent ranks may yet turn up for
        self._proven: set[str] = set()  # names of which all ranks have once passed a cell that some did not speak in
        self._doubts = False  # whether ranks that are there, but not waited for any more, may log other names
        self._reflags = False  # a rank is lost that may have been about to
        self._done: OrderedDict[Key, tuple[Totals, float]] = OrderedDict()  # what was contributed, and its origin
        self._stale: dict[tuple[str, int], int] = {}  # by name and occurrence: the largest step that was forgotten
        self._awaiting: list[Finished] = []  # finished, but written only after a round that brings their spread
        self._outbox: OrderedDict[Place, dict[str, _Queue]] = OrderedDict()
        self.many_wait = False  # on some rank: the next round is one for many rows
        self._offered: dict[Key, _Said] = {}
        self._needs_names = False  # for the next thing that this rank would say in a round for many rows
        self._batch: list[Key] | None = None  # the cells of the next round, if it is one for many rows
        self._told: list[tuple[Key, _Said]] = []  # what this rank said in the last round
        self._focus: tuple[int, ...] = ()
        self._turns: dict[tuple[Place, str], int] = {}
        self._occurrences: OrderedDict[int, _Counts] = OrderedDict()  # by step: how often each name was logged
        self._calls: dict[str, int] = {}  # and without a step
        self._same: dict[_Counts, _Counts] = {}  # most steps have the same counts: they are kept once
        self._own: OrderedDict[Key, Totals] = OrderedDict()  # what this rank said where the spread is wanted
        self._spoken: set[Key] = set()  # open cells that this rank contributed to
        self._spreading: set[str] = set()
        self._has_lost = False  # a rank that took part
        self._has_mingled = False  # some rank: then to speak in a later row is not to have passed the earlier ones
        self._recheck = False
        self._given_up = {_GIVE_UP_NEW: _NOTHING, _GIVE_UP_ALL: _NOTHING}

    # What this rank wants to say

    def post(self, values: Mapping[str, Totals], step: int | None, calls: int = 0) -> list[Key]:
        """Put what this rank logged in one call into the outbox.

        Args:
            values: This rank's contribution by name.
            step: The step that the user gave, or `None`.
            calls: How often this rank had called `log` before.

        Returns:
            The cells that the values go into, in the order of `values`.
        """
        place = Place(1, 0) if step is None else Place(0, step)
        origin = -float(self._rank * _CALLS + calls)
        if not values:
            return []
        waiting = self._outbox.setdefault(place, {})
        keys = []
        for name, occurrence in zip(values, self._count(step, values), strict=True):
            said = _Said(occurrence, values[name], origin)
            if name in waiting:
                waiting[name].append(said)
            else:
                waiting[name] = deque((said,)) if place.counted else [said]
            keys.append(Key(place, name, occurrence))
        return keys

    def _count(self, step: int | None, names: Iterable[str]) -> list[int]:
        """How often each name was logged at a step before; count it. What was counted longest ago is forgotten."""
        counts = self._calls if step is None else dict(self._occurrences.pop(step, ()))
        occurrences = [counts.get(name, 0) for name in names]
        counts.update((name, occurrence + 1) for name, occurrence in zip(names, occurrences, strict=True))
        if step is not None:
            told = tuple(counts.items())
            self._occurrences[step] = self._same.setdefault(told, told)
            if len(self._same) > self._remembered:
                self._same.clear()
            if len(self._occurrences) > _STEPS_PER_CELL * self._remembered:
                self._occurrences.popitem(last=False)
        return occurrences

    def give_up(self, born: int, *, new_only: bool) -> None:
        """Say in the next round that this rank has waited long enough for others.

        Args:
            born: Cells opened in this round or before are to be finished with those who are there.
            new_only: Whether only those of names that were never finished before are meant.
        """
        lane = _GIVE_UP_NEW if new_only else _GIVE_UP_ALL
        self._given_up[lane] = max(self._given_up[lane], born)

    @property
    def pending(self) -> int:
        """Number of rows that this rank has yet to tell the others about."""
        without_step = self._outbox.get(_WITHOUT_STEP)
        return len(self._outbox) + (max(map(len, without_step.values())) - 1 if without_step else 0)

    @property
    def busy(self) -> bool:
        """Whether there is reason for another round: something to say, cells that are open, values that wait."""
        return bool(self._outbox or self.cells or self._awaiting or (self._reflags and self._assumed))

    def pending_cells(self) -> list[tuple[str, int | None, int]]:
        """What this rank has yet to tell the others, as (name, step, occurrence), in the order of its places."""
        return [
            (name, None if place.counted else place.step, said.occurrence)
            for place, values in self._outbox.items()
            for name, waiting in values.items()
            for said in waiting
        ]

    @property
    def settled(self) -> bool:
        """Whether all that this rank ever posted is finished, and nothing waits for its spread."""
        return not (self._outbox or self._spoken or self._awaiting)

    def awaited(self) -> set[str]:
        """Names of values of which this rank has told its part, and that are not finished, or lack their spread.

        There may be more to tell of these than numbers: what is beside them, and how far they are from the mean.
        """
        awaiting = {value.key.name for value in self._awaiting if value.key in self._own}
        return awaiting | {key.name for key in self._spoken}

    def has_spread(self, name: str) -> bool:
        """Whether the spread of a name over the ranks is wanted."""
        return name in self._spreading

    @property
    def open_places(self) -> int:
        """Number of rows that open cells belong to."""
        return len({(key.place, key.occurrence if key.place.counted else 0) for key in self.cells})

    def count_doubtful(self) -> int:
        """How many finished values get a flag if the ranks that have yet to say theirs are lost."""
        return len(self._lacking_by_now())

    def unspoken(self, born: int) -> list[Key]:
        """Open cells, opened in round `born` or before, that wait for others, though this rank has said nothing."""
        old = takewhile(lambda item: item[1].born <= born, self.cells.items())  # they are in the order of their birth
        return [key for key, _ in old if key not in self._spoken]

    def unknown(self) -> list[str]:
        """Names in the outbox that the unit has not agreed on, in the order in which they were logged."""
        return [name for name in self.pending_names() if name not in self._positions]

    def pending_names(self) -> list[str]:
        """Names in the outbox, in the order in which they were logged."""
        return list(dict.fromkeys(name for values in self._outbox.values() for name in values))

    def rename(self, old: str, new: str) -> list[tuple[Key, Key]]:
        """Say under another name what this rank has yet to say, before the others know anything of it.

        Returns:
            The cells it would have gone into, and those that it goes into now.
        """
        renamed = []
        for place, values in self._outbox.items():
            step = None if place.counted else place.step
            for said in values.pop(old, ()):
                (occurrence,) = self._count(step, (new,))
                values.setdefault(new, deque()).append(said._replace(occurrence=occurrence))
                renamed.append((Key(place, old, said.occurrence), Key(place, new, occurrence)))
        return renamed

    # What all ranks do alike, between rounds

    def learn(self, told: Iterable[Iterable[str]]) -> None:
        """Agree on the names that the ranks told, given in the order of ranks."""
        for name in (name for names in told for name in names):
            if name not in self._positions:
                self._positions[name] = len(self.names)
                self.names.append(name)
                if matches_any(name, self._spread):
                    self._spreading.add(name)

    def resize(self, size: int, absent: int, *, doubts: bool = False) -> None:
        """Go on with other ranks than before. Cells in which all of them have spoken are finished in the next round.

        Args:
            size: Number of ranks that take part.
            absent: Number of ranks that should take part, but do not.
            doubts: Whether these are there, but not waited for any more, so that they may log what they never did.
        """
        self._has_lost = self._has_lost or size < self.size
        self._awaiting = [value.without_spread() if value.totals.number > size else value for value in self._awaiting]
        self.size = size
        self.absent = absent
        self._doubts = doubts
        self._recheck = True
        self._reflags = absent > 0
        self._focus = ()  # what was looked for may have been a lost rank's
        self._turns.clear()
        self._batch = None

    def forget_usual(self) -> None:
        """Forget how many ranks log which name, as that was learnt from too few of them."""
        self._usual.clear()
        self._whole.clear()

    def spoken(self) -> list[int]:
        """Positions, among the open cells, of those in which this rank has spoken."""
        return [position for position, key in enumerate(self.cells) if key in self._spoken]

    def held(self) -> list[int]:
        """Positions, among the values that await their spread, of those which this rank has contributed to."""
        return [position for position, value in enumerate(self._awaiting) if value.key in self._own]

    def recount(self, spoken: Iterable[Sequence[int]], held: Iterable[Sequence[int]]) -> None:
        """Tell, in open cells, voices of ranks that are gone from those of the ranks that take part.

        A spread is known only if all are there who contributed: each of them says how far it is from the mean.

        Args:
            spoken: What each of these has said by `spoken`.
            held: And by `held`.
        """
        holding = Counter(position for positions in held for position in positions)
        for position, value in enumerate(self._awaiting):
            if holding[position] < value.totals.number:
                self._awaiting[position] = value.without_spread()
        present = Counter(position for positions in spoken for position in positions)
        for position, cell in enumerate(self.cells.values()):  # of a correction, what was said before is not known
            cell.gone = 0 if cell.corrects else max(0, cell.totals.voices - present[position])

    def snapshot(self) -> dict[str, Any]:
        """What the ranks know together, as JSON can hold it: with it a rank that was not there can go on with them."""
        return {
            "round": self.round,
            "names": self.names,
            "cells": [_as_list(key, cell) for key, cell in self.cells.items()],
            "done": [_as_list(key, Cell(0, *done)) for key, done in self._done.items()],
            "awaiting": [value.as_list() for value in self._awaiting],
            "usual": self._usual,
            "whole": self._whole,
            "most": self._most,
            "lacking": sorted(self._lacking),
            "stale": [[*key, step] for key, step in self._stale.items()],
            "opened": self._opened,
            "many_wait": self.many_wait,
            "proven": sorted(self._proven),
            "assumed": [[key, *assumed] for key, assumed in self._assumed.items()],
            "lost": self._has_lost,
            "mingled": self._has_mingled,
            "focus": self._focus,
            "turns": [[*place, name, turn] for (place, name), turn in self._turns.items()],
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take over what the ranks know together. What this rank has yet to say is kept."""
        self.round = int(snapshot["round"])
        self.names, self._positions = [], {}
        self.learn([snapshot["names"]])
        self.cells, self._by_name = OrderedDict(), {}
        for key, cell in map(_from_list, snapshot["cells"]):
            self._keep_open(key, cell)
        self._opened = int(snapshot["opened"])
        self.many_wait = bool(snapshot["many_wait"])
        self._proven = set(snapshot["proven"])
        self._assumed = OrderedDict((Key.of(key), _Assumed(*assumed)) for key, *assumed in snapshot["assumed"])
        self._done = OrderedDict((key, (cell.totals, cell.origin)) for key, cell in map(_from_list, snapshot["done"]))
        self._awaiting = [Finished.from_list(told) for told in snapshot["awaiting"]]
        self._usual, self._whole = dict(snapshot["usual"]), dict(snapshot["whole"])
        self._most = dict(snapshot["most"])
        self._lacking = set(snapshot["lacking"])
        self._stale = {(name, occurrence): step for name, occurrence, step in snapshot["stale"]}
        self._has_lost = bool(snapshot["lost"])
        self._has_mingled = bool(snapshot["mingled"])
        self._focus = tuple(snapshot["focus"])
        self._turns = {(Place(counted, step), name): turn for counted, step, name, turn in snapshot["turns"]}
        self._spoken.intersection_update(self.cells)

    def take_back(self) -> None:
        """Say once more what this rank said in the last round: the others broke it off, and go on from before it."""
        for key, said in reversed(self._told):
            queue = self._outbox.setdefault(key.place, {}).setdefault(key.name, deque() if key.place.counted else [])
            queue.insert(0, said)
            self._outbox.move_to_end(key.place, last=False)
        self._told = []

    # A round

    def offer(self) -> list[Run]:
        """Before a round for many rows (see `many_wait`): in which cells this rank has something to say, as JSON."""
        self._offered, self._needs_names = {}, False
        rows: list[Row] = []
        apart: set[str] = set()
        for place, values in self._rows_waiting():
            names = {name for name in values if _APART in name}
            if len(self._offered) >= _MOST_CELLS or names & apart:
                break
            apart |= names
            self._offered.update((Key(place, name, said.occurrence), said) for name, said in values.items())
            rows.append(tuple(Slot(*place, self._positions[name], said.occurrence) for name, said in values.items()))
        return encoded(rows)

    def agree(self, told: Iterable[Iterable[Sequence[Any]]]) -> None:
        """Make the next round one for many rows: for the cells that the ranks told, given in the order of ranks."""
        offers = [decoded((Run(*run) for run in runs), 2 * _MOST_CELLS) for runs in told]
        slots = merged(offers, 2 * _MOST_CELLS)
        self._batch = [Key(Place(slot.counted, slot.step), self.names[slot.name], slot.occurrence) for slot in slots]

    def pack(self, *, regroup: bool = False) -> tuple[list[float], list[float]]:
        """What this rank says in the next round: numbers to be summed over ranks, and to take the largest of.

        Args:
            regroup: Whether the ranks that take part should be agreed on anew after this round.
        """
        maxima = [_NOTHING] * _HEADER
        maxima[_BUSY] = float(not self.closing or bool(self._outbox or self._awaiting))
        for lane, born in self._given_up.items():
            maxima[lane] = born
        maxima[_SPEAKING] = float(not (self.closing or self.pausing) or bool(self._outbox))
        maxima[_REGROUP] = float(regroup)
        maxima[_MINGLED] = float(self.mingles)
        return self._pack_row(maxima) if self._batch is None else self._pack_batch(self._batch, maxima)

    def take(self, sums: Sequence[float], maxima: Sequence[float]) -> Outcome:
        """Draw the conclusions of a round.

        Args:
            sums: The first lists of all ranks, summed.
            maxima: The largest of the second lists of all ranks, number by number.
        """
        self.round += 1
        self._told = []
        batch, self._batch = self._batch, None
        written = self._take_spreads(batch, sums, maxima)
        regroup = maxima[_REGROUP] > 0
        self._has_mingled = self._has_mingled or maxima[_MINGLED] > 0
        closed = maxima[_BUSY] == 0 and not regroup
        paused = maxima[_SPEAKING] == 0
        needs_names = maxima[_UNKNOWN] > 0
        if needs_names and batch is None:
            return Outcome(written, needs_names=True, more=True, regroup=regroup)
        self._given_up = {lane: born if born > maxima[lane] else _NOTHING for lane, born in self._given_up.items()}
        heard = self._heard(sums, maxima) if batch is None else self._heard_in(batch, sums, maxima)
        finished, late, lost = self._conclude(heard, maxima)
        awaits = bool(self._awaiting) or any(value.spread for value in finished)
        self._awaiting += finished if awaits else ()
        self.many_wait = maxima[_BACKLOG] >= _MANY or self._await_many()
        more = maxima[_MORE] > 0 or bool(self._focus or self._turns) or needs_names or self.many_wait
        if awaits:
            more, closed, paused = more or closed, False, False
        else:
            written, more = written + finished, more or self._recheck
        return Outcome(written, needs_names, closed, paused, more, regroup, late, lost)

    def _rows_waiting(self) -> Iterator[tuple[Place, dict[str, _Said]]]:
        """Rows in the outbox, in the order in which they are said, up to the first whose names are not agreed on."""
        for place, values in self._outbox.items():
            self._needs_names = not values.keys() <= self._positions.keys()
            if self._needs_names:
                return
            queues = {name: iter(queue) for name, queue in values.items()}
            heads = {name: next(queue) for name, queue in queues.items()}
            while heads:
                row = _oldest(heads) if place.counted else dict(heads)
                yield place, row
                for name in row:
                    following = next(queues[name], None)
                    if following is None:
                        del heads[name]
                    else:
                        heads[name] = following

    def _await_many(self) -> bool:
        """Whether so many values await their spread that they would take many rounds for one row."""
        return len(self._awaiting) >= _MANY and len(self._awaiting) - len(self._next_awaited()) >= _MANY

    def _pack_row(self, maxima: list[float]) -> tuple[list[float], list[float]]:
        """The lists of a round for one row: the header, and the numbers of all names."""
        place = self._next_place()
        due = {} if place is None else self._due(place)
        self._offered = {} if place is None else {Key(place, name, said.occurrence): said for name, said in due.items()}
        maxima[_MORE] = float(bool(self._outbox))  # also where it is another rank's turn
        if place is not None:
            for pair, number in zip((_COUNTED, _STEP), place, strict=True):
                maxima[pair] = _pair(number)
            maxima[_UNKNOWN] = float(not self._outbox[place].keys() <= self._positions.keys())
            maxima[_ORIGIN] = max((said.origin for said in due.values()), default=_NOTHING)
            waiting = sum(map(len, self._outbox[place].values()))
            maxima[_MORE] = float(len(self._outbox) > 1 or waiting > len(due))
            maxima[_BACKLOG] = self.pending - 1
        sums = self._lanes(due, maxima)
        for value in self._next_awaited():
            if value.spread is not None:
                start, header = self._starts(value.key.name)
                sums[start + SUM_LANES], maxima[header + MAX_LANES + 2] = self._spread_of(value)
        return sums, maxima

    def _pack_batch(self, batch: Sequence[Key], maxima: list[float]) -> tuple[list[float], list[float]]:
        """The lists of a round for many rows: the header, the numbers of all cells, and of all that await a spread."""
        self._offered = {key: self._offered[key] for key in batch if key in self._offered}
        rows = len({said.origin if key.place.counted else key.place for key, said in self._offered.items()})
        left = self.pending - rows
        maxima[_MORE], maxima[_BACKLOG] = float(left > 0), left
        maxima[_UNKNOWN] = float(self._needs_names)
        sums: list[float] = []
        for key in batch:
            said = self._offered.get(key)
            if said is None:
                sums += _NO_SUMS[:SUM_LANES]
                maxima += _NO_MAXIMA[:_PER_CELL]
            else:
                summed, largest = said.totals.lanes()
                sums += summed
                maxima += largest
                maxima.append(said.origin)
        for value in self._awaiting:
            squares, largest_at = self._spread_of(value)
            sums.append(squares)
            maxima.append(largest_at)
        return sums, maxima

    def _next_place(self) -> Place | None:
        """The oldest place in the outbox; while ranks look for one to agree on, the oldest that it may be."""
        return next((place for place in self._outbox if place[: len(self._focus)] == self._focus), None)

    def _due(self, place: Place) -> dict[str, _Said]:
        """By name the oldest that this rank has to say at a place, but for names where it is an earlier one's turn."""
        front = {name: said[0] for name, said in self._outbox[place].items()}
        turns = self._turns
        due = {
            name: said for name, said in front.items() if turns.get((place, name), said.occurrence) == said.occurrence
        }
        if not place.counted or not due:
            return due
        return _oldest(due)

    def _lanes(self, due: Mapping[str, _Said], maxima: list[float]) -> list[float]:
        """The first list, and the second one behind its header: what is due under the names that are known."""
        sums: list[float] = []
        for name in self.names:
            said = due.get(name)
            if said is None:
                sums += _NO_SUMS
                maxima += _NO_MAXIMA
            else:
                summed, largest = said.totals.lanes()
                sums += summed
                sums.append(0.0)
                maxima += largest
                maxima += (said.occurrence, -said.occurrence, _NOTHING)
        return sums

    def _spread_of(self, waiting: Finished) -> tuple[float, float]:
        """This rank's part in the sum of squares of a value, and, negated, its index if it has the largest number."""
        own = self._own.get(waiting.key)
        if own is None or waiting.spread is None:
            return 0.0, _NOTHING
        deviation = own.plain - waiting.totals.reduced("mean")
        has_largest = own.nans if waiting.totals.nans else own.plain == waiting.totals.largest
        squares = own.weight * deviation * deviation  # of huge ones infinite, where a power would raise
        return squares, -float(self._rank) if has_largest else _NOTHING

    def _next_awaited(self) -> tuple[Finished, ...]:
        """The first finished values whose spreads fit into one round, which has room for one cell of each name."""
        names: set[str] = set()
        for number, value in enumerate(self._awaiting):
            if value.key.name in names:
                return tuple(self._awaiting[:number])
            if value.spread is not None:
                names.add(value.key.name)
        return tuple(self._awaiting)

    def _take_spreads(
        self, batch: Sequence[Key] | None, sums: Sequence[float], maxima: Sequence[float]
    ) -> tuple[Finished, ...]:
        """Give finished values their spread: in a round for many rows all, else those that it had room for."""
        written = self._next_awaited() if batch is None else tuple(self._awaiting)
        del self._awaiting[: len(written)]
        for number, value in enumerate(written):
            if value.spread is None:
                continue
            if batch is None:
                start, header = self._starts(value.key.name)
                squares, largest_at = sums[start + SUM_LANES], maxima[header + MAX_LANES + 2]
            else:
                squares = sums[SUM_LANES * len(batch) + number]
                largest_at = maxima[_HEADER + _PER_CELL * len(batch) + number]
            value.spread.squares = squares
            value.spread.largest_at = -1 if largest_at == _NOTHING else int(-largest_at)
        return written

    def _heard(self, sums: Sequence[float], maxima: Sequence[float]) -> list[_Heard]:
        """What all ranks together said in a round for one row: nothing if they proposed different ones."""
        place = self._agreed_place(maxima)
        return [] if place is None else self._heard_at(place, sums, maxima)

    def _heard_in(self, batch: Sequence[Key], sums: Sequence[float], maxima: Sequence[float]) -> list[_Heard]:
        """What all ranks together said in a round for many rows."""
        self._focus = ()  # whose turn it is, and which place is to be next, was of what may be said by now
        self._turns.clear()
        heard = []
        start, header = 0, _HEADER
        for key in batch:
            totals = Totals.from_lanes(sums[start : start + SUM_LANES], maxima[header : header + MAX_LANES])
            if totals.voices:
                heard.append(_Heard(key, totals, maxima[header + MAX_LANES]))
            start, header = start + SUM_LANES, header + _PER_CELL
        return heard

    def _agreed_place(self, maxima: Sequence[float]) -> Place | None:
        """The place that all who proposed one proposed; else the next proposals are narrowed to the smallest."""
        self._focus = ()
        if maxima[_COUNTED][0] == _NOTHING:
            return None
        agreed: list[int] = []
        for pair in (_COUNTED, _STEP):
            largest, smallest = maxima[pair][0], -maxima[pair][1]
            agreed.append(int(smallest))
            if largest != smallest:
                self._focus = tuple(agreed)
                return None
        return Place(*agreed)

    def _heard_at(self, place: Place, sums: Sequence[float], maxima: Sequence[float]) -> list[_Heard]:
        """What all ranks together said in the cells of a place; names that were said for different times take turns."""
        heard = []
        header = _HEADER
        for start, name in zip(range(0, len(sums), _SUMS_PER_NAME), self.names, strict=True):
            if sums[start + _VOICES]:
                last, first = maxima[header + MAX_LANES], -maxima[header + MAX_LANES + 1]
                if first == last:
                    totals = Totals.from_lanes(sums[start : start + SUM_LANES], maxima[header : header + MAX_LANES])
                    heard.append(_Heard(Key(place, name, int(first)), totals, maxima[_ORIGIN]))
                    if self._turns:
                        self._turns.pop((place, name), None)
                else:
                    self._turns[place, name] = int(first)
            header += _PER_NAME
        return heard

    def _conclude(
        self, heard: list[_Heard], maxima: Sequence[float]
    ) -> tuple[tuple[Finished, ...], tuple[Key, ...], tuple[Key, ...]]:
        """Put what was said into its cells, and finish those that are ready.

        Returns:
            What is finished, the cells that this rank contributed to though they were finished before, and those
            whose other contributions are forgotten.
        """
        self._told = [(key, self._offered[key]) for key, *_ in heard if key in self._offered]
        for key, told in self._told:
            self._drop(key, told)
        self._forget(self._own, self._remembered)
        if not self.cells and not self._reflags and self._is_all(heard):  # as in every round of ranks that go in step
            self._recheck = False
            finished = tuple([self._finished_at_once(*said) for said in heard])
            self._forget_done()
            return finished, (), ()
        for key, totals, origin in heard:
            cell = self._open(key)
            cell.totals = cell.totals + totals if cell.totals.voices else totals
            cell.origin = max(cell.origin, origin)
        self._spoken.update(key for key, _ in self._told)
        late = tuple(key for key, _ in self._told if self.cells[key].corrects)
        finished, lost = self._finish_ready([key for key, *_ in heard], maxima)
        return self._reflagged() + finished, late, lost

    def _finish_ready(
        self, touched: Sequence[Key], maxima: Sequence[float]
    ) -> tuple[tuple[Finished, ...], tuple[Key, ...]]:
        """Finish what is ready, in the order in which it was opened.

        First that of new names, as others of the names may be complete by what is learnt from it.
        """
        passed = self._passed(touched)
        numbers = {key: self.cells[key].number for key in passed}
        first, lost = self._finish([_Ready(key, sure=True) for key in passed])
        suspects = {*touched, *(key for name in {key.name for key in passed} for key in self._by_name.get(name, ()))}
        ready = self._ready(suspects & self.cells.keys(), maxima)
        if not passed:
            return self._finish(ready)
        numbers.update((key, self.cells[key].number) for key, *_ in ready)
        others, lost_of_others = self._finish(ready)
        return tuple(sorted(first + others, key=lambda value: numbers[value.key])), lost + lost_of_others

    def _passed(self, touched: Sequence[Key]) -> list[Key]:
        """Open cells of names that were never finished, which all ranks have passed: each has spoken in a later row."""
        by_all = [] if self._has_mingled else [key for key in touched if self._is_by_all(self.cells[key])]
        if not by_all:
            return []
        latest = max(by_all, key=lambda key: self.cells[key].number)
        row, number = self._row(latest, self.cells[latest].origin), self.cells[latest].number
        return [
            key
            for name in self._by_name
            if name not in self._usual
            for key, cell in self._by_name[name].items()
            if cell.number < number and self._row(key, cell.origin) != row
        ]

    def _is_by_all(self, cell: Cell) -> bool:
        return not cell.corrects and cell.totals.voices - cell.gone >= self.size > 1

    @staticmethod
    def _row(key: Key, origin: float) -> tuple[Place, float]:
        """What the cells of one row have in common: without a step, each call is a row of its own."""
        return key.place, origin if key.place.counted else 0.0

    def _prove(self, key: Key, number: int, origin: float) -> None:
        """All ranks have spoken in a cell: rows before it rest on no guess any more."""
        row = self._row(key, origin)
        while self._assumed:
            oldest, assumed = next(iter(self._assumed.items()))
            if assumed.number >= number or self._row(oldest, assumed.origin) == row:
                return
            del self._assumed[oldest]
            self._proven.add(oldest.name)

    def _reflagged(self) -> tuple[Finished, ...]:
        """After a rank was lost: finished values that lack it, though nobody knew then that it logs their names."""
        if not self._reflags:
            return ()
        self._reflags = False
        return tuple(self._flag(key) for key in self._lacking_by_now() if key not in self.cells)

    def _lacking_by_now(self) -> list[Key]:
        """Cells that were finished by a guess, of names which more ranks log than had spoken."""
        most = self._most
        return [key for key, before in self._assumed.items() if most.get(key.name, 0) > before.voices]

    def _flag(self, key: Key) -> Finished:
        """A finished value anew, with a flag; without the value where it is forgotten, or has no number."""
        _, origin, voices = self._assumed.pop(key)
        totals, _ = self._done.get(key, (_NOTHING_SAID, 0.0))
        missing = max(1, min(self.absent, self._most[key.name] - voices))
        told = totals if totals.number else _NOTHING_SAID
        return Finished(key, told, int(-origin) % _CALLS, corrects=True, missing=missing)

    def _is_too_late(self, key: Key, cell: Cell) -> bool:
        """Whether what was finished of a cell before, and is forgotten, is better than what was said now."""
        if cell.corrects or not self._is_stale(key):
            return False
        return key in self._assumed or cell.totals.voices < self._whole.get(key.name, 0)

    def _is_all(self, heard: list[_Heard]) -> bool:
        """Whether nobody is waited for, and none of it comes after its cell was finished."""
        size, usual, done = self.size, self._usual, self._done
        return all(
            totals.voices == min(size, usual.get(key.name, size)) and key not in done and not self._is_stale(key)
            for key, totals, _ in heard
        )

    def _drop(self, key: Key, said: _Said) -> None:
        """Take from the outbox what this rank has said; remember the number where its spread is wanted."""
        values = self._outbox[key.place]
        queue = values[key.name]
        queue.remove(said)  # the first one, but where ranks contradict each other in their order
        if not queue:
            del values[key.name]
            if not values:
                del self._outbox[key.place]
        if key.name in self._spreading and said.totals.number:
            self._own[key] = said.totals

    def _open(self, key: Key) -> Cell:
        cell = self.cells.get(key)
        if cell is None:
            before = self._done.pop(key, None)
            cell = Cell(self.round) if before is None else Cell(self.round, *before, corrects=True)
            cell.number = self._opened
            self._opened += 1
            self._keep_open(key, cell)
        return cell

    def _keep_open(self, key: Key, cell: Cell) -> None:
        self.cells[key] = cell
        self._by_name.setdefault(key.name, {})[key] = cell

    def _ready(self, touched: set[Key], maxima: Sequence[float]) -> list[_Ready]:
        """Cells to finish now: complete ones, those that all ranks have passed or gave up, all in a common pause."""
        everything = maxima[_SPEAKING] == 0
        suspects = self.cells.keys() if self._recheck else touched
        self._recheck = False
        complete = {key for key in suspects if self._is_complete(key, self.cells[key])}
        if len(complete) == len(self.cells):
            return [_Ready(key, sure=everything, if_complete=not everything) for key in self.cells]
        newest: dict[str, int] = {}
        proof: dict[str, int] = {}
        for key in complete:
            cell = self.cells[key]
            if not cell.corrects and cell.number > newest.get(key.name, -1):
                newest[key.name] = cell.number
            if self._is_by_all(cell) and cell.number > proof.get(key.name, -1):
                proof[key.name] = cell.number
        ready = []
        for key in self.cells if everything else self._candidates(complete, maxima):
            cell = self.cells[key]
            is_behind = cell.number < newest.get(key.name, -1)  # a rank logs a name in order: all have passed this one
            in_order = bool(key.place.counted) or not self._has_mingled  # else it is likely, once it is some time ago
            passed = is_behind and (in_order or cell.born <= maxima[_GIVE_UP_NEW])
            passed_by_all = in_order and cell.number < proof.get(key.name, -1)
            is_new = key.name not in self._usual and not self._lacks_primary(key, cell)
            new = is_new and cell.born <= maxima[_GIVE_UP_NEW]
            gave_up = cell.born <= maxima[_GIVE_UP_ALL]
            if everything or key in complete or passed or new or gave_up:
                repeated = key.occurrence > 0 and not key.place.counted  # as a rank alone may log a name again
                known = key.name in self._usual and not repeated
                given_up = gave_up and known and not (everything or is_behind or key in complete)
                by_now = not (everything or passed or new or gave_up)
                ready.append(_Ready(key, given_up, everything or passed_by_all, if_complete=by_now))
        return ready

    def _candidates(self, complete: Iterable[Key], maxima: Sequence[float]) -> list[Key]:
        """Open cells that may be ready: complete ones, those that they passed, and those that may be given up."""
        names = {key.name for key in complete}
        if maxima[_GIVE_UP_NEW] > _NOTHING:
            names.update(name for name in self._by_name if name not in self._usual)
        found = {key for name in names for key in self._by_name[name]}
        found.update(key for key, _ in takewhile(lambda old: old[1].born <= maxima[_GIVE_UP_ALL], self.cells.items()))
        return sorted(found, key=lambda key: self.cells[key].number)

    def _is_complete(self, key: Key, cell: Cell) -> bool:
        return cell.totals.voices - cell.gone >= self._expected(key.name)

    def _lacks_primary(self, key: Key, cell: Cell) -> bool:
        """Whether a cell is of no use yet: what the others gave to it may be gone with them when the primary comes."""
        return -cell.origin >= _CALLS and self._needs_primary(key.name)

    def _expected(self, name: str) -> int:
        """How many ranks are waited for: as many as spoke when the name was finished last."""
        return min(self.size, self._usual.get(name, self.size))

    def _finish(self, ready: Iterable[_Ready]) -> tuple[tuple[Finished, ...], tuple[Key, ...]]:
        finished, lost = [], []
        for key, gave_up, sure, if_complete in ready:
            cell = self.cells[key]
            if if_complete and not self._is_complete(key, cell):
                continue  # more ranks log the name than before, as a cell has just shown
            del self.cells[key]
            self._close(key)
            is_own = key in self._spoken
            self._spoken.discard(key)
            if self._is_too_late(key, cell):
                lost += [key] if is_own else []
                if key in self._assumed:  # what was written has no flag, as nobody knew that a rank is missing
                    voices = self._assumed[key].voices + cell.totals.voices
                    self._most[key.name] = max(self._most.get(key.name, 0), voices)
                    finished.append(self._flag(key))
                continue
            if cell.totals.voices < self._expected(key.name):
                self._recheck = True  # other cells of this name may be complete by this
            if self._is_by_all(cell):
                self._prove(key, cell.number, cell.origin)
            value = self._finished(key, cell.totals, cell.origin, corrects=cell.corrects, gave_up=gave_up)
            is_of_others = self.size == 1 and not is_own  # who are gone
            has_gone = bool(cell.gone) or (cell.corrects and self._has_lost) or is_of_others
            finished.append(value.without_spread() if has_gone else value)
            self._assume(finished[-1], cell.number, cell.origin, sure=sure)
        self._forget_done()
        return tuple(finished), tuple(lost)

    def _finished_at_once(self, key: Key, totals: Totals, origin: float) -> Finished:
        """Finish a cell that all have spoken in who are waited for."""
        number, self._opened = self._opened, self._opened + 1
        if self._assumed and totals.voices >= self.size > 1:
            self._prove(key, number, origin)
        finished = self._finished(key, totals, origin)
        if totals.voices < self.size:
            self._assume(finished, number, origin, sure=False)
        return finished

    def _assume(self, value: Finished, number: int, origin: float, *, sure: bool) -> None:
        """Note of a finished cell whether nothing but a guess says that nobody is missing."""
        self._assumed.pop(value.key, None)
        if sure:
            self._proven.add(value.key.name)
        if not sure and not value.missing and value.totals.voices < self.size:
            self._assumed[value.key] = _Assumed(number, origin, value.totals.voices)
            if len(self._assumed) > _MOST_ASSUMED * self._remembered:
                self._assumed.popitem(last=False)

    def _close(self, key: Key) -> None:
        del self._by_name[key.name][key]
        if not self._by_name[key.name]:
            del self._by_name[key.name]

    def _is_stale(self, key: Key) -> bool:
        """Whether a cell may have been finished and forgotten, as one that lies behind it was."""
        if key.place.counted:
            return key.occurrence <= self._stale.get((key.name, -1), -1)
        step = self._stale.get((key.name, key.occurrence))
        return step is not None and key.place.step <= step

    def _forget_done(self) -> None:
        """Keep the memory of finished cells bounded; note how far it does not reach."""
        while len(self._done) > max(self._remembered, 2 * len(self.names)):
            key, _ = self._done.popitem(last=False)
            if key.place.counted:
                self._stale[key.name, -1] = max(key.occurrence, self._stale.get((key.name, -1), -1))
            else:
                before = self._stale.get((key.name, key.occurrence), key.place.step)
                self._stale[key.name, key.occurrence] = max(key.place.step, before)
            while len(self._stale) > _STALE_NOTED:
                del self._stale[next(iter(self._stale))]

    def _finished(
        self, key: Key, totals: Totals, origin: float, *, corrects: bool = False, gave_up: bool = False
    ) -> Finished:
        """Note what is finished, and what is usual by it."""
        name, voices = key.name, totals.voices
        missing = self._missing(name, voices, gave_up=gave_up)
        self._usual[name] = voices
        if voices > self._most.get(name, 0):
            self._most[name] = voices
        if not missing:
            self._whole[name] = voices
        self._done[key] = totals, origin
        has_spread = name in self._spreading and 0 < totals.number <= self.size
        return Finished(key, totals, int(-origin) % _CALLS, corrects, missing, Spread() if has_spread else None)

    def _missing(self, name: str, voices: int, *, gave_up: bool) -> int:
        """How many ranks are missing: of those whom patience ran out with, or at most those that are not there."""
        if self._doubts and name not in self._proven:
            return max(0, self.size + self.absent - voices)
        fewer = max(0, self._whole.get(name, self.size + self.absent) - voices)
        if gave_up:
            self._lacking.add(name)
        elif not fewer:
            self._lacking.discard(name)
        return fewer if name in self._lacking else min(self.absent, fewer)

    def _starts(self, name: str) -> tuple[int, int]:
        """Where the numbers of a name begin in the two lists."""
        position = self._positions[name]
        return _SUMS_PER_NAME * position, _HEADER + _PER_NAME * position

    def _forget(self, memory: OrderedDict[Any, Any], limit: int) -> None:
        """Keep memory bounded: the oldest entries go, but at least two rows of all names stay."""
        while len(memory) > max(limit, 2 * len(self.names)):
            memory.popitem(last=False)


def _oldest(due: Mapping[str, _Said]) -> dict[str, _Said]:
    """Of what was logged without a step, what stood in the oldest call: each is a row of its own."""
    oldest = max(said.origin for said in due.values())
    return {name: said for name, said in due.items() if said.origin == oldest}


def _pair(number: int) -> list[float]:
    return [float(number), -float(number)]


def _as_list(key: Key, cell: Cell) -> list[Any]:
    return [*key.place, *key[1:], cell.born, list(cell.totals), cell.origin, cell.corrects, cell.number]


def _from_list(told: Sequence[Any]) -> tuple[Key, Cell]:
    counted, step, name, occurrence, born, totals, origin, corrects, number = told
    cell = Cell(born, Totals(*totals), origin, corrects=corrects, number=number)
    return Key(Place(counted, step), name, occurrence), cell
