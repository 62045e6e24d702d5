"""What a rank knows of its own training thread and of processes on its host, without signals, hooks or values.

Stacks have files, lines, functions, and the name that the innermost lines are calling (from the positions that bytecode
has since Python 3.11). The kernel counts how long a thread has computed and how often it has gone to sleep by itself;
without ``/proc`` (macOS) there are only stacks. PyTorch's flight recorder counts the calls of collectives: it is
private, so it is used in `_recorded` only, and nothing follows if it is missing. Groups without a name are those of
the exchange.
"""

from __future__ import annotations

import ast
import gc
import json
import linecache
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from dist_wandb.stalls.verdict import Answer, Calls, Frame, Missing, Worker

MOST = 28 * 1024  # characters of the stacks that one rank publishes; encoded, with its answer, 32 KiB
_MOST_FRAMES = 60  # of a stack: the outermost and the innermost ones
_MOST_WORKERS = 16
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OWN = str(Path(__file__).parents[1])  # this package
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PROC = Path("/proc")


class Work(NamedTuple):
    """What a thread or a process has done so far, as the kernel counts."""

    cpu: float  # seconds
    sleeps: int  # how often it went to sleep by itself
    state: str = "?"


class Thread(NamedTuple):
    """The thread that trains."""

    ident: int
    native: int

    @classmethod
    def current(cls) -> Thread:
        """Return the calling thread."""
        return cls(threading.get_ident(), threading.get_native_id())

    def work(self) -> Work | None:
        """Return what it has done."""
        return _work(_PROC / "self" / "task" / str(self.native))


def _work(task: Path) -> Work | None:
    """Read a thread, or a process, of which these are the numbers of its main thread."""
    with suppress(OSError, ValueError, IndexError):
        fields = (task / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        status = (task / "status").read_text(encoding="utf-8", errors="replace")
        sleeps = status.partition("\nvoluntary_ctxt_switches:")[2].split()
        return Work((int(fields[11]) + int(fields[12])) / _TICKS, int(sleeps[0]), fields[0])
    return None


# --- stacks -----------------------------------------------------------------------------------------------------------


def stack_of(thread: int) -> tuple[Frame, ...]:
    """Return the stack of a thread, the outermost line first. Keeps no frame, which would keep tensors alive."""
    found: list[Frame] = []
    frame = _current_frames().get(thread)
    while frame is not None:
        code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
        called = _called(code, frame.f_lasti)
        found.append(Frame(code.co_filename, frame.f_lineno, code.co_name, module, _is_users(code.co_filename), called))
        frame = frame.f_back
    found.reverse()
    half = _MOST_FRAMES // 2
    return tuple(found if len(found) <= _MOST_FRAMES else found[:half] + found[-half:])


def _current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread.

    Before Python 3.11.12, a garbage collection in `sys._current_frames` can deadlock the process
    (https://github.com/python/cpython/issues/106883). So before 3.12, collections are off during that call.
    """
    if sys.version_info >= (3, 12) or not gc.isenabled():
        return sys._current_frames()  # noqa: SLF001  # the documented way
    gc.disable()
    try:
        return sys._current_frames()  # noqa: SLF001
    finally:
        gc.enable()


def _is_users(file: str) -> bool:
    return not file.startswith(("<", *_LIBRARIES, _OWN)) and "site-packages" not in file


def _called(code: Any, instruction: int) -> str:
    """Return the name of what an instruction is calling; empty if unknown."""
    with suppress(Exception):  # no source, another version of Python
        line, end_line, begin, end = list(code.co_positions())[instruction // 2]
        lines = [linecache.getline(code.co_filename, number).encode() for number in range(line, end_line + 1)]
        lines[-1] = lines[-1][:end]
        lines[0] = lines[0][begin:]
        node = ast.parse(b"".join(lines).decode().strip(), mode="eval").body
        while isinstance(node, ast.Await):
            node = node.value
        if isinstance(node, ast.Call):
            return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return ""


def all_stacks(first: Thread) -> str:
    """Return the stacks of all threads except this package's and wandb's, the given thread's first, as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts: list[str] = []
    for ident in sorted(_current_frames(), key=lambda ident: ident != first.ident):
        frames = stack_of(ident)
        if ident == first.ident or not any(frame.package in ("dist_wandb", "wandb") for frame in frames):
            lines = [f'  File "{one.file}", line {one.line}, in {one.function}' for one in frames]
            texts.append("\n".join([f"Thread {names.get(ident, ident)}:", *lines]))
    return "\n".join(texts)[:MOST]


# --- collectives ------------------------------------------------------------------------------------------------------


class Collectives:
    """The calls of collectives of this process, without those of the exchange."""

    def __init__(self) -> None:
        self.watchdog: float = 0.0  # seconds after which PyTorch gives up a call; 0 if unknown
        self._names: dict[str, str] = {}  # of groups, by the number that this process gives them
        self._known = 0  # calls that were begun, and that were completed, together

    def have_moved(self) -> bool:
        """Return whether calls were begun or completed since the last time: a sign that the training goes on."""
        groups = _recorded(entries=False).get("pg_status", {})
        if not set(groups) <= set(self._names):
            self._learn(_recorded(entries=True))
            for one in groups:
                self._names.setdefault(one, "")  # its calls are not recorded any more
        before = self._known
        self._known = sum(sum(_numbers(groups[one])) for one in groups if self._names.get(one))
        return self._known != before

    def groups(self) -> dict[str, Calls]:
        """Return the calls in each group, by its name, which is the same on all ranks."""
        found = _recorded(entries=True)
        last = self._learn(found)
        numbers = {one: _numbers(status) for one, status in found.get("pg_status", {}).items()}
        return {self._names[one]: Calls(*numbers[one], last.get(one, "")) for one in numbers if self._names.get(one)}

    def _learn(self, found: Mapping[str, Any]) -> dict[str, str]:
        last: dict[str, str] = {}
        for entry in found.get("entries", ()):
            one = str(entry.get("pg_id"))
            self._names[one] = str(entry["group"])
            last[one] = str(entry.get("profiling_name", "")).rpartition(":")[2]
            if self._names[one] and entry.get("timeout_ms"):
                within = entry["timeout_ms"] / 1000
                self.watchdog = min(self.watchdog or within, within)
        return last


def _numbers(status: Mapping[str, Any]) -> tuple[int, int]:
    names = ("last_enqueued_collective", "last_completed_collective")
    made, completed = (max(0, int(status.get(name, 0))) for name in names)
    return made, completed


def _recorded(*, entries: bool) -> dict[str, Any]:
    """Return what PyTorch's flight recorders have, NCCL's apart; nothing if there are none.

    See tests/unit/test_private_names.py.
    """
    status: dict[str, Any] = {}
    found: list[dict[str, Any]] = []
    if "torch.distributed" not in sys.modules:
        return {}
    for suffix, name in (("", "_dump_fr_trace_json"), ("/nccl", "_dump_nccl_trace_json")):
        with suppress(Exception):
            from torch._C import _distributed_c10d

            dump = json.loads(getattr(_distributed_c10d, name)(includeCollectives=entries))
            status.update({f"{one}{suffix}": numbers for one, numbers in dump.get("pg_status", {}).items()})
            for entry in dump.get("entries", ()):
                group = str(entry["process_group"][0])
                name_of_group = f"{group}{suffix}" if group else ""
                found.append({**entry, "pg_id": f"{entry['pg_id']}{suffix}", "group": name_of_group})
    return {"pg_status": status, "entries": found}


def uses_device() -> bool:
    """Return whether this process uses CUDA."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


# --- processes --------------------------------------------------------------------------------------------------------


def children() -> dict[int, tuple[str, str, Work]]:
    """Return name, what it waits for in the kernel, and work of this process's children, without wandb's, by pid."""
    found: dict[int, tuple[str, str, Work]] = {}
    with suppress(OSError):
        for task in (_PROC / "self" / "task").iterdir():
            for pid in map(int, _text(task / "children").split()):
                name, work = _text(_PROC / str(pid) / "comm").strip(), _work(_PROC / str(pid))
                if work is not None and not name.startswith(("wandb", "gpu_stats")) and len(found) < _MOST_WORKERS:
                    found[pid] = name, _text(_PROC / str(pid) / "wchan").strip("0\n"), work
    return found


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def workers(before: Mapping[int, tuple[str, str, Work]]) -> tuple[Worker, ...]:
    """Return the child processes, and whether they have moved since `before`."""
    return tuple(
        Worker(pid, name, work.state, waits, pid not in before or has_moved(before[pid][2], work))
        for pid, (name, waits, work) in children().items()
    )


def has_moved(before: Work | None, after: Work | None, over: float = 0.0) -> bool:
    """Return whether a thread has computed or woken up; waiting for a DataLoader's worker, it does every 5 s."""
    if before is None or after is None:
        return False
    return after.cpu - before.cpu > max(0.02, 0.01 * over) or after.sleeps - before.sleeps > 1


def looked_at(pids: Iterable[int], seconds: float = 1.0) -> dict[int, Missing]:
    """Return what processes of this host do, from what they have done in some seconds."""
    pids = list(pids)
    before = {pid: _work(_PROC / str(pid)) for pid in pids}
    time.sleep(seconds)
    return {pid: _doing(before[pid], _work(_PROC / str(pid)), seconds) for pid in pids}


def _doing(before: Work | None, after: Work | None, seconds: float) -> Missing:
    if not (_PROC / "self").exists():
        return "silent"
    if after is None or after.state in "ZX":
        return "gone"
    if after.state in "Tt":
        return "stopped"
    return "busy" if before is not None and after.cpu - before.cpu > seconds / 10 else "sleeping"


# --- an answer --------------------------------------------------------------------------------------------------------


def encoded(answer: Answer) -> list[Any]:
    """Return an answer for the job's store, without its stack, which many ranks may share."""
    calls = {name: [*vars(one).values()] for name, one in list(answer.calls.items())[:_MOST_WORKERS]}
    processes = [[*vars(one).values()] for one in answer.workers]
    numbers = [answer.rank, answer.host, answer.pid, answer.quiet, answer.cpu, answer.wakes, answer.moves]
    return [*numbers, calls, processes, answer.uses_device]


def encoded_stack(frames: Iterable[Frame]) -> list[Any]:
    """Return a stack for the job's store."""
    return [[*vars(frame).values()] for frame in frames]


def decoded(found: Any, stack: Any) -> Answer | None:
    """Return an answer from the job's store; `None` if no rank can have written it."""
    with suppress(TypeError, ValueError):
        rank, host, pid, quiet, cpu, wakes, moves, calls, processes, uses_device = found
        frames = tuple(Frame(*map(_checked, one)) for one in stack)
        groups = {str(name): Calls(*map(_checked, one)) for name, one in dict(calls).items()}
        these = tuple(Worker(*map(_checked, one)) for one in processes)
        numbers = int(rank), str(host), int(pid), float(quiet), float(cpu), int(wakes), bool(moves)
        return Answer(*numbers, frames, groups, these, bool(uses_device))
    return None


def _checked(value: Any) -> Any:
    if not isinstance(value, (str, int, float)):
        raise TypeError
    return value
