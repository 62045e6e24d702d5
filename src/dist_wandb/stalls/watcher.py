"""A thread beside the training that notices when it stands still, asks all ranks where they are, and tells it once.

*Signs.* The training thread leaves a time stamp in `signs` when it calls the session; the watcher also sees whether
PyTorch has counted a collective. A rank that has had no sign for its limit asks (`Clock`).

*Asking.* Every 5 s each rank checks one key of the job's store. The rank that claims it asks the others (`asking`), and
tells the verdict: in a file, on stderr, as an alert, to ``on_stall=``. The watcher of a rank with a run sends the alert
if the one that tells has none: otherwise it would wait for the next round of the exchange. If a rank has moved, it is
quiet, and asks again after half the limit, and after three limits it tells "slow". No other rank then asks about the
same stall; if the one that asked dies instead, another does. Without the store, which may be inside of a stopped rank
0, each rank tells what it knows of itself.

There is one watcher in a process, for all its sessions. It stops with the last one, and is joined at exit. It tells
only: no process is ended or signalled.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dist_wandb.errors import RendezvousError, visible
from dist_wandb.settings.options import Options
from dist_wandb.stalls import evidence
from dist_wandb.stalls.asking import ANSWERS, Questions
from dist_wandb.stalls.evidence import Collectives, Thread, Work
from dist_wandb.stalls.verdict import Answer, Stall, is_debugged, judge, may_be_slow
from dist_wandb.store.job_store import JobStore
from dist_wandb.store.timed_caller import UnansweredError, briefly
from dist_wandb.topology.launch import node_identity
from dist_wandb.topology.model import Topology
from dist_wandb.topology.ranges import named
from dist_wandb.wandb_files import stall_file
from dist_wandb.wandb_files.finding import is_in_run_directory

_log = logging.getLogger("dist_wandb")

_PAUSE = 5.0  # seconds between two looks at signs and questions; less if the user's limit is short
_WINDOW = 3.0  # seconds in which the work of the training thread is measured
_LEAST = 300.0  # seconds: the shortest limit of "auto"
_PAUSES = 10  # times the longest pause so far: the limit of "auto", if it is larger
_UNTIL_FIRST = 1800.0  # seconds: the shortest limit until there was a sign
_BEFORE_WATCHDOG = 60.0  # seconds before PyTorch's watchdog kills the job at which "auto" tells at the latest
_LIMITS_IF_SLOW = 3  # limits after which a job is told to be slow
_SILENT_STORE = 10.0  # seconds without the store after which a rank tells what it knows alone
_SUSPENDED = 5.0  # seconds by which a pause is too long if this process was suspended meanwhile
_STOP = 4.0  # seconds that the thread gets to end


class Signs:
    """Signs of life of this process's training."""

    last: float = 0.0  # on the monotonic clock; the training thread sets it


signs: Signs = Signs()


@dataclass(frozen=True)
class Outside:
    """What a session gives the watcher."""

    topology: Topology
    timeout: float | Literal["auto"]
    run: Callable[[], Any]  # the W&B run of this rank, or a `NullRun`
    directory: Path  # for the files of a rank without a run
    on_stall: Callable[[Stall], object] | None


class Clock:
    """When a rank asks. Times are those of the monotonic clock."""

    def __init__(self, timeout: float | Literal["auto"], now: float) -> None:
        self.watchdog: float = 0.0  # seconds after which PyTorch's watchdog kills the job; 0 if unknown
        self.sign: float = now  # the last one
        self.is_told = False  # whether the present stall is told
        self.tells = False  # whether this rank has told it
        self.told_in: str = ""  # path of the file of the last stall that this rank has told
        self.answered: int = 0  # number of the last question in the present stall
        self._timeout = timeout
        self._has_begun = False  # whether there was a sign
        self._longest = 0.0  # the longest pause between two signs, in seconds
        self._look = 0.0  # when this rank may ask next

    @property
    def pause(self) -> float:
        """How many seconds to wait between two looks at signs and questions: less if the user's limit is short."""
        return _PAUSE if self._timeout == "auto" else min(_PAUSE, self._timeout / 8)

    @property
    def limit(self) -> float:
        """After how many seconds without a sign this rank asks."""
        limit = max(_LEAST, _PAUSES * self._longest) if self._timeout == "auto" else self._timeout
        return self._at_most(limit if self._has_begun else max(limit, _UNTIL_FIRST))

    def _at_most(self, seconds: float) -> float:
        latest = self.watchdog - _BEFORE_WATCHDOG if self._timeout == "auto" else 0.0
        return min(seconds, latest) if latest > _BEFORE_WATCHDOG else seconds

    def is_final(self, now: float) -> bool:
        """Return whether a slow rank is no reason any more to be quiet."""
        return now - self.sign >= self._at_most(_LIMITS_IF_SLOW * self.limit)

    def due(self) -> float:
        """Return when this rank asks."""
        return max(self.sign + self.limit, self._look)

    def look_later(self, now: float, least: float = 0.0) -> None:
        """Ask again after half the limit, and at least so many seconds."""
        self._look = now + max(self.limit / 2, least)

    def hear(self, sign: float) -> float | None:
        """Take a sign; return the length of the stall that ends with it, if this rank has told it."""
        if sign <= self.sign:
            return None
        pause, has_told = sign - self.sign, self.tells
        self._longest = max(self._longest, pause) if self._has_begun else 0.0
        self.begin(sign)
        self._has_begun = True
        return pause if has_told else None

    def begin(self, now: float) -> None:
        """Begin anew, as after a suspension, which is no pause."""
        self.sign, self.is_told, self.tells, self.answered, self._look = now, False, False, 0, 0.0


class Watcher:
    """Watches the training of this process."""

    def __init__(self, outside: Outside, thread: Thread, find: Callable[[], JobStore | None]) -> None:
        self.stopped: threading.Event = threading.Event()
        topology = outside.topology
        self._outside = outside
        self._thread = thread
        self._find = find
        self._questions = Questions(topology.global_rank, topology.world_size, self.stopped.wait)
        self._clock = Clock(outside.timeout, time.monotonic())
        self._collectives = Collectives()
        self._samples: list[tuple[float, Work | None]] = []  # of the training thread, in the last half of the limit
        self._silent_since: float | None = None  # when the store has stopped answering
        self._awake_by = math.inf  # when this thread must have woken up, unless the process is suspended

    def run(self) -> None:
        """Watch until the last session ends; the target of the thread."""
        pause, rank = 0.0, self._outside.topology.global_rank
        while not self.stopped.wait(pause):
            try:
                self._step()
            except Exception:  # noqa: BLE001  # the training goes on
                _log.exception("dist_wandb: rank %d does not watch for stalls any more", rank)
                return
            now = time.monotonic()
            due = self._clock.due()
            pause = self._clock.pause
            if due > now and not self._clock.is_told:
                pause = min(pause, due - now)
            elif self._silent_since is not None:
                pause = 1.0
            self._awake_by = now + pause + _SUSPENDED
        self._see(time.monotonic())
        with suppress(RendezvousError, UnansweredError):
            self._questions.leave()

    def _step(self) -> None:
        now, clock = time.monotonic(), self._clock
        self._see(now)
        if now - clock.sign > clock.limit / 2:
            since = now - clock.limit / 2 - clock.pause
            self._samples = [*(one for one in self._samples if one[0] >= since), (now, self._thread.work())]
        try:
            if self._questions.connect(self._find):
                self._ask_or_answer(now)
            self._silent_since = None
        except (RendezvousError, UnansweredError) as error:
            since = self._silent_since = self._silent_since or now
            _log.debug("dist_wandb: rank %d cannot ask the others: %s", self._outside.topology.global_rank, error)
            if now >= clock.due() and not clock.is_told and now - since >= _SILENT_STORE:
                self._tell_alone(now)

    def _see(self, now: float) -> None:
        """Notice signs since the last look."""
        clock = self._clock
        lasted = clock.hear(now if self._collectives.have_moved() else signs.last)
        clock.watchdog = self._collectives.watchdog
        if lasted is not None:
            _log.warning("dist_wandb: the training went on after %.0f s.", lasted)
            with suppress(Exception):  # there may be no file
                stall_file.add_end(clock.told_in, lasted)
        if now > self._awake_by:
            clock.begin(now)
        self._awake_by = math.inf
        if clock.sign == now or now - clock.sign < clock.limit / 2:
            self._samples.clear()

    def _ask_or_answer(self, now: float) -> None:
        clock, questions = self._clock, self._questions
        if clock.answered and self._outside.run() and (text := questions.alert()):
            self._alert(text)
        if questions.is_asked():
            self._answer()
        elif now >= clock.due() and not clock.is_told:
            if clock.answered and questions.was_told(clock.answered):
                clock.is_told = True
            elif questions.claim():
                self._ask(now)
            else:
                self._answer()

    def _answer(self) -> None:
        self._questions.answer(self._described(), evidence.all_stacks(self._thread))
        self._clock.answered = self._questions.number
        self._clock.look_later(time.monotonic(), ANSWERS)
        self._questions.look_for_others()
        self._clock.look_later(time.monotonic(), ANSWERS)  # by then the rank that has asked has told it

    def _ask(self, now: float) -> None:
        clock, sign = self._clock, self._clock.sign
        clock.look_later(now)
        self._questions.answer(self._described(), evidence.all_stacks(self._thread))
        found = self._questions.gather(now)
        self._see(time.monotonic())
        slow = [one for one in found.answers if may_be_slow(one, clock.limit)]
        is_slow = bool(slow) or any(one.kind == "finished" for one in found.absent)
        if self.stopped.is_set() or clock.sign != sign or any(map(is_debugged, found.answers)):
            return
        if len(slow) == len(found.answers):  # nobody waits
            return
        if not is_slow or clock.is_final(now):
            quiet = time.monotonic() - sign
            self._tell(judge(found.answers, found.absent, quiet, is_slow=is_slow), found.stacks)

    def _tell_alone(self, now: float) -> None:
        own, clock = self._described(), self._clock
        if self.stopped.is_set() or is_debugged(own) or (may_be_slow(own, clock.limit) and not clock.is_final(now)):
            clock.look_later(now)
            return
        stall = judge([own], self._questions.seen_alone(), time.monotonic() - clock.sign, is_slow=False)
        text = f"{stall.message} The job's store does not answer, so nothing is known of the other ranks."
        self._tell(replace(stall, message=text), {evidence.all_stacks(self._thread): [own.rank]}, alone=True)

    def _tell(self, stall: Stall, stacks: dict[str, list[int]], *, alone: bool = False) -> None:
        self._clock.is_told = self._clock.tells = True
        stall = replace(stall, message=visible(stall.message))
        path = self._clock.told_in = self._write(stall.message, stacks, alone=alone)
        stall = replace(stall, stacks=path)
        _log.warning(
            "dist_wandb: %s All stacks are in %s. No process is ended; stall_timeout=None turns this off.",
            stall.message,
            path or "no file, because it cannot be written",
        )
        has_run = bool(self._outside.run())
        if has_run:
            self._alert(stall.message)
        if not alone:
            with suppress(RendezvousError, UnansweredError):
                self._questions.tell("" if has_run else stall.message)
        if self._outside.on_stall is not None:
            try:
                self._outside.on_stall(stall)
            except Exception:  # noqa: BLE001  # the watcher goes on
                _log.exception("dist_wandb: on_stall of rank %d failed", self._outside.topology.global_rank)

    def _alert(self, text: str) -> None:
        with suppress(Exception):  # W&B's problem is not the training's
            self._outside.run().alert("Training stands still", text, level="WARN")

    def _write(self, message: str, stacks: dict[str, list[int]], *, alone: bool) -> str:
        """Write all stacks to a file of the run; return its path."""
        rank, run = self._outside.topology.global_rank, self._outside.run()
        texts = [f"{named(ranks)}:\n{text}\n" for text, ranks in stacks.items()]
        folders = [self._outside.directory]
        with suppress(Exception):
            own = Path(run.dir if run else "" if alone else briefly(lambda: run.dir, ""))  # perhaps of another rank
            folders[:0] = [own] if run or (own.is_dir() and is_in_run_directory(own)) else []
        for folder in folders:
            with suppress(Exception):  # the message matters more
                folder.mkdir(parents=True, exist_ok=True)
                return str(stall_file.write(folder, rank, message, texts))
        return ""

    def _described(self) -> Answer:
        """Describe this rank, from what its thread does in some seconds."""
        thread, quiet = self._thread, time.monotonic() - max(self._clock.sign, signs.last)
        began, before, children = time.monotonic(), thread.work(), evidence.children()
        self.stopped.wait(_WINDOW)
        after, over = thread.work(), time.monotonic() - began
        since, earliest = self._samples[0] if self._samples else (began, before)
        return Answer(
            self._outside.topology.global_rank,
            node_identity(),
            os.getpid(),
            quiet=round(quiet, 1),
            cpu=round((after.cpu - before.cpu) / over, 3) if before and after else 0.0,
            wakes=after.sleeps - before.sleeps if before and after else 0,
            moves=evidence.has_moved(earliest, after, time.monotonic() - since),
            frames=evidence.stack_of(thread.ident),
            calls=self._collectives.groups(),
            workers=evidence.workers(children),
            uses_device=evidence.uses_device(),
        )


class _Running:
    """The watcher of this process."""

    watcher: Watcher | None = None
    thread: threading.Thread | None = None
    ending: threading.Thread | None = None  # of the last watcher


def begin(topology: Topology, options: Options, run: Callable[[], Any], directory: Path) -> None:
    """Watch the calling thread's training, if it is one of several ranks, unless this process does so already."""
    thread = _Running.thread
    is_running = thread is not None and thread.is_alive()  # not in a fork
    if options.stall_timeout is None or topology.world_size == 1 or is_running:
        return
    end()  # an earlier one would say that this rank has no session
    outside = Outside(topology, options.stall_timeout, run, directory, options.on_stall)
    find = partial(JobStore.find, "stalls", topology, options.limits.join_timeout)
    _Running.watcher = Watcher(outside, Thread.current(), find)
    _Running.thread = threading.Thread(target=_Running.watcher.run, name="dist_wandb-stalls", daemon=True)
    _Running.thread.start()


def stop() -> None:
    """Stop watching, without waiting for the thread: the run has yet to end."""
    if _Running.watcher is not None:
        _Running.watcher.stopped.set()
        _Running.ending = _Running.thread
        _Running.watcher = _Running.thread = None


def end() -> None:
    """Stop watching, and wait for the thread: in native code at the end of the process, it would abort it."""
    stop()
    thread, _Running.ending = _Running.ending, None
    if thread is not None and thread.is_alive() and thread is not threading.current_thread():  # not in a fork
        thread.join(_STOP)
