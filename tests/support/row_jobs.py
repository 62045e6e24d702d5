"""Jobs of ranks that log, of the kinds that there are in training: who logs what, when, and who comes and goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

from row_units import Unit

from dist_wandb.exchange.protocol.calls import Intent

AXIS = "samples"
WITHOUT_FAULTS = (
    *("lockstep", "lag", "long lag", "cadences", "own names", "extra calls", "guarded", "uneven", "split", "order"),
    *("leavers", "late first call"),
)
WITH_FAULTS = ("guarded alone", "late join", "death", "deaths", "pauses", "stalls", "restarts", "interrupted")
SAME_CALLS = ("lockstep", "lag", "long lag")  # all ranks make the same calls in the same order


@dataclass(frozen=True)
class Post:
    at: float  # seconds
    names: tuple[str, ...]
    step: int | None
    axis: int | None = None


class Event(NamedTuple):
    at: float
    what: str  # "die", "stall" or "come"
    rank: int


@dataclass
class Job:
    kind: str
    size: int
    with_steps: bool
    with_axis: bool
    number: int  # of common calls
    seed: int
    weights: tuple[float, ...] = (1.0,)
    programs: list[list[Post]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    absent: tuple[int, ...] = ()  # ranks that have no session at first
    leave: dict[int, float] = field(default_factory=dict)  # when ranks close that do not stay to the end
    unit: Unit = field(init=False)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.period = self.random.choice([0.02, 0.1, 0.3])
        every = self.random.choice([2, 5, 7])
        train = self.random.choice([("loss",), ("loss", "acc"), ("loss", "acc", "lr")])
        self.common = []
        for index in range(self.number):
            at, step = index * self.period, index if self.with_steps else None
            self.common.append(Post(at, train, step, 8 * index))
            if index % every == every - 1:
                self.common.append(Post(at, ("val", "val/acc"), step, 8 * index))
        if self.random.random() < 0.3:  # Lightning's validation steps go back to 0
            self.common += [
                Post(self.number * self.period + at, ("epoch", *train), 0 if self.with_steps else None) for at in (0, 1)
            ]
        self.programs = [list(self.common) for _ in range(self.size)]
        self.end = max((post.at for post in self.common), default=0.0)
        if self.kind in _KINDS:
            _KINDS[self.kind](self)

    @property
    def others(self) -> range:
        return range(1, self.size)

    def lag(self, rank: int, longest: float, *, after: int = 0) -> None:
        """Let a rank be behind now and then."""
        behind, latest, program = 0.0, 0.0, []
        for index, post in enumerate(self.programs[rank]):
            if index >= after and self.random.random() < 0.2:
                behind = self.random.uniform(0, longest)
            latest = max(latest, post.at + behind)
            program.append(replace(post, at=latest))
        self.programs[rank] = program

    # The simulation

    def run(self) -> Unit:
        self.unit = unit = Unit(self.size, [AXIS] if self.with_axis else ())
        if self.absent:
            unit.absent.update(self.absent)
            unit.resize()
        waiting = [list(reversed(program)) for program in self.programs]
        events = sorted(self.events, reverse=True)
        tick, heartbeat = self.random.choice([0.05, 0.25]), 0.0
        end = max([0.0, *(post.at for program in self.programs for post in program), *(event.at for event in events)])
        while unit.now <= end + tick:
            unit.now += tick
            posts = [(rank, post) for rank, program in enumerate(waiting) for post in self._due(program)]
            for rank, post in sorted(posts, key=lambda one: one[1].at):
                self._log(rank, post)
            for rank, at in self.leave.items():
                if at <= unit.now and not waiting[rank]:
                    unit.machines[rank].intent = Intent.CLOSING
            while events and events[-1].at <= unit.now:
                self._happen(events.pop())
            if unit.waits or unit.now >= heartbeat:
                heartbeat = unit.now + 1.0
                self._exchange()
        for rank in sorted(unit.away):
            unit.come(rank)
        unit.close()
        return unit

    def _due(self, program: list[Post]) -> list[Post]:
        found = []
        while program and program[-1].at <= self.unit.now:
            found.append(program.pop())
        return found

    def _log(self, rank: int, post: Post) -> None:
        values = {name: self.random.getrandbits(36) | 1 for name in post.names}
        if self.with_axis and post.axis is not None:
            values[AXIS] = post.axis + (rank if self.kind == "own names" else 0)
        if self.unit.machines[rank].intent is not Intent.CLOSING:
            self.unit.log(rank, values, post.step, self.random.choice(self.weights), f"{rank} {len(self.unit.calls)}")

    def _happen(self, event: Event) -> None:
        unit = self.unit
        if event.what == "come" and event.rank not in unit.members:
            unit.come(event.rank)
        elif event.what != "come" and event.rank in unit.members and len(unit.members) > 1:
            {"die": unit.die, "stall": unit.stall}[event.what](event.rank)

    def _exchange(self) -> None:
        unit = self.unit
        for _ in range(100):
            unit.impatient()
            chance = self.random.random() if self.kind == "interrupted" and unit.members[1:] else 1.0
            some = sorted(self.random.sample(unit.members, max(1, len(unit.members) // 2)))
            if chance < 0.1:
                unit.undo(some)
            outcome = unit.exchange(some if chance < 0.3 else None)
            if not outcome.more:
                return
        raise AssertionError("one round follows the other")


def _lag(job: Job) -> None:
    for rank in range(job.size):
        job.lag(rank, 0.4)


def _long_lag(job: Job) -> None:
    for rank in job.others:
        job.lag(rank, 6.0, after=job.number // 2)
    job.programs = [[replace(post, at=post.at + (index > 3) * 2) for index, post in enumerate(p)] for p in job.programs]


def _cadences(job: Job) -> None:
    for rank in range(job.size):
        every = job.random.choice([2, 3, 5])
        own = [
            replace(post, names=(f"gpu{rank}", "gpu") if job.random.random() < 0.5 else (f"gpu{rank}",))
            for post in job.common[::every]
        ]
        _add(job, rank, own)
    _lag(job)


def _own_names(job: Job) -> None:
    for rank in range(job.size):
        every = job.random.choice([1, 1, 3])
        own = job.random.choice([(), (f"own{rank}",), (f"own{rank}", "own"), ("own",)])
        job.programs[rank] = [
            replace(post, names=(*post.names, *own) if index % every == 0 else post.names)
            for index, post in enumerate(job.programs[rank])
        ]
        job.lag(rank, job.random.choice([0.0, 0.3]))


def _extra_calls(job: Job) -> None:
    for rank in range(job.size):
        chance = job.random.choice([0.0, 0.1, 0.5])
        _add(job, rank, [replace(post, names=(f"extra{rank}",)) for post in job.common if job.random.random() < chance])
    _lag(job)


def _guarded(job: Job) -> None:
    for rank in job.others:
        job.programs[rank] = []


def _guarded_alone(job: Job) -> None:
    _guarded(job)
    job.absent = tuple(job.others)


def _uneven(job: Job) -> None:
    for rank in range(job.size):
        every = job.random.choice([3, 4])
        extra = [replace(post, names=("val", "val/acc"), step=post.step) for post in job.common[every - 1 :: every]]
        if job.random.random() < 0.5:
            _add(job, rank, extra)


def _split(job: Job) -> None:
    for rank in range(job.size):
        own = job.random.choice([(), ("mem",)])
        if job.random.random() < 0.5:
            job.programs[rank] = [
                replace(post, names=names)
                for post in job.programs[rank]
                for names in (
                    ((*post.names[:1], *own), (*post.names[1:], *own)) if len(post.names) > 1 else (post.names,)
                )
            ]


def _order(job: Job) -> None:
    for rank in range(job.size):
        program = job.programs[rank]
        for index in range(len(program) - 1):
            if job.random.random() < 0.2 and program[index].names != program[index + 1].names:
                first, second = program[index : index + 2]
                program[index : index + 2] = [replace(second, at=first.at), replace(first, at=second.at)]


def _leavers(job: Job) -> None:
    for rank in job.random.sample(range(job.size), job.size // 2):
        job.programs[rank] = job.programs[rank][: job.random.randrange(len(job.common) + 1)]
        job.leave[rank] = job.programs[rank][-1].at if job.programs[rank] else 0.0


def _late_first_call(job: Job) -> None:
    for rank in job.random.sample(range(job.size), job.size // 2):
        behind = job.random.choice([0.7, 3.0, 15.0])
        job.programs[rank] = [replace(post, at=post.at + behind) for post in job.programs[rank]]


def _late_join(job: Job) -> None:
    job.absent = tuple(job.random.sample(job.others, job.size // 2))
    for rank in job.absent:
        at = job.random.uniform(0, job.end + 3)
        job.events.append(Event(at, "come", rank))
        program = job.programs[rank]
        if job.random.random() < 0.5:
            program = [replace(post, at=max(post.at, at)) for post in program]
        job.programs[rank] = [post for post in program if post.at >= at]


def _death(job: Job) -> None:
    _lag(job)
    job.events.append(Event(job.random.uniform(0, job.end), "die", job.random.randrange(job.size)))


def _deaths(job: Job) -> None:
    _extra_calls(job)
    for rank in job.random.sample(range(job.size), job.size - 1):
        job.events.append(Event(job.random.uniform(0, job.end + 10), "die", rank))


def _pauses(job: Job) -> None:
    for rank in job.random.sample(range(job.size), job.size // 2):
        at, pause = job.random.uniform(0, job.end), job.random.choice([2.0, 12.0, 30.0])
        job.programs[rank] = [replace(post, at=post.at + pause * (post.at >= at)) for post in job.programs[rank]]
        if job.random.random() < 0.5:
            _add(job, rank, [Post(at + 1.0 + index, ("beat",), None) for index in range(9)])


def _stalls(job: Job) -> None:
    _lag(job)
    for rank in job.random.sample(range(job.size), job.size // 2):
        at = job.random.uniform(0, job.end)
        job.events += [Event(at, "stall", rank), Event(at + job.random.uniform(0, 9), "come", rank)]


def _restarts(job: Job) -> None:
    for rank in job.random.sample(range(job.size), job.size // 2):
        at = job.random.uniform(0, job.end)
        job.events += [Event(at, "die", rank), Event(at + job.random.uniform(0, 3), "come", rank)]


def _interrupted(job: Job) -> None:
    job.random.choice([_lag, _own_names, _extra_calls])(job)


def _add(job: Job, rank: int, posts: Sequence[Post]) -> None:
    job.programs[rank] = sorted([*job.programs[rank], *posts], key=lambda post: post.at)


_KINDS: dict[str, Callable[[Job], None]] = {
    change.__name__[1:].replace("_", " "): change
    for change in (
        *(_lag, _long_lag, _cadences, _own_names, _extra_calls, _guarded, _guarded_alone),
        *(_uneven, _split, _order, _leavers, _late_first_call, _late_join),
        *(_death, _deaths, _pauses, _stalls, _restarts, _interrupted),
    )
}
