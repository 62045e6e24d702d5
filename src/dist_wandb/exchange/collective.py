"""The exchange that combines the numbers of several ranks, and its thread: rounds until all close, then the last rows.

On the user's threads, no collective takes place, and only `flush` and `close` wait for ranks, for a limited time.

The thread (`Worker`) reads what was logged until the next round is due (`Turns`; `Pacer` has its patience), makes calls
of it (`Rows.posting`), takes part in a round (`Cycle`: offer, choose, reduce) of the ranks that are in its generation
(`Participation`), and writes the rows that this finishes (`Rows.writing`). All of these share a `Context`.

Its phases are in `interface`. It goes from generation to generation of `membership`: it enters one, forms a group, and
goes through rounds until all ranks close, a member breaks off, or a rank wants to join.

It never blocks on a device. The device may itself be waiting for other ranks (a checkpoint, a validation on one of
them), and these must not wait for this thread. `turns` polls whether values are ready, and rounds continue meanwhile.

It is a daemon thread, because a non-daemon thread would keep a failed process alive, and is stopped and joined at exit
(`interface`). A process that ends normally without `finish` waits at most 10 s for the others; one that ends by an
exception waits for no rank, and writes what it has. After `finish`, it also stays up to 10 s if ranks that are behind
have yet to request its states, tables or spreads.
"""

from __future__ import annotations

import importlib
import logging
import math
import sys
import threading
import time
from contextlib import suppress

from dist_wandb.errors import RendezvousError
from dist_wandb.exchange.interface import WITHOUT_FINISH, Exchange, Flush, Hooks, Phase, waiting_time
from dist_wandb.exchange.membership import Situation
from dist_wandb.exchange.membership.forming import Moved, Over, Stopped
from dist_wandb.exchange.membership.generations import Generation
from dist_wandb.exchange.participation import Cycle, Participation
from dist_wandb.exchange.protocol.calls import Intent
from dist_wandb.exchange.protocol.rounds import Outcome, Rounds
from dist_wandb.exchange.reports import NEW_NAME_HEARTBEATS, PRIMARY, UNOPENED, Context, Messages, Reports, report_lost
from dist_wandb.exchange.rows import Contribution, Rows
from dist_wandb.exchange.transport import BrokenError, Group, destroy_closed, undestroyed
from dist_wandb.exchange.turns import Pacer, Turns
from dist_wandb.settings.options import Limits
from dist_wandb.settings.plan import Unit

_log = logging.getLogger("dist_wandb")

_BROKEN = Phase.BROKEN  # a member of an enumeration takes longer to read
_LAST_ROUND = 1.0  # seconds that an exiting process gives the others to end as well
_POLL_INTERVAL = 0.5  # seconds between two checks whether others still need this process
_LAST_WAIT = 0.5  # seconds to wait for a device, or for the encoding of images, when the thread ends


class CollectiveExchange(Exchange):
    """One rank's part in the exchange of its unit, as seen from this rank."""

    def __init__(self, unit: Unit, hooks: Hooks, rows: Rows, limits: Limits) -> None:
        super().__init__(limits, unit.global_rank, unit.name or "unit")
        self.rounds: Rounds = Rounds(
            unit.index,
            unit.size,
            needs_primary=rows.attachments.needs_primary,
            most_open=limits.max_pending_rows,
            hold=2 * limits.linger,
            hold_of_part=limits.peer_timeout / 3,
        )
        self._hooks = hooks
        self._rows = rows
        reports = Reports(max(limits.peer_timeout, NEW_NAME_HEARTBEATS * limits.heartbeat), time.monotonic)
        if not hooks.names_unopened:
            reports.is_first(UNOPENED)
        self._worker = Worker(Context(unit, limits, rows, reports, self._lifecycle), self.rounds, hooks)

    def start(self) -> None:
        # The transport is imported here, if torch is already: on the thread, that might happen while Python exits after
        # Ctrl-C, which it then forgets: it would exit with code 1 (`_Py_UnhandledKeyboardInterrupt`, reset by
        # `run_eval_code_obj` in CPython's Python/pythonrun.c).
        torch_distributed = sys.modules.get("torch.distributed")
        if torch_distributed is not None and torch_distributed.is_available():
            importlib.import_module("dist_wandb.exchange.transport.tree")  # which imports `gloo`
        super().start()

    def put(self, contribution: Contribution) -> None:
        if self._lifecycle.phase is not _BROKEN:
            self._worker.turns.put(contribution)

    def flush(self, timeout: float | None = None, *, together: bool = False) -> bool:
        return super().flush(timeout, together=together) and not self._worker.cycle.keeps_rows

    def pass_on(self, successor: Exchange) -> None:
        super().pass_on(successor)
        self._worker.turns.pass_on(successor.put)

    def close(self, timeout: float | None = None, *, failed: bool = False) -> bool:
        """End the exchange: a rank that writes waits for all others, any other rank until everything is delivered."""
        if self._is_foreign:
            return True
        lifecycle, cycle = self._lifecycle, self._worker.cycle
        lifecycle.has_failed = lifecycle.has_failed or failed
        limit = waiting_time(self._limits, timeout, failed=failed)
        self._worker.late_from = time.monotonic() + limit / 2
        self._ask()
        try:
            ended = lifecycle.ended if self._rows.writes and not failed else lifecycle.delivered
            if self._await_end(ended, limit) and not failed and not lifecycle.is_stopped:
                return lifecycle.has_kept_all
        except KeyboardInterrupt as error:
            lifecycle.has_failed = True
            self._stop(error)
        if failed:
            self._stop()
            return lifecycle.has_kept_all
        messages, flagged = self._worker.messages, self._rows.writing.marked
        if cycle.keeps_rows:
            messages.primary_stays_away(limit, cycle.kept_after)
        messages.overdue = f"within finish_timeout ({limit:.3g} s). Pass a larger finish_timeout, or log less often"
        self._stop()
        if not cycle.keeps_rows and lifecycle.has_kept_all:
            messages.time_is_over(limit, self._rows.writing.marked - flagged)  # what has happened to the rows
        return False

    def _await_end(self, ended: threading.Event, limit: float) -> bool:
        """Wait until the limit; until the ranks have met, after a failure: for no longer than without `finish`."""
        lifecycle, most = self._lifecycle, time.monotonic() + WITHOUT_FINISH
        deadline = time.monotonic() + limit  # without the time in which the rank that writes opens its run
        while not ended.wait(min(_POLL_INTERVAL, max(0.0, deadline - time.monotonic()))):
            if self._worker.participation.generation:
                begins = lifecycle.has_failed and not self.rounds.table.round
            else:
                begins = not (self._rows.writes or lifecycle.is_stopped) and self._hooks.is_opening()
            is_early = begins and not (lifecycle.has_failed and time.monotonic() >= most)
            if lifecycle.phase is Phase.MOVING or is_early:
                deadline = time.monotonic() + limit
            elif time.monotonic() >= deadline:
                return ended.is_set()
        return True

    def _stop_at_exit(self, within: float, *, failed: bool) -> None:
        lifecycle, deadline = self._lifecycle, time.monotonic() + within
        if not failed:  # ranks that are behind have yet to request what belongs to this rank's values
            while lifecycle.is_needed and time.monotonic() < deadline and not lifecycle.ended.wait(_POLL_INTERVAL):
                pass
        if not lifecycle.ended.wait(_LAST_ROUND) and not self._rows.writing.is_over:
            self._stop()

    @property
    def group(self) -> Group | None:
        """The participating ranks; `None` if there are none yet."""
        return self._worker.cycle.group

    @property
    def is_only_one(self) -> bool:
        """Whether the exchange has ended without any other rank having opened a session."""
        return self._worker.participation.attendance.is_only_one and self._lifecycle.ended.is_set()

    def _wake(self, flush: Flush | None = None) -> None:
        self._worker.turns.wake(flush)

    def _left(self) -> int:
        return self._worker.turns.left()

    def _stop(self, interrupt: KeyboardInterrupt | None = None) -> None:
        """Wait for no other rank any longer, and until what is left is written: see `_write_rest`."""
        self._ask(stop=True)
        try:
            self._write_rest(interrupt)
        finally:
            self._rows.writing.is_over = not self._lifecycle.ended.is_set()

    def _run(self) -> None:
        self._worker.run()


class Worker:
    """The work of an exchange's thread."""

    def __init__(self, context: Context, rounds: Rounds, hooks: Hooks) -> None:
        self.messages: Messages = Messages(context)
        self.pacer: Pacer = Pacer(context.limits, time.monotonic())
        self.cycle: Cycle = Cycle(context, rounds, self.pacer)
        self.participation: Participation = Participation(context, rounds, self.cycle)
        self._context = context
        self._rounds = rounds
        self._hooks = hooks
        self.turns: Turns = Turns(context, rounds, self._post)
        self.late_from: float = math.inf  # on the monotonic clock: half of the time to end is over

    def run(self) -> None:
        is_closed = False
        try:
            with suppress(Stopped):
                self._take_part()
                is_closed = True
            self.turns.drain()  # stopping this thread also wakes it
            delivered = not (self._rounds.outbox.waiting or self.cycle.is_awaited()) and self.turns.is_empty
            self.participation.leave(delivered=delivered, is_closed=is_closed)
        except Over as over:
            if over.args:
                self.messages.primary_is_unreachable(0, "", *over.args)
            else:
                self.messages.was_awaited = self.participation.was_awaited()
            self._continue_alone()
        except RendezvousError as error:
            self._context.warn("store", f"{error} Rank {self._context.rank} continues alone.")
            self._continue_alone()
        except Exception:  # noqa: BLE001  # the training must continue, and no logged row may be lost
            _log.exception("dist_wandb: the exchange of rank %d failed; it continues alone", self._context.rank)
            self._continue_alone()
        finally:
            self._write_rest(is_closed=is_closed)
            # other messages appear once for many values
            report_lost(self._context.rank, self._context.rows.writer.lost)
            self._context.lifecycle.end()
            self.turns.answer(list(self.turns.flushes))
            # releases the store: in reference cycles, its connections would stay open until garbage collection
            self.participation.membership = None
            self._hooks = Hooks()
            self._context.rows.writing.global_rank_of = int

    def _take_part(self) -> None:
        """Go through generations until all participating ranks have closed and all their values are finished."""
        hooks = self._hooks
        generation: Generation | None = None
        has_rows = lambda: self.turns.puts > 0 and not self._context.lifecycle.has_failed  # noqa: E731
        patience = min(self._context.limits.peer_timeout, self._context.limits.flush_timeout / 2)
        situation = Situation(hooks, self.turns.is_due, patience, has_rows)
        try:
            generation = self.participation.arrive(hooks.find, self._gives_up_waiting, situation)
        except Moved as moved:
            if hooks.move is not None:
                self._context.lifecycle.phase = Phase.MOVING
                hooks.move(self._context.unit.global_rank_of(moved.primary))
        while generation is not None:
            generation = self._go_through(generation)

    def _go_through(self, generation: Generation) -> Generation | None:
        """Take part in a generation; return the next one, or `None` if all ranks are done."""
        participation = self.participation
        if participation.catch_up(generation):
            return None
        generation, membership = participation.enter(generation), participation.joined
        is_broken = False
        try:
            group = membership.forming.form(generation, self._should_abort, lambda: time.monotonic() >= self.late_from)
            self.cycle.begin(group, generation.members, membership.presence.global_ranks.update)
            while not (outcome := self._round()).regroup:
                if outcome.closed:
                    return None
        except BrokenError as error:  # only its text is kept: its traceback keeps the group's connections open
            _log.debug("dist_wandb: %s broke on rank %d: %s", generation, self._context.rank, str(error))
            is_broken = True
        self.cycle.close()
        if is_broken and self._context.lifecycle.is_stopped:
            raise Stopped
        return participation.recover(generation) if is_broken else participation.admit(generation)

    def _round(self) -> Outcome:
        self._await_turn()
        lifecycle, rounds = self._context.lifecycle, self._rounds
        if lifecycle.is_stopped:
            raise Stopped
        table, oldest = rounds.table, next(rounds.table.unwritten(), None) if rounds.table.open else None
        born = None if oldest is None else table.cells[oldest].born
        rounds.give_up(*self.pacer.begin_round(time.monotonic(), table.round, born))
        outcome = self.cycle.round(regroup=self.participation.is_somebody_waiting())
        self.messages.about(outcome)
        if (
            lifecycle.is_closing
            and not rounds.outbox.waiting
            and self.turns.is_empty
            and not self._awaits_primary()
            and not (lifecycle.has_failed and self._context.rows.writes and not rounds.settled)
        ):
            if not self._context.rows.writes:  # its own run, if it has one, ends before this thread
                self._context.rows.writing.end_row()
            lifecycle.is_needed = self.cycle.is_awaited(by_late=True)
            lifecycle.delivered.set()
        self.turns.end_round(outcome)
        return outcome

    def _await_turn(self) -> None:
        if undestroyed:
            destroy_closed()
        self._hooks.between_rounds(self._rounds.side_data.most_published)
        self.turns.wait(has_more=self.cycle.has_more, awaits_primary=self._awaits_primary)
        self._rounds.side_data.published = self._hooks.publications()
        self._rounds.side_data.axes = self._context.rows.axes()

    def _post(self, contribution: Contribution) -> None:
        try:
            self._context.rows.posting.post(contribution, self._rounds, time.monotonic())
        except Exception:  # noqa: BLE001  # a row that cannot be processed must not stop the later ones
            self._context.rows.writer.lost["that could not be processed"] += len(contribution.metrics)
            _log.exception(
                "dist_wandb: a row of rank %d could not be processed and is lost: %r",
                self._context.rank,
                list(contribution.metrics),
            )

    def _awaits_primary(self) -> bool:
        """Return whether the rank that writes is away, but may return for the values kept for it."""
        may_come = self.cycle.keeps_rows and self._context.lifecycle.phase is not Phase.ALONE
        return may_come and not self.participation.joined.presence.departures.is_gone(PRIMARY)

    def _gives_up_waiting(self) -> bool:
        lifecycle = self._context.lifecycle
        is_new = self.participation.generation is None and not self._context.rows.writes
        return lifecycle.is_stopped or (lifecycle.is_closing and is_new and not self.turns.puts)

    def _should_abort(self) -> bool:
        if self._context.lifecycle.is_stopped:
            return True
        is_held_up = self.cycle.group is not None and self.pacer.is_held_up(time.monotonic())
        is_full = is_held_up and self.turns.backlog > self._context.limits.max_pending_rows
        return is_full or self.participation.is_broken()

    def _continue_alone(self) -> None:
        lifecycle = self._context.lifecycle
        lifecycle.phase = Phase.ALONE
        if self.cycle.keeps_rows:
            self._may_have_lost(len(self.cycle.kept), self.cycle.kept_after)
        self.cycle.continue_alone()
        self.participation.be_alone()
        self.cycle.kept.clear()
        try:
            while not (lifecycle.is_closing and self.turns.is_empty) and not lifecycle.is_stopped:
                self._await_turn()
                self._write_all()
                self.turns.end_round(Outcome(paused=True))
        except Exception:  # noqa: BLE001  # as in run
            lifecycle.phase = Phase.BROKEN
            _log.exception("dist_wandb: rank %d can no longer write rows to W&B", self._context.rank)

    def _write_all(self) -> None:
        if self._rounds.outbox.waiting:
            self.messages.too_late()
            if not self._context.rows.writes:
                self._may_have_lost(len(self._rounds.outbox.waiting))
                self._rounds.outbox.waiting.clear()
        self.cycle.write_due()
        while self._rounds.busy and not self._context.rows.writing.is_over:
            outcome = self.cycle.round()
            if outcome.closed or not (outcome.more or outcome.taken):
                break
        self.cycle.has_more = False

    def _may_have_lost(self, rows: int, kept_after: str = "") -> None:
        self._context.lifecycle.may_have_lost = True
        if not self._context.reports.has("lost"):
            has_begun = self.participation.generation is not None  # so the primary has opened its run
            is_certain = has_begun or self._hooks.move is None or self.participation.membership is None
            failure = None if has_begun else self._hooks.failure()
            self.messages.primary_is_unreachable(rows, kept_after, failure, is_certain=is_certain)

    def _write_rest(self, *, is_closed: bool) -> None:
        """Write, at the end, the values that were not combined with other ranks, or report them as lost."""
        self.cycle.continue_alone()
        try:
            writing = self._context.rows.writing
            while not writing.is_over and self.turns.drain(_LAST_WAIT if self.turns.computing else 0.0):
                pass
            if self.turns.computing:
                self._context.lifecycle.unwritten += len(self.turns.computing)
                self.messages.not_computed(len(self.turns.computing))
            if not is_closed:
                self.participation.be_alone()
            self._rounds.intent = Intent.CLOSING
            self._write_all()
            self._context.rows.act(math.inf)
            writing.end()
        except Exception:  # noqa: BLE001  # the thread must end normally
            _log.exception("dist_wandb: the last rows of rank %d could not be written", self._context.rank)
