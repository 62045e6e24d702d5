"""Which ranks of a unit are gone, and how: each rank says so of itself in the job's store."""

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

_LOOK = 0.5  # seconds between two looks where it does not matter much


class LastWords(NamedTuple):
    """What a rank publishes when it goes.

    Args:
        member: Its index in the unit.
        how: As of `Departure`.
        global_rank: Its index in the job.
        number: Of the generation that it was in; `None` if it was in none.
        round: As of `Word`.
        names: As of `Word`.
    """

    member: int
    how: str
    global_rank: int
    number: int | None
    round: int
    names: int


class Departures:
    """One rank's view of which ranks are gone.

    Args:
        unit: The unit, seen from this rank.
        keys: Keys of the unit in the job's store.

    Attributes:
        known: How each rank has gone that has said so, as far as this rank has read it.
        words: What those ranks said of their checkpoints, by generation and rank.
    """

    def __init__(self, unit: Unit, keys: JobStore) -> None:
        self.known: dict[int, Departure] = {}
        self.words: dict[int, dict[int, Word]] = {}
        self._unit = unit
        self._entries = SharedList(keys, "gone")
        self._look = Interval(interval(_LOOK, unit.size))

    @property
    def left(self) -> set[int]:
        """Ranks that are gone because they had finished."""
        return {index for index, departure in self.known.items() if departure.how == "finished"}

    @property
    def undelivered(self) -> set[int]:
        """Ranks that are gone likewise, but before the others knew all that they had logged."""
        return {index for index, departure in self.known.items() if departure.how == "undelivered"}

    def leave(self, *, failed: bool, delivered: bool, number: int | None, checkpoint: Checkpoint) -> None:
        """Say that this rank is gone.

        Args:
            failed: Whether it has failed.
            delivered: Whether the others know all that it has logged.
            number: Of the generation that it was in, if it was in one.
            checkpoint: What it knew.
        """
        how = "failed" if failed else "finished" if delivered else "undelivered"
        unit = self._unit
        names = len(checkpoint.names)
        self._entries.append(LastWords(unit.index, how, unit.global_rank, number, checkpoint.round, names))

    def among(self, ranks: Iterable[int]) -> set[int]:
        """Those of some ranks that have said that they are gone."""
        for entry in self._entries.news():
            last = LastWords(*entry)
            self.known[last.member] = Departure(last.how, last.global_rank)
            if last.number is not None:
                self.words.setdefault(last.number, {})[last.member] = Word(last.member, last.round, last.names)
        return self.known.keys() & set(ranks)

    def are_gone(self, ranks: Collection[int]) -> bool:
        """Whether all of some ranks have said that they are gone."""
        return self._entries.count() >= len(ranks) and self.among(ranks) == set(ranks)

    def is_gone(self, rank: int) -> bool:
        """Whether a rank has said that it is gone; looked up now and then."""
        if self._look.is_over(time.monotonic()):
            self.among([rank])
        return rank in self.known

    def learn(self, departures: Mapping[int, Departure]) -> None:
        """Keep what others have read."""
        self.known.update(departures)
