"""Small scripts, each of which once left another run than stock wandb, or could."""

from __future__ import annotations

from typing import Any

from oracle.scripts import Operation, Script

_END: Operation = {"do": "end", "how": "return"}
_BEHIND: Operation = {"do": "behind", "rank": 0, "seconds": 1.0}  # the rank with the run


def _log(values: dict[str, Any], step: int | None = None, commit: bool | None = None) -> Operation:
    given = {"step": step, "commit": commit}
    return {"do": "log", "values": values, **{name: value for name, value in given.items() if value is not None}}


def _axis(name: str, axis: str) -> Operation:
    return {"do": "define", "name": name, "options": {"step_metric": axis}}


def _summary(**values: Any) -> Operation:
    return {"do": "summary", "values": values, "by": "item"}


def _case(name: str, *operations: Operation, pace: float = 0.0, end: Operation = _END) -> Script:
    return Script(name, "run", {}, pace, (*operations, end))


def _parts_with_lag() -> list[Operation]:
    operations: list[Operation] = []
    for number in range(8):
        operations += [{"do": "behind", "rank": 1, "seconds": 0.15}] if number == 4 else []
        operations += [_log({"a": number}, commit=False), _log({"b": number})]
    return operations


def _cadences_with_lag() -> list[Operation]:
    operations: list[Operation] = []
    for number in range(12):
        operations += [{"do": "behind", "rank": 1, "seconds": 0.15}] if number == 6 else []
        operations += [_log({"every-third": number})] if number % 3 == 0 else []
        operations += [_log({"each": number})]
    return operations


_BOTH = (_log({"a": 1}, commit=False), _log({"a": 2, "b": 3, "s": 8}), _log({"c": 4}))

CASES = (
    _case(
        "axis-at-equal-steps", _axis("*", "samples"), _log({"a": 1, "samples": 8}, 0), _log({"b": 2, "samples": 8}, 0)
    ),
    _case("summary-after-log", _log({"loss": 0.5}), _summary(loss=9)),
    _case("steps-go-backwards", _log({"a": 1}, 5), _log({"a": 2}, 6), _log({"a": 3}, 5)),
    _case("equal-steps", _log({"a": 1}, 0), _log({"b": 2}, 0), pace=0.03),
    _case("parts", _log({"a": 1}, commit=False), _log({"b": 2}), _log({"a": 3}, commit=False), _log({"b": 4})),
    _case("parts-with-lag", *_parts_with_lag(), pace=0.01),
    _case("parts-of-two-axes", _axis("a", "e"), _log({"a": 1, "e": 0}, commit=False), _log({"b": 2, "e": 1})),
    _case("name-twice-at-a-step", _log({"lr": 1}, 2), _log({"lr": 2, "ok": 3}, 2)),
    _case("cadences-with-lag", *_cadences_with_lag(), pace=0.01),
    _case("part-before-the-next-step", _log({"a": 1}, 2, commit=False), _log({"b": 2}, 4)),
    _case("part-before-the-same-name", _log({"n": 11}, 5, commit=False), _log({"n": 12}, 6)),
    _case("summary-of-an-open-row", _log({"a": 1}, 0), _summary(a=9), _log({"a": 2}, 1, commit=True)),
    _case("axis-with-lag", *_BOTH, _BEHIND, _axis("*", "s"), *_BOTH, pace=0.01),
    _case(
        "axis-before-a-failure",
        *(_axis("a", "s"), _log({"a": 1, "s": 8}, 0), _log({"b": 2, "s": 8})),
        end={"do": "end", "how": "raise"},
    ),
    _case(
        "nested",
        _log({"d": {"x": 1, "more": {"y": 2, "word": "w"}}, "f.g": 3}),
        _log({"d": {"z": 5}}),
        _summary(d={"best": 9}),
        _log({"d": {"x": 2}}),
    ),
    _case(
        "part-after-a-row",
        *(_log({"loss": 0.5}, 0, commit=True), _log({"lr": 2}, commit=False), _log({"loss": 0.25}, commit=False)),
        *(_log({"acc": 1}, 1, commit=False), _log({}, 1, commit=True)),
    ),
    _case(
        "without-values",
        *(_log({"a": 1}, 4), _log({}, 5), _log({}, 6), _log({"b": 2}, 6, commit=True)),
        *(_log({"c": 3}, 7), _log({}, commit=True), _log({}, 8)),
    ),
    _case(
        "not-numbers",
        _log({"n": {"a": 1, "b": 2}, "text": "x", "none": None}, 1),
        _log({"n": {"b": 3, "c": {"d": 4}}, "list": [1, 2]}, 1),
        *(_log({"n": {"a": 9}}, 1), _log({"loss": 0.5}, 2), _log({"text": "y"}, 3)),
    ),
    _case(
        "summaries-between",
        {"do": "define", "name": "best", "options": {"summary": "max"}},
        *(_log({"a": 1, "best": 5}, 1), _summary(a=99), _log({"b": 1, "best": 3}, 2)),
        *(_log({"c": 1}), _summary(c=50), _log({"d": 1}, 3), _summary(d=60)),
    ),
)
