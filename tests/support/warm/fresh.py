"""Put a forked child into the state of a new interpreter, and run its program."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import importlib
import inspect
import io
import multiprocessing.process
import multiprocessing.spawn
import os
import resource
import runpy
import signal
import sys
import tempfile
import time
import types
from collections.abc import Iterable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from .request import Request

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_STDERR = 2
_OWN_FILES = tuple(str(Path(__file__).parent / name) for name in ("fresh.py", "server.py"))
_CLEARED = ("__main__", "sys", "builtins")
_NOT_FLUSHED = 120  # Python's exit code if its streams cannot be flushed
_libraries: dict[str, types.ModuleType] = {}
_code: int | None = None  # the exit code, once it is certain


def shorten_ends() -> None:
    """Make children skip the slowest part of their end: the teardown of modules that were imported before the fork.

    This part is the same in every process, and would copy a quarter of the memory that it shares with the server. Call
    this function before the libraries are imported, because hooks that are registered first run last.
    """
    atexit.register(lambda: vars(sys).update(ps2=_BeforeModules()))


def note_libraries() -> None:
    _libraries.update((name, module) for name, module in sys.modules.items() if name not in _CLEARED)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_libraries))


class _BeforeModules:
    """Python deletes it, and others of `sys`, before the modules."""

    def __del__(self) -> None:
        for name, module in _libraries.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        _libc.fflush(None)
        if _code is not None:
            vars(sys)["_end"] = _AfterModules()


class _AfterModules:
    """Python deletes it, the first of the names of `sys`, after the program's modules: the rest is Python's own."""

    def __del__(self) -> None:
        code = _code
        try:
            for stream in (sys.__stderr__, sys.__stdout__):
                if stream is not None and not stream.closed:
                    stream.flush()
        except Exception:  # noqa: BLE001  # as Python does
            code = _NOT_FLUSHED
        _libc.fflush(None)
        os._exit(code or 0)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def become(request: Request, received: Iterable[int], base_path: list[str]) -> None:
    """Turn this process into the one that was requested; `base_path` is `sys.path` without additions."""
    os.setsid()
    _libc.on_exit(_libc._exit, None)
    for descriptor in request.namespaces.values():
        if _libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "setns")
    place_descriptors(received, request.descriptors)
    os.chdir(request.directory)
    note_own_files()
    os.umask(request.umask)
    os.sched_setaffinity(0, request.processors)
    os.setpriority(os.PRIO_PROCESS, 0, request.niceness)
    for kind, limit in request.limits.items():
        resource.setrlimit(kind, limit)
    _set_environment(request.environment, [sys.executable, *request.words])
    _set_streams(request)
    _set_interpreter(request, base_path)
    _set_libraries(request)
    _set_signals(request)


def note_own_files() -> None:
    """Keep `inspect.stack`, which torchrun calls frequently, from searching thousands of modules for our frames.

    They are in the stack of every child, but these files are not those of any module.
    """
    for name in (*_OWN_FILES, "<string>", "<frozen runpy>"):  # `inspect` uses absolute paths
        inspect.modulesbyfile[os.path.abspath(name)] = "warm"  # noqa: PTH100  # not resolved


def place_descriptors(received: Iterable[int], numbers: Iterable[int]) -> None:
    """Move the received files to the given numbers, and close all other files."""
    received, numbers = list(received), list(numbers)
    beyond = max([*numbers, *received, 2]) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, beyond) for descriptor in received]
    os.closerange(0, beyond)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(name) not in numbers:
            with contextlib.suppress(OSError):  # it was open only for the listing
                os.close(int(name))


def run(request: Request) -> None:
    """Run the program in a new ``__main__``; its errors propagate, and are printed without the frames of this file."""
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __builtins__=sys.modules["builtins"], **{"__annotations__": {}} if sys.version_info < (3, 14) else {}
    )
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    try:
        if request.kind == "-c":
            main.__loader__ = importlib.machinery.BuiltinImporter
            exec(compile(request.target, "<string>", "exec", dont_inherit=True), main.__dict__)  # noqa: S102
        elif request.kind == "-m":
            sys.modules.pop(request.target, None)
            runpy._run_module_as_main(request.target)  # type: ignore[attr-defined]  # as `python -m` does
        else:
            path = str(Path(request.directory, request.target))
            main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
            exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main.__dict__)  # noqa: S102
    except SystemExit as error:
        _end_with(error.code)
        raise
    except BaseException:
        _hide_own_frames()
        raise
    else:
        _end_with(None)


def _end_with(code: object) -> None:
    global _code  # noqa: PLW0603
    _code = 0 if code is None else code & 0xFF if isinstance(code, int) else None


def _hide_own_frames() -> None:
    """Hide the frames below the program in the traceback that the interpreter prints later."""
    hook = sys.excepthook

    def print_once(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        sys.excepthook = hook
        while trace is not None and _is_own(trace):
            trace = trace.tb_next
        error.__traceback__ = trace
        hook(kind, error, trace)

    sys.excepthook = print_once


def _is_own(trace: types.TracebackType) -> bool:
    code = trace.tb_frame.f_code
    return code.co_filename in _OWN_FILES or (code.co_filename == "<string>" and "_warm" in trace.tb_frame.f_globals)


def _set_environment(environment: Mapping[str, str], words: list[str]) -> None:
    os.environ.clear()  # from here on no C code uses the old memory, which ``/proc`` reads
    os.environ.update(environment)
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, their_end, variables, end = (int(field) for field in stat[45:49])
    _overwrite(arguments, their_end - arguments, b"\0".join(map(os.fsencode, words)))
    entries = (os.fsencode(f"{name}={value}") for name, value in environment.items())
    _overwrite(variables, end - variables, b"\0".join(entries))
    if "TZ" in environment:
        time.tzset()


def _overwrite(address: int, room: int, data: bytes) -> None:
    data = data[: room - 1]
    ctypes.memset(address, 0, room)
    ctypes.memmove(address, data, len(data))


def _set_streams(request: Request) -> None:
    """Reinitialize the standard streams, as the same objects: libraries refer to them, and have wrapped methods.

    Otherwise they would buffer as the server's streams do, and treat a pipe as a seekable file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if number not in request.descriptors:
            setattr(sys, name, None)
            setattr(sys, f"__{name}__", None)
        elif isinstance(stream, io.TextIOWrapper):
            _reinitialize(stream, number, is_unbuffered=request.unbuffered)


def _reinitialize(stream: io.TextIOWrapper, number: int, *, is_unbuffered: bool) -> None:
    raw = io.FileIO(number, "wb" if number else "rb", closefd=False)
    raw.name = stream.name
    if number:
        buffer: Any = raw if is_unbuffered else io.BufferedWriter(raw)
    else:
        buffer = io.BufferedReader(raw)
    stream.__init__(  # type: ignore[misc]
        buffer,
        stream.encoding,
        stream.errors,
        newline="\n" if number else None,
        line_buffering=number == _STDERR and not is_unbuffered,
        write_through=is_unbuffered,
    )


def _set_interpreter(request: Request, base_path: list[str]) -> None:
    first = request.target if request.kind == "script" else request.kind
    sys.argv[:] = [first, *request.arguments]
    sys.orig_argv[:] = [request.stand_in, *request.words]
    before = request.search_path
    sys.path[:] = [*before, *(entry for entry in base_path if entry not in before)]  # a .pth file adds no known entry
    sys.executable = request.stand_in
    sys.dont_write_bytecode |= bool(request.environment.get("PYTHONDONTWRITEBYTECODE"))
    importlib.invalidate_caches()
    tempfile.tempdir = None
    own, own_getppid = os.getpid(), os.getppid

    def getppid() -> int:
        """Return the parent of the stand-in: it has started this process, not the server."""
        if os.getpid() != own:
            return own_getppid()
        stat = Path(f"/proc/{request.pid}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])

    os.getppid = getppid
    process: Any = multiprocessing.process
    process.ORIGINAL_DIR = request.directory
    process.current_process()._config["authkey"] = process.AuthenticationString(os.urandom(32))
    multiprocessing.spawn.set_executable(request.stand_in)


def _set_libraries(request: Request) -> None:
    modules: Mapping[str, Any] = sys.modules
    if "numpy.random" in modules:
        modules["numpy.random"].seed()
    if "rich" in modules:
        modules["rich"]._IMPORT_CWD = request.directory
    if rank_zero := modules.get("lightning.fabric.utilities.rank_zero"):
        rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0
    if prints := modules.get("torchmetrics.utilities.prints"):
        prints.rank_zero_only.rank = int(request.environment.get("LOCAL_RANK", 0))


def _set_signals(request: Request) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        is_ignored = number in request.ignored
        if number == signal.SIGINT and not is_ignored:
            signal.signal(number, signal.default_int_handler)
        elif number not in (signal.SIGPIPE, signal.SIGXFSZ):  # every interpreter ignores these
            with contextlib.suppress(OSError, ValueError):  # signals reserved for the C library
                signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    if request.environment.get("PYTHONFAULTHANDLER") and sys.stderr is not None:
        faulthandler.enable()
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)
