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
import multiprocessing.process
import os
import sys
import sysconfig
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from dist_wandb.session.stalls.verdict import Calls, Frame, Kind

_MOST_FRAMES = 60  # of a stack: the outermost and the innermost ones
_MOST = 16  # child processes, and groups
_COMPUTES = 0.05  # share of the time from which on a thread or process is computing
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OWN = str(Path(__file__).parents[2])  # this package
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PROC = Path("/proc")
_HELPERS = tuple(f"from multiprocessing.{name} import main" for name in ("forkserver", "resource_tracker"))


# --- stacks -----------------------------------------------------------------------------------------------------------


def stack_of(thread: int) -> list[Frame]:
    """Return the stack of a thread, the outermost line first. Keeps no frame, which would keep tensors alive."""
    found: list[Frame] = []
    frame = _current_frames().get(thread)
    while frame is not None:
        code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
        is_users = not code.co_filename.startswith(("<", *_LIBRARIES, _OWN)) and "site-packages" not in code.co_filename
        called = _called(code, frame.f_lasti)
        found.append(Frame(code.co_filename, frame.f_lineno, code.co_name, module, is_users, called))
        frame = frame.f_back
    found.reverse()
    half = _MOST_FRAMES // 2
    return found if len(found) <= _MOST_FRAMES else found[:half] + found[-half:]


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


def _called(code: Any, instruction: int) -> str:
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


def all_stacks(first: int) -> str:
    """Return the stacks of all threads except this package's and wandb's, the given thread's first, as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts: list[str] = []
    for ident in sorted(_current_frames(), key=lambda ident: ident != first):
        frames = stack_of(ident)
        if ident == first or not any(frame.package in ("dist_wandb", "wandb") for frame in frames):
            lines = [f'  File "{one.file}", line {one.line}, in {one.function}' for one in frames]
            texts.append("\n".join([f"Thread {names.get(ident, ident)}:", *lines]))
    return "\n".join(texts)


# --- collectives ------------------------------------------------------------------------------------------------------


class Collectives:
    """The calls of collectives of this process, without those of the exchange."""

    def __init__(self) -> None:
        self.watchdog: float = 0.0  # seconds after which PyTorch gives up a call; 0 if unknown
        self._names: dict[str, str] = {}  # of groups, by the number that this process gives them
        self._known: dict[str, tuple[int, int]] = {}

    def have_moved(self) -> bool:
        """Return whether calls were begun or completed since the last time: a sign that the training goes on."""
        numbers, _ = _recorded(entries=False)
        if not set(numbers) <= set(self._names):
            self.groups()
            for one in numbers:
                self._names.setdefault(one, "")  # its calls are not recorded any more
        before, self._known = self._known, {one: numbers[one] for one in numbers if self._names[one]}
        return self._known != before

    def groups(self) -> dict[str, Calls]:
        """Return the calls in each group, by its name, which is the same on all ranks."""
        numbers, entries = _recorded(entries=True)
        last: dict[str, str] = {}
        for one, name, call, within in entries:
            self._names[one], last[one] = name, call
            if name and within:
                self.watchdog = min(self.watchdog or within, within)
        found = sorted((one for one in numbers if self._names.get(one)), key=lambda one: (len(one), one))
        newest = {self._names[one]: one for one in found}  # a group that was destroyed keeps its name and calls
        return {name: Calls(*numbers[one], last.get(one, "")) for name, one in [*newest.items()][:_MOST]}


def _recorded(*, entries: bool) -> tuple[dict[str, tuple[int, int]], list[tuple[str, str, str, float]]]:
    """Return what PyTorch's flight recorders have, NCCL's apart; nothing if there are none.

    Calls made and completed by number of the group; of each call the number and name of its group, its own name and its
    timeout. See tests/unit/test_private_names.py.
    """
    numbers: dict[str, tuple[int, int]] = {}
    calls: list[tuple[str, str, str, float]] = []
    for kind, dump in (("", "_dump_fr_trace_json"), ("/nccl", "_dump_nccl_trace_json")):
        with suppress(Exception):
            if "torch.distributed" in sys.modules:
                from torch._C import _distributed_c10d

                found = json.loads(getattr(_distributed_c10d, dump)(includeCollectives=entries))
                for one, status in found["pg_status"].items():
                    counts = [int(status.get(f"last_{what}_collective", 0)) for what in ("enqueued", "completed")]
                    numbers[f"{one}{kind}"] = counts[0], counts[1]
                for call in found.get("entries", ()):
                    group, name = str(call["process_group"][0]), str(call["profiling_name"]).rpartition(":")[2]
                    within = call.get("timeout_ms", 0) / 1000
                    calls.append((f"{call['pg_id']}{kind}", f"{group}{kind}" if group else "", name, within))
    return numbers, calls


def uses_device() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


# --- threads and processes --------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """What a thread or a process has done so far, as the kernel counts."""

    cpu: float  # seconds
    sleeps: int  # how often it, or the main thread of the process, went to sleep by itself
    state: str  # a letter, and the function of the kernel in which it waits


def works(thread: int, pids: Iterable[int] = ()) -> dict[int, Work | None]:
    found = {pid: _work(_PROC / str(pid)) for pid in pids}
    return {**found, thread: _work(_PROC / "self" / "task" / str(thread))}


def _work(task: Path) -> Work | None:
    fields, status = _text(task / "stat").rpartition(")")[2].split(), _text(task / "status")
    sleeps = status.partition("\nvoluntary_ctxt_switches:")[2].split()
    if not fields or not sleeps:
        return None
    state = ", ".join(filter(None, [fields[0], _text(task / "wchan").strip("0\n")]))
    return Work((int(fields[11]) + int(fields[12])) / _TICKS, int(sleeps[0]), state)


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def doing(before: Work | None, after: Work | None, seconds: float) -> Kind:
    if after is None:
        return "gone" if (_PROC / "self").exists() else "silent"
    if after.state[0] in "ZXTt":
        return "stopped" if after.state[0] in "Tt" else "gone"
    if before is None or after.cpu - before.cpu > _COMPUTES * seconds:
        return "busy"
    if after.sleeps - before.sleeps > 1:
        return "waking"
    # Others have the processors of a crowded host: it would compute if it could.
    return "busy" if before.state[0] == after.state[0] == "R" else "sleeping"


def children() -> list[int]:
    """Return the processes that this one has started, without those of wandb and multiprocessing itself.

    Those of a fork server, the default since Python 3.14, are not its children; `active_children` would reap them.
    """
    started: list[int] = []
    for child in set(getattr(multiprocessing.process, "_children", ())):  # private, for the reason above
        with suppress(ValueError):  # it was closed in this moment
            started.append(child.pid)
    tasks = (_PROC / "self" / "task").glob("*/children")
    pids = [int(pid) for path in tasks for pid in _text(path).split()]
    return [*sorted(started), *(pid for pid in pids if pid not in started and not _is_helper(_PROC / str(pid)))][:_MOST]


def _is_helper(process: Path) -> bool:
    command = _text(process / "cmdline")
    return _text(process / "comm").startswith(("wandb", "gpu_stats")) or any(name in command for name in _HELPERS)
