"""How a rank finds the job's store, and how the members of a generation form a group.

Many members form a tree of groups (`transport.layout`). Each rank forms its groups from the lowest level upwards, so a
rank that arrives at a group has formed the ones below it. Finally, member 0 informs all others, group by group, that
the tree has formed; if a group cannot be formed, the ranks below it are informed of that instead. Time limits:
`peer_timeout` for the members of a group to arrive and, for each level above, the time to form the groups below. That
time is 10 s plus 5 ms for each member of the generation (all of them use one store), at most `peer_timeout`, plus 2 s.
No rank waits for the whole tree longer than twice `peer_timeout` plus that time for each level.

The members of a group meet first (`membership.meeting`), because forming it cannot be interrupted. A member that has
left since the generation was claimed is not waited for. After a broken generation, whose members have published their
checkpoints just before, they get as long to meet as for that (`grace`). Then the others regroup, and do not wait again
for those that did not come. Members that meet but cannot connect (closed ports, a wrong `GLOO_SOCKET_IFNAME`) try three
times. Then each continues alone, and so do those below them in the tree, with a warning that has gloo's reason.

gloo uses the address to which the host's name resolves: on many hosts loopback, or none. Therefore the members of a
group exchange the addresses from which they reach the job's store, and if these differ, each forms the group at its own
(`store.connection`). The user's `GLOO_SOCKET_IFNAME` takes precedence; on one host nothing is changed.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from dist_wandb.errors import RendezvousError
from dist_wandb.exchange.membership.generations import Generation
from dist_wandb.exchange.membership.meeting import Stopped
from dist_wandb.exchange.membership.membership import Membership
from dist_wandb.exchange.reports import Context
from dist_wandb.exchange.transport import layout
from dist_wandb.exchange.transport.group import BrokenError, Group
from dist_wandb.exchange.transport.layout import GroupLayout
from dist_wandb.store.job_store import JobStore
from dist_wandb.store.polling import interval
from dist_wandb.topology.ranges import named

if TYPE_CHECKING:
    from dist_wandb.exchange.transport.gloo import GlooGroup

_GRACE = 5.0  # seconds that a member of a broken generation gets to publish its checkpoint; more in very large units
BROKEN_POLL_INTERVAL = 0.5  # seconds between two checks, while waiting for others, whether one of them broke off
_STORE_POLL_INTERVAL = 0.05  # seconds between two checks whether there is a store
_FORMING_PER_MEMBER = 0.005  # additional seconds that a group gets to connect, for each member of the generation
_MOST_UNFORMED = 3  # consecutive failures to form a group although all members had arrived


def grace(context: Context) -> float:
    """Return how long the members of a broken generation wait for each other, in seconds."""
    return min(context.limits.peer_timeout, max(_GRACE, 2 * interval(BROKEN_POLL_INTERVAL, context.unit.size)))


def import_gloo() -> None:
    """Import the transport, if torch is imported already, on the thread that opens the session.

    On the exchange's thread, that might happen while Python exits after Ctrl-C, which it then forgets: it would exit
    with code 1 (`_Py_UnhandledKeyboardInterrupt`, reset by `run_eval_code_obj` in CPython's Python/pythonrun.c).
    """
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is not None and torch_distributed.is_available():
        importlib.import_module("dist_wandb.exchange.transport.tree")  # which imports `gloo`


def find_store(context: Context, find: Callable[[], JobStore | None], gives_up: Callable[[], bool]) -> JobStore:
    """Return the job's store, once there is one; raise Stopped if it `gives_up`, RendezvousError if it is too late."""
    limit, lifecycle = context.limits.join_timeout, context.lifecycle
    deadline = time.monotonic() + limit
    while (found := find()) is None:
        if gives_up():
            raise Stopped
        if time.monotonic() > deadline or lifecycle.is_closing:  # a finishing rank creates no process group
            waited = "until it finished" if lifecycle.is_closing else f"within {limit:g} s"
            raise RendezvousError(
                f"Rank {context.rank} found no store of the job {waited}, so its numbers cannot be combined with those "
                "of other ranks. Call init_process_group."
            )
        time.sleep(_STORE_POLL_INTERVAL)
    return found


class _UnformedError(BrokenError):
    """Members that have met could not connect to each other: some of `members`, or, if empty, of other groups."""

    def __init__(self, message: str, members: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.members = members


class Forming:
    """Forms the groups of generations."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._unformed = 0

    def form(self, membership: Membership, generation: Generation, should_abort: Callable[[], bool]) -> Group:
        """Return the group of a generation's members; raise BrokenError, or RendezvousError after repeated failures."""
        if len(generation.members) == 1:
            return Group()
        groups: list[GlooGroup] = []
        try:
            group = self._form_tree(membership, generation, should_abort, groups)
        except BaseException as error:
            for formed in groups:
                formed.close()
            if not isinstance(error, _UnformedError):
                raise
            self._unformed += 1
            if self._unformed < _MOST_UNFORMED or self._context.lifecycle.is_stopped:
                raise
            raise RendezvousError(self._why_unformed(membership, error)) from error
        self._unformed = 0
        return group

    def _form_tree(
        self, membership: Membership, generation: Generation, should_abort: Callable[[], bool], groups: list[GlooGroup]
    ) -> Group:
        """Form this rank's groups, which are appended to `groups`, from the lowest level upwards."""
        from dist_wandb.exchange.transport import gloo, tree

        members, index, patience = generation.members, self._context.unit.index, self._context.limits.peer_timeout
        path, levels = layout.tree_of(members, generation.nodes, index, layout.FAN_OUT)
        forming = gloo.FORMING + _FORMING_PER_MEMBER * len(members)
        per_level = min(patience, forming) + gloo.FORMING_MORE
        is_after_broken = generation.number > 0 and not generation.joined
        to_meet = grace(self._context) if is_after_broken else patience

        def form(group: GroupLayout) -> GlooGroup:
            if not membership.meeting.wait(generation, group, to_meet + group.level * per_level):
                raise BrokenError("the members did not find each other")
            size, address = len(group.members), membership.meeting.address()
            try:
                store = membership.meeting.store_of(generation, group)
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
        return tree.TreeGroup(groups, members.index(index), len(members), patience)

    def _why_unformed(self, membership: Membership, error: _UnformedError) -> str:
        others = set(error.members) - {self._context.unit.index}
        ranks = named(map(membership.presence.global_rank, others), self._context.unit.ranks_per_node)
        attempts = f"in {self._unformed} attempts, though all of them reach the store of the job"
        what = (
            f"cannot connect to {ranks} {attempts}: {error}."
            if others
            else f"reaches most ranks through others, which cannot connect to each other {attempts}."
        )
        return (
            f"Rank {self._context.rank} {what} Ports between the hosts may be closed, or GLOO_SOCKET_IFNAME may name "
            "an interface through which they cannot reach each other."
        )
