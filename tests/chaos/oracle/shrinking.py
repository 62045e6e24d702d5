"""Shrink a script while it still differs from stock in the same way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from oracle.running import Result, Variant, judge
from oracle.scripts import Operation, Script

_MOST_AT_ONCE = 24  # candidates of one job


def shrunk(script: Script, variant: Variant, kind: str) -> Result:
    """Return the result of the smallest script found that still has a difference of a kind.

    Args:
        script: A script that differs.
        variant: The variant in which it does.
        kind: The kind of difference to keep.
    """
    (best,) = judge([script], [variant])
    while True:
        candidates = [
            replace(best.script, name=f"{script.name}-{number}", operations=operations)
            for number, operations in zip(range(_MOST_AT_ONCE), _smaller(best.script.operations), strict=False)
        ]
        still = [
            result
            for result in judge(candidates, [variant])
            if any(difference.kind == kind for difference in result.differences)
        ]
        if not still:
            return best
        best = min(still, key=lambda result: len(str(result.script)))


def _smaller(operations: tuple[Operation, ...]) -> Iterator[tuple[Operation, ...]]:
    """Yield smaller scripts: without stretches of operations, then without single values and arguments."""
    body, end = operations[:-1], operations[-1:]
    size = len(body) // 2
    while size:
        for first in range(0, len(body), size):
            yield (*body[:first], *body[first + size :], *end)
        size //= 2
    for place, operation in enumerate(body):
        for name in operation.get("values", {}) if len(operation.get("values", {})) > 1 else ():
            fewer = {other: value for other, value in operation["values"].items() if other != name}
            yield (*body[:place], {**operation, "values": fewer}, *body[place + 1 :], *end)
    if end[0]["how"] != "return":
        yield (*body, {"do": "end", "how": "return"})
