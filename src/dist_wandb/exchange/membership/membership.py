"""Which ranks of a unit take part in its exchange: agreed on through the job's store, generation by generation.

A generation is a time in which the same ranks, its members, go through rounds together over one process group, or a
tree of them.

- *First.* Ranks say in the store that they are here. The last one, or one that is elected when `join_timeout` has
  passed, reads who is, and claims generation 0 with those (`arrive`). Everything is claimed in the store by
  compare-and-set, where the first claim counts, so all ranks read the same members.
- *The only one.* A rank announces that it has opened a session at once (`presence.say_opened`). If rank 0 ends, or
  `join_timeout` is over, and no other rank has, `init` was called under ``if rank == 0``: it begins alone and misses
  nobody. It has to be 2 s old for that, because ranks of one start may be some time apart.
- *Too late.* A rank that finds all members of the newest generation gone or, before there is one, the coordinator's
  session ended, goes on alone at once (`Over`).
- *Broken.* A member finds the exchange broken (a peer died, stalled past `peer_timeout`, left), or leaves before all
  have closed: it marks the generation as broken, and each member that stays publishes its checkpoint: the number of its
  last round, with the reduced lists, and the names. In a word it says which round that is. The first one to do so reads
  the words, and claims the next generation with those who said theirs in time (`regroup`). A round can only be finished
  by anybody once all members have entered it, so members differ by one round at most; whoever is a round behind takes
  its result from the checkpoint of the `source`.
- *Joined.* A rank outside, late or gone on without, asks to be taken in (`join`). All members learn of it by a flag in
  a round, and stand at the same point after that; the first of them publishes their common state and claims the next
  generation (`admit`). The newcomer keeps what it has yet to contribute, which corrects rows that were written. What it
  had contributed to a round that was broken off before its end, it contributes again.
- *Left.* A rank that goes leaves its checkpoint, and how it ended (`leave`). One that had finished, with all delivered,
  is not missed; one whose `finish` had to end before is, though it has not failed. Rows that lack a rank are marked
  with `dist_wandb/degraded`, the number of missing ranks.

A new generation begins with a greeting (`cycle`): members exchange what was left to do when the last one broke, and in
which open cells they have contributed. Contributions of ranks that are gone stay in the totals, but do not make a cell
complete for those that have yet to contribute.

Invariant: generation n + 1 is claimed only after all its members have left generation n at `last_round` or one before,
so nothing is lost or counted twice.

No rank asks about every other: what many say is a list, which one rank reads for all (`store.shared_list`), and what
it finds out is a part of the next generation, such as who has gone, and how. The others look at one key, the less often
the longer it takes, and the more they are. Should that rank be gone, another one is elected. So the store's work grows
with the number of ranks, and not with its square.

The store is polled on a connection of its own (`JobStore.beside`), with one call for each look, because a key may be
deleted meanwhile (`store.leftovers`).
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dist_wandb.errors import RendezvousError
from dist_wandb.exchange.membership.generations import Checkpoint, Generation, GenerationStore, Word
from dist_wandb.exchange.membership.meeting import Meeting
from dist_wandb.exchange.membership.polling import look_until
from dist_wandb.exchange.membership.presence import Arrival, Presence
from dist_wandb.exchange.protocol.pacing import Interval
from dist_wandb.settings.plan import Unit
from dist_wandb.store.job_store import JobStore
from dist_wandb.store.polling import interval
from dist_wandb.store.shared_list import SharedList

_TERM = 2.0  # seconds that one rank gets to claim a generation for all, before another one is elected
_LOOK_FOR_OVER = 1.0  # seconds between two looks whether the session has ended


class Over(Exception):  # noqa: N818  # no error either: this rank came too late
    """The other ranks have ended their sessions."""


class Membership:
    """One rank's part in agreeing on who takes part.

    Args:
        unit: The unit, seen from this rank.
        keys: Keys of the unit in the job's store, on a connection of its own.
        is_stopped: Whether waiting is to end at once.
    """

    def __init__(self, unit: Unit, keys: JobStore, is_stopped: Callable[[], bool]) -> None:
        self.presence: Presence = Presence(unit, keys)
        self.generations: GenerationStore = GenerationStore(keys, unit.index)
        self.meeting: Meeting = Meeting(keys, unit.index, self.generations.is_broken, is_stopped)
        self._unit = unit
        self._keys = keys
        self._is_stopped = is_stopped
        self._wanting: dict[int, SharedList] = {}  # of the generation that was asked about last

    def arrive(
        self,
        within: float,
        is_ending: Callable[[], bool] = lambda: False,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Generation:
        """Say that this rank is here, and learn who is in the first generation.

        Args:
            within: How long to wait for ranks that are not here, in seconds.
            is_ending: Whether this rank has nothing more to say: then it waits only if another has opened a session.
            is_over: Whether the coordinator has ended its session.

        Returns:
            The first generation. This rank may have come too late for it.

        Raises:
            Stopped: Waiting was to end.
            Over: There is nobody left to wait for.
            RendezvousError: The store is gone.
        """
        is_last = self.presence.arrive()
        look_for_over = Interval(interval(_LOOK_FOR_OVER, self._unit.size))

        def first() -> Generation | None:
            claimed = self.generations.get(0)
            if claimed is not None:
                return claimed
            if look_for_over.is_over(time.monotonic()) and is_over() and not self.presence.has_others():
                raise Over
            is_time = is_last and self.presence.are_all_here()
            is_time = is_time or (is_ending() and self.presence.is_only_one(within))
            return self._claim_first() if is_time else None

        return self._until(first, within, is_ending) or self._elected(0, self._claim_first)

    def _claim_first(self) -> Generation:
        members = tuple(sorted(self.presence.here()))
        return self._claim(Generation(0, members))

    def _elected(self, number: int, claim: Callable[[], Generation]) -> Generation:
        """The generation of a number, claimed by one rank that is elected; by another one if that one is gone."""
        for term in itertools.count():
            if self.generations.is_elected(number, term):
                break
            claimed = self._until(lambda: self.generations.get(number), interval(_TERM, self._unit.size))
            if claimed is not None:
                return claimed
        return claim()

    def regroup(self, generation: Generation, checkpoint: Checkpoint, within: float) -> Generation:
        """Agree with the living on the next generation, after this one broke.

        All publish their checkpoints, and say in a word what these are. The first one reads the words, and claims the
        next generation; the others look for it alone.

        Args:
            generation: The generation that broke.
            checkpoint: What this rank knows.
            within: How long to wait for the words of the other members, in seconds.

        Raises:
            Stopped: Waiting was to end.
            RendezvousError: The store is gone.
        """
        self.generations.publish_checkpoint(generation, checkpoint)
        self.generations.mark_broken(generation)
        words = self.generations.words(generation)
        is_first = words.append(Word(self._unit.index, checkpoint.round, len(checkpoint.names))) == 1
        read: dict[int, Word] = {}

        def claimed() -> Generation | None:
            following = self.generations.following(generation)
            return following or (claim() if is_first and are_complete() else None)

        def are_complete() -> bool:
            read.update({word[0]: Word(*word) for word in words.news()})
            gone = self.presence.gone(generation.members)
            return (read.keys() | gone).issuperset(generation.members)

        def claim() -> Generation:
            are_complete()  # reads what is new
            return self._claim_next(generation, read)

        patience = within if is_first else within + _TERM
        return self._until(claimed, patience) or self._elected(generation.number + 1, claim)

    def _claim_next(self, generation: Generation, words: Mapping[int, Word]) -> Generation:
        """The generation after a broken one: of those that published their checkpoint and stay."""
        known = [*words.values(), *self.presence.departures.words.get(generation.number, {}).values()]
        source = max(known, key=lambda word: (word.round, word.names))
        members = tuple(sorted(words.keys() - self.presence.departures.known.keys()))
        following = Generation(generation.number + 1, members, (), source.round, source.member)
        return self._claim(following, generation)

    def _claim(self, generation: Generation, before: Generation | None = None) -> Generation:
        """Claim a generation; it is broken at once if a member has gone meanwhile, which may not have seen it."""
        gone, known = self.presence.departures.known, {*before.lost, *before.members} if before else set[int]()
        lost = tuple(sorted(known - set(generation.members) - gone.keys()))
        nodes = {**(before.node_of() if before else {}), **self.presence.nodes}
        claimed = self.generations.claim(replace(generation, lost=lost, gone=gone).on_nodes(nodes))
        if self.presence.gone(claimed.members):
            self.generations.mark_broken(claimed)
        return claimed

    def admit(self, generation: Generation, checkpoint: Checkpoint, state: dict[str, Any]) -> Generation:
        """Begin the next generation with those that want to join; for one member of this one, after a common round."""
        joining = tuple(sorted(self.joining(generation)))
        self.generations.publish_checkpoint(generation, checkpoint)
        self.generations.publish_state(generation, state)
        members, index = tuple(sorted({*generation.members, *joining})), self._unit.index
        following = Generation(generation.number + 1, members, joining, checkpoint.round, index)
        return self._claim(following, generation)

    def await_next(self, generation: Generation, within: float) -> Generation | None:
        """The generation after this one, waiting for it; `None` if nobody claims it in time."""
        return self._until(lambda: self.generations.following(generation), within)

    def join(self, generation: Generation, within: float) -> Generation:
        """Ask to be taken in; for a rank that is not in `generation`.

        Args:
            generation: The newest generation.
            within: How long to wait for each next one, in seconds.

        Raises:
            Stopped: Waiting was to end.
            Over: Nobody of the newest generation is there any more.
            RendezvousError: The store is gone, or nobody answers.
        """
        while self._unit.index not in generation.members:
            if self.has_ended(generation):
                raise Over
            self.generations.wanting(generation).append(self.presence.own_arrival())
            following = self._until(functools.partial(self._next_or_over, generation), within)
            if following is None:
                raise RendezvousError(
                    f"Rank {self._unit.global_rank} asked to take part again, but no other rank answered within "
                    f"{within:g} s. They have ended, or go on alone."
                )
            generation = following
        return generation

    def _next_or_over(self, before: Generation) -> Generation | None:
        following = self.generations.following(before)
        if following is None and self.has_ended(before) and (following := self.generations.following(before)) is None:
            raise Over
        return following

    def has_ended(self, generation: Generation) -> bool:
        """Whether all members of a generation have said that they are gone."""
        return self.presence.departures.are_gone(generation.members)

    def joining(self, generation: Generation) -> set[int]:
        """Ranks outside of `generation` that want to join."""
        if generation.number not in self._wanting:
            self._wanting = {generation.number: self.generations.wanting(generation)}
        wanting = self._wanting[generation.number]
        wanting.news_soon()
        return {self.presence.learn(Arrival(*arrival)) for arrival in wanting.values} - set(generation.members)

    def leave(
        self,
        generation: Generation | None,
        checkpoint: Checkpoint,
        *,
        failed: bool,
        delivered: bool,
        is_closed: bool = False,
    ) -> None:
        """Say that this rank is gone, and leave what it knows.

        Args:
            generation: The generation that it is in, if it is in one.
            checkpoint: What it knows.
            failed: Whether it has failed.
            delivered: Whether the others know all that it has logged.
            is_closed: Whether all members leave after the last round. Then its result is on its way to those that do
                not have it, and they are not to break off.
        """
        number = None if generation is None else generation.number
        if generation is not None:
            self.generations.publish_checkpoint(generation, checkpoint)
        self.presence.departures.leave(failed=failed, delivered=delivered, number=number, checkpoint=checkpoint)
        left = generation or self.generations.get(0)
        while left is not None:  # also those that it was taken into, and has not seen
            if self._unit.index in left.members and not (is_closed and left is generation):
                self.generations.mark_broken(left)
            left = self.generations.following(left)

    def _until(
        self,
        look: Callable[[], Generation | None],
        within: float,
        is_urgent: Callable[[], bool] = lambda: False,
    ) -> Generation | None:
        return look_until(look, within, self._is_stopped, self._unit.size, is_urgent)
