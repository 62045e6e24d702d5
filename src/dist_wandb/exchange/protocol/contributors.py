"""Who takes part, who logs which name, and for whom a cell waits. Pure, and equal on all ranks.

A rank usually logs a name once a row with its number was written, until it is given up while it goes on with other
names. A rank that has nothing handed over since it was given up is *silent*: nobody waits for it until it comes back.
A rank is not awaited if it has logged the name later, or the cell's step is behind it: it is past this cell. This rests
on the order of a rank's calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

Ranks = frozenset[int]

NOBODY: Ranks = frozenset()
NEVER = -1


class Progress:
    """How far ranks have come: with one name, or with any."""

    def __init__(self, without: Iterable[int] = ()) -> None:
        self.without: Ranks = frozenset(without)  # lost before anybody contributed: would they have? Unknown
        self._newest: tuple[int, Ranks, int] = (NEVER, NOBODY, NEVER)  # serial, ranks and round
        self._others: dict[int, tuple[int, int]] = {}  # serial and round of other contributions, by rank
        self.falls: bool = False  # whether a rank has contributed to an earlier cell than before

    def note(self, ranks: Ranks, serial: int, number: int) -> None:
        """Record that ranks have contributed to the cell with this serial, in the round of this number."""
        newest, those, _ = self._newest
        if serial < newest:
            self.falls = self.falls or bool(self.later(ranks, serial))
            self._others.update({rank: (max(self.of(rank)[0], serial), number) for rank in ranks})
            return
        if ranks is not those and not those <= ranks:
            self._others.update({rank: self.of(rank) for rank in those - ranks})
        self._newest = serial, ranks, number

    def of(self, rank: int) -> tuple[int, int]:
        """Return the serial of the newest cell to which a rank contributed, and the last round in which it did."""
        newest, those, at = self._newest
        other = self._others.get(rank)
        if rank not in those:
            return other or (NEVER, NEVER)
        return (newest, at) if other is None else (newest, max(at, other[1]))

    def later(self, ranks: Ranks, serial: int) -> Ranks:
        if serial >= self._newest[0]:
            return NOBODY
        return frozenset(rank for rank in ranks if self.of(rank)[0] > serial)


class Contributors:
    """The ranks of a unit."""

    def __init__(self, size: int) -> None:
        self.members: Ranks = frozenset(range(size))  # those that take part
        self.closed: Ranks = NOBODY  # those that have said that they contribute nothing more
        self.failed: Ranks = NOBODY  # those that have failed, and stay until their rows are written
        # Those that should take part, but do not: up to which round calls are taken that waited when they were lost.
        self.lost: dict[int, int] = {}
        self.silent: Ranks = NOBODY  # those that were given up, and have given nothing since
        self.quiet: Ranks = NOBODY  # those that never gave anything, and were given up once: perhaps they never log
        self.interleaved: Ranks = NOBODY  # those whose order proves nothing
        self.usual: dict[str, Ranks] = {}  # by name: who logs it, once it was written
        self.version: int = 0  # changes when ranks come or go, or start or stop to log a name
        self._progress: dict[str, Progress] = {}  # by name
        self.latest: Progress = Progress()  # with any name
        self._steps: Progress = Progress()  # the same, by steps that the user gave in place of serials

    @property
    def present(self) -> Ranks:
        """Those for which cells may wait."""
        return self.members - self.closed - self.quiet - self.silent

    # What cells wait for, and lack

    def awaited(
        self, name: str, ranks: Ranks, serial: int, step: int | None = None, *, beside: Ranks = NOBODY
    ) -> tuple[Ranks, bool]:
        """Return the ranks that a cell waits for, and whether with the long patience: they usually log the name.

        Not those `beside` that have logged other values of the same row, and then another call, unless they usually
        log the name. If no rank's steps ever fall, not those that have given a later step, but others of these.
        """
        usual, rest, unproven = self.usual.get(name), self.present - ranks, self.interleaved
        if step is not None and not self._steps.falls:
            rest = unproven = rest - (self._steps.later(rest, step) - self.interleaved)
        known = frozenset(r for r in rest if (self._has_given(r, name) if usual is None else r in usual))
        if known:
            progress = self._progress[name]
            behind = frozenset(r for r in known if r in unproven or progress.of(r)[0] <= serial)
            if behind or usual is not None:
                return behind, True
        return (rest - (beside - self.interleaved) if usual is None else NOBODY), False

    def lacking(self, name: str, ranks: Ranks, born: int) -> Ranks:
        """Return the ranks that a cell lacks: they have failed, are lost, or were given up and gave nothing since."""
        if not (self.lost or self.silent or self.failed):
            return NOBODY
        usual, lost = self.usual.get(name), self.lost
        return frozenset(
            rank
            for rank in {*self.failed, *self.silent, *lost} - ranks
            if (usual is not None and rank in usual)
            or (rank in lost and self.latest.of(rank)[0] == NEVER)
            or (rank in lost and born <= lost[rank] and (usual is None or rank in self._progress[name].without))
            or (usual is None and rank not in self.silent and self._has_given(rank, name))
        )

    def _has_given(self, rank: int, name: str) -> bool:
        """Return whether a rank has contributed to a name, of which no row may have been written yet."""
        return name in self._progress and self._progress[name].of(rank)[0] > NEVER

    def lost_before(self, name: str, ranks: Ranks, serial: int) -> Ranks:
        """Return lost ranks that usually log a name, but gave neither to a cell with this serial nor to later ones."""
        those = (self.usual.get(name, NOBODY) & self.lost.keys()) - ranks
        return frozenset(rank for rank in those if self._progress[name].of(rank)[0] < serial)

    # What is learnt from rows

    def note(self, names: Iterable[str], ranks: Ranks, serial: int, number: int, step: int | None) -> None:
        """Record that ranks have contributed to the cells with this serial of some names, at a step, in a round."""
        for name in names:
            progress = self._progress.get(name)
            if progress is None:
                progress = self._progress[name] = Progress(self.lost)
            progress.note(ranks, serial, number)
        self.latest.note(ranks, serial, number)
        if step is not None:
            self._steps.note(ranks, step, number)
        if self.silent and not self.silent.isdisjoint(ranks):
            self.silent -= ranks
            self.version += 1
        if self.quiet and not self.quiet.isdisjoint(ranks):
            self.quiet -= ranks
            self.version += 1

    def note_usual(self, names: Iterable[str], ranks: Ranks) -> None:
        for name in names:
            usual = self.usual.get(name)
            if usual is None or not (ranks is usual or ranks <= usual):
                self.usual[name] = ranks if usual is None else usual | ranks
                self.version += 1

    def give_up(self, name: str, ranks: Ranks, born: int) -> None:
        """Record that ranks were given up that did not contribute to a cell."""
        self.version += 1
        for rank in ranks:
            if self.latest.of(rank)[1] <= born:
                self.silent |= {rank}  # nothing came from it since
            elif name in self.usual and self._progress[name].of(rank)[1] <= born:
                self.usual[name] -= {rank}  # it goes on, but not with this name
            # otherwise it is far behind with this name, but coming

    def give_up_new(self, ranks: Ranks) -> None:
        """Record that ranks were given up that may never log; the primary is asked again for each name."""
        quiet = frozenset(rank for rank in ranks if rank and self.latest.of(rank)[0] == NEVER)
        if not quiet <= self.quiet:
            self.quiet |= quiet
            self.version += 1

    # Ranks come and go

    def resize(self, members: Ranks, lost: Ranks, number: int) -> None:
        self.members, self.closed = members, self.closed & members
        self.lost = {rank: self.lost.get(rank, number + 1) for rank in sorted(lost)}
        self.silent &= members
        self.quiet &= members
        self.version += 1


class Patience(NamedTuple):
    """What rows wait for in a round."""

    most_open: int  # how many rows may be open
    needs_primary: Callable[[str], bool]  # see `Rounds`
    of_new: int = NEVER  # rounds up to which cells of names that were never written have waited long enough
    of_all: int = NEVER  # the same for all cells
    everything: bool = False  # whether all ranks pause or close: nothing is waited for
    behind: bool = False  # whether some rank has more waiting than it could offer: nobody is given up now
