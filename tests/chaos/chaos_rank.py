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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from drawing import AXIS, FATAL, FULL, HARD, NOTE, Fault, Spec, draw, text_of, value_of
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
    """A rank that logs."""

    def __init__(self, spec: Spec, rank: int, directory: Path) -> None:
        self.spec, self.rank, self.directory = spec, rank, directory
        self.ledger = Ledger(directory, rank)
        self._cells: Counter[tuple[int, str]] = Counter()
        self._dice = random.Random(f"{spec.seed} {rank}")
        # what streams log in a row in other ways; a signal handler and a thread log in a session at any time
        self._further: dict[str, Callable[[Any, int, int], None]] = {
            "shuffled": self._shuffled,
            "axis": self._axis_alone,
            "burst": self._burst,
            "table": self._table,
            "metric": self._metric,
            "forked": self._forked,
            "beside": self._beside,
        }

    def run(self) -> None:
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
        if spec.axis:
            run.define_metric(AXIS)
            run.define_metric(spec.axis, step_metric=AXIS)
        self.ledger.write("opened", session=session)
        (self.directory / f"opened-{self.rank}").touch()
        return run

    def _train(self, run: Any, session: int) -> None:
        last = session == self.spec.sessions - 1
        with contextlib.ExitStack() as meanwhile:
            if "handler" in self.spec.streams:
                meanwhile.enter_context(self._signals(run, session))
            if "threads" in self.spec.streams:
                meanwhile.enter_context(self._thread(run, session))
            for row in range(self.spec.rows):
                for fault in self.spec.faults_of(self.rank):
                    if last and fault.row == row:
                        self._suffer(fault)
                time.sleep(self.spec.lag(self.rank, row))
                for stream in self.spec.streams:
                    self._log_row(run, session, row, stream)
                if self.spec.nested and row == self.spec.rows // 2:
                    self._inner_session()
                time.sleep(self.spec.pace)

    def _inner_session(self) -> None:
        session = self.spec.sessions
        with self._opened(session, reinit="create_new") as run:
            for row in range(5):
                self._log_row(run, session, row, "lockstep")
            self.ledger.write("finish", session=session)
        self.ledger.write("finished", session=session)

    def _take_stock(self, session: int) -> None:
        """Record the open descriptors and threads of this process after a session."""
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        self.ledger.write("held", session=session, descriptors=descriptors, threads=threading.active_count())

    def _meet(self) -> None:
        """Let the rank that hosts the job's store wait until the others have ended, if it should."""
        spec = self.spec
        (self.directory / f"ended-{self.rank}").write_text(str(os.getpid()))
        is_needed = spec.run_mode == "new" and spec.session_count > 1  # sessions do not wait for each other's end there
        if self.rank == 0 and (spec.meets or spec.has("never") or spec.guarded or is_needed):
            others = [rank for rank in range(1, spec.world_size) if not spec.faults_of(rank, *FATAL)]
            marks = [self.directory / f"ended-{rank}" for rank in others]
            with contextlib.suppress(AssertionError):  # the judge detects ranks that have not ended
                wait_until(lambda: all(mark.exists() for mark in marks), within=_LONGEST_MEETING)
                if spec.faults_of(0, "never"):  # it has no session in which it would be waited for
                    wait_until(lambda: not any(map(_lives, marks)), within=_LONGEST_MEETING)

    # --- what is logged -----------------------------------------------------------------------------------------------

    def _log(self, run: Any, session: int, names: dict[str, int], row: int) -> None:
        """Log numbers and texts in a row, each with a cell that is unique among the values of its name."""
        cells = {name: (cell, value_of(self.rank, cell)) for name, cell in names.items()}
        values = {name: text_of(value) if name == NOTE else value for name, (_, value) in cells.items()}
        weight = 1.0 + (self.rank + max(names.values())) % 3 if self.spec.weighted else None
        self._hand_over(run, session, row, values, cells, weight, {"weight": weight})

    def _hand_over(
        self,
        run: Any,
        session: int,
        row: int,
        values: Mapping[str, Any],
        cells: Mapping[str, tuple[int, float]],
        weight: float | None = None,
        arguments: Mapping[str, Any] | None = None,
        axes: Mapping[str, float] | None = None,
    ) -> None:
        """Log values in a row, with the user's axis, and record them before and after."""
        step = row if self.spec.steps and run is not None else None
        given = (self.spec.axes(name, self.rank, row) for name in values)
        axes = axes or {axis: value for named in given for axis, value in named.items()}
        number = self.ledger.intend(session, cells, weight=weight, step=step, axes=axes)
        if run is None:  # a helper that only uses wandb
            import wandb

            wandb.log({**values, **axes})
        else:
            run.log({**values, **axes}, step=step, **(arguments or {}))
        self.ledger.done(number)

    def _next(self, session: int, name: str, step: int | None = None) -> int:
        """Return the cell of the next number of a name: its step, or the number of earlier calls."""
        if step is not None and self.spec.steps:
            return step
        cell = self._cells[session, name]
        self._cells[session, name] += 1
        return cell

    def _calls(self, stream: str, row: int) -> list[list[str]]:
        """Return the names of each call of a stream in a row."""
        rank, is_first = self.rank, self.rank == 0
        own = ["common", f"own_{rank}", NOTE] if row % (1 + rank) == 0 else ["common"]  # a text with them
        often = [name for name, every in {"often": 1, "second": 2, "third": 3}.items() if row % every == 0]
        axis = ["axis_loss", *(["axis_lr"] if is_first else []), *(["axis_third"] if row % 3 == 2 else [])]
        a, b = ["split_a"], ["split_b"]
        calls = {
            "lockstep": [["loss"]],
            "guarded": [["first_only"]] * is_first + [["last_only"]] * (rank == self.spec.world_size - 1),
            "uneven": [["uneven"]] * (row < self.spec.rows * (1 - 0.2 * rank)),
            "own": [own],
            "cadence": [often, *([["fifth"]] if row % 5 == 4 else [])],
            "split": [a + b] if rank % 2 == self.spec.seed % 2 else [a, b],
            "turned": [["turned_a"], ["turned_b"]] if rank % 2 else [["turned_b"], ["turned_a"]],
            "axis": [axis],
            "dynamic": [[f"dynamic_{row}"]],
        }
        if stream == "mixed":
            return [self._dice.sample([f"mixed_{number}" for number in range(5)], self._dice.randrange(1, 4))]
        return calls.get(stream, [])

    def _log_row(self, run: Any, session: int, row: int, stream: str) -> None:
        for names in self._calls(stream, row):
            self._log(run, session, {name: self._next(session, name, row) for name in names}, row)
        if further := self._further.get(stream):
            further(run, session, row)

    def _shuffled(self, run: Any, session: int, row: int) -> None:
        start = row - row % 5
        order = list(range(start, min(start + 5, self.spec.rows)))
        random.Random(f"{self.spec.seed} {self.rank} {start}").shuffle(order)
        step = order[row - start]
        self._log(run, session, {"shuffled": step}, step)

    def _axis_alone(self, run: Any, session: int, row: int) -> None:
        if self.spec.axis and row % 7 == 6:
            self._hand_over(run, session, row + 1, {}, {}, axes=self.spec.axes("axis_only", self.rank, row + 1))

    def _burst(self, run: Any, session: int, row: int) -> None:
        if row == self.spec.rows // 2:
            for step in range(row, row + BURST):
                self._log(run, session, {"burst": self._next(session, "burst", step)}, step)

    def _table(self, run: Any, session: int, row: int) -> None:
        """Log tables whose lengths identify the ranks in them."""
        if row % 5 == 0:
            import dist_wandb

            length = 2**self.rank + 16 * (row // 5 + 1)
            cell = self._next(session, "table", row)
            rows = [[float(index), "text"] for index in range(length)]
            table = {"table": dist_wandb.gathered(rows, ["number", "text"])}
            self._hand_over(run, session, row, table, {"table.nrows": (cell, length)})

    def _metric(self, run: Any, session: int, row: int) -> None:
        from torchmetrics import MeanMetric

        metric, cell = MeanMetric(), self._next(session, "metric", row)
        weight = 1.0 + (self.rank + cell) % 3
        metric.update(value_of(self.rank, cell), weight=weight)
        cells = {"metric": (cell, value_of(self.rank, cell))}
        self._hand_over(run, session, row, {"metric": metric}, cells, weight)

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

        if "lockstep" not in self.spec.streams:
            self._log_row(run, session, row, "lockstep")
        if wandb.run:
            cell = self._next(session, "beside")
            value = value_of(self.rank, cell)
            self._hand_over(None, session, row, {"beside": value}, {"beside": (cell, value)})

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    def _fill_disk(self) -> None:
        """Let the files of W&B grow no further."""
        size = max(path.stat().st_size for path in (self.directory / "runs").rglob("*.wandb"))
        for core in cores_of(os.getpid()):
            resource.prlimit(core, resource.RLIMIT_FSIZE, (size, size))

    def _suffer(self, fault: Fault) -> None:
        if fault.kind == FULL:
            self.ledger.write("fault", kind=fault.kind)
            self._fill_disk()
        elif fault.kind not in ("late", "never"):
            self._break(fault)

    def _break(self, fault: Fault) -> None:
        if fault.kind == "tmp_gone" or (fault.kind in FATAL and self.rank == 0):
            see_others_begin(self.spec, self.directory)
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


def _lives(mark: Path) -> bool:
    with contextlib.suppress(OSError):
        return " Z " not in Path("/proc", mark.read_text(), "stat").read_text()
    return False


def see_others_begin(spec: Spec, directory: Path) -> None:
    """Wait until all have opened their session, for which they need the job's store, and wandb the temporary directory.

    Rank 0 hosts the store. wandb waits for itself forever if it starts without that directory.
    """
    absent = ("never",) if spec.has("tmp_gone") else ("late", "never")
    others = [other for other in range(spec.world_size) if not spec.faults_of(other, *absent)]
    if not spec.guarded:
        with contextlib.suppress(AssertionError):  # one of them has already failed
            wait_until(lambda: all((directory / f"opened-{other}").exists() for other in others), within=20)


def break_off(ledger: Ledger, fault: Fault) -> None:
    ledger.write("fault", kind=fault.kind)
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "raise":
        raise ChaosError
    stop(os.getpid(), fault.value)


def stop(pid: int, seconds: float) -> None:
    later = f"kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}"
    subprocess.Popen(["/bin/sh", "-c", later], start_new_session=True)
    if pid == os.getpid():
        time.sleep(0.2)  # it is stopped during this sleep


def cores_of(pid: int) -> list[int]:
    """Return the ids of wandb's own processes that a process has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"wandb-core" in Path(f"/proc/{child}/cmdline").read_bytes()]


def work(rank: int, spec: Spec, directory: str) -> None:
    part = Rank(spec, rank, Path(directory))
    watch_messages(part.ledger)
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=rank, world_size=spec.world_size)
    part.run()


def main(seed: str, directory: str) -> None:
    """Run one rank, or start all of them."""
    spec = draw(int(seed))
    if spec.launcher == "spawn":
        import torch.multiprocessing as mp

        mp.spawn(work, (spec, directory), spec.world_size)  # type: ignore[no-untyped-call]  # torch's
    else:
        work(int(os.environ["RANK"]), spec, directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
