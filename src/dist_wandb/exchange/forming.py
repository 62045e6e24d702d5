"""How a rank finds the job's store, and how the members of a generation form a group.

Members meet first (`membership.meeting`), because forming a group cannot be broken off; a member that has gone since
the generation was claimed is not waited for. Members that meet but cannot connect (closed ports, a wrong
`GLOO_SOCKET_IFNAME`) try it three times. Then each goes on alone, with a warning that has gloo's reason.

gloo takes the address that the host's name resolves to: on many hosts loopback, or none. So members tell each other
from which address they reach the job's store, and, if these differ, each forms the group at its own
(`store.addresses`). A `GLOO_SOCKET_IFNAME` of the user's takes precedence; on one host nothing is changed.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable

from dist_wandb.errors import RendezvousError
from dist_wandb.exchange.context import Context
from dist_wandb.exchange.membership.generations import Generation
from dist_wandb.exchange.membership.membership import Membership
from dist_wandb.exchange.membership.polling import Stopped
from dist_wandb.exchange.transport.group import Alone, BrokenError, Group
from dist_wandb.store.job_store import JobStore
from dist_wandb.topology.ranges import named

_LOOK_FOR_STORE = 0.05  # seconds between two looks whether there is a store
_MOST_UNFORMED = 3  # groups one after the other that could not be formed, though all members had come


def import_gloo() -> None:
    """Import what forms groups, where torch is there already: on the thread that opens the session.

    Left to the exchange's thread, the import might come while Python ends after Ctrl-C. Making classes evaluates code,
    and by that Python forgets the Ctrl-C: the process would end with exit code 1 instead of by SIGINT
    (`_Py_UnhandledKeyboardInterrupt`, reset by `run_eval_code_obj` in CPython's Python/pythonrun.c).
    """
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is not None and torch_distributed.is_available():
        importlib.import_module("dist_wandb.exchange.transport.gloo")


def find_store(context: Context, find: Callable[[], JobStore | None], is_in_vain: Callable[[], bool]) -> JobStore:
    """The job's store, waiting until there is one.

    Raises:
        Stopped: Waiting was to end.
        RendezvousError: There is none within the time limit, or before the session is finished.
    """
    limit, lifecycle = context.limits.join_timeout, context.lifecycle
    deadline = time.monotonic() + limit
    while (found := find()) is None:
        if is_in_vain():
            raise Stopped
        if time.monotonic() > deadline or lifecycle.is_closing:  # who finishes makes no process group any more
            waited = "until it finished" if lifecycle.is_closing else f"within {limit:g} s"
            raise RendezvousError(
                f"Rank {context.rank} found no store of the job {waited}, so its numbers cannot be "
                "brought together with those of other ranks. Call init_process_group."
            )
        time.sleep(_LOOK_FOR_STORE)
    return found


class Forming:
    """Forms the groups of generations.

    Args:
        context: What the parts of the exchange share.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._unformed = 0

    def form(self, membership: Membership, generation: Generation, is_broken_off: Callable[[], bool]) -> Group:
        """The group of a generation's members.

        Args:
            membership: How they meet.
            generation: The generation.
            is_broken_off: Asked while an exchange waits for the others: whether it is in vain.

        Raises:
            BrokenError: The members did not find each other.
            RendezvousError: Time and again they cannot connect to each other.
        """
        if len(generation.members) == 1:
            return Alone()
        from dist_wandb.exchange.transport.gloo import GlooGroup

        patience = self._context.limits.peer_timeout
        if not membership.meeting.wait(generation, patience):
            raise BrokenError("the members did not find each other")
        rank = generation.members.index(self._context.unit.index)
        store, address = membership.meeting.store_of(generation), membership.meeting.address()
        try:
            group = GlooGroup(store, rank, len(generation.members), patience, is_broken_off, address)
        except BrokenError as error:
            self._unformed += 1
            if self._unformed < _MOST_UNFORMED or self._context.lifecycle.is_stopped:
                raise
            raise RendezvousError(self._why_unformed(membership, generation, error)) from error
        self._unformed = 0
        return group

    def _why_unformed(self, membership: Membership, generation: Generation, error: Exception) -> str:
        others = set(generation.members) - {self._context.unit.index}
        ranks = named(map(membership.presence.global_rank, others), self._context.unit.ranks_per_node)
        return (
            f"Rank {self._context.rank} cannot connect to {ranks} in {self._unformed} attempts, though all of "
            f"them reach the store of the job: {error}. Ports between the hosts may be closed, or GLOO_SOCKET_IFNAME "
            "name an interface by which they do not reach each other."
        )
