"""One rank of a random job. It logs and fails as described, and writes to its ledger before it logs."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from drawing import FATAL, HARD, Fault, Spec, from_json, value_of
from ledger import Ledger, watch_messages
from processes import wait_until

BURST = 300
_TICK = 0.02  # seconds between two signals
_SIGNALS = 60
_CHILD_ROWS = 3
_LONGEST_MEETING = 60.0  # seconds


class ChaosError(Exception):
    """Raised by a rank that should fail."""


class Rank:
    """A rank that logs.

    Args:
        spec: The job.
        rank: Global rank.
        directory: Directory of runs, ledgers and marks.
    """

    def __init__(self, spec: Spec, rank: int, directory: Path) -> None:
        self.spec, self.rank, self.directory = spec, rank, directory
        self.ledger = Ledger(directory, rank)
        self._cells: Counter[tuple[int, str]] = Counter()
        self._dice = random.Random(f"{spec.seed} {rank}")
        self._streams: dict[str, Callable[[Any, int, int], None]] = {
            stream: getattr(self, f"_{stream}") for stream in spec.streams
        }

    def run(self) -> None:
        """Run all sessions, one after the other."""
        spec = self.spec
        absent = spec.guarded and self.rank != 0
        if spec.nofile:
            resource.setrlimit(resource.RLIMIT_NOFILE, (spec.nofile, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        for fault in spec.faults_of(self.rank, "late"):
            time.sleep(fault.value)
        if absent:
            time.sleep(spec.pace * spec.rows)
        elif not spec.faults_of(self.rank, "never"):
            for session in range(spec.sessions):
                self._session(session)
                self._take_stock(session)
        self.ledger.write("end")
        self._meet()

    # --- sessions -----------------------------------------------------------------------------------------------------

    def _session(self, session: int) -> None:
        if self.spec.ending == "with":
            with self._opened(session) as run:
                self._train(run, session)
                self.ledger.write("finish", session=session)
        else:
            run = self._opened(session)
            self._train(run, session)
            if self.spec.ending == "finish":
                self.ledger.write("finish", session=session)
                run.finish()
        if self.spec.ending != "missing":
            self.ledger.write("finished", session=session)

    def _opened(self, session: int, **more: Any) -> Any:
        import dist_wandb

        spec = self.spec
        run = dist_wandb.init(
            "chaos",
            id=f"s{session}",
            dir=str(self.directory / "runs"),
            **spec.options,
            **more,
        )
        self.ledger.write("opened", session=session)
        (self.directory / f"opened-{self.rank}").touch()
        return run

    def _train(self, run: Any, session: int) -> None:
        last = session == self.spec.sessions - 1
        with contextlib.ExitStack() as meanwhile:
            if "handler" in self._streams:
                meanwhile.enter_context(self._signals(run, session))
            if "threads" in self._streams:
                meanwhile.enter_context(self._thread(run, session))
            for row in range(self.spec.rows):
                for fault in self.spec.faults_of(self.rank):
                    if last and fault.row == row:
                        self._suffer(fault)
                for stream in self._streams.values():
                    stream(run, session, row)
                if self.spec.nested and row == self.spec.rows // 2:
                    self._inner_session()
                time.sleep(self.spec.pace)

    def _inner_session(self) -> None:
        session = self.spec.sessions
        with self._opened(session, reinit="create_new") as run:
            for row in range(5):
                self._lockstep(run, session, row)
            self.ledger.write("finish", session=session)
        self.ledger.write("finished", session=session)

    def _take_stock(self, session: int) -> None:
        """Record the open descriptors and threads of this process after a session."""
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        self.ledger.write("held", session=session, descriptors=descriptors, threads=threading.active_count())

    def _meet(self) -> None:
        """Let the rank that hosts the job's store wait until the others have ended, if it should."""
        spec = self.spec
        (self.directory / f"ended-{self.rank}").touch()
        if self.rank == 0 and (spec.meets or spec.has("never") or spec.guarded):
            others = [rank for rank in range(1, spec.world_size) if not spec.faults_of(rank, *FATAL)]
            marks = [self.directory / f"ended-{rank}" for rank in others]
            with contextlib.suppress(AssertionError):  # the judge detects ranks that have not ended
                wait_until(lambda: all(mark.exists() for mark in marks), within=_LONGEST_MEETING)

    # --- what is logged -----------------------------------------------------------------------------------------------

    def _log(self, run: Any, session: int, names: dict[str, int], step: int | None = None) -> None:
        """Log numbers, each with a cell that is unique among the numbers of its name."""
        row = {name: value_of(self.rank, cell) for name, cell in names.items()}
        step = step if self.spec.steps else None
        weight = 1.0 + (self.rank + max(names.values())) % 3 if self.spec.weighted else None
        cells = {name: (cell, row[name]) for name, cell in names.items()}
        number = self.ledger.intend(session, cells, weight=weight, step=step)
        run.log(row, step=step, weight=weight)
        self.ledger.done(number)

    def _next(self, session: int, name: str, step: int | None = None) -> int:
        """Return the cell of the next number of a name: its step, or the number of earlier calls."""
        if step is not None and self.spec.steps:
            return step
        cell = self._cells[session, name]
        self._cells[session, name] += 1
        return cell

    def _lockstep(self, run: Any, session: int, row: int) -> None:
        self._log(run, session, {"loss": self._next(session, "loss", row)}, row)

    def _guarded(self, run: Any, session: int, row: int) -> None:
        for name, rank in (("first_only", 0), ("last_only", self.spec.world_size - 1)):
            if self.rank == rank:
                self._log(run, session, {name: self._next(session, name, row)}, row)

    def _mixed(self, run: Any, session: int, row: int) -> None:
        names = self._dice.sample([f"mixed_{number}" for number in range(5)], self._dice.randrange(1, 4))
        self._log(run, session, {name: self._next(session, name, row) for name in names}, row)

    def _uneven(self, run: Any, session: int, row: int) -> None:
        if row < self.spec.rows * (1 - 0.2 * self.rank):
            self._log(run, session, {"uneven": self._next(session, "uneven", row)}, row)

    def _shuffled(self, run: Any, session: int, row: int) -> None:
        start = row - row % 5
        order = list(range(start, min(start + 5, self.spec.rows)))
        random.Random(f"{self.spec.seed} {self.rank} {start}").shuffle(order)
        step = order[row - start]
        self._log(run, session, {"shuffled": step}, step)

    def _dynamic(self, run: Any, session: int, row: int) -> None:
        self._log(run, session, {f"dynamic_{row}": self._next(session, f"dynamic_{row}", row)}, row)

    def _burst(self, run: Any, session: int, row: int) -> None:
        if row == self.spec.rows // 2:
            for step in range(row, row + BURST):
                self._log(run, session, {"burst": self._next(session, "burst", step)}, step)

    def _table(self, run: Any, session: int, row: int) -> None:
        """Log tables whose lengths identify the ranks in them."""
        if row % 5 == 0:
            import dist_wandb

            step = row if self.spec.steps else None
            length = 2**self.rank + 8 * (row // 5 + 1)
            cell = self._next(session, "table", row)
            number = self.ledger.intend(session, {"table.nrows": (cell, length)}, step=step)
            rows = [[float(index), "text"] for index in range(length)]
            run.log({"table": dist_wandb.gathered(rows, ["number", "text"])}, step=step)
            self.ledger.done(number)

    def _metric(self, run: Any, session: int, row: int) -> None:
        from torchmetrics import MeanMetric

        metric, cell = MeanMetric(), self._next(session, "metric", row)
        weight = 1.0 + (self.rank + cell) % 3
        metric.update(value_of(self.rank, cell), weight=weight)
        step = row if self.spec.steps else None
        number = self.ledger.intend(session, {"metric": (cell, value_of(self.rank, cell))}, weight=weight, step=step)
        run.log({"metric": metric}, step=step)
        self.ledger.done(number)

    def _handler(self, run: Any, session: int, row: int) -> None:
        """Do nothing in a row: see `_signals`."""

    @contextlib.contextmanager
    def _signals(self, run: Any, session: int) -> Iterator[None]:
        """Log in a signal handler, at any point of the training thread."""
        name = f"handler_{self.rank}"

        def handle(*_: object) -> None:
            if self._cells[session, name] < _SIGNALS:
                cell = self._next(session, name)
                self._log(run, session, {name: cell}, cell)
                # A periodic timer would interrupt its own handler without end on a busy machine.
                signal.setitimer(signal.ITIMER_REAL, _TICK)

        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, _TICK)
        try:
            yield
        finally:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)  # a pending signal would start the timer again
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _threads(self, run: Any, session: int, row: int) -> None:
        """Do nothing in a row: see `_thread`."""

    @contextlib.contextmanager
    def _thread(self, run: Any, session: int) -> Iterator[None]:
        def work() -> None:
            for row in range(self.spec.rows):
                self._log(run, session, {"thread": self._next(session, "thread", row)}, row)
                time.sleep(self.spec.pace)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        yield
        thread.join()

    def _forked(self, run: Any, session: int, row: int) -> None:
        if row != self.spec.rows // 3:
            return
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                signal.alarm(60)
                for step in range(_CHILD_ROWS):
                    name = f"child_{self.rank}"
                    self._log(run, session, {name: self._next(session, name, step)}, step)
                os._exit(0)
            os._exit(1)
        os.waitpid(child, 0)

    def _beside(self, run: Any, session: int, row: int) -> None:
        """Log as a helper that only uses wandb, after a row of the session with or without a step."""
        import wandb

        if "lockstep" not in self._streams:
            self._lockstep(run, session, row)
        if wandb.run is not None:
            cell = self._next(session, "beside")
            number = self.ledger.intend(session, {"beside": (cell, value_of(self.rank, cell))})
            wandb.log({"beside": value_of(self.rank, cell)})
            self.ledger.done(number)

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    def _suffer(self, fault: Fault) -> None:
        if fault.kind in ("late", "never"):
            return
        if fault.kind in FATAL:
            see_others_begin(self.spec, self.rank, self.directory)
        self.ledger.write("fault", kind=fault.kind)
        if fault.kind in HARD:
            os.kill(os.getpid(), signal.SIGKILL) if fault.kind == "kill" else os._exit(int(fault.value))
        elif fault.kind == "raise":
            raise ChaosError
        elif fault.kind == "exit":
            sys.exit(int(fault.value))
        elif fault.kind == "term":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        elif fault.kind == "stop":
            stop(os.getpid(), fault.value)
        elif fault.kind == "tmp_gone":
            with contextlib.suppress(OSError):  # another rank was faster
                Path(os.environ["TMPDIR"]).rename(f"{os.environ['TMPDIR']}-gone")
        else:
            for core in cores_of(os.getpid()):
                os.kill(core, signal.SIGKILL) if fault.kind == "core_kill" else stop(core, fault.value)


def see_others_begin(spec: Spec, rank: int, directory: Path) -> None:
    """Wait until the others have opened their session if this rank hosts the job's store, which they need for it."""
    others = [other for other in range(1, spec.world_size) if not spec.faults_of(other, "late", "never")]
    if rank == 0 and not spec.guarded:
        with contextlib.suppress(AssertionError):  # one of them has already failed
            wait_until(lambda: all((directory / f"opened-{other}").exists() for other in others), within=20)


def stop(pid: int, seconds: float) -> None:
    """Stop a process for a number of seconds."""
    later = f"kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}"
    subprocess.Popen(["/bin/sh", "-c", later], start_new_session=True)
    if pid == os.getpid():
        time.sleep(0.2)  # it is stopped during this sleep


def cores_of(pid: int) -> list[int]:
    """Return the ids of wandb's own processes that a process has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"wandb-core" in Path(f"/proc/{child}/cmdline").read_bytes()]


def work(rank: int, spec_file: str, directory: str, world: int | None = None) -> None:
    """Run one rank; `world` is the number of ranks if no launcher has set it."""
    spec = from_json(Path(spec_file).read_text())
    part = Rank(spec, rank, Path(directory))
    watch_messages(part.ledger)
    import torch.distributed as dist

    if world is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    part.run()


def main(spec_file: str, directory: str) -> None:
    """Run one rank, or start all of them."""
    spec = from_json(Path(spec_file).read_text())
    if spec.launcher == "spawn":
        import torch.multiprocessing as mp

        mp.spawn(work, (spec_file, directory, spec.world_size), spec.world_size)  # type: ignore[no-untyped-call]  # torch's
    else:
        work(int(os.environ["RANK"]), spec_file, directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
