"""Runs commands of dist-wandb, or jobs that resume a run, in turn, each in a fork with limits, and measures them.

The only argument is a JSON list of them. Python starts once, so that many small commands take little time. What a
command `preloads` is imported before its fork, and thereby for all later commands. A command that `forks_wandb` forks
for each `wandb sync`, instead of starting a Python that imports wandb.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dist_wandb.cli import main

_PR_CAPBSET_DROP = 24
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TOO_MUCH = 2**30  # bytes: a process that has more is ended, for the sake of the machine
_CAPABILITIES_3 = 0x20080522  # _LINUX_CAPABILITY_VERSION_3


def obey_modes() -> None:
    """Make root and the programs that it starts obey the modes of files."""
    libc = ctypes.CDLL(None, use_errno=True)
    taken = (1 << _CAP_DAC_OVERRIDE) | (1 << _CAP_DAC_READ_SEARCH)
    for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    head, sets = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0), (ctypes.c_uint32 * 6)()
    libc.capget(head, sets)
    for index in range(3):  # effective, permitted, inheritable: of the capabilities below 32
        sets[index] &= ~taken
    libc.capset(head, sets)


def forked(act: Callable[[], int], limit: float) -> dict[str, Any]:
    """Run a function in a fork. Return exit code, seconds, CPU seconds, and the most memory of any beyond ours."""
    began, before = time.monotonic(), memory_of(os.getpid())
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        code = 1
        try:
            code = code_of(act)
        finally:
            os._exit(code)
    is_killed = False
    while True:
        ended, status, used = os.wait4(child, os.WNOHANG)
        if ended:
            break
        if not is_killed and (time.monotonic() - began > limit or memory_of(child) > _TOO_MUCH):
            is_killed = True
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.02)
    return {
        "code": None if is_killed else os.waitstatus_to_exitcode(status),
        "seconds": time.monotonic() - began,
        "cpu": used.ru_utime + used.ru_stime,
        "megabytes": used.ru_maxrss / 1024 - before / 2**20,
    }


def fork_wandb() -> None:
    """Replace `subprocess.Popen`: `python -m wandb` runs in a fork of this process; all else is as asked for."""
    popen: Any = subprocess.Popen

    def started(command: Sequence[str], **options: Any) -> Any:
        if list(command[:3]) == [sys.executable, "-m", "wandb"]:
            sys.stdout.flush()  # or else the fork writes it too
            environment, kept = options.pop("env"), {0, 1, 2, *options["pass_fds"]}
            options["preexec_fn"] = lambda: run_wandb(command[3:], environment, kept)
        return popen(command, **options)

    subprocess.Popen = started  # type: ignore[misc, assignment]


def run_wandb(arguments: Sequence[str], environment: Mapping[str, str], kept: Collection[int]) -> None:
    """Make this fork a `python -m wandb`, which keeps some descriptors."""
    code = 1
    try:
        for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - set(kept):  # noqa: PTH208
            with suppress(OSError):  # it was open only for the listing
                os.close(descriptor)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[1:] = arguments
        code = code_of(lambda: runpy.run_module("wandb", run_name="__main__", alter_sys=True))
    finally:
        os._exit(code)


def code_of(act: Callable[[], object]) -> int:
    """Do something as Python does a program, with its exit hooks; return the exit code."""
    code = 0
    try:
        result = act()
        code = result if isinstance(result, int) else 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001  # as Python does at its end
        traceback.print_exc()
        code = 1
    finally:
        atexit._run_exitfuncs()  # what Python does at the end of a process that was not forked
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def memory_of(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):  # it is ending
        return 0


def resume(order: dict[str, Any]) -> int:
    """Log two rows in a run that was begun before."""
    import dist_wandb

    os.environ.clear()  # only now: a warm interpreter has imported the libraries in another environment
    os.environ.update(order["environment"])
    with dist_wandb.init(project="tests", dir=order["dir"], id=order["id"], resume="allow") as run:
        for value in (5.0, 6.0):
            run.log({"loss": value})
    return 0


def run(order: dict[str, Any]) -> dict[str, Any]:
    for name in order["preloads"]:
        importlib.import_module(name)
    output, errors = (Path(f"{order['output']}.{kind}") for kind in ("out", "err"))

    def act() -> int:
        for path, handle in ((output, 1), (errors, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), handle)
        os.chdir(order["cwd"])
        if order.get("obeys_modes"):
            obey_modes()
        if order.get("forks_wandb"):
            fork_wandb()
        return main(order["argv"]) if "argv" in order else resume(order)

    return {**forked(act, order["limit"]), "out": str(output), "err": str(errors)}


if __name__ == "__main__":
    json.dump([run(order) for order in json.loads(Path(sys.argv[1]).read_text())], sys.stdout)
