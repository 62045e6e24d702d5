"""Files in places where others may write are opened by `small_files` alone; other ways there have a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dist_wandb

SOURCES = Path(dist_wandb.__file__).parent
MODULES = (
    *("bounded_reader", "delivery", "destination", "offline", "record_file", "restart", "script_ids"),
    *("upload", "upload_log", "upload_state"),  # not upload_copy, which looks up names in folders that it has open
)
# What opens, reads, writes, follows or parses without a bound, by its last name.
OPENS = frozenset(
    {
        *("open", "read_text", "read_bytes", "write_text", "write_bytes", "touch", "symlink_to", "hardlink_to"),
        *("load", "loads", "copy", "copy2", "copyfile", "copytree", "move", "mkstemp"),
        *("NamedTemporaryFile", "TemporaryFile", "ZipFile", "mkfifo", "truncate"),
    }
)
# By module and function: what is called there, and why that may be.
ALLOWED = {
    ("offline", "_records_of"): {"open": "a new file in a private directory"},
    ("offline", "_parsed"): {"loads": "a line of the reader's, of bounded length and depth"},
    ("record_file", "copy_without"): {"open": "a new file in the user's own state directory"},
    ("upload", "_mark"): {"open": "made anew or not at all, through no link"},
    ("upload", "_run_wandb_sync"): {
        "open": "a new file in the user's own state directory",
        "read_text": "the same file, which wandb's own process has written",
    },
}


def opened_in(source: str) -> Iterator[tuple[str, str]]:
    """The innermost function around each call that opens a file, and the name of what is called."""

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


def test_a_call_is_found_wherever_it_stands() -> None:
    source = "def f(p):\n    with open(p) as x: json.load(x)\n    def g(): return [p.read_text() for p in q]\n"
    assert sorted(opened_in(source)) == [("f", "load"), ("f", "open"), ("g", "read_text")]


@pytest.mark.parametrize("module", MODULES)
def test_nothing_else_opens_files_where_others_may_write(module: str) -> None:
    found = {(module, function, name) for function, name in opened_in((SOURCES / f"{module}.py").read_text())}
    allowed = {(of, function, name) for (of, function), names in ALLOWED.items() if of == module for name in names}
    assert found - allowed == set(), "use dist_wandb.small_files, or say here why not"
    assert allowed - found == set(), "no longer there"
