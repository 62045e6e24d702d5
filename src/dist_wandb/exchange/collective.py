"""Between `log` and the written row: how a rank's contributions become rows of its unit.

`CollectiveExchange` is the one thread of a session that brings the ranks' numbers together: it carries rounds over a
process group of its own, and hands what is finished to the writer of rows. `own_rows` has what is there where nothing
is brought together.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from dist_wandb.errors import RendezvousError
from dist_wandb.exchange.attachments.gathers import is_gathered_name
from dist_wandb.exchange.attachments.metrics import is_metric_name
from dist_wandb.exchange.interface import LOOK_AT_DEVICES, WITHOUT_FINISH, Flush, is_set_within, remember
from dist_wandb.exchange.membership.membership import Epoch, Membership, Over, Stopped, Word, keys_of
from dist_wandb.exchange.protocol.rounds import Finished, Key, Outcome, Rounds
from dist_wandb.exchange.reports import Reports
from dist_wandb.exchange.rows import Contribution, Rows
from dist_wandb.exchange.transport.group import Alone, BrokenError, Group
from dist_wandb.settings.limits import Limits
from dist_wandb.settings.plan import Unit
from dist_wandb.store.job_store import JobStore
from dist_wandb.store.timed_caller import TimedCaller

_log = logging.getLogger("dist_wandb")

_FIRST_PAUSE = 0.01  # seconds until the next round while others are waited for; doubled up to a heartbeat
_GRACE = 5.0  # seconds that a member of a broken epoch is given to speak up
_LAST_WORDS = 2.0  # seconds that the thread is given to write what is there, when its time is over
_LAST_LOOK = 0.5  # seconds that a device, or the encoding of images, is given then
_LAST_ROUND = 1.0  # seconds that a process which ends gives the others to end as well
_LOOK_FOR_BROKEN = 0.5  # seconds between two looks, while waiting for others, whether one of them broke off
_QUICK = 0.1  # seconds between rows that follow each other quickly
_MOST_UNWRITTEN = 20_000  # values kept for a primary that is away
_MANY_AT_ONCE = 256  # contributions in the inbox, from which on the thread does not linger
_MOST_AT_ONCE = 1024  # contributions taken from the inbox before the next round
_WRITING = 0.0003  # seconds that it takes to write a row, as long as nothing was measured
_MORE_TIME = 1.2  # times as much time is left at the end to write what the others have not heard of
_MOST_WRITING = 0.5  # of the time for `finish`, at most
_TIMES_APART = 0.02  # seconds between two notes of when a round took place
_PRIMARY = 0  # its index in the unit
_FLUSH_HEARTBEATS = 2  # how long a rank that flushes waits for others to do so as well
_NEW_NAME_HEARTBEATS = 5  # patience with a name that was never finished before
_STANDSTILL_HEARTBEATS = 2  # beyond that between two rounds, the exchange stands still, and no rank can speak
_MOST_UNFORMED = 3  # groups one after the other that could not be formed, though all members had come


class CollectiveExchange:
    """One rank's thread in the exchange of its unit.

    Args:
        unit: The unit, seen from this rank.
        find: Finds the job's store; asked until there is one.
        rows: Makes totals of contributions, and rows of what is finished.
        limits: How long, and how much, to wait.
        spread: Patterns of names whose spread over ranks is wanted.
        look: Called now and then on the thread.
        has_ended: Whether the rank that leads the job has ended this session already.
    """

    def __init__(
        self,
        unit: Unit,
        find: Callable[[], JobStore | None],
        rows: Rows,
        limits: Limits,
        spread: Sequence[str] = (),
        look: Callable[[], None] = lambda: None,
        has_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self.unit = unit
        self.limits = limits
        self.rounds = Rounds(unit.index, unit.size, spread=spread, needs_primary=is_metric_name)
        self.group: Group | None = None
        self.collectives = 0
        self._find = find
        self._rows = rows
        self._look = look
        self._has_ended = has_ended
        self._inbox: SimpleQueue[Contribution | Flush | None] = SimpleQueue()
        self._waiting: deque[Contribution] = deque()  # for a device to compute what is in them
        self._flushes: list[Flush] = []
        self._pending = 0  # rows that the rounds have yet to bring to the others
        self._doubtful = 0  # values that are to be written again if no others come to this rank any more
        self._writing = _WRITING  # seconds that a row takes
        # Somebody waits: no lingering. No event, as whoever sets one holds a lock, which a signal handler that
        # interrupts it and logs would wait for; `SimpleQueue.put` may be interrupted by itself.
        self._urgent: SimpleQueue[None] = SimpleQueue()
        self._last_row = 0.0
        self._stopped = threading.Event()  # no waiting for others any more
        self._taken = threading.Event()  # closing, and the others know all that this rank had to say
        self._done = threading.Event()
        self._closing = self._failed = self._left = self._broken = False
        self._goes_on_alone = False  # as the others, or the store, cannot be reached
        self._has_closed = False  # all ranks that took part have closed, and all that they said is finished
        self._is_needed = False  # closing, but values that this rank has a part in are not written yet
        self._is_only_one = False  # no other rank has opened a session
        self._lost: set[int] = set()
        self._settled_since: float | None = None
        self._membership: Membership | None = None
        self._epoch: Epoch | None = None
        self._result: tuple[list[float], list[float]] | None = None
        self._due: tuple[Finished, ...] = ()  # finished, but not written yet
        self._unwritten: deque[Finished] = deque(maxlen=_MOST_UNWRITTEN)  # as the primary is away
        self._names_due = False
        self._times: deque[tuple[int, float]] = deque()  # when rounds took place, as long as their cells are open
        self._minded = time.monotonic()  # when patience was looked at last
        self._unformed = 0  # groups one after the other that could not be formed
        self._pause = _FIRST_PAUSE
        self._looked_for_wanting = self._looked_for_broken = 0.0
        self._known_names: set[str] = set()  # names that this rank has contributed to
        self._reports = Reports(max(limits.peer_timeout, _NEW_NAME_HEARTBEATS * limits.heartbeat), time.monotonic)
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._main, name=f"dist_wandb-{unit.name or 'unit'}", daemon=True)

    # On the threads of the user

    def start(self) -> None:
        """Start the thread; `look`, which it calls, has to be able to from now on."""
        self._thread.start()
        remember(self)

    def put(self, contribution: Contribution) -> None:
        """Hand a contribution to the thread."""
        if not self._broken:
            self._inbox.put(contribution)
            if self._inbox.qsize() > _MANY_AT_ONCE:
                self._hurry()

    def flush(self, timeout: float | None = None, *, together: bool = False) -> bool:
        """Wait until all that this rank has logged so far is finished, and, if this rank writes it, written.

        Args:
            timeout: How long to wait, in seconds; `None` for `finish_timeout`.
            together: Whether all ranks flush at this point, so that it ends once all of them have come to it, and all
                that any of them said is finished.

        Returns:
            Whether it is.
        """
        if self._is_foreign() or self._done.is_set():
            return not self._broken
        flushed = Flush(together=together)
        self._wake(flushed)
        limit = self.limits.flush_timeout if timeout is None else timeout
        return is_set_within(flushed, limit, self._done.is_set) and not self._broken

    def close(self, timeout: float | None = None, *, failed: bool = False) -> bool:
        """Say that nothing more comes. A rank that writes waits for all others; the rest until their words are taken.

        Args:
            timeout: How long to wait, in seconds; `None` for `finish_timeout`.
            failed: Whether to wait for nobody.

        Returns:
            Whether all that this rank logged is written, or taken by the rank that writes it.
        """
        if self._is_foreign():
            return True
        self._closing, self._failed = True, self._failed or failed
        self._wake()
        if failed:
            self._stopped.set()
        limit = self.limits.flush_timeout if timeout is None else timeout
        if failed:
            limit = min(limit, _LAST_WORDS)
        if self._await_end(limit) and not self._stopped.is_set():
            return not self._broken
        if not failed:
            self._tell_of_end(limit)
        self._stop(self._time_to_write(limit))
        return False

    def _await_end(self, limit: float) -> bool:
        """Wait until all is written, or taken by the rank that writes; leave time to write what the others lack."""
        ended = self._done if self._rows.writes else self._taken
        deadline = time.monotonic() + limit
        return is_set_within(ended, limit, lambda: deadline - time.monotonic() <= self._time_to_write(limit))

    def _time_to_write(self, limit: float) -> float:
        """How long it takes this rank to write what it has without waiting for others any more."""
        rows = self._backlog + self._doubtful if self._rows.writes else 0
        return min(_MORE_TIME * self._writing * rows, _MOST_WRITING * limit)

    @property
    def _backlog(self) -> int:
        """About how many rows of this rank the others have not heard of."""
        return self._inbox.qsize() + len(self._waiting) + self._pending

    def _tell_of_end(self, limit: float) -> None:
        rank, backlog = self.unit.global_rank, self._backlog
        if not backlog:
            self._warn(
                "finish",
                f"rank {rank} waited {limit:.3g} s for the other ranks to finish, and goes on without them. Rows that "
                "lack a rank are flagged. See finish_timeout.",
            )
            return
        within = f"within finish_timeout ({limit:.3g} s). Pass a larger finish_timeout, or log less often."
        if self._rows.writes:
            told = f"the last rows of rank {rank} (about {backlog}) are written with its own numbers, and flagged: they"
            self._warn("finish", f"{told} had not been exchanged with the other ranks {within}")
        else:
            told = f"what rank {rank} logged after {self._where()} may be lost: these rows (about {backlog})"
            self._warn("lost", f"{told} had not been exchanged {within}")

    def retire(self) -> None:
        """Say that nothing more comes, without waiting; the thread goes through the rounds until all ranks close."""
        if not self._is_foreign():
            self._closing = True
            self._wake()

    def leave(self, *, failed: bool = False) -> None:
        """Make an end, because the process does: leave word for those who stay.

        A thread that is in native code when Python goes down aborts the process. So it must have ended by then.
        """
        if self._is_foreign():
            return
        if not self._closing:
            self.close(min(self.limits.flush_timeout, WITHOUT_FINISH), failed=failed)
        if not failed:
            self._stay_while_needed()
        if not self._done.wait(_LAST_ROUND):
            self._stop()
        self._thread.join(_LAST_WORDS)

    def _stay_while_needed(self) -> None:
        """Wait until others that are behind have asked for all that belongs to the values this rank has logged."""
        deadline = time.monotonic() + min(self.limits.flush_timeout, WITHOUT_FINISH)
        while self._is_needed and time.monotonic() < deadline and not self._done.wait(_LOOK_FOR_BROKEN):
            pass

    @property
    def lost(self) -> frozenset[int]:
        """Indices in the unit of ranks that took part, and are gone without having finished."""
        return frozenset(self._lost)

    @property
    def is_only_one(self) -> bool:
        """Whether it has ended without any other rank having opened a session."""
        return self._is_only_one and self._done.is_set()

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def _stop(self, to_write: float = 0.0) -> None:
        self._closing = True
        self._stopped.set()
        self._wake()
        if not self._done.wait(_LAST_WORDS + to_write):
            self._rows.is_over = True

    def _wake(self, item: Flush | None = None) -> None:
        self._inbox.put(item)
        self._hurry()

    def _hurry(self) -> None:
        """Let the thread not linger. Called after what it is to hurry for was put into the inbox."""
        if self._urgent.empty():
            self._urgent.put(None)

    def _is_foreign(self) -> bool:
        """Whether this process is a fork, in which the thread does not exist."""
        return os.getpid() != self._pid

    # On the thread

    def _main(self) -> None:
        try:
            with suppress(Stopped):
                self._take_part()
            if self._epoch is None:
                self._is_only_one = self._finds_itself_alone()
            self._say_goodbye()
        except Over:
            self._warn("lost", self._too_late())  # so that this is all that is said of it
            self._go_on_alone()
        except RendezvousError as error:
            self._warn("store", f"{error} Rank {self.unit.global_rank} goes on alone.")
            self._go_on_alone()
        except Exception:  # noqa: BLE001  # the training must not suffer, and nothing that was logged be lost
            _log.exception("dist_wandb: the exchange of rank %d failed; it goes on alone", self.unit.global_rank)
            self._go_on_alone()
        finally:
            self._let_go()
            self._write_what_is_there()
            self._tell_of_unsaid()
            self._taken.set()
            self._done.set()
            for flushed in self._flushes:
                flushed.set()
            self._hang_up()

    def _too_late(self) -> str:
        rank = self.unit.global_rank
        if self._epoch is not None:
            return (
                f"rank {rank} stood still, or was cut off, after {self._where()}, and came back when the other ranks "
                "had ended their sessions. What it logged meanwhile is not brought together with their numbers."
            )
        return (
            f"rank {rank} opened its session when the other ranks had ended theirs, so nothing that it logs is brought "
            "together with their numbers. Open the same runs in the same order on all ranks: a guard such as "
            "`if rank == 0` may stay around log, but not around an init that further ones follow."
        )

    def _tell_of_unsaid(self) -> None:
        if self._rows.unwritten:
            self._warn(
                "unwritten in time",
                f"{self._rows.unwritten} rows of rank {self.unit.global_rank} are not written: the time for finish was "
                "over. Pass a larger finish_timeout, or log less often.",
            )
        unsaid = self._reports.unsaid("too late")
        if unsaid:
            self._warn("too late in all", f"{unsaid} more values of rank {self.unit.global_rank} came too late.")

    def _take_part(self) -> None:
        job_store = self._find_job_store()
        self._rows.global_rank_of = self._global_rank
        # Who comes back from a network that was cut off takes part again; until then nobody waits for this rank.
        limit = self.limits.join_timeout + self.limits.peer_timeout
        caller = TimedCaller(limit, lambda: self._stopped.is_set() or self._left)
        beside = job_store.beside(keys_of(self.unit), caller)
        self._membership = Membership(self.unit, beside, self._is_over, self._has_ended)
        epoch = self._membership.arrive(self.limits.join_timeout, lambda: self._closing and self._rows.writes)
        while True:
            following = self._go_through(epoch)
            if following is None:
                self._has_closed = True
                return
            epoch = following

    def _find_job_store(self) -> JobStore:
        deadline = time.monotonic() + self.limits.join_timeout
        while (found := self._find()) is None:
            if self._is_over():
                raise Stopped
            if time.monotonic() > deadline or self._closing:  # who finishes makes no process group any more
                waited = "until it finished" if self._closing else f"within {self.limits.join_timeout:g} s"
                raise RendezvousError(
                    f"Rank {self.unit.global_rank} found no store of the job {waited}, so its numbers cannot be "
                    "brought together with those of other ranks. Call init_process_group."
                )
            time.sleep(0.05)
        return found

    def _go_through(self, epoch: Epoch) -> Epoch | None:
        """Take part in an epoch; what comes after it, or `None` if all ranks are done."""
        membership = self._the_membership()
        if self._catch_up(epoch):
            return None
        if self.unit.index not in epoch.members:
            if self._is_ahead(epoch):
                self.rounds.take_back()
            epoch = self._ask_in(membership.latest(epoch))
        self._enter(epoch)
        try:
            self._form_group(epoch)
            self._greet()
            while True:
                outcome = self._round()
                if outcome.closed:
                    return None
                if outcome.regroup:
                    break
        except BrokenError as error:
            self._let_go()
            if self._stopped.is_set():
                raise Stopped from None
            _log.debug("dist_wandb: epoch %d broke on rank %d: %s", epoch.number, self.unit.global_rank, error)
            return membership.regroup(epoch, self._word(), min(_GRACE, self.limits.peer_timeout))
        self._let_go()
        return self._take_in(epoch)

    def _ask_in(self, epoch: Epoch) -> Epoch:
        """The epoch in which this rank takes part, which the others began without it."""
        membership = self._the_membership()
        if not membership.has_ended(epoch):
            self._warn("late", f"rank {self.unit.global_rank} was not there in time, and asks to be taken in.")
            self._reports.expect("late")
        epoch = membership.join(epoch, self.limits.join_timeout + self.limits.peer_timeout)
        self._epoch = None
        self._restore(membership.state(epoch))
        return epoch

    def _take_in(self, epoch: Epoch) -> Epoch:
        """The epoch with those who want to join, after a round in which all members have learnt of them."""
        membership = self._the_membership()
        if self._is_only_one:
            self.rounds.forget_usual()
        if epoch.members[0] == self.unit.index:
            unwritten = [value.as_list() for value in self._unwritten]
            common = {**self.rounds.snapshot(), "unwritten": unwritten, "ranks": membership.told_ranks()}
            return membership.admit(epoch, self._word(), common)
        following = membership.await_epoch(epoch.number + 1, self.limits.peer_timeout)
        return following or membership.regroup(epoch, self._word(), min(_GRACE, self.limits.peer_timeout))

    def _is_ahead(self, epoch: Epoch) -> bool:
        """Whether this rank came to the end of a round that those of the next epoch had broken off."""
        is_next = self._epoch is not None and self._epoch.number == epoch.number - 1
        return is_next and self.rounds.round > epoch.last_round

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Take over what the others know, also what they finished while the primary was away."""
        self.rounds.restore(state)
        self._the_membership().global_ranks.update(state["ranks"])
        unwritten = map(Finished.from_list, state["unwritten"])
        if self._rows.writes:
            self._due += tuple(unwritten)
        else:
            self._unwritten.extend(unwritten)

    def _catch_up(self, epoch: Epoch) -> bool:
        """Come to where the others were when an epoch began: one round ahead at most, or some names.

        Returns:
            Whether all ranks were done then.
        """
        is_next = self._epoch is not None and self._epoch.number == epoch.number - 1
        if epoch.source in (None, self.unit.index) or not is_next:
            return False
        word = self._the_membership().word(epoch)
        if word is None:
            return False
        closed = False
        if word.round == self.rounds.round + 1 and word.result is not None:
            closed = self._take(list(word.result[0]), list(word.result[1])).closed
        if word.round == self.rounds.round:
            self.rounds.learn([word.names])
        return closed

    def _enter(self, epoch: Epoch) -> None:
        membership = self._the_membership()
        before, self._epoch = self._epoch, epoch
        was_only_one, self._is_only_one = self._is_only_one, self._finds_itself_alone()
        if was_only_one and not self._is_only_one:
            others = ", ".join(str(membership.global_rank(index)) for index in epoch.joined)
            self._warn(
                "accompanied",
                f"rank {others} opened a session {round(membership.waited, 1):g} s after rank {self.unit.global_rank}, "
                "and is taken in. Rows from before are written again where it logs at their steps.",
            )
        absent = set() if self._is_only_one else membership.absent(epoch)
        self.rounds.resize(len(epoch.members), len(absent))
        if self._has_primary():
            self._unwritten.clear()
        had_begun = before is not None and not was_only_one
        missing = absent & set(before.members) if before is not None and had_begun else absent
        self._lost = ((self._lost | missing) if had_begun else self._lost) - set(epoch.members)
        self._lost -= membership.left | membership.unheard
        self._tell_of_missing(missing, had_begun=had_begun)

    def _tell_of_missing(self, missing: Iterable[int], *, had_begun: bool) -> None:
        """Say which ranks are gone on without, and why."""
        membership = self._the_membership()
        reasons: dict[str, list[int]] = {}
        for index in sorted(missing):
            why = self._why_gone(index) if had_begun else membership.why_absent(index)
            reasons.setdefault(why, []).append(membership.global_rank(index))
        told = " and ".join(f"rank {', '.join(map(str, ranks))} {why}" for why, ranks in reasons.items())
        if told:
            self._warn(
                f"lost {sorted(reasons.values())}",
                f"{told}. Rank {self.unit.global_rank} goes on without it; rows that lack it carry "
                "dist_wandb/degraded.",
            )

    def _why_gone(self, index: int) -> str:
        if index in self._the_membership().unheard:
            return f"ended after {self._where()}, before the others had all that it logged (see finish_timeout)"
        return f"stopped taking part after {self._where()}"

    def _finds_itself_alone(self) -> bool:
        """Whether the rank that writes is the only one that has opened a session: the others were not asked to."""
        if self._membership is None or not self._rows.writes:
            return False
        try:
            if not self._membership.is_only_one(self.limits.join_timeout):
                return False
        except RendezvousError:  # who cannot ask does not know
            return False
        self._warn(
            "only one",
            f"no other rank has opened a session, so the run has rank {self.unit.global_rank}'s own numbers. To have "
            "those of all ranks, open the run on all of them, without a rank guard around it; if that is not wanted, "
            "pass reduce=None.",
        )
        return True

    def _form_group(self, epoch: Epoch) -> None:
        from dist_wandb.exchange.transport.gloo import GlooGroup

        if len(epoch.members) == 1:
            self.group = Alone()
            return
        if not self._the_membership().meet(epoch, self.limits.peer_timeout):
            raise BrokenError("the members did not find each other")
        membership, rank = self._the_membership(), epoch.members.index(self.unit.index)
        store, address = membership.store_of(epoch), membership.address(epoch)
        patience = self.limits.peer_timeout
        try:
            self.group = GlooGroup(store, rank, len(epoch.members), patience, self._is_broken_off, address)
        except BrokenError as error:
            self._unformed += 1
            if self._unformed < _MOST_UNFORMED or self._stopped.is_set():
                raise
            raise RendezvousError(self._why_unformed(epoch, error)) from error
        self._unformed = 0

    def _why_unformed(self, epoch: Epoch, error: Exception) -> str:
        others = sorted(self._global_rank(index) for index in epoch.members if index != self.unit.index)
        return (
            f"Rank {self.unit.global_rank} cannot connect to rank {', '.join(map(str, others))} in {self._unformed} "
            f"attempts, though all of them reach the store of the job: {error}. Ports between the hosts may be closed, "
            "or GLOO_SOCKET_IFNAME name an interface by which they do not reach each other."
        )

    def _greet(self) -> None:
        """Begin an epoch: do what some members had yet to do when the last one broke."""
        state = [self.rounds.round, self.rounds.names]
        own = {"state": state, "names": self._names_due, "due": self._due_keys()}
        own["spoken"], own["held"], own["rank"] = self.rounds.spoken(), self.rounds.held(), self.unit.global_rank
        told = [json.loads(text) for text in self._the_group().gather(json.dumps(own).encode())]
        if any(greeting["state"] != state for greeting in told):  # gloo would abort the process over it
            raise RuntimeError(f"the members of epoch {self._epoch} disagree: {told}")
        self.rounds.recount([greeting["spoken"] for greeting in told], [greeting["held"] for greeting in told])
        self._the_membership().learn_ranks(self._the_epoch(), [greeting["rank"] for greeting in told])
        if any(greeting["names"] for greeting in told):
            self._exchange_names()
        due = {Key.of(key): None for greeting in told for key in greeting["due"]}
        self._exchange_others(due)
        self._write_due()

    def _round(self) -> Outcome:
        self._wait_for_reason()
        if self._stopped.is_set():
            raise Stopped
        self._mind_patience()
        self._minded = time.monotonic()
        result = self._exchange_numbers(regroup=self._is_somebody_waiting())
        self._rows.gathers.passed()
        outcome = self._take(*result)
        if outcome.needs_names:
            self._exchange_names()
        self._exchange_others(self._due_keys())
        self._write_due()
        self._more = outcome.more
        self._tell_of_late(outcome.late, outcome.lost)
        if self._closing and not self.rounds.pending and self._has_heard_all() and not self._awaits_primary():
            self._is_needed = self._has_more_to_tell()
            self._taken.set()
        self._answer_flushes(paused=outcome.paused)
        return outcome

    def _exchange_numbers(self, *, regroup: bool = False) -> tuple[list[float], list[float]]:
        group = self._the_group()
        if self.rounds.many_wait:
            told = group.gather(json.dumps(self.rounds.offer()).encode())
            self.rounds.agree([json.loads(offer) for offer in told])
        return group.reduce(*self.rounds.pack(regroup=regroup))

    def _has_more_to_tell(self) -> bool:
        """Whether the others will ask for more than the numbers that this rank has told: states, tables, deviations."""
        return any(
            is_metric_name(name) or is_gathered_name(name) or self.rounds.has_spread(name)
            for name in self.rounds.awaited()
        )

    def _take(self, sums: list[float], maxima: list[float]) -> Outcome:
        outcome = self.rounds.take(sums, maxima)
        self._result = sums, maxima
        self._due += outcome.finished
        self._names_due = outcome.needs_names
        return outcome

    def _exchange_names(self) -> None:
        told = self._the_group().gather(json.dumps(self.rounds.unknown()).encode())
        self.rounds.learn([json.loads(names) for names in told])
        self._names_due = False
        self._rows.settle(self.rounds)

    def _due_keys(self) -> list[Key]:
        """Cells that are finished; not those which only get a flag."""
        return [value.key for value in self._due if value.totals.voices]

    def _exchange_others(self, due: Iterable[Key]) -> None:
        keys = list(due)
        metrics = [key for key in keys if is_metric_name(key.name)]
        if metrics:
            self._rows.metrics.exchange(metrics, self._the_group())
        gathered = [key for key in keys if is_gathered_name(key.name)]
        if gathered and (self._has_primary() or self._rows.gathers.collects):
            began = time.monotonic()
            self._rows.gathers.exchange(gathered, self._the_group())
            spent = time.monotonic() - began  # on a slow network it is long, but no rank is silent meanwhile
            self._times = deque((number, at + spent) for number, at in self._times)
            self._minded += spent

    def _write_due(self) -> None:
        due, self._due = self._due, ()
        if not due:
            return
        if not self._rows.writes and not self._has_primary():
            if len(self._unwritten) + len(due) > _MOST_UNWRITTEN:
                self._warn("unwritten", f"rows up to {self._where()} are lost: the rank that writes them is away.")
            self._unwritten.extend(due)
        try:
            began = time.monotonic()
            self._rows.write_finished(due)
            if len(due) >= _MANY_AT_ONCE:
                self._writing = (time.monotonic() - began) / len(due)
        except Exception:  # noqa: BLE001  # what was not understood must not end the others
            _log.exception("dist_wandb: rank %d could not write rows; they are lost", self.unit.global_rank)

    _more = False

    def _wait_for_reason(self) -> None:
        """Sleep until this rank has something to say, others wait for it, or a heartbeat has passed."""
        self._look()
        is_idle = not (self._more or self.rounds.pending or self._closing)
        if not is_idle:
            timeout = 0.0
        elif self.rounds.cells or self._flushes:
            timeout, self._pause = self._pause, min(2 * self._pause, self.limits.heartbeat)
        else:
            timeout, self._pause = self.limits.heartbeat, _FIRST_PAUSE
        if self._drain(timeout):
            self._pause = _FIRST_PAUSE
            if is_idle:
                self._linger()
        self.rounds.closing = self._closing and self._has_heard_all() and not self._awaits_primary()
        self.rounds.pausing = bool(self._flushes) and self._has_heard_all()
        self._pending = self.rounds.pending
        self._doubtful = self.rounds.count_doubtful() if self._closing else 0
        if self._backlog > self.limits.max_pending_rows:
            self._warn(
                "outbox",
                f"rank {self.unit.global_rank} logs rows faster than the ranks exchange them: more than "
                f"{self.limits.max_pending_rows} wait. None is lost by that, but they take memory, and time at "
                "the end (finish_timeout). Log less often.",
            )

    def _linger(self) -> None:
        """Where rows follow each other quickly, let some more come before the next round."""
        now = time.monotonic()
        is_quick, self._last_row = now - self._last_row < _QUICK, now
        with suppress(Empty):
            while True:
                self._urgent.get_nowait()
        self._drain(0)  # what was put before that was emptied
        if is_quick and not (self._flushes or self._closing or self._stopped.is_set()):
            with suppress(Empty):
                self._urgent.get(timeout=self.limits.linger)
            self._drain(0)

    def _has_heard_all(self) -> bool:
        """Whether nothing of what this rank logged is still on its way to the rounds."""
        return self._inbox.empty() and not self._waiting

    def _awaits_primary(self) -> bool:
        """Whether the rank that writes is away, but may come back for what the others have for it."""
        may_come = bool(self._unwritten) and not self._has_primary() and not self._goes_on_alone
        return may_come and not self._the_membership().is_gone(_PRIMARY)

    def _has_primary(self) -> bool:
        return self._epoch is not None and _PRIMARY in self._epoch.members

    def _drain(self, timeout: float) -> bool:
        """Take what was put into the inbox; whether there was anything, or a device is done with what was."""
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            accepted = self._accept_all(min(left, LOOK_AT_DEVICES) if self._waiting else left)
            if self._post_ready() or accepted:
                return True
            if not left:
                return False

    def _accept_all(self, timeout: float) -> bool:
        with suppress(Empty):
            self._accept(self._inbox.get(timeout=timeout) if timeout else self._inbox.get_nowait())
            with suppress(Empty):
                for _ in range(_MOST_AT_ONCE):
                    self._accept(self._inbox.get_nowait())
            return True
        return False

    def _accept(self, item: Contribution | Flush | None) -> None:
        """Take a contribution, or the wish for a flush; `None` only wakes the thread."""
        if isinstance(item, Contribution):
            self._waiting.append(item)
        elif item is not None:
            self._flushes.append(item)

    def _post_ready(self) -> bool:
        """Post, in their order, what devices have computed. Waiting for one would keep the other ranks waiting."""
        found = False
        while self._waiting and self._waiting[0].is_ready():
            self._post(self._waiting.popleft())
            found = True
        return found

    def _post(self, contribution: Contribution) -> None:
        try:
            self._known_names.update(self._rows.post(contribution, self.rounds))
        except Exception:  # noqa: BLE001  # one row that cannot be understood must not end the others
            _log.exception(
                "dist_wandb: a row of rank %d could not be taken and is lost: %r",
                self.unit.global_rank,
                list(contribution.metrics),
            )

    def _answer_flushes(self, *, paused: bool) -> None:
        """Answer those who wait for what this rank said, but give others the chance to pause as well.

        When all ranks pause, what only some of them said is finished. Who has nothing open waits for that a little, if
        others have something open, or more to say.
        """
        if not (self._flushes and self.rounds.settled and self._has_heard_all()):
            self._settled_since = None
            return
        now = time.monotonic()
        self._settled_since = self._settled_since or now
        waited = now - self._settled_since > _FLUSH_HEARTBEATS * self.limits.heartbeat
        for flush in [flush for flush in self._flushes if paused or not flush.together]:
            if paused or waited or not (self.rounds.cells or self._more):
                flush.set()
                self._flushes.remove(flush)

    def _pass_over_standstill(self, now: float) -> None:
        """Count against no rank that it said nothing while the exchange stood still, as for a rank that was cut off."""
        stood_still = now - self._minded - _STANDSTILL_HEARTBEATS * self.limits.heartbeat
        if stood_still > 0:
            self._times = deque((number, at + stood_still) for number, at in self._times)

    def _mind_patience(self) -> None:
        """Give up waiting for ranks that do not speak where others did."""
        if not self.rounds.cells:
            self._times.clear()
            return
        now, oldest = time.monotonic(), next(iter(self.rounds.cells.values())).born
        self._pass_over_standstill(now)
        if not self._times or now - self._times[-1][1] >= _TIMES_APART:
            self._times.append((self.rounds.round, now))
        while self._times[0][0] < oldest and len(self._times) > 1 and self._times[1][0] <= oldest:
            self._times.popleft()
        self._give_up(now - _NEW_NAME_HEARTBEATS * self.limits.heartbeat, new_only=True)
        self._give_up(now - self.limits.peer_timeout, new_only=False)
        limit = self.limits.max_pending_rows
        if len(self.rounds.cells) > limit and self.rounds.open_places > limit:
            self._warn(
                "pending",
                f"more than {self.limits.max_pending_rows} rows wait for ranks that have not logged them yet, or are "
                "behind. The oldest are written without these, and written again once they log them. See "
                "max_pending_rows.",
            )
            self.rounds.give_up(oldest, new_only=False)

    def _give_up(self, since: float, *, new_only: bool) -> None:
        born = None
        for number, at in self._times:
            if at > since:
                break
            born = number
        if born is None:
            return
        self.rounds.give_up(born, new_only=new_only)
        if new_only:
            return
        rank, patience = self.unit.global_rank, self.limits.peer_timeout
        known = self._known_names
        unspoken = [key for key in self.rounds.unspoken(born) if key.name in known]
        self._reports.values(
            "silent",
            [key for key in unspoken if key.place.counted or not key.occurrence],
            lambda values: (
                f"rank {rank} has not logged {values} within {patience:g} s of the first rank, as it usually does. "
                "Rows are written without it, and corrected if it logs them later."
            ),
        )

    def _tell_of_late(self, late: Sequence[Key], lost: Sequence[Key]) -> None:
        rank = self.unit.global_rank
        self._reports.values(
            "too late",
            lost,
            lambda values: (
                f"rank {rank} logged {values} so long after the others that their part is forgotten. "
                "Rows stay without it. How many there are is said at the end."
            ),
        )
        if late and not self._reports.follows("late", "silent"):
            self._reports.values(
                "late",
                late,
                lambda values: (
                    f"rank {rank} logged {values} after the other ranks' row was written. A corrected row "
                    "follows. Log a name on all ranks in the same order to avoid this."
                ),
            )

    def _is_somebody_waiting(self) -> bool:
        """Whether a rank outside wants to take part; looked up by one member, now and then."""
        epoch, membership = self._epoch, self._membership
        if epoch is None or membership is None or len(epoch.members) + len(membership.left) >= self.unit.size:
            return False
        now = time.monotonic()
        is_time = self.rounds.closing or now - self._looked_for_wanting >= self.limits.heartbeat
        if epoch.members[0] != self.unit.index or not is_time:
            return False
        self._looked_for_wanting = now
        return bool(membership.wanting(epoch))

    def _is_over(self) -> bool:
        """Whether waiting for other ranks has no point any more."""
        if self._stopped.is_set():
            return True
        if self._epoch is not None or self._rows.writes or not self._closing:
            return False
        self._drain(0)  # a rank that has nothing to say, and nothing to write, need not wait for the others to come
        return not self.rounds.pending and not self._waiting

    def _is_broken_off(self) -> bool:
        """Asked while a round waits for the others: whether it is in vain."""
        if self._stopped.is_set() or self._is_full():
            return True
        epoch, membership, now = self._epoch, self._membership, time.monotonic()
        if epoch is None or membership is None or now - self._looked_for_broken < _LOOK_FOR_BROKEN:
            return False
        self._looked_for_broken = now
        return membership.is_broken(epoch)

    def _is_full(self) -> bool:
        """Whether too many rows have come while a round waits for ranks that seem to be held up."""
        waited = time.monotonic() - self._minded
        is_long = self.group is not None and waited > _NEW_NAME_HEARTBEATS * self.limits.heartbeat
        return is_long and self._inbox.qsize() > self.limits.max_pending_rows

    def _let_go(self) -> None:
        if self.group is not None:
            self.collectives += getattr(self.group, "collectives", 0)
            self.group.close()
            self.group = None

    def _hang_up(self) -> None:
        """Let go of the connections to the store: in circles of references they last until Python looks for those."""
        self._membership = None
        self._find, self._look, self._has_ended = (lambda: None), (lambda: None), (lambda: False)
        self._rows.global_rank_of = int

    def _say_goodbye(self) -> None:
        if self._membership is None or self._left:
            return
        self._left = True
        try:
            self._drain(0)  # who stops this thread wakes it
            heard = not self.rounds.pending and self._has_heard_all() and not self._has_more_to_tell()
            self._membership.leave(self._epoch, self._word(), failed=self._failed, heard=heard)
        except RendezvousError:  # the job is over
            return

    def _go_on_alone(self) -> None:
        """Write what this rank says until it finishes."""
        self._goes_on_alone = True
        self._let_go()
        self.group = Alone()
        self._be_alone()
        self._unwritten.clear()
        self._more = False
        try:
            while not (self._closing and self._has_heard_all()) and not self._stopped.is_set():
                self._wait_for_reason()
                self._write_all()
                self._answer_flushes(paused=True)
        except Exception:  # noqa: BLE001  # as in _main
            self._broken = True
            _log.exception("dist_wandb: rank %d can bring no more rows to W&B", self.unit.global_rank)

    def _be_alone(self, *, doubts: bool = False) -> None:
        gone = len(self._membership.left) if self._membership is not None else 0
        absent = 0 if self._is_only_one else max(0, self.unit.size - 1 - gone)
        self.rounds.resize(1, absent, doubts=doubts)

    def _write_what_is_there(self) -> None:
        """At the end: what was not brought together is written as it is here, or said to be lost."""
        try:
            while self._drain(_LAST_LOOK if self._waiting else 0):
                pass
            if self._waiting:
                lost = f"{len(self._waiting)} rows of rank {self.unit.global_rank} are lost"
                self._warn("device", f"{lost}: the device has not computed what is in them, or it is not encoded.")
            self.group = Alone()
            if not self._has_closed:
                self._be_alone(doubts=not self._failed)
            self.rounds.closing = True
            self._write_all()
            self._rows.write_left_over()
        except Exception:  # noqa: BLE001  # an end must not be spoilt
            _log.exception("dist_wandb: the last rows of rank %d could not be written", self.unit.global_rank)

    def _write_all(self) -> None:
        if not self._rows.writes and self.rounds.pending:
            self._warn(
                "lost",
                f"what rank {self.unit.global_rank} logged after {self._where()} may be lost: the rank that writes it "
                "cannot be reached.",
            )
        self._write_due()
        while self.rounds.busy or self._names_due:
            outcome = self._take(*self._exchange_numbers())
            if outcome.needs_names:
                self._exchange_names()
            self._exchange_others(self._due_keys())
            self._write_due()
            if outcome.closed or not (outcome.more or self.rounds.pending or self.rounds.closing):
                break

    def _global_rank(self, index: int) -> int:
        """Never asks the store, which may be gone: it is needed to write rows."""
        return index if self._membership is None else self._membership.global_ranks.get(index, index)

    def _word(self) -> Word:
        return Word(self.rounds.round, self.rounds.names, self._result)

    def _where(self) -> str:
        return self._rows.last_place

    def _warn(self, kind: str, message: str) -> None:
        """Say something once."""
        self._reports.once(kind, message)

    def _the_group(self) -> Group:
        assert self.group is not None, "a group is formed before anything is exchanged"  # noqa: S101
        return self.group

    def _the_epoch(self) -> Epoch:
        assert self._epoch is not None, "entered before its members greet each other"  # noqa: S101
        return self._epoch

    def _the_membership(self) -> Membership:
        assert self._membership is not None, "found before the first epoch"  # noqa: S101
        return self._membership
