from __future__ import annotations

from pathlib import Path

from run_all import checks

ROOT = Path(__file__).parents[2]


def test_every_directory_of_tests_is_in_a_check() -> None:
    words = {word for part in checks(2)["test"] for word in part.command}
    assert {path.parent for path in (ROOT / "tests").glob("*/test_*.py")} == {
        ROOT / word for word in words if word.startswith("tests/") and not word.endswith(".py")
    }
