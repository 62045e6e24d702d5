"""Failures of W&B, its server or a disk: training continues, and the rows are kept somewhere."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import wandb
from processes import Job, python, rank_commands, run_job, started, wait_until
from stored import find_runs, rows_in
from wandb_server import Request, WandbServer

import dist_wandb

ROWS = 40
ALL = Counter(range(ROWS))
LOSS = {step: 2.0 * step + 0.5 for step in range(ROWS)}
FEW = 3


def train_shortly(directory: str, name: str) -> None:
    """Log a few rows; under the name `large`, also one that is longer than W&B accepts. Two runs have short limits."""
    settings = wandb.Settings(init_timeout=4 if name == "id-deleted" else 60)
    limits = dist_wandb.Limits(finish_timeout=4.0 if name == "patience" else 60.0)
    with dist_wandb.init("tests", id=name, dir=directory, settings=settings, limits=limits) as run:
        for step in range(FEW):
            run.log({"loss": float(step)}, step=step)
        if name == "large":
            run.log({"text": "x" * 11_000_000}, step=FEW)
            run.log({"loss": float(FEW)}, step=FEW + 1)


def open_refused(directory: str, *names: str) -> None:
    """One process that opens a run for each name that it is given, one after the other, and logs a few rows to each."""
    for name in names:
        try:
            train_shortly(directory, name)
        except wandb.Error as error:  # noqa: PERF203  # each run by itself
            sys.stdout.write(f"\nSAW {name} {type(error).__name__}\n")


def train_despite(directory: str, pace: str, finish: str, waits_for: str = "") -> None:
    """Train; `finish` is the limit for the other ranks and for the upload, `waits_for` a file."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    begun = time.monotonic()
    limits: dict[str, Any] = {"peer_timeout": 20.0, "finish_timeout": float(finish), "heartbeat": 0.2}
    own = {"join_timeout": 2.0} if "INNER" in os.environ else {}
    with dist_wandb.init("tests", id="exp", dir=directory, limits={**limits, **own}) as run:
        inner = (
            dist_wandb.init("tests", id="exp-inner", dir=directory, limits=limits, reinit="create_new")
            if os.environ.get("INNER")
            else None
        )
        sys.stdout.write(f"OPENED {rank} after {time.monotonic() - begun:.1f} s\n")
        for step in range(ROWS):
            gradient = torch.ones(2)
            dist.all_reduce(gradient)  # the training
            assert gradient.tolist() == [2.0, 2.0]
            table = (
                {"table": wandb.Table(["step"], [[step]])} if step == ROWS // 2 + 5 and "TABLE" in os.environ else {}
            )
            run.log({"loss": 2.0 * step + rank, **table}, step=step)
            if inner is not None:
                inner.log({"inner": 2.0 * step + rank}, step=step)
            time.sleep(float(pace))
            if step == ROWS // 2:
                run.flush()
                mark = Path(f"begun-{rank}")
                mark.write_text(str(os.getpid()))
                mark.rename(f"half-{rank}")  # so that no partial file is read
                while waits_for and not Path(waits_for).exists():
                    time.sleep(0.05)
                second_half = time.monotonic()
        if inner is not None:
            inner.finish()
        run.flush(timeout=30)
        dist.barrier()  # no rank is late to the end: the limits are those of the upload
        sys.stdout.write(f"TRAINED {rank} in {time.monotonic() - second_half:.1f} s\n")
        ended = time.monotonic()
    sys.stdout.write(f"\nFINISHED {rank} after {time.monotonic() - ended:.1f} s\n")


@dataclass
class Training:
    """Two training ranks, and the server that they log to."""

    server: WandbServer
    directory: Path
    job: Job

    def wait_for(self, name: str, within: float = 60) -> str:
        """Wait until a rank has created a file, and return its content."""
        path = self.directory / name
        wait_until(path.exists, within, name)
        return path.read_text()

    def let_go_on(self) -> None:
        """Create the file that ranks wait for at half time."""
        (self.directory / "go-on").touch()

    def core_of(self, rank: int) -> int:
        """Return the id of a rank's wandb process."""
        parent = int(self.wait_for(f"half-{rank}"))
        (core,) = [pid for pid in self.job.living() if _is_core_of(pid, parent)]
        return core


def _is_core_of(pid: int, parent: int) -> bool:
    process = Path(f"/proc/{pid}")
    try:
        of = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        return of == parent and "wandb-core" in (process / "cmdline").read_text()
    except OSError:  # the process has ended
        return False


@dataclass(frozen=True)
class Outcome:
    """The end of a job, and the rows that it left on the server and on disk."""

    exit_codes: tuple[int, ...]
    output: str
    online: Counter[int]
    on_disk: Counter[int]
    run_codes: list[int]


def train(
    server: WandbServer,
    tmp_path: Path,
    meanwhile: Callable[[Training], object] = lambda _: None,
    *,
    pace: float = 0.05,
    finish: float = 30.0,
    waits: bool = False,
    lingers: bool = False,
    directory: str = "",
    prefix: Iterable[str] = (),
    **extra: str,
) -> Outcome:
    """Train on two unsupervised ranks, while `meanwhile` injects a fault. If W&B `lingers`, its end is not awaited."""
    waits_for = [tmp_path / "go-on"] if waits else []
    commands = rank_commands(train_despite, directory or tmp_path, pace, finish, *waits_for, world_size=2)
    commands = tuple([*prefix, *command] for command in commands)
    with started(*commands, cwd=tmp_path, environment=server.environment(tmp_path, **extra)) as job:
        meanwhile(Training(server, tmp_path, job))
        finished = job.wait(240)
        # wandb continues to write after `finish`
        wait_until(lambda: not job.living() or (lingers and on_disk(tmp_path) == ALL), within=60)
    runs = server.runs
    recorded = next(iter(runs.values()), None)
    return Outcome(
        finished.exit_codes,
        finished.output,
        steps_of(recorded.rows if recorded else []),
        on_disk(tmp_path),
        recorded.exit_codes if recorded else [],
    )


def on_disk(directory: Path) -> Counter[int]:
    """Return how often each step is on disk."""
    files = [path for path in find_runs(directory) if path.stat().st_size > 100]
    return steps_of([row for path in files for row in rows_in(path)])


def steps_of(rows: Iterable[dict[str, Any]]) -> Counter[int]:
    """Return how often each step has a row with the mean over both ranks."""
    return Counter(row["global_step"] for row in rows if row.get("loss") == LOSS.get(row["global_step"]))


def test_rows_are_on_disk_if_the_server_is_down_from_the_start(wandb_server: WandbServer, tmp_path: Path) -> None:
    """Rank 1 waits for rank 0, which takes longer than `join_timeout` to give up."""
    wandb_server.stop()
    outcome = train(
        wandb_server, tmp_path, lingers=True, WANDB_INIT_TIMEOUT="1", WANDB_X_GRAPHQL_RETRY_MAX="1", INNER="1"
    )
    assert outcome.exit_codes == (0, 0)
    assert outcome.output.count("TRAINED") == 2
    assert outcome.output.count("rank 0 could not open its run") == 2  # also for the nested session
    assert outcome.on_disk == ALL
    inner = [row for path in find_runs(tmp_path) if "exp-inner" in path.name for row in rows_in(path)]
    assert [row["inner"] for row in inner] == [2.0 * step + 0.5 for step in range(ROWS)]


def test_a_temporary_server_failure_and_dropped_connections_lose_no_rows(
    wandb_server: WandbServer, tmp_path: Path
) -> None:
    def meanwhile(training: Training) -> None:
        training.wait_for("half-0")
        fault = wandb_server.fail("file_stream", status=500)
        training.let_go_on()
        wait_until(lambda: fault.hits > 1, within=60)
        fault.stop()
        wandb_server.fail("file_stream", count=1, drop=True)
        wandb_server.fail("file_stream", count=1, drop=True, processed=True)

    outcome = train(wandb_server, tmp_path, meanwhile, waits=True, pace=0.1)
    assert (outcome.exit_codes, outcome.run_codes) == ((0, 0), [0])
    assert outcome.online == outcome.on_disk == ALL


def test_rows_are_on_disk_if_the_server_is_down_at_the_end(wandb_server: WandbServer, tmp_path: Path) -> None:
    def meanwhile(training: Training) -> None:
        training.wait_for("half-0")
        wandb_server.stop()
        training.let_go_on()

    # With a table, wandb asks the server again and again before it takes the row.
    extra: dict[str, Any] = {"TABLE": "1", "WANDB_X_GRAPHQL_RETRY_MAX": "4"}
    outcome = train(wandb_server, tmp_path, meanwhile, waits=True, lingers=True, finish=6.0, **extra)
    assert outcome.exit_codes == (0, 0)
    second_half = re.findall(r"TRAINED \d in ([\d.]+) s", outcome.output)
    assert len(second_half) == 2
    assert max(map(float, second_half)) < 20  # W&B would ask for half a minute
    assert "did not accept all of the run exp" in outcome.output
    assert "upload it with: dist-wandb sync" in outcome.output
    assert outcome.on_disk == ALL


# What W&B answers, as its client (core/internal/clients/retry_policy.go, core/internal/filestream) expects it. The
# client repeats 429 after the time that the server asks for, and 409 of an upsert; it gives up after the other ones.
REFUSED_ROWS = {"key-expired": 401, "no-run": 404, "run-deleted": 409, "too-large": 413}
REFUSED_RUNS = {"no-project": 404, "id-deleted": 409}
SHORT = Counter(range(3))


def test_runs_whose_server_refuses_or_asks_for_patience(wandb_server: WandbServer, tmp_path: Path) -> None:
    for name, status in REFUSED_ROWS.items():
        wandb_server.fail("file_stream", status=status, only=partial(_is_stream_of, name))
    for name, status in REFUSED_RUNS.items():
        wandb_server.fail("UpsertBucket", status=status, only=partial(_is_upsert_of, name), message="no such thing")
    busy: dict[str, Any] = {"status": 429, "headers": {"Retry-After": "1"}, "message": "rate limit exceeded"}
    wandb_server.fail("file_stream", count=2, only=partial(_is_stream_of, "busy"), **busy)
    wandb_server.fail("UpsertBucket", count=2, only=partial(_is_upsert_of, "busy"), **busy)
    patient = {**busy, "headers": {"Retry-After": "600"}}
    wandb_server.fail("file_stream", only=partial(_is_stream_of, "patience"), **patient)
    names = [*REFUSED_ROWS, *REFUSED_RUNS, "busy", "large", "patience"]
    job = python(open_refused, tmp_path, *names)
    finished = run_job(*job, cwd=tmp_path, environment=wandb_server.environment(tmp_path)).check()

    assert finished.lines("SAW") == sorted(f"SAW {name} CommError" for name in REFUSED_RUNS)
    rows = {path.stem.removeprefix("run-"): steps_of_loss(rows_in(path)) for path in find_runs(tmp_path)}
    opened = {**dict.fromkeys([*REFUSED_ROWS, "busy", "patience"], SHORT), "large": SHORT + Counter([3])}
    assert rows == {**opened, **{name: Counter() for name in REFUSED_RUNS}}
    for name, status in {**REFUSED_ROWS, "patience": 429}.items():
        (line,) = [line for line in finished.output.splitlines() if f"did not accept all of the run {name} " in line]
        assert str(status) in line
    for name in ("busy", "large"):
        recorded = wandb_server.run(name)
        assert steps_of_loss(recorded.rows) == rows[name]
        assert recorded.exit_codes == [0]
        assert f"did not accept all of the run {name} " not in finished.output
    assert finished.output.count("Skipped uploading run.log() data that exceeded size limit") == 1  # of wandb


def _is_stream_of(name: str, request: Request) -> bool:
    return request.path.endswith(f"/{name}/file_stream")


def _is_upsert_of(name: str, request: Request) -> bool:
    return bool(request.message["variables"]["name"] == name)


def steps_of_loss(rows: Iterable[dict[str, Any]]) -> Counter[int]:
    return Counter(int(row["loss"]) for row in rows if "loss" in row)


def test_rows_are_on_disk_if_wandbs_own_process_is_killed(wandb_server: WandbServer, tmp_path: Path) -> None:
    def meanwhile(training: Training) -> None:
        os.kill(training.core_of(0), signal.SIGKILL)
        training.let_go_on()

    outcome = train(wandb_server, tmp_path, meanwhile, waits=True)
    assert outcome.exit_codes == (0, 0)
    assert "Lost wandb's own process on rank 0" in outcome.output
    assert outcome.on_disk >= ALL  # those of the last seconds may be in both files
    assert max(outcome.on_disk.values()) <= 2


def test_rows_are_on_disk_until_the_primary_is_killed(wandb_server: WandbServer, tmp_path: Path) -> None:
    until_half = Counter(range(ROWS // 2 + 1))

    def meanwhile(training: Training) -> None:
        training.wait_for("half-0")
        wait_until(lambda: on_disk(tmp_path) == until_half, within=20)  # a second later, if the machine is idle
        os.kill(int(training.wait_for("half-0")), signal.SIGKILL)
        training.let_go_on()

    outcome = train(wandb_server, tmp_path, meanwhile, waits=True)
    assert outcome.exit_codes[0] == -signal.SIGKILL
    assert outcome.on_disk == until_half


def test_rows_arrive_online_if_the_directory_cannot_be_written(wandb_server: WandbServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcome = train(wandb_server, tmp_path, directory=str(tmp_path / "file" / "below"))
    assert (outcome.exit_codes, outcome.run_codes) == ((0, 0), [0])
    assert outcome.online == ALL


def test_a_full_disk_does_not_stop_the_training(wandb_server: WandbServer, tmp_path: Path) -> None:
    limits = ["prlimit", "--fsize=8192"]  # also applies to compiled modules, which would be truncated
    outcome = train(wandb_server, tmp_path, prefix=limits, WANDB_MODE="offline", PYTHONDONTWRITEBYTECODE="1")
    assert outcome.exit_codes == (0, 0), outcome.output
    assert outcome.output.count("TRAINED") == 2
    assert 0 < len(outcome.on_disk) < ROWS
    assert "rank 0: not all of the run exp could be written to disk (rows: " in outcome.output
