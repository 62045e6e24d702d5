"""A session's link to the other ranks of its job, through the job's store; also how they report their ends.

A session moves if its primary never opens it: it continues as another session, of which another rank is the primary.
Each rank opens that session when it learns of this (`exchange.membership`), on the thread of the exchange.
The user keeps the object that `init` has returned: it gets the parts of the other session. A call that is in progress
on another thread ends with the former parts, and then does the same with the new ones (`Shutdown.successor`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import ConfigurationError, RendezvousError
from dist_wandb.exchange.collective import CollectiveExchange
from dist_wandb.exchange.interface import Exchange
from dist_wandb.exchange.membership import generations
from dist_wandb.job import leftovers
from dist_wandb.job.job_identity import is_base_id_known, publish_base_id, refusal, wait_base_id
from dist_wandb.job.job_store import LONGEST_PAUSE, JobStore, SharedList
from dist_wandb.job.timed_caller import STORE_PATIENCE, call_or_default, poll
from dist_wandb.job.topology import Topology
from dist_wandb.notices import Line, named_line, warn
from dist_wandb.runs import wandb_private
from dist_wandb.runs.opening import attached_writers, opening_key, run_key
from dist_wandb.session import job_description, registry
from dist_wandb.session.job_description import ask
from dist_wandb.settings.options import Options
from dist_wandb.settings.plan import RunPlan, Unit, unit_of, unit_run_id

if TYPE_CHECKING:
    from dist_wandb.session.session import Session

_ARRIVAL = 5.0  # seconds from the opening of a run until its rank has arrived in the exchange
_PAUSE = 0.02  # seconds between two polls for writers that have ended
_DECISION = 2.0  # seconds after `join_timeout` in which ranks notice that another one becomes the primary
_OPENING = 10.0  # seconds that reads then wait for its run
_ELSEWHERE = 2.0  # seconds to wait for the coordinator's decision about `init` at another line than the first
_ENDING = "ending"  # key: set once the coordinator has begun to end the session
MOVED = "/moved"  # part of the name of a session that continues another one
_KEPT = ("opened_at", "opened_inside")  # attributes of a session that moves


def _is_ending(store: JobStore) -> bool:
    return store.has([_ENDING]) or leftovers.is_over(store)


def why_no_run(link: JobLink) -> str | None:
    """Return why the primary of a session opened no run, if it has published that."""
    return ask(link.store, lambda store: (store.try_get(run_key(link.plan)) or {}).get("error") or refusal(store), None)


def have_same_run(one: JobLink, other: JobLink) -> bool:
    """Return whether the numbers of sessions of a rank without a run go to the same run, as far as that is known."""

    def published(store: JobStore) -> str | None:
        with suppress(ConfigurationError):  # the coordinator opens no run
            return wait_base_id(store, one.topology, 0.0)
        return None

    plans = [
        link.plan if link.plan.base_id else replace(link.plan, base_id=ask(link.store, published, None))
        for link in (one, other)
    ]
    first, second = map(unit_run_id, plans)
    return first is not None and first == second


@dataclass(eq=False, repr=False)
class JobLink:
    """Exchanges messages with the other ranks of the job. Without a store, it does nothing."""

    options: Options
    topology: Topology
    plan: RunPlan
    store: JobStore | None  # the session's keys in the job's store
    name: str  # of the session, equal on all ranks
    is_counted: bool  # whether no other session will have this name: its number was counted, not given

    def __post_init__(self) -> None:
        options, plan = self.options, self.plan
        self.unit: Unit = unit_of(self.topology, options.rank_scope, options.unit_ranks)
        # Whether numbers are reduced over several ranks. If not, each row comes from a single rank.
        self.reduces: bool = self.unit.is_member and self.unit.size > 1 and options.reductions is not None
        # Reads of the base id wait unless it is known to be the coordinator's, rather than what this rank was given.
        self.has_id: bool = plan.base_id is not None and plan.needs_base_id
        self.may_move: bool = False  # whether another rank may become the primary
        # Continues the session, given the rank of its new primary; `None` after its end.
        self.move: Callable[[int], None] | None = None
        self.has_moved: bool = False  # whether the session has continued
        self.reads_until: float = math.inf  # until when reads wait, by the monotonic clock, once there was one
        self._calls_of_init: Counter[str] = Counter()  # while the session is open, by line
        self._unanswered: set[str] = set()  # lines at which this rank calls `init`, but the coordinator does not

    def find_store(self) -> JobStore | None:
        # The store may appear after the session was opened.
        return self.store or JobStore.find(self.name, self.topology, self.options.limits.join_timeout)

    def unit_keys(self, store: JobStore) -> JobStore:
        return store.below(generations.keys_of(self.unit))

    def report_opened(self) -> None:
        if self.store is not None and self.unit.is_member:
            generations.publish_opened(self.unit_keys(self.store), self.unit)

    def connect_late(self, init_arguments: Mapping[str, Any], integration: str, number: int) -> None:
        """Find the store and publish the job's description, for a session that was opened before there was a store."""
        _, self.store = job_description.name_and_store(self.options, self.topology, integration, number)
        if self.store is not None and self.topology.is_coordinator:
            publish_base_id(self.store, self.plan.base_id)
            job_description.publish(self.options, self.store, init_arguments)
        self.report_opened()

    def move_to(self, primary_rank: int) -> None:
        if self.move is None:
            raise RuntimeError("the session has ended")
        self.move(primary_rank)

    def wait(self, is_known: Callable[[], bool]) -> None:
        """Let a read wait until what the primary publishes `is_known`; raise `RendezvousError` if the store is gone.

        All reads together wait up to `join_timeout` and, if another rank becomes the primary then, until it has opened
        the run, but no more than some seconds. None waits if the primary's `init` has failed, nor if the session is
        over on the coordinator: what that has published may be gone.
        """
        if self.reads_until == math.inf:
            within = self.options.limits.join_timeout + self.may_move * _DECISION
            self.reads_until = time.monotonic() + within
        if not self.is_over():
            poll(
                lambda: self.has_moved or time.monotonic() > self.reads_until or is_known() or why_no_run(self),
                *(math.inf, LONGEST_PAUSE, self.topology.world_size),
            )

    def run_id(self) -> str | None:
        """Return the id of the unit's run; `wait` for the one that the coordinator publishes."""
        store, given = self.store, self.plan.base_id
        if store is not None and not self.has_id and not self.topology.is_coordinator:
            try:
                if given is None or job_description.is_published(store):
                    self.wait(lambda: is_base_id_known(store))
                base_id = wait_base_id(store, self.topology, 0.0)
            except (RendezvousError, ConfigurationError):
                return None if given is None else unit_run_id(self.plan)
            self.plan = replace(self.plan, base_id=base_id)  # of a rank without a run
            self.has_id = True
        return unit_run_id(self.plan)

    def run_url(self) -> str | None:
        published = ask(self.store, lambda store: store.try_get(run_key(self.plan)), None)
        return published.get("url") if published else None

    def until_open(self, enclosing: Sequence[JobLink] = ()) -> Callable[[], bool]:
        """Return what tells whether the unit's primary still opens its run: it arrives in the exchange after that.

        It can come to this session only after it has opened the runs of the `enclosing` ones, which are open here, and
        ended the one before, in which W&B may still upload. Once it has come, it has yet to import wandb, for example.
        On the primary, it tells whether others, with runs of their own, still end the session before.
        """
        key, latest = run_key(self.plan), math.inf
        latest_outside = time.monotonic() + self.options.limits.join_timeout
        outside = 0.0  # until when it may come from another session

        def is_begun(link: JobLink, store: JobStore) -> bool:
            """Whether the primary of a session has begun to open it, and not opened its run yet."""
            return generations.has_opened(link.unit_keys(store), 0) and not store.has([run_key(link.plan)])

        def is_ending_former(store: JobStore) -> bool:
            """Whether ranks have left the exchange of the session before this one, but have yet to end their runs."""
            before = leftovers.before(store)
            return before is not None and generations.number_ending(self.unit_keys(before)) > 0

        def follows(store: JobStore) -> bool:
            """Whether the coordinator is in the session before this one, or in an earlier one that has ended here."""
            open_here = {link.store.namespace for link in enclosing if link.store is not None}
            unended = leftovers.unended(store)
            checked = int(self.is_counted)  # the sessions of loggers may be open side by side
            formers = unended[:checked] + [keys for keys in unended[checked:] if keys.namespace not in open_here]
            return any(map(job_description.is_published, formers))

        def is_opening() -> bool:
            nonlocal latest, outside
            now = time.monotonic()
            if not self.unit.index:
                is_due = self.plan.run_mode == "new" and self.is_counted and now < latest_outside
                return is_due and ask(self.store, is_ending_former, False)
            keys = [opening_key(self.plan), key]
            found: dict[str, Any] | None = ask(self.store, lambda store: store.get_present(keys), None)
            if found is None:  # the store may stand still for seconds: it does not say that the primary is elsewhere
                return self.store is not None and now < latest_outside
            if opening_key(self.plan) not in found or "error" in found.get(key, ()):
                if now < latest_outside and (
                    any(ask(link.store, partial(is_begun, link), link.store is not None) for link in (self, *enclosing))
                    or ask(self.store, follows, True)
                ):
                    outside = now + generations.APART
                return now < outside
            within = _ARRIVAL if key in found else float(found[opening_key(self.plan)])
            latest = min(latest, now + within)
            return now < latest

        return is_opening

    def has_peers(self) -> bool:
        store = self.store
        return store is not None and ask(store, lambda _: generations.number_opened(self.unit_keys(store)) > 1, True)

    def until_attached(self) -> Callable[[], bool]:
        """Return what tells whether all writers of a shared run are attached, or it cannot be determined.

        After some seconds, these are the ranks that have opened their sessions: the others may never come.
        """
        began = time.monotonic()

        def are_attached(store: JobStore) -> bool:
            attached, apart = attached_writers(store, self.plan).count(), time.monotonic() - began
            is_time = apart >= generations.least_wait(self.options.limits.join_timeout, self.unit)
            return attached >= (generations.number_opened(self.unit_keys(store)) if is_time else self.unit.size)

        return lambda: ask(self.store, are_attached, True)

    def other_writers(self, deadline: float) -> set[int] | None:
        """Return the indices in the unit of the other ranks that write into its run, if the store answers in time.

        Without an answer by the deadline, on the monotonic clock (`None`), the run ends before its writers.
        """
        within = max(STORE_PATIENCE, deadline - time.monotonic())
        writers = ask(self.store, lambda store: attached_writers(store, self.plan).read_new(), None, within)
        return None if writers is None else set(writers) - {self.unit.index}

    def unit_end(self) -> UnitEnd:
        """Return the ends of the unit's ranks; with a run per rank, they are not shared."""
        return UnitEnd(None if self.plan.run_mode == "new" else self.store, self.unit)

    def report_end(self, *, is_over: bool) -> None:
        """Publish, as the coordinator, that it ends the session, for `init`, or that it has, for late ranks."""
        if self.topology.is_coordinator:
            ask(self.store, leftovers.publish_over if is_over else lambda store: store.publish(_ENDING, 1), None)

    def is_ending(self) -> bool:
        """Whether the coordinator has begun to end this session, as far as the job's store answers."""
        return ask(self.store, _is_ending, False)

    def agree(self, line: Line | None, mine: bool, *, is_first: bool) -> bool | None:
        """Decide as the coordinator does whether a call of `init` at `line` returns this session.

        The coordinator publishes how it has decided, for each line of the script, and that it ends the session. A rank
        that is ahead waits for that: at the line that has opened the session (`is_first`), as in a loop whose runs are
        finished on rank 0 only, as long as `init` waits; at another line, which perhaps only this rank reaches, for a
        few seconds. Its own decision, `mine`, counts on the coordinator, and if that does not decide. The result is
        `None` if the coordinator ends the session, so that this rank has to end it, too.
        """
        place = named_line(line)
        self._calls_of_init[place] += 1
        number, key = self._calls_of_init[place], f"again/{place}"
        within = self.options.limits.join_timeout
        within = within if is_first else min(_ELSEWHERE, within) if place not in self._unanswered else 0.0

        def decision(store: JobStore) -> tuple[bool | None] | None:
            is_ended = _is_ending(store)  # asked first: the decision may be older
            theirs = store.try_get(key)
            if theirs is not None and theirs[0] >= number:
                return (bool(theirs[1]),)
            return (None,) if is_ended else (mine,) if self.has_moved or why_no_run(self) else None

        def decided(store: JobStore) -> tuple[bool | None] | None:
            if self.topology.is_coordinator:
                store.publish(key, [number, mine])
                return (mine,)
            return poll(lambda: decision(store), within, LONGEST_PAUSE, self.topology.world_size)

        with suppress(RendezvousError):
            store = self.find_store()
            found = (mine,) if store is None else ask(store, decided, None, within + STORE_PATIENCE)
            if found is not None:
                return found[0]
        self._unanswered.add(place)
        return mine

    def is_over(self) -> bool:
        """Whether the coordinator has already ended this session, so that this rank opens it too late."""
        is_follower = not self.topology.is_coordinator and self.options.rank_scope == "global"
        return is_follower and ask(self.store, leftovers.is_over, False)

    def leave(self, exchange: Exchange) -> None:
        """Delete the session's keys once its exchange has ended, unless a logger may open it again by its number."""
        store, self.move = self.store, None  # breaks a reference cycle
        if store is None or not self.is_counted:
            return
        if self.plan.run_mode == "new" and self.reduces:
            ask(store, lambda store: generations.publish_ended(self.unit_keys(store)), None)
        self.is_counted = False
        is_needed = self.plan.needs_base_id  # by a rank that comes later
        if not is_needed and isinstance(exchange, CollectiveExchange) and exchange.is_only_one:
            call_or_default(lambda: store.delete(store.own_keys), None)  # a rank that comes later finds that it is over
        else:
            leftovers.leave(store, lambda: exchange.has_ended)


@dataclass(frozen=True)
class UnitEnd:
    """The messages of a unit's ranks about their ends, so that its run ends last and with the right exit code.

    A rank that fails publishes its exit code before anything else at its end, and waits for no other. The first failure
    of a unit is claimed in the store and becomes the exit code of its run; with ``run_mode="new"``, each run has its
    own. Secondaries publish that they write nothing more; the primary waits for that, up to `finish_timeout` and not
    for ranks that its exchange has lost, and finishes last. Without the store nothing can be reported.
    """

    _store: JobStore | None
    _unit: Unit

    def report(self, exit_code: int | None) -> int | None:
        """Publish this rank's exit code; return the unit's first failure, if it is one: others follow from that."""
        if not exit_code:
            return exit_code
        return int(ask(self._store, lambda store: store.claim(self._key("failed"), exit_code), exit_code))

    def report_written(self) -> None:
        ask(self._store, lambda store: self._written(store).append(self._unit.index), 0)

    def await_writers(self, deadline: float, writers: Collection[int]) -> bool:
        """Wait until other ranks, by index, have called `report_written`, or the deadline; return whether they have."""
        store = self._store
        if store is None or not writers:
            return True
        written = self._written(store)

        def have_written() -> bool | None:
            written.read_new()
            return set(writers).issubset(written.values) or None

        def wait() -> bool:
            with suppress(RendezvousError):
                return bool(poll(have_written, deadline - time.monotonic(), _PAUSE))
            return True

        return call_or_default(wait, False, max(0.0, deadline - time.monotonic()) + STORE_PATIENCE)

    def exit_code(self, gone: Collection[int]) -> int:
        """Return the unit's first failure; 1 if ranks are gone without a report; 0 otherwise, and for own runs."""
        reported = ask(self._store, lambda store: store.try_get(self._key("failed")), None)
        return int(reported or (registry.FAILED if gone and self._store is not None else 0))

    def _key(self, what: str) -> str:
        return f"end/{self._unit.name}/{what}"

    def _written(self, store: JobStore) -> SharedList:
        return SharedList(store, self._key("written"))


def move(session: Session, reopen: Callable[[int, Session], Session], primary_rank: int) -> None:
    """Continue a session as another one, made by `reopen`, to which the rows that were logged so far are passed on.

    The session is the one that the user has, also if it continues as a third one.
    """
    before: dict[str, Any] = dict(vars(session))
    link: JobLink = before["_link"]
    if link.reads_until != math.inf:
        link.reads_until = time.monotonic() + _OPENING  # reads wait for the other session
    former = next((one for one in registry.open_sessions() if vars(one)["_link"] is link), session)
    with wandb_private.before_the_end():
        other = reopen(primary_rank, session)
    other.opened_at, other.opened_inside = session.opened_at, session.opened_inside or session
    after = {name: part for name, part in vars(other).items() if name not in _KEPT}
    following: JobLink = after["_link"]

    def publish_before() -> None:
        """Publish which ranks had the former session, and have not left it: if one died, it is missing."""
        if following.store is not None and link.store is not None:
            known = generations.Presence(link.unit, link.unit_keys(link.store))
            generations.Presence(following.unit, following.unit_keys(following.store)).publish_before(known)

    after["_own"].summary.continue_from(before["_own"].summary, other.run)
    after["_intake"].continue_from(before["_intake"])
    after["_shutdown"].failure, before["_shutdown"].successor = before["_shutdown"].failure, after["_shutdown"]
    relay, own = before["_relay"], after["_relay"]  # children have the address of the former
    relay.deliver, relay.metadata = own.deliver, own.metadata
    after["_relay"] = vars(other)["_relay"] = after["_shutdown"].relay = relay
    vars(session).update(after)
    before["_own"].restore()  # from here on wandb's functions are those of the other run
    before["_own"].run.show(_successor=lambda: session)  # the script may still have this stand-in
    if written := before["_config_sync"].continue_in(lambda: session.run):
        session.run.config.update(written, allow_val_change=True)
    call_or_default(publish_before, None)
    following.unit_end().report(link.unit_end().exit_code(()))  # of ranks that have failed before
    following.reads_until, link.has_moved = link.reads_until, True  # reads continue there
    registry.remove(former)
    if following.plan.primary:
        rank = following.topology.global_rank
        warn(
            f"the rank that should write the run has not opened a session, so rank {rank} writes it. Pass "
            f"primary_rank={rank} to init on all ranks, and it does so from the start."
        )
