"""Draw a job with faults from a seed. Ranks and judge draw the same one, and nothing else is random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

LAUNCHERS = ("processes", "torchrun", "spawn", "lightning", "accelerate")
AXIS = "samples"
"""Name of the user's x axis."""
NOTE = "note"
"""Name of a text, which each rank writes for itself."""
STREAMS = (
    "lockstep",  # all ranks log the same name in each row
    "guarded",  # only one rank logs it
    "mixed",  # each rank logs some of five names
    "uneven",  # the higher the rank, the fewer rows
    "shuffled",  # each rank has its own order of steps
    "own",  # names of one rank in a call that all ranks make
    "cadence",  # names in every second, third and fifth row, in a common call and in their own
    "split",  # one call on some ranks, two calls on the others
    "turned",  # two calls, in another order on some ranks
    "axis",  # names on an x axis of the user's
    "dynamic",  # another name in each row
    "burst",  # many rows at once in the middle
    "table",  # tables of all ranks
    "metric",  # objects of torchmetrics
    "handler",  # a signal handler logs
    "threads",  # another thread logs
    "forked",  # a forked child logs
    "beside",  # wandb.log next to the session
)
SERVERS = ("offline", "healthy", "errors", "drops", "dies", "dead")
ENDINGS = ("with", "finish", "missing")

FATAL = ("kill", "os_exit", "term", "raise", "exit")
"""Faults by which a rank ends early."""
HARD = ("kill", "os_exit")
"""Fatal faults to which the rank cannot react."""
ABSENT = ("never",)
OTHER = ("stop", "late", "core_kill", "core_stop", "tmp_gone")
FULL = "full"
"""No further byte fits on the disk."""

_FIRST_WITH_ABSENT_RANKS = 300
_CODES = (1, 3, 7)
_PACES = (0.0, 0.01, 0.05, 0.1)
_CALLS = ("own", "cadence", "split", "turned", "axis")  # streams whose calls have several names, or differ
_LAYOUTS = ((1,), (2,), (2,), (2,), (3,), (3,), (4,), (1, 1), (2, 2), (1, 2), (2, 1))


@dataclass(frozen=True)
class Fault:
    kind: str  # one of `FATAL`, `ABSENT` and `OTHER`, or `FULL`
    rank: int  # global rank
    row: int  # row of the last session before which the fault happens
    value: float  # an exit code, or a number of seconds


@dataclass(frozen=True)
class Lag:
    """How a rank falls behind now and then."""

    rank: int  # global rank
    every: int  # number of rows from one time to the next
    first: int  # the first row before which it sleeps
    seconds: float  # how long it sleeps

    def before(self, row: int) -> float:
        """Return for how many seconds the rank sleeps before a row."""
        return self.seconds if row % self.every == self.first else 0.0


@dataclass(frozen=True)
class Spec:
    seed: int  # the seed from which the job was drawn
    launcher: str  # one of `LAUNCHERS`
    strategy: str  # strategy of Lightning; empty for other launchers
    nodes: tuple[int, ...]  # number of ranks of each node
    run_mode: str  # argument of `dist_wandb.init`, like the next four
    rank_scope: str  # see `run_mode`
    reduce: Any  # see `run_mode`
    spread: bool  # see `run_mode`
    per_rank: bool  # see `run_mode`
    weighted: bool  # whether numbers have weights
    steps: bool  # whether rows are logged with a step
    axis: str  # the pattern of the names on an x axis of the user's; empty for none
    axis_differs: bool  # whether its values differ between ranks
    rows: int  # number of rows of each session
    pace: float  # seconds between two rows
    streams: tuple[str, ...]  # the values logged in each row, of `STREAMS`
    sessions: int  # number of sessions, one after the other
    nested: bool  # whether a second session is opened within the first
    guarded: bool  # whether only rank 0 opens a session
    ending: str  # how a session ends, of `ENDINGS`
    meets: bool  # whether the rank that hosts the job's store waits until the others have ended
    server: str  # behaviour of W&B's server, of `SERVERS`
    nofile: int  # largest number of descriptors of a rank; 0 for the limit of the system
    limits: dict[str, float]  # `join_timeout`, `peer_timeout`, `finish_timeout` and `heartbeat`
    lags: tuple[Lag, ...]  # ranks that are behind now and then
    faults: tuple[Fault, ...]

    @property
    def world_size(self) -> int:
        return sum(self.nodes)

    @property
    def session_count(self) -> int:
        """Number of sessions, including the nested one."""
        return self.sessions + self.nested

    def faults_of(self, rank: int, *kinds: str) -> list[Fault]:
        return [fault for fault in self.faults if fault.rank == rank and (not kinds or fault.kind in kinds)]

    def lag(self, rank: int, row: int) -> float:
        """Return for how many seconds a rank sleeps before a row because it falls behind."""
        return sum(lag.before(row) for lag in self.lags if lag.rank == rank)

    def axes(self, name: str, rank: int, row: int) -> dict[str, float]:
        """Return the values of the user's axis that a rank logs with a name, in a row."""
        if not self.axis or not name.startswith(self.axis.removesuffix("*")):
            return {}
        return {AXIS: 10.0 * row + (rank / 8 if self.axis_differs else 0.0)}

    def has(self, *kinds: str) -> bool:
        return any(fault.kind in kinds for fault in self.faults)

    def place(self, rank: int) -> tuple[int, int]:
        places = [(node, local) for node, size in enumerate(self.nodes) for local in range(size)]
        return places[rank]

    def reduction(self, name: str) -> str | None:
        """Return the reduction of a name; `None` if its numbers are not reduced."""
        if name.startswith("table"):
            return None if self._reduce is None else "sum"
        if name.startswith("metric"):
            return None if self._reduce is None else "mean"
        if name == NOTE:
            return None if self._reduce is None else "own"
        by_name = self._reduce if isinstance(self._reduce, dict) else {"*": self._reduce}
        found: str | None = by_name.get(name, by_name["*"])
        return found

    @property
    def _reduce(self) -> Any:
        if self.reduce == "auto":
            return None if self.run_mode == "new" else "mean"
        return self.reduce

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that all integrations share."""
        names = ("run_mode", "rank_scope", "reduce", "spread", "per_rank")
        return {name: getattr(self, name) for name in names} | {"limits": self.limits}

    def describe(self) -> str:
        """Return one line that identifies the job."""
        faults = [f"{fault.kind}@{fault.rank}:{fault.row}({fault.value:g})" for fault in self.faults]
        lags = [f"lag@{lag.rank}:{lag.first}/{lag.every}({lag.seconds:g})" for lag in self.lags]
        steps = " with steps" if self.steps else ""
        axis = f", {self.axis} on {AXIS}{' of each rank' if self.axis_differs else ''}" if self.axis else ""
        words = [
            f"{self.launcher}{'/' + self.strategy if self.strategy else ''} {'+'.join(map(str, self.nodes))}",
            f"{self.run_mode}/{self.rank_scope} reduce={self.reduce}",
            f"{self.sessions}{'+1' if self.nested else ''} x {self.rows} rows of {','.join(self.streams)}{steps}{axis}",
            f"{self.server} {self.ending}{' guarded' if self.guarded else ''}",
            " ".join([*lags, *(faults or ["no fault"])]),
        ]
        return "; ".join(words)


def value_of(rank: int, cell: int) -> float:
    """Return the number that a rank logs. It identifies the cell, and every mean or sum identifies the ranks in it."""
    return 100.0 * (cell + 1) + 2.0**rank + rank**2 / 8  # powers of two alone: (101 + 3 * 104) / 4 is many ranks' mean


def text_of(value: float) -> str:
    return f"note {value}"


def draw(seed: int) -> Spec:
    """Draw the job of a seed. From seed 300 on, some ranks open no session, or the disk is full."""
    spec = _draw(seed)
    return spec if seed < _FIRST_WITH_ABSENT_RANKS else _with_absent_ranks(spec, random.Random(f"{seed} absent"))


def _with_absent_ranks(spec: Spec, rng: random.Random) -> Spec:
    """Let rank 0 alone open a session, or all others, or let the disk be full; something may happen to a rank, too."""
    drawn = replace(spec, launcher="processes", strategy="", sessions=1, nested=False, guarded=False)
    row = rng.randrange(spec.rows)
    which = rng.choice(("guarded", "others", "full"))
    if which == "others":
        kind = rng.choice((*FATAL, "stop", ""))
        faults = [Fault("never", 0, 0, 0.0), *([Fault(kind, 2, row, _value(rng, kind))] if kind else [])]
        drawn = replace(drawn, nodes=rng.choice(((3,), (4,))), run_mode="auto", faults=tuple(faults))
    elif which == "guarded":
        kind = rng.choice((*FATAL, "core_kill", "core_stop", "stop"))
        drawn = replace(drawn, nodes=(2,), guarded=True, faults=(Fault(kind, 0, row, _value(rng, kind)),))
    else:
        drawn = replace(drawn, nodes=(2,), server="offline", faults=(Fault(FULL, 0, row, 0.0),))
    return replace(drawn, limits=_limits(drawn.faults, drawn.server))


def _draw(seed: int) -> Spec:
    rng = random.Random(seed)
    launcher = rng.choices(LAUNCHERS, weights=(64, 14, 8, 6, 8))[0]
    nodes = _nodes(rng, launcher)
    server = rng.choices(SERVERS, weights=(64, 12, 8, 8, 5, 3))[0]
    plain = launcher not in ("lightning", "accelerate")
    faults = _faults(rng, launcher, nodes)
    steps = not plain or rng.random() < 0.6
    streams = _streams(rng, steps) if plain else ("lockstep",)
    sessions, nested = _sessions(rng) if plain and not faults else (1, False)
    rows = rng.choice((10, 20, 30)) if sessions == 1 else 6
    if nested and rng.random() < 0.3:
        server = "dead"
    run_mode = rng.choice(("auto", "shared", "new"))
    reduce = _reduce(rng)
    if "tmp_gone" in {fault.kind for fault in faults}:
        server, streams = "offline", ("lockstep", "table")
    if reduce is None and "table" in streams:  # rejected in mode `auto` because rows would be lost
        reduce = "mean"
    axis = _axis(rng, streams) if plain else ""
    if sessions > 1 or nested:
        streams = tuple(stream for stream in streams if stream not in ("beside", "forked", "handler")) or ("lockstep",)
    return Spec(
        seed=seed,
        launcher=launcher,
        strategy=rng.choice(("ddp", "ddp_spawn")) if launcher == "lightning" else "",
        nodes=nodes,
        run_mode=run_mode,
        rank_scope=rng.choice(("global", "global", "worker")),
        reduce=reduce,
        spread=rng.random() < 0.25,
        per_rank=rng.random() < 0.7,
        weighted=plain and rng.random() < 0.3,
        steps=steps,
        axis=axis,
        axis_differs=bool(axis) and rng.random() < 0.3,
        rows=rows,
        pace=rng.choice(_PACES),
        streams=streams,
        sessions=sessions,
        nested=nested,
        guarded=_tells_layout(launcher, nodes) and not faults and not nested and rng.random() < 0.08,
        ending=rng.choice(ENDINGS) if sessions == 1 and not nested else rng.choice(("with", "finish")),
        meets=rng.random() < 0.7,
        server=server,
        nofile=rng.choice((0, 0, 0, 0, 128)),
        limits=_limits(faults, server),
        lags=_lags(rng, sum(nodes)),
        faults=_in_rows(rng, faults, rows),
    )


def _nodes(rng: random.Random, launcher: str) -> tuple[int, ...]:
    if launcher == "processes":
        return rng.choice(_LAYOUTS)
    if launcher == "torchrun":
        return rng.choice(((2,), (2,), (3,), (1, 1), (2, 2)))
    return rng.choice(((1,), (2,), (2,), (2,), (3,)))


def _faults(rng: random.Random, launcher: str, nodes: tuple[int, ...]) -> list[Fault]:
    """Draw one fault in half of the jobs, two in some, none in every third."""
    kinds = (*FATAL, *ABSENT, *OTHER, "kill", "stop") if launcher in LAUNCHERS[:3] else ("kill", "raise", "stop")
    size, number = sum(nodes), rng.choices((0, 1, 2), weights=(35, 50, 15))[0]
    drawn = [Fault(rng.choice(kinds), rng.randrange(size), 0, 0.0) for _ in range(number)]
    return list({fault.rank: _possible(fault, launcher, nodes) for fault in drawn}.values())


def _possible(fault: Fault, launcher: str, nodes: tuple[int, ...]) -> Fault:
    """Replace faults in which a rank is absent if all ranks are needed at the start, because `init` would raise."""
    if fault.kind in ("never", "late") and (fault.rank == 0 or not _tells_layout(launcher, nodes)):
        return replace(fault, kind="stop")
    return fault


def _tells_layout(launcher: str, nodes: tuple[int, ...]) -> bool:
    """Return whether the launcher's variables contain the layout of ranks on nodes; else all ranks publish it."""
    return launcher == "torchrun" or (launcher == "processes" and len(nodes) == 1)


def _in_rows(rng: random.Random, faults: Sequence[Fault], rows: int) -> tuple[Fault, ...]:
    return tuple(Fault(fault.kind, fault.rank, rng.randrange(rows), _value(rng, fault.kind)) for fault in faults)


def _value(rng: random.Random, kind: str) -> float:
    if kind in ("exit", "os_exit"):
        return rng.choice(_CODES)
    if kind in ("stop", "core_stop"):
        return rng.choice((1.0, 2.0, 3.0, 9.0))
    return rng.choice((0.5, 2.0, 12.0)) if kind == "late" else 0.0


def _limits(faults: Sequence[Fault], server: str) -> dict[str, float]:
    """Return short limits if waits time out because of faults; else limits that a busy machine does not reach."""
    if not faults:
        finish = 8.0 if server in ("dies", "dead") else 40.0
        return {"join_timeout": 40.0, "peer_timeout": 30.0, "finish_timeout": finish, "heartbeat": 0.5}
    return {"join_timeout": 10.0, "peer_timeout": 6.0, "finish_timeout": 12.0, "heartbeat": 0.5}


def _streams(rng: random.Random, steps: bool) -> tuple[str, ...]:
    known = [stream for stream in STREAMS if steps or stream != "shuffled"]
    drawn = rng.sample(known, rng.choice((1, 2, 3)))
    drawn += rng.sample(_CALLS, rng.choices((0, 1, 2), weights=(30, 50, 20))[0])
    return tuple(sorted({*drawn, *(["lockstep"] if rng.random() < 0.5 else [])}, key=STREAMS.index))


def _axis(rng: random.Random, streams: Sequence[str]) -> str:
    """Draw the names on an x axis of the user's: those of one stream, or all."""
    if "axis" in streams:
        return rng.choice(("axis_*", "*"))
    return "*" if rng.random() < 0.15 else ""


def _lags(rng: random.Random, size: int) -> tuple[Lag, ...]:
    """Let ranks fall behind now and then, in two of three jobs."""
    behind = rng.sample(range(size), rng.choices((0, 1, min(2, size)), weights=(33, 47, 20))[0])
    every = {rank: rng.choice((3, 5, 7)) for rank in behind}
    return tuple(Lag(rank, every[rank], rng.randrange(every[rank]), rng.uniform(0.05, 0.2)) for rank in sorted(behind))


def _sessions(rng: random.Random) -> tuple[int, bool]:
    return rng.choices(((1, False), (2, False), (6, False), (1, True)), weights=(70, 12, 8, 10))[0]


def _reduce(rng: random.Random) -> Any:
    patterns = {"loss": "sum", "*": "mean"}
    return rng.choice(("auto", "auto", "mean", "sum", "max", "min", "first", None, patterns))


def seeds_of(text: str) -> list[int]:
    """Return the seeds of an option such as ``"0-9,17"``."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds.extend(range(int(first), int(last or first) + 1))
    return seeds
