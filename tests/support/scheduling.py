"""Which worker of pytest-xdist runs which tests of whole jobs: tests that inspect the same job stay together.

pytest-xdist 3.8 writes the group of a test into its id, which pytest 9.2 no longer allows: all tests are distributed,
and each worker runs the shared jobs again. Here a file with a module-scoped fixture is a group.
"""

from __future__ import annotations

import functools
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


def group_of(nodeid: str, root: Path) -> str:
    """Return the group of a test: itself, or its file if tests share a job there, with the parameter of that job."""
    path, _, test = nodeid.partition("::")
    source = _source(root / path)
    if 'scope="module"' not in source:
        return nodeid
    return f"{path}[{test.partition('[')[2]}" if 'scope="module", params=' in source else path


@functools.cache
def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8")
