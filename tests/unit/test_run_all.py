from __future__ import annotations

import ast
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import run_all
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


@pytest.mark.parametrize("tests", ["", "import os\nos._exit(0)", "def test_1(): pass\nimport no_such_module"])
def test_a_part_without_results_has_failed(tmp_path: Path, tests: str) -> None:
    (outcome,) = run([of_pytest(tmp_path, tests)])
    assert (outcome.passed, outcome.failed) == (0, 1)


def test_output_of_a_concurrent_part_follows_that_of_the_next_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'came')!r}).exists(): time.sleep(0.01)\n"
    beside = Part("beside", (sys.executable, "-c", f"{waits}print('is here')"), is_pytest=False, is_beside=True)
    comes = f"import pathlib\npathlib.Path({str(tmp_path / 'came')!r}).touch()\nprint('comes')"
    outcomes = run([beside, Part("next", (sys.executable, "-c", comes), is_pytest=False), exiting(0)])
    assert [(outcome.part.name, outcome.failed) for outcome in outcomes] == [
        ("next", 0),
        ("beside", 0),
        ("exits with 0", 0),
    ]
    shown = re.findall(r"^(--- [a-z]+|is here)", capfd.readouterr().out, re.MULTILINE)
    assert shown == ["--- next", "--- beside", "is here", "--- exits"]


def test_a_concurrent_part_ends_with_an_interrupted_check(tmp_path: Path) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    sleeps = f"""
import pathlib, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background inherits that it is ignored
try:
    pathlib.Path({str(begun)!r}).touch()
    time.sleep(60)
except KeyboardInterrupt:
    pathlib.Path({str(ended)!r}).touch()
"""
    beside = Part("beside", (sys.executable, "-c", sleeps), is_pytest=False, is_beside=True)

    def parts() -> Iterator[Part]:
        yield beside
        while not begun.exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(parts())
    assert ended.exists()


def test_a_part_whose_environment_is_missing_has_failed(tmp_path: Path) -> None:
    assert run([Part("oldest", (str(tmp_path / "python"),))])[0].failed == 1


@pytest.mark.parametrize("failing", [0, 1])
def test_the_exit_code_is_1_if_any_part_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failing: int
) -> None:
    monkeypatch.setattr(run_all, "checks", lambda _: {"lint": (exiting(failing), exiting(0))})
    monkeypatch.setattr(sys, "argv", ["run_all", "lint"])
    assert run_all.main() == failing
    assert capsys.readouterr().out.splitlines()[-1] == f"{2 - failing} passed, {failing} failed"


def test_every_directory_of_tests_is_in_a_check() -> None:
    words = {word for part in checks(2)["test"] for word in part.command}
    assert {path.parent for path in (ROOT / "tests").glob("*/test_*.py")} == {
        ROOT / word for word in words if word.startswith("tests/") and not word.endswith(".py")
    }


def test_every_test_with_short_limits_is_in_a_part() -> None:
    """Those of whole jobs, which leave them out, are run by another part."""
    short, core, jobs = checks(2)["test"]
    marked = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py") if has_mark("alone", path)}
    assert marked
    assert {path for path in marked if Path(path).parent.as_posix() in jobs.command} == {
        word for word in short.command if word.startswith("tests/")
    }
    assert all({*Path(path).parents} & {*map(Path, (*core.command, *jobs.command))} for path in marked)


def has_mark(name: str, path: Path) -> bool:
    """Return whether a file reads an attribute `name` of something called `mark`."""
    text = path.read_text(encoding="utf-8")
    nodes = ast.walk(ast.parse(text)) if name in text else ()
    attributes = (node for node in nodes if isinstance(node, ast.Attribute) and node.attr == name)
    return any(ast.unparse(node.value).endswith("mark") for node in attributes)


@pytest.mark.parametrize("niceness", [0, 1])
def test_a_part_runs_at_its_priority(niceness: int, capfd: pytest.CaptureFixture[str]) -> None:
    reports = (sys.executable, "-c", "import os; print('niceness', os.nice(0))")
    run([Part("reports", reports, is_pytest=False, niceness=niceness)])
    assert f"niceness {min(19, os.nice(0) + niceness)}\n" in capfd.readouterr().out
