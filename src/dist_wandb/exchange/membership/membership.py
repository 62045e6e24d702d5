"""Which ranks of a unit take part in its exchange: agreed on through the job's store, generation by generation.

A generation is a time in which the same ranks, its members, go through rounds together over one process group.

- *First.* Ranks write "here" into the store. When all are there, or `join_timeout` has passed, generation 0 is claimed
  with those that are (`arrive`). Everything is claimed in the store by compare-and-set, where the first claim counts,
  so all ranks read the same members.
- *The only one.* A rank announces that it has opened a session at once (`presence.say_opened`). If rank 0 ends, or
  `join_timeout` is over, and no other rank has, `init` was called under ``if rank == 0``: it begins alone and misses
  nobody. It has to be 2 s old for that, because ranks of one start may be some time apart.
- *Too late.* A rank that finds all members of the newest generation gone or, before there is one, the coordinator's
  session ended, goes on alone at once (`Over`).
- *Broken.* A member finds the exchange broken (a peer died, stalled past `peer_timeout`, left), or leaves: it marks the
  generation as broken, and each member that stays publishes its checkpoint: the number of its last round, with the
  reduced lists, and the names. The next generation is claimed with those who did so in time (`regroup`). A round can
  only be finished by anybody once all members have entered it, so members differ by one round at most; whoever is a
  round behind takes its result from the checkpoint of the `source`.
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

The store is polled on a connection of its own (`JobStore.beside`), with one call for each look, because a key may be
deleted meanwhile (`store.leftovers`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dist_wandb.errors import RendezvousError
from dist_wandb.exchange.membership.generations import Checkpoint, Generation, GenerationStore
from dist_wandb.exchange.membership.meeting import Meeting
from dist_wandb.exchange.membership.polling import look_until
from dist_wandb.exchange.membership.presence import Presence
from dist_wandb.settings.plan import Unit
from dist_wandb.store.job_store import JobStore


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
        self.presence = Presence(unit, keys)
        self.generations = GenerationStore(keys, unit.index)
        self.meeting = Meeting(keys, unit.index, self.presence, self.generations.is_broken, is_stopped)
        self._unit = unit
        self._keys = keys
        self._is_stopped = is_stopped

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
        self.presence.arrive()

        def first() -> Generation | None:
            claimed = self.generations.get(0)
            if claimed is not None:
                return claimed
            if is_over() and not self.presence.has_others():
                raise Over
            is_time = self.presence.are_all_here() or (is_ending() and self.presence.is_only_one(within))
            return self._claim_first() if is_time else None

        return self._until(first, within) or self._claim_first()

    def _claim_first(self) -> Generation:
        return self.generations.claim(Generation(0, tuple(sorted(self.presence.here()))))

    def regroup(self, generation: Generation, checkpoint: Checkpoint, within: float) -> Generation:
        """Agree with the living on the next generation, after this one broke.

        Args:
            generation: The generation that broke.
            checkpoint: What this rank knows.
            within: How long to wait for the checkpoints of the other members, in seconds.

        Raises:
            Stopped: Waiting was to end.
            RendezvousError: The store is gone.
        """
        self.generations.publish_checkpoint(generation, checkpoint)
        self.generations.mark_broken(generation)
        checkpoints: dict[int, Checkpoint] = {}

        def claimed_by_all() -> Generation | None:
            following = self.generations.following(generation)
            if following is not None:
                return following
            gone = self.presence.gone(generation.members)
            for member in set(generation.members) - checkpoints.keys():
                known = self.generations.checkpoint_of(generation, member)
                if known is not None:
                    checkpoints[member] = known
            is_complete = (checkpoints.keys() | gone).issuperset(generation.members)
            return self._claim_next(generation, checkpoints) if is_complete else None

        return self._until(claimed_by_all, within) or self._claim_next(generation, checkpoints)

    def _claim_next(self, generation: Generation, checkpoints: dict[int, Checkpoint]) -> Generation:
        """The generation after a broken one: of those that published their checkpoint and stay."""
        last_round = max(checkpoint.round for checkpoint in checkpoints.values())
        source = max(checkpoints, key=lambda member: (checkpoints[member].round, len(checkpoints[member].names)))
        members = checkpoints.keys() - self.presence.gone(checkpoints)
        return self.generations.claim(Generation(generation.number + 1, tuple(sorted(members)), (), last_round, source))

    def admit(self, generation: Generation, checkpoint: Checkpoint, state: dict[str, Any]) -> Generation:
        """Begin the next generation with those that want to join; for one member of this one, after a common round."""
        joining = tuple(sorted(self.joining(generation)))
        self.generations.publish_checkpoint(generation, checkpoint)
        self.generations.publish_state(generation, state)
        members, index = tuple(sorted({*generation.members, *joining})), self._unit.index
        return self.generations.claim(Generation(generation.number + 1, members, joining, checkpoint.round, index))

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
            self._keys.publish(f"want/{generation.number}/{self._unit.index}", self._unit.global_rank)
            self._keys.publish(f"want/{generation.number}", 1)
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
        return self.presence.gone(generation.members) == set(generation.members)

    def joining(self, generation: Generation) -> set[int]:
        """Ranks outside of `generation` that want to join."""
        outside = set(range(self._unit.size)) - set(generation.members)
        if not outside or self._keys.try_get_soon(f"want/{generation.number}") is None:  # one look for all of them
            return set()
        stored = {index: self._keys.try_get_soon(f"want/{generation.number}/{index}") for index in outside}
        joining = {index: rank for index, rank in stored.items() if rank is not None}
        self.presence.global_ranks.update(joining)
        return set(joining)

    def leave(self, generation: Generation | None, checkpoint: Checkpoint, *, failed: bool, delivered: bool) -> None:
        """Say that this rank is gone, and leave what it knows.

        Args:
            generation: The generation that it is in, if it is in one.
            checkpoint: What it knows.
            failed: Whether it has failed.
            delivered: Whether the others know all that it has logged.
        """
        if generation is not None:
            self.generations.publish_checkpoint(generation, checkpoint)
        self.presence.leave(failed=failed, delivered=delivered)
        left = generation or self.generations.get(0)
        if left is not None and self._unit.index in left.members:
            self.generations.mark_broken(left)

    def _until(self, look: Callable[[], Generation | None], within: float) -> Generation | None:
        return look_until(look, within, self._is_stopped)
