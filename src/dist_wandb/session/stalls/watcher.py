"""A thread beside the training that notices when it stands still, asks all ranks where they are, and tells it once.

*Signs.* The training thread leaves a time stamp in `signs` when it calls the session; the watcher also sees whether
PyTorch has counted a collective. A rank that has had no sign for its limit asks (`Clock`).

*Asking.* Every 5 s each rank checks one key of the job's store. The rank that claims it asks the others
(`Questions`), and tells the verdict: in a file, on stderr, as an alert, to ``on_stall=``. The watcher of a rank with a
run sends the alert if the one that tells has none: otherwise it would wait for the next round of the exchange. If a
rank has moved, it is quiet, and asks again after half the limit, and after three limits it tells "slow". No other rank
then asks about the same stall; if the one that asked dies instead, another does. Without the store, which may be inside
of a stopped rank 0, each rank tells what it knows of itself.

*Keys.* ``ask/N``, claimed by the rank that asks the question number N; ``rank/RANK``, what a rank has said last: that
it has a session, that it has finished it, or an answer and the number of its question, which only the rank that asks
reads; ``answers/N``, how many have answered; ``stack/DIGEST``, stacks that several ranks may share; ``told/N``, the
message to which a question has led, and ``alerted/N``, claimed by the rank that sends it as an alert; ``on/HOST``, a
list of the ranks on a host, with their processes.

There is one watcher in a process, for all its sessions. It stops with the last one, and is joined at exit. It tells
only: no process is ended or signalled.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from dist_wandb.errors import RendezvousError
from dist_wandb.job.job_store import JobStore, SharedList, is_first
from dist_wandb.job.launch import node_identity
from dist_wandb.job.ranges import named
from dist_wandb.job.timed_caller import STORE_PATIENCE, TimedCaller, call_or_default
from dist_wandb.job.topology import Topology
from dist_wandb.notices import warn
from dist_wandb.session.stalls import evidence
from dist_wandb.session.stalls.verdict import MOVING, Answer, Calls, StalledRank, judge, located
from dist_wandb.settings.options import Options
from dist_wandb.wandb_files.finding import is_in_run_directory
from dist_wandb.wandb_files.sidecar import end_stall, write_stall

_log = logging.getLogger("dist_wandb")

_PAUSE = 5.0  # seconds between two looks at signs and questions; less if the user's limit is short
_SHORTEST_PAUSE = 0.5  # seconds, around the moment at which this rank asks
_WINDOW = 3.0  # seconds in which the work of the training thread is measured
_LEAST = 300.0  # seconds: the shortest limit of "auto"
_PAUSES = 10  # times the longest pause so far: the limit of "auto", if it is larger
_UNTIL_FIRST = 1800.0  # seconds: the shortest limit until there was a sign
_BEFORE_WATCHDOG = 60.0  # seconds before PyTorch's watchdog kills the job at which "auto" tells at the latest
_LIMITS_IF_SLOW = 3  # limits after which a job is told to be slow
_SILENT_STORE = 6.0  # seconds for which the store has not taken a question when a rank tells what it knows alone
_SUSPENDED = 5.0  # seconds by which a pause is too long if this process was suspended meanwhile
_STOP = 4.0  # seconds that the thread gets to end
_ANSWERS = 8.5  # seconds in which ranks answer: a pause between two looks at the store, evidence, and the store
_MOST_STACKS = 28 * 1024  # characters of the stacks that one rank publishes; with its answer, 32 KiB
_ALONE = "The job's store does not answer, so nothing is known of the other ranks."


# Signs of life of this process's training. `last` is on the monotonic clock; the training thread sets it.
signs = SimpleNamespace(last=0.0)


class Clock:
    """When a rank asks. Times are those of the monotonic clock."""

    def __init__(self, timeout: float | Literal["auto"], now: float) -> None:
        self.pause: float = _PAUSE if timeout == "auto" else min(_PAUSE, timeout / 8)  # between two looks
        self.watchdog: float = 0.0  # seconds after which PyTorch's watchdog kills the job; 0 if unknown
        self._timeout = timeout
        self._longest: float | None = None  # the longest pause between two signs, in seconds; `None` before the first
        self.begin(now)

    def begin(self, now: float) -> None:
        """Begin anew, as after a suspension, which is no pause."""
        self.sign: float = now  # the last one
        self.early: tuple[float, evidence.Work | None] | None = None  # what the thread had done some time after that
        self.has_answered: bool = False  # whether this rank has answered a question about the present stall
        self.is_told: bool = False  # whether that is told
        self.told_in: str | None = None  # path of the file in which this rank has told it; empty if there is none
        self._look = 0.0  # when this rank may ask next

    def limit(self, times: int = 1) -> float:
        """Return after how many seconds without a sign this rank asks, or several times as many."""
        limit = max(_LEAST, _PAUSES * (self._longest or 0.0)) if self._timeout == "auto" else self._timeout
        limit = times * (max(limit, _UNTIL_FIRST) if self._longest is None else limit)
        latest = self.watchdog - _BEFORE_WATCHDOG if self._timeout == "auto" else 0.0
        return min(limit, latest) if latest > _BEFORE_WATCHDOG else limit

    def due(self) -> float:
        return max(self.sign + self.limit(), self._look)

    def look_later(self, now: float, least: float = 0.0) -> None:
        """Ask again after half the limit, and at least so many seconds."""
        self._look = now + max(self.limit() / 2, least)

    def hear(self, sign: float) -> float:
        """Take a sign; return the length of the pause that ends with it, 0 if it is an old one."""
        pause = max(0.0, sign - self.sign)
        if pause:
            self._longest = 0.0 if self._longest is None else max(self._longest, pause)
            self.begin(sign)
        return pause


class Questions:
    """One rank's part in questions and answers. All methods may raise as `JobStore` does if it does not answer."""

    def __init__(self, store: JobStore, here: StalledRank) -> None:
        self._topology, self._here = store.topology, here
        self._store = store.beside("watch", TimedCaller(STORE_PATIENCE))  # on a connection of its own
        self._on_host = SharedList(self._store, f"on/{node_identity()}")
        self.neighbours: dict[int, int] = {}  # processes of the ranks on this host, by rank
        self._on_host.append_once(f"{here.rank} {here.pid}")  # a process may open many sessions
        self._say(Answer(here))
        self.number: int = 0  # of the last question
        while self.is_asked():  # before this session
            pass

    def leave(self) -> None:
        self._say(Answer(self._here._replace(kind="finished")))

    def is_asked(self) -> bool:
        if len(self.neighbours) < (self._topology.local_world_size or self._topology.world_size):
            for one in self._on_host.read_new():
                rank, pid = map(int, one.split())
                self.neighbours[rank] = pid
        is_asked = self._store.has([f"ask/{self.number + 1}"])
        self.number += is_asked
        return is_asked

    def claim(self) -> bool:
        """Ask, unless another rank has just done so; return whether this one asks."""
        self.number += 1
        return is_first(self._store, f"ask/{self.number}")

    def answer(self, answer: Answer, text: str) -> None:
        """Say where this rank stands; `text` has all its stacks."""
        digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
        if not self._store.has([f"stack/{digest}"]):
            self._store.publish(f"stack/{digest}", text[:_MOST_STACKS])
        self._say(answer._replace(question=self.number, stacks=digest))
        self._store.count(f"answers/{self.number}")

    def _say(self, answer: Answer) -> None:
        self._store.publish(f"rank/{self._here.rank}", answer)

    def gather(self, since: float, wait: Callable[[float], object]) -> tuple[list[Answer], dict[str, list[int]]]:
        """Return what is known of all ranks, and their stacks with the ranks of which they are.

        This rank has asked at a time of the monotonic clock. `wait` returns whether the watcher ends.
        """
        size, counter = self._topology.world_size, f"answers/{self.number}"
        while (self._store.try_get(counter) or 0) < size and time.monotonic() < since + _ANSWERS and not wait(0.5):
            pass
        found = self._store.get_present([f"rank/{rank}" for rank in range(size)])
        said = [one for one in map(_decoded, found.values()) if one is not None]
        answers = [one for one in said if one.question == self.number]
        seen = {rank: kind for one in reversed(answers) for rank, kind, _ in one.seen}  # by the lowest rank of the host
        stacks: dict[str, list[int]] = {}
        for one in answers:
            stacks.setdefault(f"stack/{one.stacks}", []).append(one.place.rank)
        texts = self._store.get_present(list(stacks))
        for last in [one.place for one in said if one.question != self.number]:
            kind = last.kind if last.kind == "finished" else seen.get(last.rank, "silent")
            answers.append(Answer(StalledRank(last.rank, kind, host=last.host, pid=last.pid)))
        return answers, {str(text): stacks[key] for key, text in texts.items()}

    def tell(self, message: str) -> None:
        """Publish to which message the last question has led; empty if no other rank is to send the alert."""
        self._store.publish(f"told/{self.number}", message)

    def told(self) -> str | None:
        return self._store.try_get(f"told/{self.number}")

    def may_alert(self) -> bool:
        return is_first(self._store, f"alerted/{self.number}")


def _decoded(found: Any) -> Answer | None:
    """Return what a rank has published; `None` if no rank can have written it."""
    with suppress(TypeError, ValueError, AttributeError):
        answer = Answer(*found)
        calls = {name: Calls(*one) for name, one in answer.calls.items()}
        return answer._replace(place=StalledRank(*answer.place), calls=calls)
    return None


class Watcher(threading.Thread):
    """Watches the thread that makes it."""

    def __init__(
        self,
        topology: Topology,
        options: Options,
        run: Callable[[], Any],  # the W&B run of this rank, or a `NullRun`
        directory: Path,  # for the files of a rank without a run
        find: Callable[[], JobStore | None],
    ) -> None:
        super().__init__(name="dist_wandb-stalls", daemon=True)
        self.stopped: threading.Event = threading.Event()
        self._run, self._directory, self._on_stall = run, directory, options.on_stall
        self._find = find
        self._training = threading.get_ident(), threading.get_native_id()  # Python's and the kernel's number
        self._here = StalledRank(topology.global_rank, "silent", host=socket.gethostname(), pid=os.getpid())
        self._clock = Clock(options.stall_timeout or "auto", time.monotonic())
        self._collectives = evidence.Collectives()
        self._questions: Questions | None = None  # once there is a store

    def run(self) -> None:
        pause, before = 0.0, time.monotonic()
        while not self.stopped.wait(pause):
            try:
                if time.monotonic() > before + pause + _SUSPENDED:
                    self._clock.begin(time.monotonic())
                self._step()
            except Exception:  # noqa: BLE001  # the training goes on
                _log.exception("dist_wandb: rank %d does not watch for stalls any more", self._here.rank)
                return
            before, pause = time.monotonic(), self._clock.pause
            if not self._clock.is_told:
                pause = min(pause, max(_SHORTEST_PAUSE, self._clock.due() - before))
        self._see()
        with suppress(RendezvousError):
            if self._questions is not None:
                self._questions.leave()

    def _step(self) -> None:
        self._see()
        now, clock = time.monotonic(), self._clock
        if clock.early is None and now > clock.sign + clock.limit() / 2:
            clock.early = now, evidence.works(self._training[1])[self._training[1]]
        try:
            if self._questions is None and (store := self._find()) is not None:
                self._questions = Questions(store, self._here)
            if self._questions is not None:
                self._take_part(self._questions, now)
        except RendezvousError as error:
            _log.debug("dist_wandb: rank %d cannot ask the others: %s", self._here.rank, error)
            if now >= clock.due() + _SILENT_STORE and not clock.is_told:
                clock.look_later(now)
                own, text = self._described()
                ended = [one for one in own.seen if one[1] in ("stopped", "gone")]
                others = [Answer(self._here._replace(rank=rank, kind=kind, pid=pid)) for rank, kind, pid in ended]
                self._judge(now, [own, *others], {text: [own.place.rank]}, _ALONE)

    def _see(self) -> None:
        told_in = self._clock.told_in
        lasted = self._clock.hear(time.monotonic() if self._collectives.have_moved() else signs.last)
        self._clock.watchdog = self._collectives.watchdog
        if lasted and told_in is not None:
            warn(f"the training went on after {lasted:.0f} s.")
            with suppress(Exception):  # there may be no file
                end_stall(told_in, lasted)

    def _take_part(self, questions: Questions, now: float) -> None:
        clock = self._clock
        if clock.has_answered and (message := questions.told()) is not None:
            clock.is_told, clock.has_answered = True, False
            if message and self._run() and questions.may_alert():
                self._alert(message)
        is_asked = questions.is_asked()
        if not is_asked and (clock.is_told or now < clock.due()):
            return
        asks = not is_asked and questions.claim()
        clock.look_later(now)
        questions.answer(*self._described())
        if asks:
            self._judge(now, *questions.gather(now, self.stopped.wait))
        else:
            clock.has_answered = True
            clock.look_later(time.monotonic(), _ANSWERS)  # by then the rank that has asked has told it

    def _judge(self, now: float, answers: list[Answer], stacks: dict[str, list[int]], more: str = "") -> None:
        clock, sign = self._clock, self._clock.sign
        self._see()
        is_final = now >= sign + clock.limit(_LIMITS_IF_SLOW)
        stall = judge(answers, time.monotonic() - sign, clock.limit(), is_final=is_final, more=more)
        if stall is None or clock.sign != sign or self.stopped.is_set():
            return
        self._clock.is_told = True
        path = self._clock.told_in = self._write(stall.message, stacks)
        warn(
            f"{stall.message} All stacks are in {path or 'no file, because it cannot be written'}. No process is "
            "ended; stall_timeout=None turns this off."
        )
        if self._run():
            self._alert(stall.message)
        with suppress(RendezvousError):
            if self._questions is not None:
                self._questions.tell("" if self._run() else stall.message)
        if self._on_stall is not None:
            try:
                self._on_stall(stall._replace(stacks=path))
            except Exception:  # noqa: BLE001  # the watcher goes on
                _log.exception("dist_wandb: on_stall of rank %d failed", self._here.rank)

    def _alert(self, text: str) -> None:
        with suppress(Exception):  # W&B's problem is not the training's
            self._run().alert("Training stands still", text, level="WARN")

    def _write(self, message: str, stacks: dict[str, list[int]]) -> str:
        run, texts = self._run(), [f"{named(ranks)}:\n{text}\n" for text, ranks in stacks.items()]
        own = Path(call_or_default(lambda: str(run.dir), ""))  # perhaps of another rank
        is_own = run or (own.is_dir() and is_in_run_directory(own))
        for folder in [own, self._directory] if is_own else [self._directory]:
            with suppress(Exception):  # the message matters more
                folder.mkdir(parents=True, exist_ok=True)
                return str(write_stall(folder, self._here.rank, message, texts))
        return ""

    def _described(self) -> tuple[Answer, str]:
        """Describe this rank, from what threads and processes do in some seconds; return all its stacks, too."""
        (thread, native), clock = self._training, self._clock
        children = evidence.children()
        neighbours = self._questions.neighbours if self._questions is not None else {}
        pids = [*children, *neighbours.values()]
        began, before = time.monotonic(), evidence.works(native, pids)
        self.stopped.wait(_WINDOW)
        now, after = time.monotonic(), evidence.works(native, pids)
        does = {pid: evidence.doing(before[pid], after[pid], now - began) for pid in after}
        since, earliest = clock.early or (began, before[native])
        clock.early = now, after[native]
        known = Answer(
            self._here,
            quiet=round(began - max(clock.sign, signs.last), 1),
            moves=bool(MOVING & {does[native], evidence.doing(earliest, after[native], now - since)}),
            uses_device=evidence.uses_device(),
            calls=self._collectives.groups(),
            workers={str(pid): (work.state, does[pid]) for pid in children if (work := after[pid])},
            seen=[(rank, "sleeping" if does[pid] == "waking" else does[pid], pid) for rank, pid in neighbours.items()],
        )
        return located(known, evidence.stack_of(thread), does[native]), evidence.all_stacks(thread)


_running: list[Watcher] = []  # the watcher of this process


def begin(topology: Topology, options: Options, run: Callable[[], Any], directory: Path) -> None:
    """Watch the calling thread's training, if it is one of several ranks, unless this process does so already."""
    is_running = any(one.is_alive() and not one.stopped.is_set() for one in _running)  # not in a fork
    if options.stall_timeout is None or topology.world_size == 1 or is_running:
        return
    end()  # an earlier one would say that this rank has no session
    find = partial(JobStore.find, "stalls", topology, options.limits.join_timeout)
    _running[:] = [Watcher(topology, options, run, directory, find)]
    _running[0].start()


def stop() -> None:
    """Stop watching, without waiting for the thread: the run has yet to end."""
    for one in _running:
        one.stopped.set()


def end() -> None:
    """Stop watching, and wait for the thread: in native code at the end of the process, it would abort it."""
    stop()
    for one in _running:
        if one.is_alive() and one is not threading.current_thread():  # not in a fork
            one.join(_STOP)
