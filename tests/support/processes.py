"""Jobs of several processes for tests: started with a clean environment, and always ended with the test."""

from __future__ import annotations

import contextlib
import inspect
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import warm

_SUPPORT = Path(__file__).parent
_SOURCE = _SUPPORT.parents[1] / "src"
_MARK = "DIST_WANDB_TEST_JOB"
_FOREIGN = (
    *("WANDB_", "TORCHELASTIC_", "TORCHINDUCTOR_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "ACCELERATE_"),
    *("DIST_WANDB_", "PET_"),
)
_RANKS = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "CROSS_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "LOCAL_SIZE", "CROSS_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
# A file, or a function of a test file, whose arguments are texts.
Script: TypeAlias = Path | str | Callable[..., object]
Command = list[str | Path]
_NONE: Mapping[str, object] = MappingProxyType({})
starts_cold = False  # whether the current test is marked with `cold`


@dataclass(frozen=True)
class Finished:
    """The result of a job: the exit codes of its commands, and their output."""

    exit_codes: tuple[int, ...]
    output: str

    def check(self) -> Finished:
        """Fail the test, with all output, unless every command succeeded."""
        assert set(self.exit_codes) == {0}, f"exit codes {self.exit_codes}\n{self.output}"
        return self

    def lines(self, start: str) -> list[str]:
        """Return the lines of output that begin with `start`, sorted."""
        return sorted(line for line in self.output.splitlines() if line.startswith(start))


def run_python(code: str) -> str:
    """Run code in a new interpreter; return its output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def clean_environment(**extra: str) -> dict[str, str]:
    """Return this process's environment without variables that set ranks or configure wandb; offline, and quiet.

    Scripts find the modules of this directory, the package of this checkout, even if another one is installed, and what
    this process finds by its own `PYTHONPATH`. Only cold starts save the list of installed packages, for which wandb
    parses more than a hundred files for each run.
    """
    excluded = (*_RANKS, "PYTHONDONTWRITEBYTECODE")  # our modules would be compiled in every process
    kept = {name: value for name, value in os.environ.items() if not (name.startswith(_FOREIGN) or name in excluded)}
    return {
        **kept,
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_CONSOLE": "off",
        **({} if starts_cold else {"WANDB_X_SAVE_REQUIREMENTS": "false"}),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_SUPPORT), str(_SOURCE), os.environ.get("PYTHONPATH")])),
        **extra,
    }


def run_job(
    *commands: Sequence[str | Path], cwd: Path, environment: Mapping[str, str] | None = None, timeout: float = 240
) -> Finished:
    """Run commands concurrently until all have ended, or kill them all after `timeout` seconds and fail."""
    with started(*commands, cwd=cwd, environment=environment) as job:
        return job.wait(timeout)


@dataclass
class Job:
    """Commands that run concurrently, and all processes that they start."""

    mark: str
    processes: list[subprocess.Popen[str]]

    def wait(self, timeout: float) -> Finished:
        """Wait until all commands have ended, or kill them after `timeout` seconds and fail."""
        deadline = time.monotonic() + timeout
        try:
            outputs = [
                process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0] for process in self.processes
            ]
        except subprocess.TimeoutExpired:
            self.kill()
            text = "\n".join(process.communicate()[0] for process in self.processes)
            commands = [process.args for process in self.processes]
            raise AssertionError(f"not finished after {timeout:g} s: {commands}\n{text}") from None
        sys.stdout.writelines(outputs)  # pytest shows it if the test fails
        return Finished(tuple(process.returncode for process in self.processes), "\n".join(outputs))

    def kill(self) -> None:
        """Kill every process of the job, including children that left its process group."""
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def living(self) -> list[int]:
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and self._is_mine(path)]

    def _is_mine(self, process: Path) -> bool:
        try:
            return f"{_MARK}={self.mark}".encode() in (process / "environ").read_bytes()
        except OSError:  # it has ended, or we may not read it
            return False


@contextlib.contextmanager
def started(
    *commands: Sequence[str | Path],
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    output: Path | None = None,
) -> Iterator[Job]:
    """Start commands concurrently; at the end of the block, all processes that they started are killed.

    If a command uses this process's interpreter, a warm one is started (see `warm`). Without an `environment`, it is
    `clean_environment`. `output` is a file for the output of all commands, instead of pipes that must be read.
    """
    job = Job(uuid.uuid4().hex, [])
    variables = {**(environment if environment is not None else clean_environment()), _MARK: job.mark}
    python = sys.executable if starts_cold else warm.interpreter(clean_environment())
    stdout = subprocess.PIPE if output is None else os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for command in commands:
            process = subprocess.Popen(
                [python if word == sys.executable else str(word) for word in command],
                cwd=cwd,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            job.processes.append(process)
        yield job
    finally:
        job.kill()
        for process in job.processes:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if output is not None:
            os.close(stdout)


def words_of(script: Script, *arguments: object) -> list[str | Path]:
    """Return what Python is told to run a script: see `called`."""
    if isinstance(script, Path | str):
        return [script, *map(str, arguments)]
    return [_SUPPORT / "called.py", inspect.getfile(script), script.__name__, *map(str, arguments)]


def python(script: Script, *arguments: object) -> tuple[list[str | Path], ...]:
    """Return the command that runs `script` as one process; used like `torchrun`."""
    return ([sys.executable, *words_of(script, *arguments)],)


def torchrun(script: Script, *arguments: object, processes: int = 2, nodes: int = 1) -> tuple[list[str | Path], ...]:
    """Return the command, or for several simulated nodes the commands, to start `script` under torchrun on loopback."""
    launcher: list[str | Path] = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    words = words_of(script, *arguments)
    if nodes == 1:
        return ([*launcher, "--standalone", *words],)
    port = str(free_port())
    rendezvous = ["--nnodes", str(nodes), "--master-addr", "127.0.0.1", "--master-port", port]
    return tuple([*launcher, *rendezvous, "--node-rank", str(node), *words] for node in range(nodes))


def with_variables(variables: Mapping[str, object], script: Script, *arguments: object) -> Command:
    """Return the command that runs a script, or a module after ``-m``, with environment variables."""
    assignments = [f"{name}={value}" for name, value in variables.items()]
    return ["env", *assignments, sys.executable, *words_of(script, *arguments)]


def rank_commands(
    script: Script,
    *arguments: object,
    world_size: int = 1,
    layout: Sequence[int] = (),
    variables: Mapping[str, object] = _NONE,
) -> tuple[Command, ...]:
    """Return the commands that start `script` as ranks, like a launcher: on one node, or on those of a `layout`.

    Unlike under torchrun, a failing rank does not end the others.
    """
    layout = layout or (world_size,)
    world = {"WORLD_SIZE": sum(layout), "GROUP_WORLD_SIZE": len(layout)}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    commands: list[Command] = []
    for node, size in enumerate(layout):
        for local in range(size):
            place = {"RANK": len(commands), "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": size}
            place |= {"NODE_RANK": node, "GROUP_RANK": node}
            commands.append(with_variables({**place, **world, **meeting, **variables}, script, *arguments))
    return tuple(commands)


def wait_until(condition: Callable[[], bool], within: float, what: str = "") -> None:
    """Poll a condition that depends on other processes; fail if it is not met within so many seconds."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"{what or condition} did not come within {within:g} s"
        time.sleep(0.05)


def free_port() -> int:
    """Return an unused port of 127.0.0.1, outside of the range that the system assigns: it is used only much later."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)  # frameworks seed `random`: concurrent tests would get the same port
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
