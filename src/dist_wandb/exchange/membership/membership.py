"""Which ranks of a unit take part in its exchange: agreed on through the job's store, epoch by epoch.

An epoch is a time in which the same ranks, its members, go through rounds together. It ends where a member breaks off,
or where a rank that was late wants to join. The next one is claimed in the store, where the first claim counts; it says
who its members are and which was the last round, so that all of them go on from the same state.
"""

from __future__ import annotations

import base64
import functools
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import RendezvousError
from dist_wandb.settings.plan import Unit
from dist_wandb.store.addresses import address_among
from dist_wandb.store.job_store import JobStore
from dist_wandb.topology.launch import job_setting

if TYPE_CHECKING:
    from torch.distributed import Store

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds between two looks at the store
_APART = 2.0  # seconds that ranks of one start may be apart: who ends sooner waits as long for a sign of the others
_OPENED, _ACCOMPANIED = "opened", "accompanied"  # keys


class Stopped(Exception):  # noqa: N818  # no error: somebody asked for it
    """Waiting was to end at once."""


class Over(Exception):  # noqa: N818  # no error either: this rank came too late
    """The other ranks have ended their sessions."""


@dataclass(frozen=True)
class Word:
    """What a member says when its epoch breaks: the last round it took part in, with the result.

    Args:
        round: Number of that round.
        names: The names it knows, in their order.
        result: The reduced lists of that round; `None` before the first.
    """

    round: int
    names: list[str]
    result: tuple[Sequence[float], Sequence[float]] | None

    def as_json(self) -> dict[str, Any]:
        """As JSON can hold it, with all bits of the numbers."""
        result = None if self.result is None else [_encoded(numbers) for numbers in self.result]
        return {"round": self.round, "names": self.names, "result": result}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Word:
        """The inverse of `as_json`."""
        result = told["result"]
        return cls(told["round"], told["names"], (_decoded(result[0]), _decoded(result[1])) if result else None)


@dataclass(frozen=True)
class Epoch:
    """A time in which the same ranks go through rounds together.

    Args:
        number: 0, 1, 2, ...
        members: Indices in the unit of those that take part.
        joined: Those of them that were not in the epoch before, and take over the state of the others.
        last_round: Number of the round before this epoch.
        source: The member of the epoch before that has the result of that round, and the names known after it.
    """

    number: int
    members: tuple[int, ...]
    joined: tuple[int, ...] = ()
    last_round: int = 0
    source: int | None = None


def keys_of(unit: Unit) -> str:
    """Below which prefix of a session's keys those of a unit are."""
    return f"unit/{unit.name}"


def say_opened(keys: JobStore, unit: Unit) -> None:
    """Say that this rank opens its session, for others not to take themselves for the only one that does.

    Args:
        keys: Those of the unit.
        unit: The unit, seen from this rank.
    """
    if keys.claim(_OPENED, unit.index) != unit.index:
        keys.publish(_ACCOMPANIED, 1)


def is_accompanied(keys: JobStore) -> bool:
    """Whether two ranks of a unit, or more, have opened their sessions."""
    return keys.has([_ACCOMPANIED])


class Membership:
    """One rank's view of who takes part.

    Args:
        unit: The unit, seen from this rank.
        job_store: Keys of the unit in the job's store, on a connection of its own.
        is_stopped: Whether waiting is to end at once.
        is_over: Whether the rank that leads has ended its session.
    """

    def __init__(
        self,
        unit: Unit,
        job_store: JobStore,
        is_stopped: Callable[[], bool],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.unit = unit
        self._job_store = job_store
        self._is_stopped = is_stopped
        self._is_over = is_over
        self.left: set[int] = set()  # ranks that are gone because they had finished
        self.unheard: set[int] = set()  # ranks that are gone likewise, but before the others knew all they had said
        self._gone: dict[int, str] = {}  # how each has gone that has left word
        self._began = time.monotonic()
        self._is_accompanied = False
        self._address: str | None = None
        self.global_ranks: dict[int, int] = {unit.index: unit.global_rank}

    def arrive(self, within: float, is_ending: Callable[[], bool] = lambda: False) -> Epoch:
        """Say that this rank is here, and learn who is in the first epoch.

        Args:
            within: How long to wait for ranks that are not here, in seconds.
            is_ending: Whether this rank has nothing more to say: then it waits only if another has opened a session.

        Returns:
            The first epoch. This rank may have come too late for it.

        Raises:
            Stopped: Waiting was to end.
            Over: There is nobody left to wait for.
            RendezvousError: The store is gone.
        """
        say_opened(self._job_store, self.unit)
        self._job_store.publish(f"here/{self.unit.index}", self.unit.global_rank)
        everyone = [f"here/{index}" for index in range(self.unit.size)]

        def first() -> Epoch | None:
            claimed = self.epoch(0)
            if claimed is not None:
                return claimed
            if self._is_over() and not self._has_others():
                raise Over
            is_time = self._job_store.has(everyone) or (is_ending() and self.is_only_one(within))
            return self._claim_first() if is_time else None

        return self._until(first, within) or self._claim_first()

    def _has_others(self) -> bool:
        """Whether other ranks are here, and stay."""
        others = [index for index in range(self.unit.size) if index != self.unit.index]
        self._look_for_gone(others)
        return any(index not in self._gone and self._job_store.has([f"here/{index}"]) for index in others)

    def is_only_one(self, within: float) -> bool:
        """Whether no other rank has opened a session, though it has had the time to.

        Args:
            within: How long ranks that have not opened theirs are waited for, in seconds.
        """
        if not self._is_accompanied:
            self._is_accompanied = is_accompanied(self._job_store)
        return not self._is_accompanied and self.waited >= min(within, _APART)

    @property
    def waited(self) -> float:
        """Seconds since this rank began to wait for the others."""
        return time.monotonic() - self._began

    def why_absent(self, index: int) -> str:
        """Why a rank is not in the first epoch of this one."""
        self._look_for_gone([index])
        how = self._gone.get(index)
        if how is not None:
            return f"{'failed' if how == 'failed' else 'ended its session'} before rank {self.unit.global_rank} began"
        if self._job_store.has([f"here/{index}"]):
            return "does not take part"
        return f"did not open a session within {round(self.waited, 1):g} s"

    def regroup(self, epoch: Epoch, word: Word, within: float) -> Epoch:
        """Agree with the living on the next epoch, after this one broke.

        Args:
            epoch: The epoch that broke.
            word: What this rank knows.
            within: How long to wait for the words of the other members, in seconds.

        Raises:
            Stopped: Waiting was to end.
            RendezvousError: The store is gone.
        """
        self._job_store.publish(f"word/{epoch.number}/{self.unit.index}", word.as_json())
        self._job_store.publish(f"broken/{epoch.number}", self.unit.index)
        words: dict[int, Word] = {}

        def everyone_spoke() -> Epoch | None:
            next_epoch = self.epoch(epoch.number + 1)
            if next_epoch is not None:
                return next_epoch
            self._look_for_gone(epoch.members)
            for member in set(epoch.members) - words.keys():
                told = self._job_store.try_get(f"word/{epoch.number}/{member}")
                if told is not None:
                    words[member] = Word.from_json(told)
            done = words.keys() | self._gone.keys()
            return self._next_from(epoch, words) if done.issuperset(epoch.members) else None

        return self._until(everyone_spoke, within) or self._next_from(epoch, words)

    def admit(self, epoch: Epoch, word: Word, snapshot: dict[str, Any]) -> Epoch:
        """Begin the next epoch with those that want to join; for one member of this one, after a common round."""
        wanting = tuple(sorted(self.wanting(epoch)))
        following = epoch.number + 1
        self._job_store.publish(f"word/{epoch.number}/{self.unit.index}", word.as_json())
        self._job_store.publish(f"state/{following}", snapshot)
        members = tuple(sorted({*epoch.members, *wanting}))
        return self._claim(Epoch(following, members, wanting, word.round, self.unit.index))

    def await_epoch(self, number: int, within: float) -> Epoch | None:
        """The epoch of this number, waiting for it; `None` if nobody claims it in time."""
        return self._until(lambda: self.epoch(number), within)

    def join(self, epoch: Epoch, within: float) -> Epoch:
        """Ask to be taken in; for a rank that is not in `epoch`.

        Args:
            epoch: The newest epoch.
            within: How long to wait for each next one, in seconds.

        Raises:
            Stopped: Waiting was to end.
            Over: Nobody of the newest epoch is there any more.
            RendezvousError: The store is gone, or nobody answers.
        """
        while self.unit.index not in epoch.members:
            if self.has_ended(epoch):
                raise Over
            number = epoch.number + 1
            self._job_store.publish(f"want/{epoch.number}/{self.unit.index}", self.unit.global_rank)
            self._job_store.publish(f"want/{epoch.number}", 1)
            following = self._until(functools.partial(self._epoch_or_over, number, epoch), within)
            if following is None:
                raise RendezvousError(
                    f"Rank {self.unit.global_rank} asked to take part again, but no other rank answered within "
                    f"{within:g} s. They have ended, or go on alone."
                )
            epoch = following
        return epoch

    def has_ended(self, epoch: Epoch) -> bool:
        """Whether all members of an epoch have left word that they are going."""
        self._look_for_gone(epoch.members)
        return self._gone.keys() >= set(epoch.members)

    def _epoch_or_over(self, number: int, before: Epoch) -> Epoch | None:
        following = self.epoch(number)
        if following is None and self.has_ended(before) and (following := self.epoch(number)) is None:
            raise Over
        return following

    def state(self, epoch: Epoch) -> dict[str, Any]:
        """What the members know together at the beginning of an epoch that ranks joined."""
        state: dict[str, Any] = self._job_store.wait_get(f"state/{epoch.number}", "the unit")
        return state

    def word(self, epoch: Epoch) -> Word | None:
        """What was known of the last round before `epoch`; `None` for the first."""
        if epoch.source is None:
            return None
        return Word.from_json(self._job_store.wait_get(f"word/{epoch.number - 1}/{epoch.source}", "the unit"))

    def epoch(self, number: int) -> Epoch | None:
        """The epoch of this number, if somebody has claimed it."""
        told = self._job_store.try_get(f"epoch/{number}")
        return None if told is None else _epoch(number, told)

    def latest(self, epoch: Epoch) -> Epoch:
        """The newest epoch after `epoch`, or itself."""
        following = self.epoch(epoch.number + 1)
        return epoch if following is None else self.latest(following)

    def meet(self, epoch: Epoch, within: float) -> bool:
        """Wait until all members have come to form their group: forming it cannot be broken off.

        Args:
            epoch: The epoch that begins.
            within: How long to wait, in seconds.

        Returns:
            Whether all of them have come. One that is going is not waited for.

        Raises:
            Stopped: Waiting was to end.
            RendezvousError: The store is gone.
        """
        if self._address is None:
            self._address = self._job_store.own_address()
        self._job_store.publish(f"met/{epoch.number}/{self.unit.index}", self._address)
        keys = self._met(epoch)

        def come() -> Epoch | None:
            return epoch if self._job_store.has(keys) or self.is_broken(epoch) or has_lost() else None

        def has_lost() -> bool:  # it gave its word, was counted on, and went
            self._look_for_gone(epoch.members)
            return not self._gone.keys().isdisjoint(epoch.members)

        return self._until(come, within) is not None and self._job_store.has(keys)

    def address(self, epoch: Epoch) -> str | None:
        """The address by which the other members, which have met, reach this rank; `None` to leave it to gloo."""
        if job_setting("GLOO_SOCKET_IFNAME"):
            return None
        return address_among(self._address, [self._job_store.try_get(key) for key in self._met(epoch)])

    def _met(self, epoch: Epoch) -> list[str]:
        return [f"met/{epoch.number}/{member}" for member in epoch.members]

    def store_of(self, epoch: Epoch) -> Store:
        """Where the members of an epoch find each other for their process group."""
        group = f"group/{epoch.number}"
        self._job_store.record_key(f"{group}/0/{epoch.members.index(self.unit.index)}")  # where gloo puts its address
        return self._job_store.store(group)

    def is_broken(self, epoch: Epoch) -> bool:
        """Whether some member found this epoch broken."""
        return self._job_store.try_get_soon(f"broken/{epoch.number}") is not None

    def wanting(self, epoch: Epoch) -> set[int]:
        """Ranks outside of `epoch` that want to join."""
        outside = set(range(self.unit.size)) - set(epoch.members)
        if not outside or self._job_store.try_get_soon(f"want/{epoch.number}") is None:  # one look for all of them
            return set()
        told = {index: self._job_store.try_get_soon(f"want/{epoch.number}/{index}") for index in outside}
        wanting = {index: rank for index, rank in told.items() if rank is not None}
        self.global_ranks.update(wanting)
        return set(wanting)

    def leave(self, epoch: Epoch | None, word: Word, *, failed: bool, heard: bool) -> None:
        """Leave word of what this rank knows, and how it goes.

        Args:
            epoch: The epoch that it is in, if it is in one.
            word: What it knows.
            failed: Whether it has failed.
            heard: Whether the others know all that it had to say.
        """
        how = "failed" if failed else "finished" if heard else "unheard"
        if epoch is not None:
            self._job_store.publish(f"word/{epoch.number}/{self.unit.index}", word.as_json())
        self._job_store.publish(f"gone/{self.unit.index}", how)
        self._job_store.publish("gone", 1)
        left = epoch or self.epoch(0)
        if left is not None and self.unit.index in left.members:
            self._job_store.publish(f"broken/{left.number}", self.unit.index)

    def is_gone(self, index: int) -> bool:
        """Whether a rank has left word that it is going."""
        self._look_for_gone([index])
        return index in self._gone

    def absent(self, epoch: Epoch) -> set[int]:
        """Ranks that should take part in `epoch` but do not: neither members nor gone with a word."""
        outside = set(range(self.unit.size)) - set(epoch.members)
        self._look_for_gone(outside)
        return outside - self.left

    def learn_ranks(self, epoch: Epoch, ranks: Sequence[int]) -> None:
        """Keep the indices in the job of an epoch's members, as they told them when it began."""
        self.global_ranks.update(zip(epoch.members, ranks, strict=True))

    def told_ranks(self) -> list[tuple[int, int]]:
        """Index in the unit and in the job of all ranks that have been met, for those that join."""
        return list(self.global_ranks.items())

    def global_rank(self, index: int) -> int:
        """Index in the job of a rank of the unit, from the store if need be; that in the unit where it is not known."""
        if index not in self.global_ranks:
            told = self._job_store.try_get(f"here/{index}")
            if told is None:
                return index
            self.global_ranks[index] = told
        return self.global_ranks[index]

    def _claim_first(self) -> Epoch:
        everyone = range(self.unit.size)
        here = {index for index in everyone if self._job_store.has([f"here/{index}"])}
        self._look_for_gone(everyone)
        return self._claim(Epoch(0, tuple(sorted(here - self._gone.keys()))))

    def _look_for_gone(self, ranks: Iterable[int]) -> None:
        if not self._job_store.has(["gone"]):  # most ranks go when all do
            return
        for index in set(ranks) - self._gone.keys():
            how = self._job_store.try_get(f"gone/{index}")
            if how is not None:
                self._gone[index] = how
            if how == "finished":
                self.left.add(index)
            if how == "unheard":
                self.unheard.add(index)

    def _next_from(self, epoch: Epoch, words: dict[int, Word]) -> Epoch:
        """The epoch after a broken one: of those that gave their word and stay."""
        last_round = max(word.round for word in words.values())
        source = max(words, key=lambda member: (words[member].round, len(words[member].names)))
        members = tuple(sorted(words.keys() - self._gone.keys()))
        return self._claim(Epoch(epoch.number + 1, members, (), last_round, source))

    def _claim(self, epoch: Epoch) -> Epoch:
        claim = [epoch.members, epoch.joined, epoch.last_round, epoch.source]
        return _epoch(epoch.number, self._job_store.claim(f"epoch/{epoch.number}", claim))

    def _until(self, look: Callable[[], Epoch | None], within: float | None) -> Epoch | None:
        """Look again and again until there is something to see; `None` when the time is over."""
        deadline = None if within is None else time.monotonic() + within
        pause = _FIRST_PAUSE
        while True:
            seen = look()
            if seen is not None:
                return seen
            if self._is_stopped():
                raise Stopped
            if deadline is not None and time.monotonic() >= deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _epoch(number: int, told: Sequence[Any]) -> Epoch:
    members, joined, last_round, source = told
    return Epoch(number, tuple(members), tuple(joined), last_round, source)


def _encoded(numbers: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}d", *numbers)).decode("ascii")


def _decoded(text: str) -> list[float]:
    data = base64.b64decode(text)
    return list(struct.unpack(f"<{len(data) // 8}d", data))
