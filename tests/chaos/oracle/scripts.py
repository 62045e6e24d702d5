"""Scripts that use W&B, as data: drawn from a seed, and translated for stock wandb.

A script is a list of operations, which `player.py` carries out with wandb or with this package:

- ``{"do": "log", "values": {...}, "step": 3, "commit": False}``: step and commit only if they are given.
- ``{"do": "define", "name": "val/*", "options": {"step_metric": "samples"}}``.
- ``{"do": "summary" | "config", "values": {...}, "by": "item" | "update"}``.
- ``{"do": "behind", "rank": 1, "seconds": 0.1}``: one rank is late; stock wandb ignores it.
- ``{"do": "end", "how": "return" | "raise" | "code", "code": 3}``: the last one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

Operation = dict[str, Any]

STEPS = ("none", "each", "equal", "mixed", "back")
"""How a script gives steps: never, in each call, in several calls of equal step, now and then, or not in order."""


@dataclass(frozen=True)
class Script:
    name: str  # its name, which is the id of its run
    by: str  # whether it calls ``run.log`` (`run`) or ``wandb.log`` (`module`)
    config: dict[str, Any]  # config given to `init`
    pace: float  # seconds after each call of `log` in a job of several ranks
    operations: tuple[Operation, ...]  # what it does between `init` and the end

    def __str__(self) -> str:
        head = f"{self.name}, by {self.by}, with config {self.config} and {self.pace} s between calls:"
        return "\n    ".join([head, *map(str, self.operations)])

    @property
    def is_failing(self) -> bool:
        """Whether it ends with an exception or an exit code."""
        return any(operation["do"] == "end" and operation["how"] != "return" for operation in self.operations)

    @property
    def axes(self) -> frozenset[str]:
        definitions = (operation["options"] for operation in self.operations if operation["do"] == "define")
        return frozenset(options["step_metric"] for options in definitions if "step_metric" in options)

    @property
    def late_axes(self) -> frozenset[str]:
        """Those that it has logged before it defines them."""
        last = max((at for at, operation in enumerate(self.operations) if operation["do"] == "define"), default=0)
        before = (operation["values"] for operation in self.operations[:last] if operation["do"] == "log")
        return self.axes.intersection(name for values in before for name in values)


def to_json(scripts: Sequence[Script]) -> str:
    return json.dumps([asdict(script) for script in scripts])


def for_stock(script: Script, *, has_peers: bool) -> tuple[Script, dict[int, int]]:
    """Return the script as stock wandb has to play it, so that its rows are those that are wanted of this package,
    and the documented position on our x axis by wandb's step, where they differ.

    It is the same script, unless W&B would drop a row because its step is too small, or, with several ranks, a call
    would overwrite a part of the open row: then the row gets the next free step of wandb. On our x axis, a row lies at
    the step of its call, else at the last step before it, else at the number of calls. A row that begins with a call
    without a step that leaves it open lies, as in wandb, after the rows that have ended since the last step.
    """
    translating = _Translating(has_peers=has_peers)
    operations = [
        translating.log(operation) if operation["do"] == "log" else operation for operation in script.operations
    ]
    return replace(script, operations=tuple(operations)), translating.x_of


class _Translating:
    """Follows wandb's step through a script."""

    def __init__(self, *, has_peers: bool) -> None:
        self.x_of: dict[int, int] = {}
        self._has_peers = has_peers
        self._current = 0  # wandb's step: that of the open row, or of the next one
        self._open: dict[str, Any] | None = None  # values of the open row
        self._open_at = 0
        self._last: int | None = None  # step that was given
        self._ended = 0  # rows since then
        self._calls = 0

    def log(self, operation: Operation) -> Operation:
        """Return a call of `log` for stock wandb."""
        step, commit = operation.get("step"), operation.get("commit")
        if step is not None or (commit is False and self._last is not None):
            self._last, self._ended = (self._last or 0) + self._ended if step is None else step, 0
        x = self._calls if self._last is None else self._last
        is_new = self._open is None or not self._continues(operation["values"], x)
        given: dict[str, Any] = {}
        if is_new and self._open is not None:
            self._current += 1
            given = {"step": self._current, "commit": step is None if commit is None else commit}
        if step is not None:
            self._current = max(step, self._current) if is_new else self._current
            given = {"step": self._current}
        if self._current != x:
            self.x_of[self._current] = x
        before = {} if self._open is None or is_new else self._open
        self._open, self._open_at = {**before, **operation["values"]}, x
        self._calls += commit is not False
        if commit or (commit is None and step is None):
            self._current, self._open = self._current + 1, None
            self._ended += 1
        return {**operation, **given}

    def _continues(self, values: dict[str, Any], x: int) -> bool:
        """Return whether a call belongs to the open row."""
        row: dict[str, Any] = self._open or {}
        shared = row.keys() & values.keys()
        is_free = all(row[name] == values[name] and not isinstance(row[name], dict) for name in shared)
        return x == self._open_at and (is_free or not self._has_peers)


# --- drawing ----------------------------------------------------------------------------------------------------------


def draw(seed: int) -> Script:
    return _Drawing(random.Random(seed)).script(f"s{seed}")


class _Drawing:
    """Draws one script: a loop as people write it, with what they add to it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._steps = rng.choices(STEPS, weights=(30, 28, 22, 10, 10))[0]
        self._stride = rng.choice((1, 1, 1, 5, 10))
        self._axis = rng.choices(("", "samples", "epoch"), weights=(45, 35, 20))[0]
        self._everywhere = rng.random() < 0.5  # whether each call has the value of the axis
        self._done: list[Operation] = []

    def script(self, name: str) -> Script:
        rng = self._rng
        pace = rng.choice((0.0, 0.01, 0.03))
        rounds = rng.randint(2, 12 if pace else 7)
        definitions = self._definitions()
        late = rng.randrange(rounds) if rng.random() < 0.2 else 0  # definitions may follow the first rows
        regular, asides = self._regular(), self._asides()
        for number in range(rounds):
            if number == late:
                self._done += definitions
            self._round(number, regular, asides)
        self._ending()
        config = {"lr": rng.choice((0.1, 0.01)), **({"model": {"depth": 2}} if rng.random() < 0.3 else {})}
        return Script(name, rng.choice(("run", "module")), config, pace, tuple(self._done))

    def _regular(self) -> list[tuple[str, int]]:
        """Draw the names of the loop's main call, each with the number of rounds after which it comes again."""
        known = ("loss", "lr", "grad/norm", "note", "acc", "time", "deep", "ok")
        names = self._rng.sample(known, self._rng.randint(1, 4))
        return [(name, self._rng.choice((1, 1, 1, 2, 3))) for name in names]

    def _asides(self) -> list[tuple[list[str], int, bool | None, bool]]:
        """Draw further calls of a round: names, every n-th round, `commit`, and whether it comes first."""
        rng = self._rng
        drawn = []
        known = (["val/loss", "val/acc"], ["gpu"], ["lr"], ["text", "count"], ["val"])
        for names in rng.sample(known, rng.randint(0, 2)):
            commit = rng.choices((None, False, True), weights=(60, 30, 10))[0]
            drawn.append((names, rng.choice((1, 2, 3)), commit, rng.random() < 0.5))
        return drawn

    def _definitions(self) -> list[Operation]:
        rng, axis = self._rng, self._axis
        drawn: list[tuple[str, dict[str, Any]]] = []
        if axis:
            if rng.random() < 0.7:
                drawn.append((axis, {}))
            drawn.append((rng.choice(("*", "val/*", "val/acc", "loss", "*")), {"step_metric": axis}))
        if rng.random() < 0.35:
            summary = rng.choice(("min", "max", "mean", "last", "first", "none", "min,max"))
            drawn.append((rng.choice(("loss", "acc", "val/loss")), {"summary": summary}))
        return [{"do": "define", "name": name, "options": options} for name, options in drawn]

    def _round(self, number: int, regular: list[tuple[str, int]], asides: list[Any]) -> None:
        rng = self._rng
        if rng.random() < 0.25:
            seconds = rng.choice((0.05, 0.1, 0.15))
            self._done.append({"do": "behind", "rank": rng.choice((0, 1, 1, 2)), "seconds": seconds})
        step = number * self._stride
        if self._steps == "back" and number and rng.random() < 0.4:
            step = rng.randrange(number + 1) * self._stride
        for names, every, commit, is_before in asides:
            if is_before and number % every == 0:
                self._log(names, step, commit, is_main=False)
        names = [name for name, every in regular if number % every == 0]
        if names:
            self._log(names, step, rng.choices((None, True, False), weights=(88, 7, 5))[0], is_main=True)
        for names, every, commit, is_before in asides:
            if not is_before and number % every == 0:
                self._log(names, step, commit, is_main=False)
        if rng.random() < 0.15:
            self._done.append(self._write("summary"))
        if rng.random() < 0.12:
            self._done.append(self._write("config"))

    def _log(self, names: list[str], step: int, commit: bool | None, *, is_main: bool) -> None:
        values: dict[str, Any] = {}
        for name in names:
            values.update(self._value(name))
        if self._axis and (is_main or self._everywhere):
            values[self._axis] = step * 32 if self._axis == "samples" else step / self._stride
        has_step = {
            "none": False,
            "each": True,
            "equal": True,
            "back": True,
            "mixed": is_main or self._rng.random() < 0.3,
        }[self._steps]
        if self._steps == "each":  # one call for each step
            step = self._next_step()
        self._done.append(
            {
                "do": "log",
                "values": values,
                **({"step": step} if has_step else {}),
                **({} if commit is None else {"commit": commit}),
            }
        )

    def _next_step(self) -> int:
        return max((done["step"] + self._stride for done in self._done if "step" in done), default=0)

    def _value(self, name: str) -> dict[str, Any]:
        rng = self._rng
        number = round(rng.uniform(0, 1), 3)
        drawn: dict[str, dict[str, Any]] = {
            "note": {"note": rng.choice(("warm", "cold"))},
            "text": {"text": rng.choice(("a", "b"))},
            "ok": {"ok": rng.random() < 0.5},
            "count": {"count": rng.randrange(100)},
            "deep": {"deep": {"a": number, "more": {"b": rng.randrange(9), "word": "w"}}},
            "val": {"val": {"acc": number, "f1": number / 2}},
        }
        return drawn.get(name, {name: number})

    def _write(self, where: str) -> Operation:
        rng = self._rng
        by = rng.choice(("item", "update"))
        names: tuple[str, ...] = ("best", "loss", "val/acc") if where == "summary" else ("lr", "note")
        if where == "config" and by == "item":  # which must not change a value
            names = (f"item-{len(self._done)}",)
        values: dict[str, Any] = {rng.choice(names): round(rng.uniform(1, 2), 2)}
        if rng.random() < 0.3:
            values[f"nested-{len(self._done)}"] = {"of": where, "n": rng.randrange(5)}
        return {"do": where, "values": values, "by": by}

    def _ending(self) -> None:
        rng = self._rng
        if rng.random() < 0.35:
            self._done.append(self._write("summary"))
        how = rng.choices(("return", "raise", "code"), weights=(82, 10, 8))[0]
        self._done.append({"do": "end", "how": how, **({"code": 3} if how == "code" else {})})
