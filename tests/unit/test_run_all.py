from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from run_all import Part, checks, run, summary

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable installed plugins in a pytest that a test starts: importing them would take most of its start."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def exiting(code: int) -> Part:
    return Part(f"exits with {code}", (sys.executable, "-c", f"raise SystemExit({code})"), is_pytest=False)


def of_pytest(directory: Path, tests: str) -> Part:
    file = directory / "test_it.py"
    file.write_text(tests)
    return Part("tests", (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)))


def test_all_parts_run_after_a_failure(tmp_path: Path) -> None:
    tests = "import pytest\ndef test_1(): pass\ndef test_2(): assert False\ndef test_3(): pytest.skip()\n"
    outcomes = run([exiting(3), of_pytest(tmp_path, tests), exiting(0)])
    assert [(outcome.passed, outcome.failed) for outcome in outcomes] == [(0, 1), (1, 2), (1, 0)]
    *parts, last = summary(outcomes).splitlines()
    assert [re.findall(r"(FAILED|passed)  ", line)[0] for line in parts] == ["FAILED", "FAILED", "passed"]
    assert last == "2 passed, 3 failed"


def test_a_part_without_results_has_failed(tmp_path: Path) -> None:
    (outcome,) = run([of_pytest(tmp_path, "import os\nos._exit(0)")])
    assert (outcome.passed, outcome.failed) == (0, 1)


def test_every_directory_of_tests_is_in_a_check() -> None:
    words = {word for part in checks(2)["test"] for word in part.command}
    assert {path.parent for path in (ROOT / "tests").glob("*/test_*.py")} == {
        ROOT / word for word in words if word.startswith("tests/") and not word.endswith(".py")
    }


def test_every_test_with_short_limits_is_in_a_part() -> None:
    """Those of whole jobs, which leave them out, are run by another part."""
    short, distributed, core, jobs = checks(2)["test"]
    marked = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py") if has_mark("alone", path)}
    assert marked
    assert {path for path in marked if Path(path).parent.as_posix() in jobs.command} == {
        word for word in short.command if word.startswith("tests/")
    }
    assert all(
        {*Path(path).parents} & {*map(Path, (*distributed.command, *core.command, *jobs.command))} for path in marked
    )


def has_mark(name: str, path: Path) -> bool:
    """Return whether a file reads an attribute `name` of something called `mark`."""
    text = path.read_text(encoding="utf-8")
    nodes = ast.walk(ast.parse(text)) if name in text else ()
    attributes = (node for node in nodes if isinstance(node, ast.Attribute) and node.attr == name)
    return any(ast.unparse(node.value).endswith("mark") for node in attributes)
