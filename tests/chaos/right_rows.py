"""The rows of a job without faults by the rules, written down independently of the judge, to judge the judge."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import ledger
from chaos_facts import Facts, Writer
from chaos_rank import Rank
from drawing import AXIS, NOTE, Spec, draw, text_of
from driving import Evidence, Row, RunFile
from ledger import Entry

_STREAMS = (
    "lockstep",
    "guarded",
    "mixed",
    "uneven",
    "shuffled",
    "own",
    "cadence",
    "split",
    "turned",
    "axis",
    "dynamic",
)
_LAYOUTS = ((1,), (2,), (2,), (3,), (4,), (2, 1))
_Number = tuple[str, int]  # name and cell


@dataclass(frozen=True, eq=False)
class _Call:
    rank: int
    x: int
    step: int | None
    axes: dict[str, float]
    cells: dict[str, tuple[int, float]]
    weight: float


class _NoRun:
    """Takes the calls of a rank, which writes them to its ledger."""

    def log(self, *_: object, **__: object) -> None: ...


def draw_plain(seed: int) -> Spec:
    """Draw a job whose ranks only log numbers, without a fault, and all at once."""
    rng = random.Random(seed)
    steps = rng.random() < 0.5
    streams = [stream for stream in rng.sample(_STREAMS, rng.choice((1, 2, 4))) if steps or stream != "shuffled"]
    return replace(
        draw(seed),
        launcher="processes",
        nodes=rng.choice(_LAYOUTS),
        run_mode=rng.choice(("auto", "auto", "shared", "new")),
        spread=False,
        steps=steps,
        axis=rng.choice(("axis_*", "*") if "axis" in streams else ("", "*")),
        axis_differs=rng.random() < 0.3,
        rows=rng.choice((6, 15)),
        pace=0.0,
        streams=tuple(streams) or ("lockstep",),
        sessions=1,
        nested=False,
        guarded=False,
        ending="finish",
        server="offline",
        nofile=0,
        lags=(),
        faults=(),
    )


def evidence_of(spec: Spec, directory: Path) -> Evidence:
    """Return the evidence of a job whose rows follow the rules."""
    for rank in range(spec.world_size):
        part = Rank(spec, rank, directory)
        part.ledger.write("opened", session=0)
        part._train(_NoRun(), 0)
        part.ledger.write("end")
    entries = ledger.read(directory)
    for entry in entries:  # this process stands for all ranks
        entry["pid"] = entry["rank"]
    entries = [{**entry, "at": float(at)} for at, entry in enumerate(sorted(entries, key=lambda each: each["at"]))]
    evidence = Evidence(spec, entries, [0] * spec.world_size)
    calls = _calls(entries)
    for writer in Facts.of(spec, entries).writers():
        rows = _rows(spec, writer, calls)
        evidence.files.append(RunFile(writer.run_id, writer.directory, [*_joined(spec.seed, rows)]))
    return evidence


def _calls(entries: list[Entry]) -> list[_Call]:
    calls: list[_Call] = []
    counts: Counter[int] = Counter()
    last: dict[int, int] = {}
    for entry in entries:
        if entry["event"] == "log":
            rank, step = entry["rank"], entry["step"]
            x = step if step is not None else last.get(rank, counts[rank])
            counts[rank] += 1
            if step is not None:
                last[rank] = step
            cells = {name: (cell, value) for name, (cell, value) in entry["cells"].items()}
            calls.append(_Call(rank, x, step, entry["axes"], cells, entry["weight"] or 1.0))
    return calls


def _rows(spec: Spec, writer: Writer, all_calls: list[_Call]) -> dict[_Call, Row]:
    rows: dict[_Call, Row] = defaultdict(dict)
    is_alone = len(writer.unit) == 1 or spec.reduction("loss") is None
    for call in all_calls:
        is_own = call.rank == writer.rank
        if is_own and writer.label and spec.per_rank and spec.reduction("loss") is not None:
            mine = {name: value for name, (_, value) in call.cells.items() if name != NOTE}
            rows[call].update({f"{writer.label}/{name}": value for name, value in mine.items()})
            if NOTE in call.cells and not writer.primary:
                rows[call][f"{writer.label}/{NOTE}"] = text_of(call.cells[NOTE][1])
        if is_own and writer.primary and not call.cells:
            rows[call] = {}
    if writer.primary:
        calls = [call for call in all_calls if call.rank in ({writer.rank} if is_alone else writer.unit)]
        is_first = not is_alone and spec.reduction("loss") == "first"  # all names, or none
        _reduce_into(rows, spec, [call for call in calls if not is_first or call.rank == min(writer.unit)])
        _add_texts(rows, calls, writer.rank)
    for call, row in rows.items():
        row.update(**call.axes, global_step=call.x)
    return rows


def _add_texts(rows: dict[_Call, Row], calls: list[_Call], rank: int) -> None:
    """Add the writer's texts to the rows of its calls, or of the calls that own the numbers of these."""
    given = _given(calls)
    for call in calls:
        if call.rank == rank and NOTE in call.cells:
            rows[_home(call, given)][NOTE] = text_of(call.cells[NOTE][1])


def _given(calls: list[_Call]) -> dict[_Number, dict[int, _Call]]:
    given: dict[_Number, dict[int, _Call]] = defaultdict(dict)
    for call in calls:
        for name, (cell, _) in call.cells.items():
            if name != NOTE:
                given[name, cell][call.rank] = call
    return given


def _reduce_into(rows: dict[_Call, Row], spec: Spec, calls: list[_Call]) -> None:
    given = _given(calls)
    logged = {(call.rank, name) for call in calls for name in call.cells}
    for (name, _), by_rank in given.items():
        owner = by_rank[min(by_rank)]
        home = _home(owner, given)
        if (home.rank, name) in logged:
            home = owner
        rows[home][name] = _reduced(spec.reduction(name) or "mean", name, list(by_rank.values()))


def _home(call: _Call, given: dict[_Number, dict[int, _Call]]) -> _Call:
    """Return the call whose row has what a call owns: itself, or one of a lower rank that it clearly belongs to."""
    owners = {given[cell][min(given[cell])] for cell in _numbers(call)} - {call}
    if len(owners) != 1:
        return call
    (other,) = owners
    partners = {given[cell].get(call.rank) for cell in _numbers(other)} - {None}
    return _home(other, given) if partners == {call} else call


def _numbers(call: _Call) -> list[_Number]:
    return [(name, cell) for name, (cell, _) in call.cells.items() if name != NOTE]


def _reduced(reduction: str, name: str, calls: list[_Call]) -> float:
    numbers = [(call.cells[name][1], call.weight) for call in calls]
    values = [value for value, _ in numbers]
    if reduction == "mean":
        return sum(value * weight for value, weight in numbers) / sum(weight for _, weight in numbers)
    if reduction == "first":
        return values[0]
    return sum(values) if reduction == "sum" else min(values) if reduction == "min" else max(values)


def _joined(seed: int, rows: dict[_Call, Row]) -> list[Row]:
    """Join some of the calls at the same step, as W&B does."""
    rng, written = random.Random(seed), list[tuple[_Call, Row]]()
    for call, row in rows.items():
        for other, before in written:
            is_same = call.step is not None and other.step == call.step
            names = (row.keys() & before.keys()) - {AXIS, "global_step"}
            if is_same and not names and row.get(AXIS) == before.get(AXIS) and rng.random() < 0.5:
                before.update(row)
                break
        else:
            written.append((call, row))
    return [row for _, row in written]
