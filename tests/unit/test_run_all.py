from __future__ import annotations

import ast
from pathlib import Path

from run_all import checks

ROOT = Path(__file__).parents[2]


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
