"""Only `small_files` opens files in directories that others can write to; each exception has a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import dist_wandb

SOURCES = Path(dist_wandb.__file__).parent
LEFT_OUT = {"wandb_files/small_files.py"}
MODULES = sorted(
    path.relative_to(SOURCES).as_posix()
    for pattern in (
        "wandb_files/*.py",
        "cli/report/*.py",
        "cli/uploads/*.py",
        "session/restart.py",
        "runs/client_settings.py",
        "lightning/launching.py",
    )
    for path in SOURCES.glob(pattern)
    if path.relative_to(SOURCES).as_posix() not in LEFT_OUT
)
# Functions that open, read, write, follow or parse without a limit, by their last name.
OPENS = frozenset(
    {
        *("open", "read_text", "read_bytes", "write_text", "write_bytes", "touch", "symlink_to", "hardlink_to"),
        *("load", "loads", "raw_decode", "copy", "copy2", "copyfile", "copytree", "move", "mkstemp"),
        *("NamedTemporaryFile", "TemporaryFile", "ZipFile", "mkfifo", "truncate"),
    }
)
# By sub-package and function: the called functions, and why each is safe.
ALLOWED = {
    ("wandb_files", "search"): {"open": "what the user gives, or no link, in a directory that is open"},
    ("report", "check_target"): {"open": "a descriptor that small_files has opened"},
    ("report", "json_of"): {"loads": "what was made of a report just before"},
    ("report", "_asset"): {"read_text": "a file of this package"},
    ("report", "_run"): {"open": "the browser"},
    ("uploads", "_entries"): {"open": "a directory that is no link, in a directory that is open"},
    ("uploads", "copy_file"): {"open": "a new file in the user's own state directory"},
    ("uploads", "_copy"): {"open": "a new file in the user's own state directory"},
    ("uploads", "_run_wandb_sync"): {
        "open": "a new file in the user's own state directory",
        "read_text": "the same file, which wandb's own process has written",
    },
}


def opened_in(source: str) -> Iterator[tuple[str, str]]:
    """Yield the innermost function around each call that opens a file, and the name of the called function."""

    def within(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                called = child.func
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                if name in OPENS:
                    yield function, name
            is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from within(child, child.name if is_function else function)  # type: ignore[attr-defined]

    yield from within(ast.parse(source), "")


def test_no_other_module_opens_files_that_others_may_have_written() -> None:
    found = {
        ((SOURCES / module).parent.name, function, name)
        for module in MODULES
        for function, name in opened_in((SOURCES / module).read_text())
    }
    allowed = {(room, function, name) for (room, function), names in ALLOWED.items() for name in names}
    assert found - allowed == set(), "use dist_wandb.wandb_files.small_files, or add an exception with its reason"
    assert allowed - found == set(), "these exceptions are not needed"
