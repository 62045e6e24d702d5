"""A warm interpreter: processes of tests are forked from a process that has imported the large libraries.

Imports of torch, Lightning and Accelerate take seconds of processor time, in hundreds of processes of whole jobs.

- `served` (here) creates the server's home, a private directory, for the duration of a test run.
- `interpreter` (here) returns the executable to start instead of `sys.executable`. Its first call starts the server.
- The *stand-in* (``stand_in.py``) is that executable: a small Python that passes its descriptors to the server,
  forwards signals, and ends as the child ends. It is also `sys.executable` in a forked child.
- The *server* (``server.py``) imports the libraries once, and forks a child for each stand-in. It ends, and kills
  its children, when the test run ends, for whatever reason.
- A *request* (``request.py``) describes how a stand-in was started, read from ``/proc``. If a fork cannot match it, the
  stand-in executes the real interpreter: the start is *cold*.
- ``fresh.py`` puts the forked child into the state of a new interpreter.

Differences from a new interpreter:

- All children have the server's seed of string hashes (a start with ``PYTHONHASHSEED`` is cold).
- The preloaded modules are in `sys.modules` before the script imports them, with the warning filters that they add.
- The parent is the server; Python's `os.getppid` returns the stand-in's parent.
- SIGSTOP sent only to the stand-in does not stop the child; both have the same environment in ``/proc``.
- A child has its own session, so `os.killpg` of its group reaches the child and its descendants, but not its siblings.
- At its end, Python clears the modules of the program, but neither the preloaded ones nor `sys` and `builtins`.

Therefore a few jobs of every kind stay cold: those of tests marked with ``cold``. ``DIST_WANDB_TESTS_COLD=1`` makes all
starts cold.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

COLD = "DIST_WANDB_TESTS_COLD"
ALIVE = "alive"  # a named pipe that the test run holds open for writing
_HOME = "DIST_WANDB_TESTS_WARM"
_SUPPORT = Path(__file__).parents[1]
_STAND_IN = Path(__file__).parent / "stand_in.py"
_LONGEST_SHEBANG = 127
_ROOM = {"arguments": 4_000, "environment": 32_000}  # bytes that the server reserves for those of its children
_OF_EACH_CHILD = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONFAULTHANDLER", "PYTHONDONTWRITEBYTECODE")
_SECONDS_TO_END = 10.0
_started: list[subprocess.Popen[bytes]] = []


@contextlib.contextmanager
def served() -> Iterator[None]:
    """Provide a home for a server, which `interpreter` starts, to this process and its child processes.

    A process that was started by one with such a home shares it.
    """
    if _HOME in os.environ:
        yield
        return
    home = Path(tempfile.mkdtemp(prefix="dist_wandb-warm-"))
    os.mkfifo(home / ALIVE)
    alive = os.open(home / ALIVE, os.O_RDWR | os.O_NONBLOCK)
    os.environ[_HOME] = str(home)
    try:
        yield
    finally:
        os.environ.pop(_HOME, None)
        is_served = (home / "python").exists()
        os.close(alive)  # this ends the server, which removes its home
        deadline = time.monotonic() + _SECONDS_TO_END
        while is_served and home.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in _started:
            process.kill()  # it may still import the libraries
            process.wait()
        _started.clear()
        shutil.rmtree(home, ignore_errors=True)


def interpreter(environment: Mapping[str, str], python: str = "") -> str:
    """Return the executable that starts warm interpreters, or a cold one if no server is available.

    Args:
        environment: Environment of the server, if this call starts it: processes whose libraries would have read other
            values on import start cold.
        python: The interpreter of the server, if this call starts it; by default this process's own.
    """
    python = python or sys.executable
    home = Path(os.environ.get(_HOME, ""))
    stand_in = home / "python"
    if os.environ.get(COLD) or not os.environ.get(_HOME) or not home.is_dir() or not _can_be_named(python):
        return python
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stand_in.exists():
            _start(home, stand_in, environment, python)
    return str(stand_in)


def cold(executable: str) -> str:
    """Return the interpreter in whose place an executable of this run stands; any other one as it is."""
    stand_in = Path(os.environ.get(_HOME, "/")) / "python"
    if executable != str(stand_in):
        return executable
    return str(ast.literal_eval(stand_in.read_text().splitlines()[1].removeprefix("COLD = ")))


def _can_be_named(python: str) -> bool:
    """Return whether the interpreter exists, and a shebang can contain its path."""
    return not set(python) & set(" \t") and len(python) < _LONGEST_SHEBANG - 10 and os.access(python, os.X_OK)


def _start(home: Path, stand_in: Path, environment: Mapping[str, str], python: str) -> None:
    variables = {name: value for name, value in environment.items() if name not in _OF_EACH_CHILD}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "_": "." * _ROOM["environment"]}
    code = f"import sys; _warm = True; sys.path.insert(0, {str(_SUPPORT)!r}); from warm.server import main; main()"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening, (home / "server.log").open("wb") as log:
        listening.bind(str(home / "socket"))
        listening.listen(512)
        process = subprocess.Popen(
            [python, "-c", code, str(listening.fileno()), str(home), "." * _ROOM["arguments"]],
            cwd=home,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[listening.fileno()],
            start_new_session=True,
        )
    _started.append(process)  # it outlives the test
    head = f"#!{python} -IS\nCOLD = {python!r}\nADDRESS = {str(home / 'socket')!r}\n"
    made = home / "python.new"
    made.write_text(head + _STAND_IN.read_text())
    made.chmod(0o700)
    made.rename(stand_in)
