"""The ranks of a unit that are gone, and how they ended: each rank publishes its own departure in the job's store."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from dist_wandb.exchange.membership.generations import Checkpoint, Departure, Word
from dist_wandb.exchange.protocol.pacing import Interval
from dist_wandb.settings.plan import Unit
from dist_wandb.store.job_store import JobStore
from dist_wandb.store.polling import interval
from dist_wandb.store.shared_list import SharedList

_LOOK = 0.5  # seconds between two polls in `is_gone`


class DepartureRecord(NamedTuple):
    """The record that a rank publishes when it leaves."""

    member: int  # index of the rank in the unit
    how: str  # as in `Departure`
    global_rank: int  # index of the rank in the job
    number: int | None  # number of its last generation; `None` if it was in none
    round: int  # as in `Word`
    names: int  # as in `Word`


class Departures:
    """The departed ranks, as far as this rank has read their records.

    Args:
        unit: The unit, from the view of this rank.
        keys: Keys of the unit in the job's store.

    Attributes:
        known: The departures, by index of the rank in the unit.
        words: Summaries of the last checkpoints of these ranks, by generation and rank.
    """

    def __init__(self, unit: Unit, keys: JobStore) -> None:
        self.known: dict[int, Departure] = {}
        self.words: dict[int, dict[int, Word]] = {}
        self._unit = unit
        self._entries = SharedList(keys, "gone")
        self._look = Interval(interval(_LOOK, unit.size))

    @property
    def left(self) -> set[int]:
        """Ranks that have finished, after they delivered everything."""
        return {index for index, departure in self.known.items() if departure.how == "finished"}

    @property
    def undelivered(self) -> set[int]:
        """Ranks that have finished before the others had received everything that they logged."""
        return {index for index, departure in self.known.items() if departure.how == "undelivered"}

    def leave(self, *, failed: bool, delivered: bool, number: int | None, checkpoint: Checkpoint) -> None:
        """Publish that this rank is gone.

        Args:
            failed: Whether it has failed.
            delivered: Whether the others have received everything that it logged.
            number: Number of its generation, if it was in one.
            checkpoint: Its last checkpoint.
        """
        how = "failed" if failed else "finished" if delivered else "undelivered"
        unit, names = self._unit, len(checkpoint.names)
        self._entries.append(DepartureRecord(unit.index, how, unit.global_rank, number, checkpoint.round, names))

    def among(self, ranks: Iterable[int]) -> set[int]:
        """Return those of some ranks that have published their departure. Reads new records."""
        for entry in self._entries.news():
            record = DepartureRecord(*entry)
            self.known[record.member] = Departure(record.how, record.global_rank)
            if record.number is not None:
                word = Word(record.member, record.round, record.names)
                self.words.setdefault(record.number, {})[record.member] = word
        return self.known.keys() & set(ranks)

    def are_gone(self, ranks: Collection[int]) -> bool:
        """Return whether all of some ranks have published their departure."""
        return self._entries.count() >= len(ranks) and self.among(ranks) == set(ranks)

    def is_gone(self, rank: int) -> bool:
        """Return whether a rank has published its departure. Polls the store at intervals only."""
        if self._look.is_over(time.monotonic()):
            self.among([rank])
        return rank in self.known

    def learn(self, departures: Mapping[int, Departure]) -> None:
        """Add departures that other ranks have read."""
        self.known.update(departures)
