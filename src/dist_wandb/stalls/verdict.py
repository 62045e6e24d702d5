"""What it means that the ranks of a job stand still: one message, and the same as data. Pure.

Each rank that answers has described its training thread (`Answer`), and of those that do not, somebody on their host
has looked at the process (`Absent`). A rank is described by what it does and where:

- It waits in a collective only if frames further in than the user's innermost line say so, or PyTorch counts one that
  has begun and not ended: `DDP.forward` is an outer frame of all model code.
- A thread that has neither computed nor woken up is in one blocking call, which is named if its bytecode tells.
- A rank that computes or wakes up again and again may only be slow (`Answer.moves`). While one does, there is no stall,
  until so much time has passed that it has to be told; the message then says "slow".

What the evidence does not show is not guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal, TypeAlias

from dist_wandb.topology.ranges import named

Answering: TypeAlias = Literal["collective", "call", "line", "computing", "waking", "device", "workers"]
Missing: TypeAlias = Literal["stopped", "gone", "sleeping", "busy", "finished", "silent"]
Kind: TypeAlias = Answering | Missing
_TEXTS: dict[str, tuple[str, str]] = {  # of one rank, and of several
    "collective": ("waits in {call} ({at})", "wait in {call} ({at})"),
    "call": ("is calling {call} at {at}", "are calling {call} at {at}"),
    "line": ("stands at {at}", "stand at {at}"),
    "computing": ("is computing at {at}", "are computing at {at}"),
    "waking": ("wakes up again and again at {at}", "wake up again and again at {at}"),
    "device": ("waits for its device in {call} at {at}", "wait for their devices in {call} at {at}"),
    "workers": ("waits for DataLoader workers at {at}", "wait for DataLoader workers at {at}"),
    "stopped": ("does not answer: its process is stopped", "do not answer: their processes are stopped"),
    "gone": ("does not answer: its process is gone", "do not answer: their processes are gone"),
    "sleeping": (
        "does not answer: its process sleeps, perhaps in native code that holds the GIL",
        "do not answer: their processes sleep, perhaps in native code that holds the GIL",
    ),
    "busy": (
        "does not answer: its process is computing, perhaps in native code that holds the GIL",
        "do not answer: their processes are computing, perhaps in native code that holds the GIL",
    ),
    "finished": ("has finished its session", "have finished their sessions"),
    "silent": ("does not answer", "do not answer"),
}
_ON_DEVICE = frozenset({"item", "cpu", "to", "tolist", "numpy", "synchronize", "nonzero", "__bool__", "__float__"})
_IN_COLLECTIVE = frozenset({"wait"})  # of a collective that was begun
_WITH_COLLECTIVES = ("torch.autograd", "torch.distributed", "torch.nn.parallel")
_DEBUGGERS = frozenset(
    {"pdb", "bdb", "code", "debugpy", "pydevd", "_pydevd_bundle", "IPython", "ipykernel", "ipdb", "pudb"}
)
_COMPUTES = 0.1  # share of the time from which on a thread is said to be computing
_MOST_GROUPS = 2  # of which the message has the calls
_MOST_NAMED = 3  # processes for which the message says how to look into them


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str
    module: str
    is_users: bool = True  # not of a library
    called: str = ""  # the name of what the line is calling, if known

    @property
    def package(self) -> str:
        """The outermost package of the module."""
        return self.module.partition(".")[0]


@dataclass(frozen=True)
class Calls:
    """One rank's calls of collectives in one process group, as PyTorch counts them."""

    made: int
    completed: int
    last: str  # its name


@dataclass(frozen=True)
class Worker:
    """A child process of a rank."""

    pid: int
    name: str
    state: str  # as in /proc
    waits_in: str  # a function of the kernel, or empty
    moves: bool


@dataclass(frozen=True)
class Answer:
    """What a rank says about its training thread."""

    rank: int
    host: str  # its name, and after a slash what tells it from others of that name
    pid: int
    quiet: float  # seconds since its last sign
    cpu: float  # share of the last seconds in which the thread has computed
    wakes: int  # how often it has woken up in these seconds
    moves: bool  # whether it has computed or woken up lately
    frames: tuple[Frame, ...]  # the outermost first
    calls: Mapping[str, Calls] = field(default_factory=dict)  # by name of the group
    workers: tuple[Worker, ...] = ()
    uses_device: bool = False


@dataclass(frozen=True)
class Absent:
    """A rank that does not answer."""

    rank: int
    host: str
    pid: int
    kind: Missing


@dataclass(frozen=True)
class StalledRank:
    """Where one rank stands.

    Attributes:
        rank: Its number in the job.
        kind: What it does: `"collective"` (it waits in one), `"call"` (it is in one blocking call), `"line"`
            (the same, but the name is not known), `"computing"`, `"waking"` (it wakes up again and again), `"device"`
            or `"workers"` (it waits for them). If it does not answer, what its process does: `"stopped"`, `"gone"`,
            `"sleeping"`, `"busy"`; `"finished"` without a session, `"silent"` if that is unknown.
        call: Name of the collective or call; empty if unknown.
        file: The user's innermost line: path of the file; empty if unknown.
        line: Number of that line.
        function: The function that contains it.
        host: Name of its host.
        pid: Id of its process.
    """

    rank: int
    kind: Kind
    call: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    host: str = ""
    pid: int = 0


@dataclass(frozen=True)
class Stall:
    """A job that stands still, as ``on_stall=`` gets it on the rank that has asked the others.

    Attributes:
        message: What is printed.
        seconds: How long that rank has seen no sign.
        is_slow: Whether a rank still computes or wakes up.
        ranks: Where the ranks stand, by number.
        stacks: Path of the file with all stacks; empty if it could not be written.
    """

    message: str
    seconds: float
    is_slow: bool
    ranks: tuple[StalledRank, ...]
    stacks: str = ""


def is_debugged(answer: Answer) -> bool:
    """Return whether the thread is in a debugger or an interactive prompt."""
    return any(frame.package in _DEBUGGERS for frame in answer.frames)


def may_be_slow(answer: Answer, limit: float) -> bool:
    """Return whether a rank has moved, so that the others may only be waiting for it."""
    if _waits_for_workers(answer):
        return answer.quiet < limit / 2 or any(worker.moves for worker in answer.workers)
    spins = answer.uses_device and _place(answer).kind == "collective"  # the CPU is busy while it waits
    return answer.quiet < limit / 2 or (answer.moves and not spins)


def judge(answers: Sequence[Answer], absent: Sequence[Absent], seconds: float, *, is_slow: bool) -> Stall:
    """Say which rank stands where."""
    known = {answer.rank: answer for answer in answers}
    places = sorted([_place(one) for one in answers] + [_absent(one) for one in absent], key=lambda one: one.rank)
    groups: dict[str, list[StalledRank]] = {}
    for place in places:
        groups.setdefault(_key(place, known.get(place.rank)), []).append(place)
    order = sorted(groups.values(), key=lambda group: (group[0].kind != "collective", -len(group), group[0].rank))
    first = f"{'Slow, not stalled: no sign' if is_slow else 'Nothing moved'} for {seconds:.0f} s."
    parts = [_described(group, known.get(group[0].rank)) for group in order]
    text = "; ".join(parts)
    text = f"{text[0].upper()}{text[1:]}{_conclusion(order, answers)}."
    more = [*_about_workers(answers), *_commands(order, known)]
    return Stall(" ".join([first, text, *more]), seconds, is_slow, tuple(places))


# --- one rank ---------------------------------------------------------------------------------------------------------


def _place(answer: Answer) -> StalledRank:
    at = _users(answer.frames)
    frame, inner = answer.frames[at] if answer.frames else Frame("", 0, "", ""), answer.frames[at + 1 :]
    kind, call = _doing(answer, frame, inner)
    host = answer.host.partition("/")[0]
    return StalledRank(answer.rank, kind, call, frame.file, frame.line, frame.function, host, answer.pid)


def _users(frames: Sequence[Frame]) -> int:
    """Return the index of the user's innermost line; if there is none, of the innermost line outside of torch."""
    users = [index for index, frame in enumerate(frames) if frame.is_users]
    others = [index for index, frame in enumerate(frames) if frame.package != "torch"]
    return (users or others or [0])[-1]


def _doing(answer: Answer, frame: Frame, inner: Sequence[Frame]) -> tuple[Kind, str]:
    innermost = inner[-1].called if inner else ""
    named = frame.called or innermost
    is_still = answer.cpu < _COMPUTES and answer.wakes <= 1
    is_on_device = answer.uses_device and bool({named, innermost} & _ON_DEVICE)
    collective = next((one.function for one in inner if _is_collective(one)), "")
    if not collective and (is_on_device or (is_still and _may_be_in_collective(frame, inner))):
        collective = next((calls.last for calls in answer.calls.values() if calls.made > calls.completed), "")
    kinds: list[tuple[bool, Kind, str]] = [
        (_waits_for_workers(answer), "workers", ""),
        (bool(collective), "collective", collective),
        (is_on_device, "device", named),
        (answer.cpu >= _COMPUTES, "computing", ""),
        (not is_still, "waking", ""),
        (bool(named), "call", named),
        (True, "line", ""),
    ]
    return next((kind, call) for applies, kind, call in kinds if applies)


def _may_be_in_collective(frame: Frame, inner: Sequence[Frame]) -> bool:
    """Return whether the user's line calls what waits for other ranks without a line of Python."""
    return frame.called in _IN_COLLECTIVE or (bool(inner) and inner[-1].module.startswith(_WITH_COLLECTIVES))


def _is_collective(frame: Frame) -> bool:
    is_torch = frame.module in ("torch.distributed.distributed_c10d", "torch.distributed._functional_collectives")
    return is_torch and not frame.function.startswith("_")


def _waits_for_workers(answer: Answer) -> bool:
    inner = answer.frames[_users(answer.frames) + 1 :]
    return any(frame.module == "torch.utils.data.dataloader" and "_get_data" in frame.function for frame in inner)


def _absent(absent: Absent) -> StalledRank:
    return StalledRank(absent.rank, absent.kind, host=absent.host.partition("/")[0], pid=absent.pid)


# --- the message ------------------------------------------------------------------------------------------------------


def _at(place: StalledRank, answer: Answer | None) -> str:
    if not place.file:
        return "an unknown line"
    text = f"{PurePath(place.file).name}:{place.line}"
    if place.kind != "collective" and place.function != "<module>":
        text += f", {place.function}"
    within = _framework(answer)
    return text if within is None else f"{text}, inside {within.package} {PurePath(within.file).name}:{within.line}"


def _framework(answer: Answer | None) -> Frame | None:
    """Return the framework's innermost line that the user's line has led to, outside of torch and Python's own."""
    if answer is None:
        return None
    inner = answer.frames[_users(answer.frames) + 1 :]
    found = [one for one in inner if one.package not in ("torch", "") and "site-packages" in one.file]
    return found[-1] if found else None


def _key(place: StalledRank, answer: Answer | None) -> str:
    return place.kind if answer is None else f"{place.kind} {place.call} {_at(place, answer)}"


def _described(group: Sequence[StalledRank], answer: Answer | None) -> str:
    one = group[0]
    text = _TEXTS[one.kind][len(group) > 1].format(call=one.call, at=_at(one, answer))
    return f"{named(place.rank for place in group)} {text}"


def _conclusion(groups: Sequence[Sequence[StalledRank]], answers: Sequence[Answer]) -> str:
    """Return what follows if all ranks wait for each other, from the calls that PyTorch has counted."""
    kinds = {group[0].kind for group in groups}
    differ = f" ({differing})" if (differing := _calls(answers)) else ""
    if kinds == {"collective"} and len(groups) > 1:
        return f": they do not make the same calls{differ}"
    if kinds == {"collective"} and len(answers) > 1 and answers[0].calls:
        return f": they have not made the same calls{differ}" if differ else "; they have made the same calls"
    return differ if any(answer.uses_device for answer in answers) else ""  # the stacks do not tell who is behind


def _calls(answers: Iterable[Answer]) -> str:
    """Return how the ranks' calls of collectives differ; empty if they do not."""
    groups: dict[str, dict[int, Calls]] = {}
    for answer in answers:
        for name, calls in answer.calls.items():
            groups.setdefault(name, {})[answer.rank] = calls
    names = {name: "the default group" if name in ("0", "0/nccl") else f"the group {name}" for name in groups}
    numbers = {name: {rank: str(calls.made) for rank, calls in groups[name].items()} for name in sorted(groups)}
    lasts = {name: {rank: calls.last for rank, calls in groups[name].items()} for name in sorted(groups)}
    behind = [
        f"calls in {names[name]}: {', '.join(f'{text} of {ranks}' for text, ranks in _by(of_ranks))}"
        for name, of_ranks in numbers.items()
        if len(set(of_ranks.values())) > 1
    ]
    mixed = [
        f"call {min(numbers[name].values())} of {names[name]}: "
        + ", ".join(f"{text} on {ranks}" for text, ranks in _by(of_ranks))
        for name, of_ranks in lasts.items()
        if len(set(of_ranks.values())) > 1
    ]
    return "; ".join((behind or mixed)[:_MOST_GROUPS])


def _by(texts: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    for text in dict.fromkeys(texts[rank] for rank in sorted(texts)):
        yield text, named(rank for rank in texts if texts[rank] == text)


def _about_workers(answers: Iterable[Answer]) -> Iterator[str]:
    for answer in [one for one in answers if _waits_for_workers(one)][:_MOST_NAMED]:
        listed = [f"{one.pid} ({one.state}{f', {one.waits_in}' if one.waits_in else ''})" for one in answer.workers]
        yield f"Workers of rank {answer.rank}: {', '.join(listed) or 'none'}."


def _commands(groups: Sequence[Sequence[StalledRank]], known: Mapping[int, Answer]) -> Iterator[str]:
    """Yield how to look into the processes that the others wait for."""
    found: list[str] = []
    culprits = [group for group in groups if group[0].kind not in ("collective", "gone", "finished")]
    for place in [place for group in culprits for place in group]:
        workers = known[place.rank].workers if place.kind == "workers" else ()
        pids = [worker.pid for worker in workers] or [place.pid]
        found += [f"`py-spy dump --pid {pid}` on {place.host}" for pid in pids]
    if found:
        yield f"To see more: {', '.join(found[:_MOST_NAMED])}."
