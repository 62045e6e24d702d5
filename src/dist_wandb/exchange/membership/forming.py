"""The members of a generation form a group: they meet at the job's store, and then connect.

Many members form a tree of groups (`transport`). Each rank forms its groups from the lowest level upwards, so a
rank that arrives at a group has formed the ones below it. Finally, member 0 informs all others, group by group, that
the tree has formed; if a group cannot be formed, the ranks below it are informed of that instead. Time limits:
`peer_timeout` for the members of a group to arrive and, for each level above, the time to form the groups below. That
time is 10 s plus 5 ms for each member of the generation (all of them use one store), at most `peer_timeout`, plus 2 s.
No rank waits for the whole tree longer than twice `peer_timeout` plus that time for each level.

The members of a group meet first, because forming it cannot be interrupted. A member that has left since the generation
was claimed is not waited for. After a broken generation, whose members have published their checkpoints just before,
they get as long to meet as for that (`grace`), as they do in any generation once half of `finish_timeout` is over. Then
the others regroup, and do not wait again for those that did not come. Members that meet but cannot connect (closed
ports, a wrong `GLOO_SOCKET_IFNAME`) try three times. Then each continues alone, and so do those below them in the tree,
with a warning that has gloo's reason.

gloo uses the address to which the host's name resolves: on many hosts loopback, or none. Therefore the members of a
group exchange the addresses from which they reach the job's store, and if these differ, each forms the group at its own
(`store.connection`). The user's `GLOO_SOCKET_IFNAME` takes precedence; on one host nothing is changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from dist_wandb.errors import RendezvousError
from dist_wandb.exchange.membership.generations import Generation, GenerationStore
from dist_wandb.exchange.transport import BrokenError, Group, GroupLayout, tree_of
from dist_wandb.job.connection import address_among
from dist_wandb.job.job_store import JobStore, SharedList
from dist_wandb.job.launch import job_setting
from dist_wandb.job.ranges import named
from dist_wandb.job.timed_caller import Interval, interval, poll
from dist_wandb.settings.options import Limits
from dist_wandb.settings.plan import Unit

if TYPE_CHECKING:
    from torch.distributed import Store

    from dist_wandb.exchange.transport.gloo import GlooGroup

_Query = Callable[[], bool]
_T = TypeVar("_T")
BROKEN_POLL_INTERVAL = 0.5  # seconds between two checks, during a round, whether another member broke off
_BROKEN_CHECK_INTERVAL = 0.2  # seconds between two checks, while members meet, whether the generation is broken
_LONGEST_PAUSE = 0.05  # seconds between two polls of the store at first, and between two checks whether to stop
_FORMING_PER_MEMBER = 0.005  # additional seconds that a group gets to connect, for each member of the generation
_MOST_UNFORMED = 3  # consecutive failures to form a group although all members had arrived


class Stopped(Exception):  # noqa: N818  # not an error: it was requested
    """Waiting was stopped."""


class Over(Exception):  # noqa: N818  # not an error either: this rank is late
    """The other ranks have ended their sessions, or the primary could not open its run, for the reason given."""


class Moved(Exception):  # noqa: N818  # not an error either: the ranks continue in another session
    """The primary has not opened a session. Another rank becomes the primary of another session."""

    def __init__(self, primary: int) -> None:
        super().__init__(primary)
        self.primary = primary  # its index in the unit


def poll_until_stopped(
    query: Callable[[], _T | None],
    within: float,
    is_stopped: Callable[[], bool],
    ranks: int = 1,
    is_urgent: Callable[[], bool] = lambda: False,
) -> _T | None:
    """Poll like `poll` of the store; if `is_stopped`, raise Stopped; if `is_urgent`, without the rest of the pause."""

    def sleep(seconds: float) -> None:
        until = time.monotonic() + seconds
        while not is_stopped() and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LONGEST_PAUSE))
            if is_urgent():
                break
        if is_stopped():
            raise Stopped

    found = poll(query, within, _LONGEST_PAUSE, ranks, sleep)
    if found is None and is_stopped():
        raise Stopped
    return found


def grace(limits: Limits, unit: Unit) -> float:
    """Return how long the members of a broken generation wait for each other, in seconds; more in very large units."""
    return min(limits.peer_timeout, max(limits.grace, 2 * interval(BROKEN_POLL_INTERVAL, unit.size)))


class _UnformedError(BrokenError):
    """Members that have met could not connect to each other: some of `members`, or, if empty, of other groups."""

    def __init__(self, message: str, members: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.members = members


class Forming:
    """Forms the groups of generations."""

    def __init__(
        self,
        unit: Unit,
        limits: Limits,
        keys: JobStore,  # of the unit
        generations: GenerationStore,
        global_rank_of: Callable[[int], int],  # as published, by index in the unit
        is_stopped: Callable[[], bool],
    ) -> None:
        self.missing: frozenset[int] = frozenset()  # of the latest lowest group, if they did not come in time
        self._unit = unit
        self._limits = limits
        self._keys = keys
        self._generations = generations
        self._global_rank_of = global_rank_of
        self._is_stopped = is_stopped
        self._address: str | None = None  # of this rank, once it has met others
        self._unformed = 0

    def form(self, generation: Generation, should_abort: _Query, is_late: _Query = lambda: False) -> Group:
        """Return the group of a generation's members; raise BrokenError, or RendezvousError after repeated failures.

        `is_late`: whether members that do not come to form the group are waited for no longer than the grace.
        """
        if len(generation.members) == 1:
            return Group()
        groups: list[GlooGroup] = []
        try:
            group = self._form_tree(generation, should_abort, is_late, groups)
        except BaseException as error:
            for formed in groups:
                formed.close()
            if not isinstance(error, _UnformedError):
                raise
            self._unformed += 1
            if self._unformed < _MOST_UNFORMED or self._is_stopped():
                raise
            others = set(error.members) - {self._unit.index}
            ranks = named(map(self._global_rank_of, others), self._unit.ranks_per_node)
            attempts = f"in {self._unformed} attempts, though all of them reach the store of the job"
            what = (
                f"cannot connect to {ranks} {attempts}: {error}."
                if others
                else f"reaches most ranks through others, which cannot connect to each other {attempts}."
            )
            raise RendezvousError(
                f"Rank {self._unit.global_rank} {what} Ports between the hosts may be closed, or GLOO_SOCKET_IFNAME "
                "may name an interface through which they cannot reach each other."
            ) from error
        self._unformed = 0
        return group

    def _form_tree(
        self, generation: Generation, should_abort: _Query, is_late: _Query, groups: list[GlooGroup]
    ) -> Group:
        """Form this rank's groups, which are appended to `groups`, from the lowest level upwards."""
        from dist_wandb.exchange.transport import gloo, tree

        members, index, patience = generation.members, self._unit.index, self._limits.peer_timeout
        path, levels = tree_of(members, generation.nodes, index)
        forming = gloo.FORMING + _FORMING_PER_MEMBER * len(members)
        per_level = min(patience, forming) + gloo.FORMING_MORE
        is_after_broken = generation.number > 0 and not generation.joined
        to_meet = grace(self._limits, self._unit) if is_after_broken else patience

        def form(group: GroupLayout) -> GlooGroup:
            addresses = self.meet(generation, group, to_meet + group.level * per_level, is_late)
            if not addresses:
                raise BrokenError("the members did not find each other")
            try:
                store, address = self.store_of(generation, group), self.address(addresses)
                size = len(group.members)
                return gloo.GlooGroup(store, group.group_rank, size, patience, should_abort, address, forming)
            except BrokenError as error:
                raise _UnformedError(str(error), group.members) from error

        deadline = time.monotonic() + 2 * patience + levels * per_level
        try:
            groups.extend(map(form, path))
        except _UnformedError:
            with suppress(BrokenError):
                tree.hand_down(groups, formed=False, deadline=deadline)
            raise
        if levels == 1:
            return groups[0]
        if not tree.hand_down(groups, formed=True, deadline=deadline):
            raise _UnformedError("groups above have not formed")
        return tree.TreeGroup(groups, path, members.index(index), len(members), patience)

    def meet(
        self, generation: Generation, group: GroupLayout, within: float, is_late: _Query = lambda: False
    ) -> list[str | None]:
        """Wait until all members are ready to form their group; return their addresses, or nothing if they are not.

        Each member publishes its address (`None` if unknown), and the last one those of all: so each polls one key.
        They are not ready after `within` seconds, after the grace if it `is_late`, or if the generation is broken. If
        all had come and another one could not connect before this rank tried, that is a failure of this rank, too.
        """
        if self._address is None:
            self._address = self._keys.connection.own_address()
        members, name = len(group.members), f"met/{generation.number}/{group.name}"
        met = SharedList(self._keys, name)
        is_last = met.append_one_of([self._unit.index, self._address], members)
        broken_check = Interval(_BROKEN_CHECK_INTERVAL, len(generation.members))
        until = time.monotonic() + grace(self._limits, self._unit)

        def addresses_or_nothing() -> list[str | None] | None:
            if is_last:
                met.read_new()
            addresses_of = dict(met.values)
            if len(addresses_of) >= members:
                self._keys.publish(f"{name}/all", list(dict.fromkeys(addresses_of.values())))
            addresses: list[str | None] | None = self._keys.try_get(f"{name}/all")
            if addresses is None and broken_check.is_over(time.monotonic()):
                is_too_late = time.monotonic() >= until and is_late()
                return [] if self._generations.is_broken(generation) or is_too_late else None
            return addresses

        self.missing = frozenset()
        found = poll_until_stopped(addresses_or_nothing, within, self._is_stopped, len(generation.members))
        if found:
            return found
        is_broken = self._generations.is_broken(generation)
        if is_broken and self._keys.try_get(f"{name}/all"):
            raise _UnformedError("another rank could not connect", group.members)
        is_over = found is None or not is_broken
        if is_over and not group.level:  # those of higher groups may still be waiting in theirs
            met.read_new()
            self.missing = frozenset(group.members) - dict(met.values).keys()
        return []

    def address(self, addresses: Sequence[str | None]) -> str | None:
        """Return the address at which members with these addresses reach this rank; `None` to let gloo choose it."""
        return None if job_setting("GLOO_SOCKET_IFNAME") else address_among(self._address, addresses)

    def store_of(self, generation: Generation, group: GroupLayout) -> Store:
        prefix = f"group/{generation.number}/{group.name}"
        self._keys.record_key(f"{prefix}/0/{group.group_rank}")  # gloo writes its address there
        return self._keys.store(prefix)
