"""How tests of whole jobs are assigned to workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import scheduling

SOURCE = """
import pytest

@pytest.fixture(scope="module")
def job(): ...

@pytest.fixture
def outcome(job): ...

@pytest.fixture(scope="module", params=["a", "b"])
def played(request): ...

@pytest.fixture
def own(): ...

def test_direct(job): ...
def test_by_way_of_another(tmp_path, outcome): ...
def test_of_each(played): ...
def test_alone(own): ...
"""


@pytest.mark.parametrize(
    ("test", "group"),
    [
        ("test_direct", "test_it.py::job"),
        ("test_direct[x]", "test_it.py::job"),
        ("test_by_way_of_another", "test_it.py::job"),
        ("test_of_each[a]", "test_it.py::played[a]"),
        ("test_of_each[b]", "test_it.py::played[b]"),
        ("test_alone", "test_it.py::test_alone"),
        ("test_alone[x]", "test_it.py::test_alone[x]"),
    ],
)
def test_tests_that_share_a_job_are_one_group(tmp_path: Path, test: str, group: str) -> None:
    (tmp_path / "test_it.py").write_text(SOURCE)
    assert scheduling.group_of(f"test_it.py::{test}", tmp_path) == group


def test_shared_jobs_are_found_in_the_test_files() -> None:
    root = Path(__file__).parents[2]
    shared = {
        f"{path.stem}: {fixture}"
        for path in sorted((root / "tests").glob("*/test_*.py"))
        for fixture, _ in scheduling._shared(path).values()
    }
    assert {"test_contract: played", "test_promises: plain", "test_patterns: outcome"} <= shared


def test_names_that_differ_between_workers_are_found() -> None:
    names = [f"test_it.py::test_it[{value!r}]" for value in (object(), 7, "at 0x", {"a": 1})]
    assert scheduling.names_of_one_process(names) == names[:1]
