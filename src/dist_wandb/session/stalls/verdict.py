"""What it means that the ranks of a job stand still: one message, and the same as data. Pure.

Each rank says what its training thread does, and where (`located`). Of those that do not answer, another rank on their
host has seen what the process does.

- A rank waits in a collective only if frames further in than the user's innermost line say so, or PyTorch counts one
  that has begun and not ended: `DDP.forward` is an outer frame of all model code.
- A thread that has neither computed nor woken up is in one blocking call, which is named if its bytecode tells.
- A rank that computes or wakes up again and again may only be slow (`Answer.moves`). While one does, there is no stall,
  until so much time has passed that it has to be told; the message then says "slow".

What the evidence does not show is not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Literal, NamedTuple, TypeAlias

from dist_wandb.errors import visible
from dist_wandb.job.ranges import named

Answering: TypeAlias = Literal["collective", "call", "line", "computing", "waking", "device", "workers"]
Missing: TypeAlias = Literal["stopped", "gone", "sleeping", "busy", "finished", "silent"]
Kind: TypeAlias = Answering | Missing
MOVING = frozenset({"busy", "waking"})  # what a thread or process does that has computed or woken up
_GIL = ", perhaps in native code that holds the GIL"
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
    "sleeping": (f"does not answer: its process sleeps{_GIL}", f"do not answer: their processes sleep{_GIL}"),
    "busy": (f"does not answer: its process is computing{_GIL}", f"do not answer: their processes are computing{_GIL}"),
    "finished": ("has finished its session", "have finished their sessions"),
    "silent": ("does not answer", "do not answer"),
}
_ON_DEVICE = frozenset({"item", "cpu", "to", "tolist", "numpy", "synchronize", "nonzero", "__bool__", "__float__"})
_COLLECTIVES = ("torch.distributed.distributed_c10d", "torch.distributed._functional_collectives")
_WITH_COLLECTIVES = ("torch.autograd", "torch.distributed", "torch.nn.parallel")
_DEBUGGERS = ("pdb", "bdb", "code", "debugpy", "pydevd", "_pydevd_bundle", "IPython", "ipykernel", "ipdb", "pudb")
_MOST_GROUPS = 2  # of which the message has the calls
_MOST_NAMED = 3  # processes for which the message says how to look into them


class Frame(NamedTuple):
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


_NOWHERE = Frame("", 0, "", "")


class Calls(NamedTuple):
    """One rank's calls of collectives in one process group, as PyTorch counts them."""

    made: int
    completed: int
    last: str = ""  # its name


class StalledRank(NamedTuple):
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


class Answer(NamedTuple):
    """What is known of a rank: by itself, or only `place`, if it does not answer."""

    place: StalledRank
    at: str = ""  # the line for the message, and a framework's; empty if it does not answer
    quiet: float = math.inf  # seconds since its last sign
    moves: bool = False  # whether it has computed or woken up lately, and so may only be slow
    is_debugged: bool = False
    uses_device: bool = False
    calls: Mapping[str, Calls] = {}  # by name of the group
    workers: Mapping[str, tuple[str, str]] = {}  # state, and what they do, of the workers that it waits for, by pid
    seen: Sequence[tuple[int, Kind, int]] = ()  # ranks on its host, what their processes do, and their ids
    question: int = 0  # number of the question that this answers
    stacks: str = ""  # hash of the text of its stacks


class Stall(NamedTuple):
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


def judge(answers: Iterable[Answer], seconds: float, limit: float, *, is_final: bool, more: str = "") -> Stall | None:
    """Say which rank stands where; `None` if nobody waits, one is debugged, or may be slow, unless this `is_final`."""
    answers = sorted(answers, key=lambda one: one.place.rank)
    moved = [one for one in answers if one.moves or one.quiet < limit / 2]  # the others may only be waiting for these
    is_slow = bool(moved) or any(one.place.kind == "finished" for one in answers)
    waits = any(one.at and one not in moved for one in answers)
    if not waits or any(one.is_debugged for one in answers) or (is_slow and not is_final):
        return None
    groups: dict[str, list[Answer]] = {}
    for one in answers:
        groups.setdefault(_text(one), []).append(one)
    order = sorted(groups.values(), key=lambda group: (group[0].place.kind != "collective", -len(group)))
    parts = [f"{named(one.place.rank for one in group)} {_text(group[0], len(group) > 1)}" for group in order]
    first = f"{'Slow, not stalled: no sign' if is_slow else 'Nothing moved'} for {seconds:.0f} s."
    text = "; ".join(parts)
    text = f"{text[0].upper()}{text[1:]}{_conclusion(order, answers)}."
    message = " ".join(filter(None, [first, text, *_about_workers(answers), *_commands(order), more]))
    return Stall(visible(message), seconds, is_slow, tuple(one.place for one in answers))


# --- one rank ---------------------------------------------------------------------------------------------------------


def located(known: Answer, frames: Sequence[Frame], does: str) -> Answer:
    """Say where a rank stands, by the stack of its training thread, and what that does: "busy", "waking", or it waits.

    `known` says whether the thread has moved lately, and has all child processes.
    """
    users = [index for index, frame in enumerate(frames) if frame.is_users]
    others = [index for index, frame in enumerate(frames) if frame.package != "torch"]
    at = (users or others or [0])[-1]  # the user's innermost line; without one, the innermost line outside of torch
    frame, inner = frames[at] if frames else _NOWHERE, frames[at + 1 :]
    kind, call = _doing(known, frame, inner, does)
    place = known.place._replace(kind=kind, call=call, file=frame.file, line=frame.line, function=frame.function)
    moves = known.moves and not (kind == "collective" and known.uses_device)  # on a device, it spins
    if kind == "workers":
        moves = any(does in MOVING for _, does in known.workers.values())  # the rank itself wakes up every 5 s
    workers = known.workers if kind == "workers" else {}
    is_debugged = any(frame.package in _DEBUGGERS for frame in frames)
    return known._replace(place=place, at=_line(place, inner), moves=moves, is_debugged=is_debugged, workers=workers)


def _doing(known: Answer, frame: Frame, inner: Sequence[Frame], does: str) -> tuple[Kind, str]:
    innermost = inner[-1] if inner else _NOWHERE
    name = frame.called or innermost.called
    is_on_device = known.uses_device and bool({name, innermost.called} & _ON_DEVICE)
    may_wait = frame.called == "wait" or innermost.module.startswith(_WITH_COLLECTIVES)  # without a line of Python
    called = (one.function for one in inner if one.module in _COLLECTIVES and not one.function.startswith("_"))
    collective = next(called, "")
    if not collective and (is_on_device or (does not in MOVING and may_wait)):
        collective = next((calls.last for calls in known.calls.values() if calls.made > calls.completed), "")
    in_loader = any(one.module == "torch.utils.data.dataloader" and "_get_data" in one.function for one in inner)
    kinds: list[tuple[bool, Kind, str]] = [
        (in_loader, "workers", ""),
        (bool(collective), "collective", collective),
        (is_on_device, "device", name),
        (does == "busy", "computing", ""),
        (does == "waking", "waking", ""),
        (bool(name), "call", name),
        (True, "line", ""),
    ]
    return next((kind, call) for applies, kind, call in kinds if applies)


def _line(place: StalledRank, inner: Sequence[Frame]) -> str:
    """Return the user's line, and the framework's innermost line that it has led to, outside of torch and Python."""
    if not place.file:
        return "an unknown line"
    function = "" if place.kind == "collective" or place.function == "<module>" else f", {place.function}"
    within = [one for one in inner if one.package not in ("torch", "") and "site-packages" in one.file]
    inside = [f", inside {one.package} {PurePath(one.file).name}:{one.line}" for one in within[-1:]]
    return "".join([f"{PurePath(place.file).name}:{place.line}", function, *inside])


# --- the message ------------------------------------------------------------------------------------------------------


def _text(one: Answer, are_several: bool = False) -> str:
    return _TEXTS[one.place.kind][are_several].format(call=one.place.call, at=one.at)


def _conclusion(groups: Sequence[Sequence[Answer]], answers: Sequence[Answer]) -> str:
    """Return what follows if all ranks wait for each other, from the calls that PyTorch has counted."""
    kinds = {one.place.kind for one in answers}
    differ = f" ({differing})" if (differing := _calls(answers)) else ""
    if kinds == {"collective"} and len(groups) > 1:
        return f": they do not make the same calls{differ}"
    if kinds == {"collective"} and len(answers) > 1 and answers[0].calls:
        return f": they have not made the same calls{differ}" if differ else "; they have made the same calls"
    return differ if any(one.uses_device for one in answers) else ""  # the stacks do not tell who is behind


def _calls(answers: Sequence[Answer]) -> str:
    """Return how the ranks' calls of collectives differ; empty if they do not."""
    behind: list[str] = []
    mixed: list[str] = []
    for name in sorted({name for one in answers for name in one.calls}):
        group = "the default group" if name in ("0", "0/nccl") else f"the group {name}"
        made = {one.place.rank: str(one.calls[name].made) for one in answers if name in one.calls}
        last = {one.place.rank: one.calls[name].last for one in answers if name in one.calls}
        if len(set(made.values())) > 1:
            behind.append(f"calls in {group}: {_by(made, 'of')}")
        elif len(set(last.values())) > 1:
            mixed.append(f"call {min(made.values())} of {group}: {_by(last, 'on')}")
    return "; ".join((behind or mixed)[:_MOST_GROUPS])


def _by(texts: Mapping[int, str], word: str) -> str:
    """Return texts with the ranks of which they are."""
    found = dict.fromkeys(texts.values())
    return ", ".join(f"{text} {word} {named(rank for rank in texts if texts[rank] == text)}" for text in found)


def _about_workers(answers: Iterable[Answer]) -> Iterator[str]:
    for one in [one for one in answers if one.place.kind == "workers"][:_MOST_NAMED]:
        listed = [f"{pid} ({state})" for pid, (state, _) in one.workers.items()]
        yield f"Workers of rank {one.place.rank}: {', '.join(listed) or 'none'}."


def _commands(groups: Iterable[Iterable[Answer]]) -> Iterator[str]:
    """Yield how to look into the processes that the others wait for."""
    found = [
        f"`py-spy dump --pid {pid}` on {one.place.host}"
        for group in groups
        for one in group
        if one.place.kind not in ("collective", "gone", "finished")
        for pid in one.workers or [one.place.pid]
    ]
    if found:
        yield f"To see more: {', '.join(found[:_MOST_NAMED])}."
