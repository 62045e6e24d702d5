"""The exchange that combines the numbers of several ranks, and its thread: rounds until all close, then the last rows.

On the user's threads, no collective takes place, and only `flush` and `close` wait for ranks, for a limited time.

The thread reads what was logged until the next round is due (`Turns`; `Pacer` has its patience), makes calls of it
(`Rows`), takes part in a round (offer, choose, reduce) of the ranks that are in its generation (`Participation`), and
writes the rows that this finishes (`Writing`). All of these share a `Context`.

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
from dist_wandb.exchange.interface import WITHOUT_FINISH, Exchange, Flush, Hooks, Phase
from dist_wandb.exchange.membership.forming import Moved, Over, Stopped
from dist_wandb.exchange.membership.generations import Generation
from dist_wandb.exchange.participation import Participation
from dist_wandb.exchange.protocol.calls import Intent
from dist_wandb.exchange.protocol.rounds import Outcome, Rounds
from dist_wandb.exchange.reports import UNOPENED, Context, report_lost
from dist_wandb.exchange.rows import Contribution, Rows
from dist_wandb.exchange.transport import BrokenError, Group, destroy_closed, undestroyed
from dist_wandb.exchange.turns import Turns
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
        self._context = Context(unit, limits, rows, self.lifecycle)
        if not hooks.names_unopened:
            self._context.is_first(UNOPENED)
        self.turns: Turns = Turns(self._context, self.rounds)
        self.participation: Participation = Participation(self._context, self.rounds, self.turns.pacer)
        if not (rows.writes or rows.writer.label):
            self.rounds.side_data.unwritten = rows.reductions.unreduced
        self._hooks = hooks
        self._rows = rows
        self._late_from = math.inf  # on the monotonic clock: half of the time to end is over

    def start(self) -> None:
        # The transport is imported here, if torch is already: on the thread, that might happen while Python exits after
        # Ctrl-C, which it then forgets: it would exit with code 1 (`_Py_UnhandledKeyboardInterrupt`, reset by
        # `run_eval_code_obj` in CPython's Python/pythonrun.c).
        torch_distributed = sys.modules.get("torch.distributed")
        if torch_distributed is not None and torch_distributed.is_available():
            importlib.import_module("dist_wandb.exchange.transport.tree")  # which imports `gloo`
        super().start()

    def put(self, contribution: Contribution) -> None:
        if self.lifecycle.phase is not _BROKEN:
            self.turns.put(contribution)

    def flush(self, timeout: float | None = None, *, together: bool = False, commit: bool = True) -> bool:
        return super().flush(timeout, together=together, commit=commit) and not self.participation.keeps_rows

    def pass_on(self, successor: Exchange) -> None:
        super().pass_on(successor)
        self.turns.pass_on(successor.put)

    def close(self, timeout: float | None = None, *, failed: bool = False) -> bool:
        """End the exchange: a rank that writes waits for all others, any other rank until everything is delivered."""
        if self._is_foreign:
            return True
        lifecycle, participation = self.lifecycle, self.participation
        lifecycle.has_failed = lifecycle.has_failed or failed
        limit = self._waiting_time(timeout, failed=failed)
        self._late_from = time.monotonic() + limit / 2
        self._ask()
        try:
            ended = lifecycle.ended if self._rows.writes and not failed else lifecycle.delivered
            if self._await_end(ended, limit) and not failed and not lifecycle.is_stopped:
                return lifecycle.has_kept_all
        except BaseException as error:  # noqa: BLE001  # Ctrl-C, or of a signal handler: raised again at the end
            lifecycle.has_failed = True
            self._stop(error)
        if failed:
            self._stop()
            return lifecycle.has_kept_all
        context, flagged = self._context, self._rows.writing.marked
        if participation.keeps_rows:
            context.primary_stays_away(limit, participation.kept_after)
        context.overdue = f"within finish_timeout ({limit:.3g} s). Pass a larger finish_timeout, or log less often"
        self._stop()
        if not participation.keeps_rows and lifecycle.has_kept_all:
            context.time_is_over(limit, self._rows.writing.marked - flagged)  # what has happened to the rows
        return False

    def _await_end(self, ended: threading.Event, limit: float) -> bool:
        """Wait until the limit; until the ranks have met, after a failure: for no longer than without `finish`."""
        lifecycle, most = self.lifecycle, time.monotonic() + WITHOUT_FINISH
        deadline = time.monotonic() + limit  # without the time in which the rank that writes opens its run
        while not ended.wait(min(_POLL_INTERVAL, max(0.0, deadline - time.monotonic()))):
            if self.participation.generation:
                begins = lifecycle.has_failed and not self.rounds.table.round
            else:
                begins = not lifecycle.is_stopped and self._hooks.is_opening()
            is_early = begins and not (lifecycle.has_failed and time.monotonic() >= most)
            if lifecycle.phase is Phase.MOVING or is_early:
                deadline = time.monotonic() + limit
            elif time.monotonic() >= deadline:
                return ended.is_set()
        return True

    def _stop_at_exit(self, within: float, *, failed: bool) -> None:
        lifecycle, deadline = self.lifecycle, time.monotonic() + within
        if not failed:  # ranks that are behind have yet to request what belongs to this rank's values
            while lifecycle.is_needed and time.monotonic() < deadline and not lifecycle.ended.wait(_POLL_INTERVAL):
                pass
        if not lifecycle.ended.wait(_LAST_ROUND) and not self._rows.writing.is_over:
            self._stop()

    @property
    def group(self) -> Group | None:
        """The group of the present generation, which counts what it passes on; `None` between two generations."""
        return self.participation.group

    @property
    def is_only_one(self) -> bool:
        """Whether the exchange has ended without any other rank having opened a session."""
        return self._context.is_only_one and self.lifecycle.ended.is_set()

    def _wake(self, flush: Flush | None = None) -> None:
        self.turns.wake(flush)

    def _left(self) -> int:
        return self.turns.left()

    def _stop(self, interrupt: BaseException | None = None) -> None:
        """Wait for no other rank any longer, and until what is left is written: see `_write_rest`."""
        self._ask(stop=True)
        try:
            self._write_rest(interrupt)
        finally:
            self._rows.writing.is_over = not self.lifecycle.ended.is_set()

    # On the thread

    def _run(self) -> None:
        is_closed = False
        try:
            with suppress(Stopped):
                self._take_part()
                is_closed = True
            self.turns.drain()  # stopping this thread also wakes it
            delivered = not (self.rounds.outbox.waiting or self.participation.is_awaited()) and self.turns.is_empty
            self.participation.leave(delivered=delivered, is_closed=is_closed)
        except Over as over:
            if over.args:
                self._context.primary_is_unreachable(0, "", *over.args)
            else:
                self._context.was_awaited = self.participation.was_awaited()
            self._continue_alone()
        except RendezvousError as error:
            self._context.warn("store", f"{error} Rank {self._rank} continues alone.")
            self._continue_alone()
        except Exception:  # noqa: BLE001  # the training must continue, and no logged row may be lost
            _log.exception("dist_wandb: the exchange of rank %d failed; it continues alone", self._rank)
            self._continue_alone()
        finally:
            self._write_last(is_closed=is_closed)
            # other messages appear once for many values
            report_lost(self._rank, self._rows.writer.lost)
            self.lifecycle.end()
            self.turns.answer(list(self.turns.flushes))
            # releases the store: in reference cycles, its connections would stay open until garbage collection
            self.participation.membership = None
            self._hooks = Hooks()
            self._rows.writing.global_rank_of = int

    def _take_part(self) -> None:
        """Go through generations until all participating ranks have closed and all their values are finished."""
        hooks = self._hooks
        generation: Generation | None = None
        has_rows = lambda: self.turns.puts > 0 and not self.lifecycle.has_failed  # noqa: E731
        try:
            generation = self.participation.arrive(hooks, self.turns.is_due, has_rows, self._gives_up_waiting)
        except Moved as moved:
            if hooks.move is not None:
                self.lifecycle.phase = Phase.MOVING
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
            group = membership.forming.form(generation, self._should_abort, lambda: time.monotonic() >= self._late_from)
            participation.begin(group, generation)
            while not (outcome := self._round()).regroup:
                if outcome.closed:
                    return None
        except BrokenError as error:  # only its text is kept: its traceback keeps the group's connections open
            _log.debug("dist_wandb: %s broke on rank %d: %s", generation, self._rank, str(error))
            is_broken = True
        participation.end_rounds()
        if is_broken and self.lifecycle.is_stopped:
            raise Stopped
        return participation.recover(generation) if is_broken else participation.admit(generation)

    def _round(self) -> Outcome:
        self._await_turn()
        lifecycle, rounds = self.lifecycle, self.rounds
        if lifecycle.is_stopped:
            raise Stopped
        table, oldest = rounds.table, next(rounds.table.unwritten(), None) if rounds.table.open else None
        born = None if oldest is None else table.cells[oldest].born
        rounds.gives_up = self.turns.pacer.begin_round(time.monotonic(), table.round, born)
        outcome = self.participation.round(regroup=self.participation.is_somebody_waiting())
        self._context.about(outcome)
        if (
            lifecycle.is_closing
            and not rounds.outbox.waiting
            and self.turns.is_empty
            and not self.participation.awaits_primary()
            and not (lifecycle.has_failed and self._rows.writes and not rounds.settled)
        ):
            if not self._rows.writes:  # its own run, if it has one, ends before this thread
                self._rows.writing.end_row()
            lifecycle.is_needed = self.participation.is_awaited(by_late=True)
            lifecycle.delivered.set()
        self.turns.end_round(outcome)
        return outcome

    def _await_turn(self) -> None:
        if undestroyed:
            destroy_closed()
        self._hooks.between_rounds(self.rounds.side_data.all_published)
        self.turns.wait(self.participation.awaits_primary)
        self.rounds.side_data.published = self._hooks.publications()
        self.rounds.side_data.axes = self._rows.axes()

    def _gives_up_waiting(self) -> bool:
        lifecycle = self.lifecycle
        is_new = self.participation.generation is None and not self._rows.writes
        return lifecycle.is_stopped or (lifecycle.is_closing and is_new and not self.turns.puts)

    def _should_abort(self) -> bool:
        if self.lifecycle.is_stopped:
            return True
        is_held_up = self.participation.group is not None and self.turns.pacer.is_held_up(time.monotonic())
        is_full = is_held_up and self.turns.backlog > self._limits.max_pending_rows
        return is_full or self.participation.is_broken()

    def _continue_alone(self) -> None:
        lifecycle = self.lifecycle
        lifecycle.phase = Phase.ALONE
        if self.participation.keeps_rows:
            self._may_have_lost(len(self.participation.kept), self.participation.kept_after)
        self.participation.continue_alone()
        self.participation.kept.clear()
        try:
            while not (lifecycle.is_closing and self.turns.is_empty) and not lifecycle.is_stopped:
                self._await_turn()
                self._write_all()
                self.turns.end_round(Outcome(paused=True))
        except Exception:  # noqa: BLE001  # as in run
            lifecycle.phase = Phase.BROKEN
            _log.exception("dist_wandb: rank %d can no longer write rows to W&B", self._rank)

    def _write_all(self) -> None:
        if self.rounds.outbox.waiting:
            self._context.too_late()
            if not self._rows.writes:
                self._may_have_lost(len(self.rounds.outbox.waiting))
                self.rounds.outbox.waiting.clear()
        self.participation.write_due()
        while self.rounds.busy and not self._rows.writing.is_over:
            outcome = self.participation.round()
            if outcome.closed or not (outcome.more or outcome.taken):
                break

    def _may_have_lost(self, rows: int, kept_after: str = "") -> None:
        self.lifecycle.may_have_lost = True
        if not self._context.has("lost"):
            has_begun = self.participation.generation is not None  # so the primary has opened its run
            is_certain = has_begun or self._hooks.move is None or self.participation.membership is None
            failure = None if has_begun else self._hooks.failure()
            self._context.primary_is_unreachable(rows, kept_after, failure, is_certain=is_certain)

    def _write_last(self, *, is_closed: bool) -> None:
        """Write, at the end, the values that were not combined with other ranks, or report them as lost."""
        try:
            self.participation.continue_alone(is_closed=is_closed)
            writing = self._rows.writing
            while not writing.is_over and self.turns.drain(_LAST_WAIT if self.turns.computing else 0.0):
                pass
            if self.turns.computing:
                self.lifecycle.unwritten += len(self.turns.computing)
                self._context.not_computed(len(self.turns.computing))
            self.rounds.intent = Intent.CLOSING
            self._write_all()
            self._rows.act(math.inf)
            writing.end()
        except Exception:  # noqa: BLE001  # the thread must end normally
            _log.exception("dist_wandb: the last rows of rank %d could not be written", self._rank)
