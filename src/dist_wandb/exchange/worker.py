"""The thread of an exchange: it takes part in rounds until all ranks close, and writes what is left at the end.

It is in the phases of `lifecycle`. While it takes part it goes from generation to generation of `membership`: it enters
one, forms a group, and goes through rounds until all close, a member breaks off, or a rank wants to join. A rank enters
a round when it has contributions, when cells are open, or when it was idle for a heartbeat (`protocol.pacing`).

It never blocks on a device: that may itself wait for other ranks (a checkpoint, a validation on one of them), and these
must not wait for this thread. `inbox` asks whether values are ready, and rounds go on meanwhile.

It is a daemon, because a thread that is not one would keep a failed process alive. But a thread in native code while
Python goes down aborts the process, so it is stopped and joined at exit (`interface`). A process that ends normally
without `finish` waits at most 10 s for the others; one that ends by an exception waits for nobody, and writes what it
has. After `finish` it stays as long, if ranks that are behind have yet to ask for states, tables or spreads of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from dist_wandb.errors import RendezvousError
from dist_wandb.exchange.context import Context
from dist_wandb.exchange.cycle import Cycle
from dist_wandb.exchange.inbox import Inbox
from dist_wandb.exchange.lifecycle import Demand, Phase
from dist_wandb.exchange.membership.generations import Generation
from dist_wandb.exchange.membership.membership import Over
from dist_wandb.exchange.membership.polling import Stopped
from dist_wandb.exchange.messages import Messages
from dist_wandb.exchange.output import Output
from dist_wandb.exchange.participation import Participation
from dist_wandb.exchange.posting import Contribution
from dist_wandb.exchange.protocol.cells import Outcome
from dist_wandb.exchange.protocol.pacing import Pacer
from dist_wandb.exchange.protocol.rounds import Intent, Rounds
from dist_wandb.exchange.transport.group import BrokenError, destroy_closed
from dist_wandb.exchange.turns import Turns
from dist_wandb.store.job_store import JobStore

_log = logging.getLogger("dist_wandb")

_LAST_LOOK = 0.5  # seconds that a device, or the encoding of images, is given when the thread ends


@dataclass(frozen=True)
class Hooks:
    """What the thread calls of its session.

    Args:
        find: Finds the job's store; asked until there is one.
        look: Called now and then, with how often any rank has published something through the job's store.
        is_over: Whether the coordinator has ended this session already.
        news: How often this rank has.
    """

    find: Callable[[], JobStore | None] = lambda: None
    look: Callable[[float], None] = lambda _: None
    is_over: Callable[[], bool] = lambda: False
    news: Callable[[], int] = lambda: 0


class Worker:
    """What the thread of an exchange does.

    Args:
        context: What the parts of the exchange share.
        rounds: The state machine of this rank.
        hooks: What is called of the session.

    Attributes:
        inbox: Where the user's threads put contributions.
        messages: What is warned of.
        turns: Has what is not written yet.
        output: Has how long it takes to write.
    """

    def __init__(self, context: Context, rounds: Rounds, hooks: Hooks) -> None:
        self.inbox: Inbox = Inbox(self._post)
        self.messages: Messages = Messages(context)
        self.pacer: Pacer = Pacer(context.limits, time.monotonic())
        self.output: Output = Output(context)
        self.cycle: Cycle = Cycle(context, rounds, self.output, self.pacer)
        self.participation: Participation = Participation(context, rounds, self.cycle, self.output)
        self._context = context
        self._rounds = rounds
        self._hooks = hooks
        self.turns: Turns = Turns(context, rounds, self.inbox, self.pacer, self.messages)

    def run(self) -> None:
        """Take part until the end."""
        is_closed = False
        try:
            with suppress(Stopped):
                self._take_part()
                is_closed = True
            self.participation.leave(self._has_delivered, is_closed=is_closed)
        except Over:
            self.messages.too_late(has_taken_part=self.participation.generation is not None)
            self._go_on_alone()
        except RendezvousError as error:
            self._context.warn("store", f"{error} Rank {self._context.rank} continues alone.")
            self._go_on_alone()
        except Exception:  # noqa: BLE001  # the training must not suffer, and nothing that was logged be lost
            _log.exception("dist_wandb: the exchange of rank %d failed; it continues alone", self._context.rank)
            self._go_on_alone()
        finally:
            self._write_rest(is_closed=is_closed)
            self.messages.at_end()
            self._context.lifecycle.end()
            self.inbox.answer(list(self.inbox.flushes))
            self._detach()

    def _detach(self) -> None:
        """Let connections to the store be closed: in circles of references they last until Python looks for those."""
        self.participation.membership = None
        self._hooks = Hooks()
        self._context.rows.writing.global_rank_of = int

    # Together

    def _take_part(self) -> None:
        """Go through generations until all ranks that take part have closed, and all that they logged is finished."""
        generation: Generation | None
        generation = self.participation.arrive(self._hooks.find, self._gives_up_waiting, self._hooks.is_over)
        while generation is not None:
            generation = self._go_through(generation)

    def _go_through(self, generation: Generation) -> Generation | None:
        """Take part in a generation; what comes after it, or `None` if all ranks are done."""
        participation = self.participation
        if participation.catch_up(generation):
            return None
        generation = participation.enter(generation)
        try:
            group = participation.form(self._should_abort)
            self.cycle.begin(group, participation.learn_ranks)
            while True:
                outcome = self._round()
                if outcome.closed:
                    return None
                if outcome.regroup:
                    break
        except BrokenError as error:
            self.cycle.close()
            if self._context.lifecycle.is_stopped:
                raise Stopped from None
            _log.debug("dist_wandb: %s broke on rank %d: %s", generation, self._context.rank, error)
            return participation.recover(generation)
        self.cycle.close()
        return participation.admit(generation)

    def _round(self) -> Outcome:
        self._await_turn()
        lifecycle = self._context.lifecycle
        if lifecycle.is_stopped:
            raise Stopped
        self.turns.give_up_overdue()
        outcome = self.cycle.round(regroup=self.participation.is_somebody_waiting())
        self.messages.silent(outcome.silent)
        self.messages.late(outcome.late, outcome.lost)
        if (
            lifecycle.is_closing
            and not self._rounds.outbox.pending
            and self.inbox.is_empty
            and not self._awaits_primary()
        ):
            lifecycle.is_needed = self.cycle.is_awaited()
            lifecycle.delivered.set()
        self.turns.answer_flushes(is_paused=outcome.paused, has_more=outcome.more)
        return outcome

    def _await_turn(self) -> None:
        destroy_closed()
        self._hooks.look(self._rounds.side_data.most_published)
        self.turns.wait(has_more=self.cycle.has_more, awaits_primary=self._awaits_primary)
        self._rounds.side_data.published = self._hooks.news()

    def _post(self, contribution: Contribution) -> None:
        try:
            self.messages.contributed(self._context.rows.posting.post(contribution, self._rounds))
        except Exception:  # noqa: BLE001  # one row that cannot be understood must not end the others
            _log.exception(
                "dist_wandb: a row of rank %d could not be processed and is lost: %r",
                self._context.rank,
                list(contribution.metrics),
            )

    def _awaits_primary(self) -> bool:
        """Whether the rank that writes is away, but may come back for what the others have for it."""
        may_come = self.output.keeps_rows and self._context.lifecycle.phase is not Phase.ALONE
        return may_come and self.participation.may_primary_come()

    def _gives_up_waiting(self) -> bool:
        """Whether waiting for other ranks to come has no point any more."""
        lifecycle = self._context.lifecycle
        if lifecycle.is_stopped:
            return True
        if self.participation.generation is not None or self._context.rows.writes or not lifecycle.is_closing:
            return False
        self.inbox.drain()  # a rank that has nothing to say, and nothing to write, need not wait for the others to come
        return not self._rounds.outbox.pending and not self.inbox.computing

    def _should_abort(self) -> bool:
        """Asked while a round waits for the others: whether it is in vain."""
        if self._context.lifecycle.is_stopped:
            return True
        is_held_up = self.cycle.group is not None and self.pacer.is_held_up(time.monotonic())
        is_full = is_held_up and self.inbox.unread > self._context.limits.max_pending_rows
        return is_full or self.participation.is_broken()

    def _has_delivered(self) -> bool:
        """Whether the others know all that this rank has logged."""
        self.inbox.drain()  # who stops this thread wakes it
        return not self._rounds.outbox.pending and self.inbox.is_empty and not self.cycle.is_awaited()

    # Alone

    def _go_on_alone(self) -> None:
        """Write what this rank logs until it finishes."""
        lifecycle = self._context.lifecycle
        lifecycle.phase = Phase.ALONE
        self.cycle.go_alone()
        self.participation.be_alone()
        self.output.forget()
        try:
            while not (lifecycle.is_closing and self.inbox.is_empty) and not lifecycle.is_stopped:
                self._await_turn()
                self._write_all()
                self.turns.answer_flushes(is_paused=True, has_more=False)
        except Exception:  # noqa: BLE001  # as in run
            lifecycle.phase = Phase.BROKEN
            _log.exception("dist_wandb: rank %d can no longer write rows to W&B", self._context.rank)

    def _write_all(self) -> None:
        if not self._context.rows.writes and self._rounds.outbox.pending:
            self._context.lifecycle.may_have_lost = True
            self.messages.primary_is_unreachable()
        self.cycle.write_all()

    def _write_rest(self, *, is_closed: bool) -> None:
        """At the end: what was not brought together is written as it is here, or said to be lost."""
        self.cycle.go_alone()
        try:
            while self.inbox.drain(_LAST_LOOK if self.inbox.computing else 0.0):
                pass
            if self.inbox.computing:
                self.messages.not_computed(self.inbox.computing)
            if not is_closed:
                self.participation.be_alone(doubts=self._context.lifecycle.demand is not Demand.ABORT)
            self._rounds.intent = Intent.CLOSING
            self._write_all()
            self._context.rows.writing.write_left_over()
        except Exception:  # noqa: BLE001  # an end must not be spoilt
            _log.exception("dist_wandb: the last rows of rank %d could not be written", self._context.rank)
