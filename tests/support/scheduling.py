"""Which worker of pytest-xdist runs which tests of whole jobs: tests that inspect the same job stay together.

pytest-xdist 3.8 writes the group of a test into its id, which pytest 9.2 no longer allows: all tests are distributed,
and each worker runs the shared jobs again. Here the group is derived from the source of the test's file: it consists of
tests that use the same module-scoped fixture, directly or through other fixtures, with the same parameter.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# The files with the longest tests come first, so that no worker is left alone with a long test at the end.
_LONGEST = (
    "rounds",
    "fuzz",
    "hostile_trees",
    "examples",
    "launchers",
    "faults",
    "promises",
    "exits",
    "contract",
    "accelerate",
    "patterns",
)


class SharedJobsScheduling(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Distributes tests individually, but tests that share a job together."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid, self.config.rootpath)

    def _reschedule(self, node: Any) -> None:
        """Queue one test behind the running one, not two: the running test may be long."""
        if not self.workqueue or self._pending_of(self.assigned_work[node]) <= 1:
            super()._reschedule(node)


def order(item: pytest.Item) -> int:
    """Return the sort key of a test, which puts the files with the longest tests first."""
    name = item.path.stem.removeprefix("test_")
    return _LONGEST.index(name) if name in _LONGEST else len(_LONGEST)


def names_of_one_process(names: Iterable[str]) -> list[str]:
    """Return the test ids that contain the address of an object, such as ``test_it[<object object at 0x7f>]``.

    Each worker gives such a test another name, and pytest-xdist then runs no test at all. A single worker does not
    reveal the problem.

    Args:
        names: Ids of tests.
    """
    return [name for name in names if re.search(r" at 0x[0-9a-f]{6,}>", name)]


def group_of(nodeid: str, root: Path) -> str:
    """Return the group of a test: its id, or its file with the fixture that it shares with other tests of the file."""
    path, _, test = nodeid.partition("::")
    name, _, parameter = test.partition("[")
    shared = _shared(root / path)
    if name not in shared:
        return nodeid
    fixture, has_parameters = shared[name]
    return f"{path}::{fixture}[{parameter}" if has_parameters else f"{path}::{fixture}"


@functools.cache
def _shared(path: Path) -> dict[str, tuple[str, bool]]:
    """Return, for each test that uses a module-scoped fixture, the first such fixture and whether it has parameters."""
    functions = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    fixtures = {name: options for name, node in functions.items() if (options := _options(node)) is not None}

    def first(name: str) -> tuple[str, bool] | None:
        if fixtures.get(name, {}).get("scope") == "'module'":
            return name, "params" in fixtures[name]
        used = [argument.arg for argument in functions[name].args.args] if name in functions else []
        return next((found for found in map(first, used) if found), None)

    return {name: found for name in functions if name not in fixtures and (found := first(name))}


def _options(function: ast.FunctionDef) -> dict[str, str] | None:
    """Return the arguments of a function's `pytest.fixture`, as text; `None` for a function that is not a fixture."""
    for decorator in function.decorator_list:
        if ast.unparse(decorator).startswith("pytest.fixture"):
            keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
            return {str(keyword.arg): ast.unparse(keyword.value) for keyword in keywords}
    return None
