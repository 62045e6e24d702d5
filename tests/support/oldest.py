"""Which test files are redundant with the oldest supported versions, so that `make test-oldest` leaves them out.

Its environment has other versions of a few packages (`constraints-oldest.txt`). A test file of the rooms below whose
imports, including those of tests/support and of the package, reach none of these packages runs the same code there.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

DIFFERENT = frozenset(
    {"accelerate", "lightning", "plotly", "pytorch_lightning", "torchmetrics", "transformers", "wandb"}
)
ROOMS = ("exchange", "settings", "store", "topology")  # their tests start no programs that import more
_ROOT = Path(__file__).parents[2]
_SUPPORT = _ROOT / "tests" / "support"


def shows_nothing_new(path: Path) -> bool:
    """Return whether a test file reaches none of the packages with other versions."""
    is_of_rooms = path.parent in [_ROOT / "tests" / "unit" / room for room in ROOMS]
    return is_of_rooms and not any(_imports(reached)[0] & DIFFERENT for reached in _reached(path))


@functools.cache
def _reached(path: Path) -> frozenset[Path]:
    """Return a file and all files that it imports, directly or indirectly."""
    reached, new = {path}, [path]
    while new:
        following = set(_imports(new.pop())[1]) - reached
        reached |= following
        new += following
    return frozenset(reached)


@functools.cache
def _imports(path: Path) -> tuple[frozenset[str], tuple[Path, ...]]:
    """Return the packages that a file imports anywhere, and our files among its imports."""
    modules = set(_modules(path))
    files = (candidate for module in modules for candidate in _files(module) if candidate.exists())
    return frozenset(module.partition(".")[0] for module in modules), tuple(files)


def _modules(path: Path) -> Iterator[str]:
    for node in _nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that a file executes, without its module-level `__getattr__` and code for type checkers."""
    if isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
        return
    below: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        below = node.orelse
    else:
        yield node
    for part in below:
        yield from _nodes(part)


def _files(module: str) -> Iterator[Path]:
    below = Path(*module.split("."))
    for top in (_ROOT / "src", _SUPPORT):
        yield top / below.with_suffix(".py")
        if module != "dist_wandb":  # it imports names on demand
            yield top / below / "__init__.py"
