"""Run a drawn job and collect the evidence: ledgers of ranks, outputs, runs, processes and files."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ledger
from drawing import Spec
from processes import Job, clean_environment, free_port, python, rank_commands, started, torchrun, with_variables
from stored import find_runs
from wandb_server import WandbServer

from dist_wandb.errors import ReadError
from dist_wandb.wandb_files.records import read_records

_HERE = Path(__file__).parent
_SETTLING = 20.0  # seconds in which wandb's own processes may still write
_STACKS_WAIT = 3.0  # seconds for the stacks of processes that hang
_READERS = 2

Row = dict[str, Any]


@dataclass(frozen=True)
class RunFile:
    run_id: str
    writer: int | None  # rank whose directory contains it; `None` if the directory does not name a rank
    rows: list[Row]
    exit_code: int | None = 0  # exit code of the run; `None` if the file has no end
    problem: str = ""  # parts that could not be read


@dataclass
class Evidence:
    spec: Spec
    entries: list[ledger.Entry]  # entries of all ledgers, ordered by time
    codes: list[int | None]  # exit codes of the started commands; `None` for one that had to be killed
    output: str = ""
    files: list[RunFile] = field(default_factory=list)  # runs on disk, in the order of their starts
    arrived: dict[str, list[Row]] = field(default_factory=dict)  # rows of the runs at the server, by run id
    unknown: list[str] = field(default_factory=list)  # requests that the server does not know
    alive: list[str] = field(default_factory=list)  # processes that outlived the job
    left: list[str] = field(default_factory=list)  # remaining files in the directory for temporary files
    seconds: float = 0.0  # duration of the job


def play(spec: Spec, limit: float, keep: Path | None = None) -> Evidence:
    """Run a job to its end, for at most `limit` seconds; `keep` is a directory for a copy of its directory."""
    begin = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        evidence = _played(spec, directory, limit)
        if keep is not None:
            shutil.rmtree(keep, ignore_errors=True)
            shutil.copytree(directory, keep, symlinks=True, dirs_exist_ok=True, ignore=_no_files)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    evidence.seconds = time.monotonic() - begin
    return evidence


def _played(spec: Spec, directory: Path, limit: float) -> Evidence:
    temporary, output = directory / "t", directory / "output.txt"
    temporary.mkdir()
    (directory / "runs").mkdir()
    with _server(spec) as server:
        environment = _environment(spec, directory, server)
        commands = _commands(spec, directory)
        with started(*commands, cwd=directory, environment=environment, output=output) as job:
            codes = _wait(job, spec, server, limit)
            alive = _outliving(job)
        arrived = {run.run_id: run.rows for run in server.runs.values()} if server else {}
        unknown = server.unknown if server else []
    entries = sorted(ledger.read(directory), key=lambda entry: float(entry["at"]))
    return Evidence(
        spec=spec,
        entries=entries,
        codes=codes,
        output=output.read_text(errors="replace"),
        files=_files(directory / "runs"),
        arrived=arrived,
        unknown=unknown,
        alive=alive,
        left=sorted(str(path.relative_to(temporary)) for path in temporary.rglob("*")),
    )


def _no_files(folder: str, names: list[str]) -> list[str]:
    """Return the names of sockets and pipes in a directory."""
    paths = [Path(folder, name) for name in names]
    return [path.name for path in paths if not (path.is_file() or path.is_dir() or path.is_symlink())]


# --- starting and waiting ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _server(spec: Spec) -> Iterator[WandbServer | None]:
    if spec.server == "offline":
        yield None
        return
    with WandbServer() as server:
        if spec.server == "errors":
            server.fail("file_stream", count=3, status=500)
        elif spec.server == "drops":
            server.fail("file_stream", count=2, drop=True)
            server.fail("file_stream", count=1, drop=True, processed=True)
        elif spec.server == "dead":
            server.stop()
        yield server


def _environment(spec: Spec, directory: Path, server: WandbServer | None) -> dict[str, str]:
    path = os.pathsep.join([str(_HERE), clean_environment()["PYTHONPATH"]])
    more = {"PYTHONPATH": path, "TMPDIR": str(directory / "t"), "WANDB_SILENT": "true"}
    if spec.server in ("dies", "dead"):
        more["WANDB_INIT_TIMEOUT"] = "4"
    return server.environment(directory, **more) if server else clean_environment(**more)


def _commands(spec: Spec, directory: Path) -> tuple[list[str | Path], ...]:
    script, arguments = _HERE / "chaos_rank.py", (spec.seed, directory)
    if spec.launcher == "torchrun":
        return torchrun(script, *arguments, processes=spec.nodes[0], nodes=len(spec.nodes))
    if spec.launcher == "spawn":
        return (with_variables({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}, script, *arguments),)
    if spec.launcher == "lightning":
        return python(_HERE / "chaos_lightning.py", *arguments)
    if spec.launcher == "accelerate":
        script = _HERE / "chaos_accelerate.py"
    return rank_commands(script, *arguments, layout=spec.nodes)


def _wait(job: Job, spec: Spec, server: WandbServer | None, limit: float) -> list[int | None]:
    """Return the exit codes of the commands. Commands that hang print their stacks, and are killed."""
    deadline = time.monotonic() + limit
    while any(process.poll() is None for process in job.processes) and time.monotonic() < deadline:
        if server and spec.server == "dies" and any(run.rows for run in server.runs.values()):
            server.stop()
        if spec.launcher == "torchrun" and any(process.poll() for process in job.processes):
            _end_idle_agents(job)
        time.sleep(0.05)
    codes = [process.poll() for process in job.processes]
    if None in codes:
        for pid in job.living():
            if "python" in _name(pid):
                _signal(pid, signal.SIGCONT)
                _signal(pid, signal.SIGABRT)
        time.sleep(_STACKS_WAIT)
        job.kill()
    return codes


def _end_idle_agents(job: Job) -> None:
    """End agents of torchrun without workers after another one has failed: they wait for it, for up to 300 s."""
    idle = [one for one in job.processes if one.poll() is None and not _children(one.pid)]
    time.sleep(_SETTLING if idle else 0.0)
    for process in idle:
        if process.poll() is None and not _children(process.pid):
            process.kill()


def _children(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []


def _outliving(job: Job) -> list[str]:
    """Return the processes that are alive although they should have ended."""
    deadline = time.monotonic() + _SETTLING
    while (living := job.living()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [_name(pid) for pid in living]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return ""


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


# --- reading back -----------------------------------------------------------------------------------------------------


def _files(directory: Path) -> list[RunFile]:
    # Two may start in the same second: the one that replaces a lost process of wandb is written last.
    paths = sorted(
        find_runs(directory), key=lambda path: (path.parent.name.split("run-", 1)[1], path.stat().st_mtime_ns)
    )
    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(_file, paths))


def _file(path: Path) -> RunFile:
    run_id = path.stem.removeprefix("run-")
    (own,) = [part for part in path.parts if part.startswith("rank-")] or (None,)
    rows: list[Row] = []
    codes: list[int] = []

    problems: list[str] = []
    try:
        for kind, contents in read_records(path, problems):
            if kind == "history":
                rows.append(contents)
            elif kind == "exit":
                codes.append(contents.get("exit_code", 0))
    except ReadError as error:
        problems = [str(error)]
    writer = int(own.removeprefix("rank-")) if own else None
    return RunFile(run_id, writer, rows, codes[-1] if codes else None, "; ".join(problems))
