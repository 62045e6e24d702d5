"""Print what the package consists of, and fail if it has grown beyond its limits.

Run `python scripts/house.py`; `make lint` does. With ``--log`` it also runs a job of two ranks, and counts the
functions of the package that one `log` on rank 0 crosses, in all threads, and the modules that `init` loads.

Each measure has a limit, near what it is today, and a goal. Lower a limit when the measure has fallen; a commit that
raises one says why.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES, TESTS = ROOT / "src" / "dist_wandb", ROOT / "tests"
_UNSEEN = re.compile(r"<!--.*?-->|<[^>\n]*>", re.DOTALL)  # comments and tags of a page
_DOCUMENTED = frozenset({"_asdict", "_exit", "_replace", "_repr_html_"})  # of named tuples, os and IPython
_LAYOUT = frozenset(
    {
        tokenize.COMMENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
        tokenize.INDENT,
        tokenize.NEWLINE,
        tokenize.NL,
    }
)
_JOB = """
import json, os, sys, threading, time
crossed, counts = set(), [False]
def note(frame, event, argument):
    if counts[0] and event == "call" and os.sep + "dist_wandb" + os.sep in frame.f_code.co_filename:
        crossed.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))
threading.setprofile(note)  # for threads that start later
import dist_wandb
session = dist_wandb.init(mode="offline", dir=sys.argv[1])
loaded = [name for name in sys.modules if name.startswith("dist_wandb.")]
for step in range(4):
    counts[0] = step == 3
    if counts[0]:
        sys.setprofile(note)
    session.log({"loss": 0.5}, step=step)
    sys.setprofile(None)
    time.sleep(2.0) if counts[0] else session.flush()
if os.environ["RANK"] == "0":
    print(json.dumps([len(crossed), len(loaded)]))
session.finish()
"""


@dataclass(frozen=True)
class Measure:
    """A measure.

    Args:
        name: What is measured.
        found: The number today.
        limit: The largest number that is no error.
        goal: The number that is wanted.
    """

    name: str
    found: int
    limit: int
    goal: int


def measures() -> Iterator[Measure]:
    """Yield the measures of the files."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(SOURCES.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    rooms = {path.relative_to(SOURCES).parts[0] for path in texts}
    yield Measure("lines of src", sum(text.count("\n") for text in texts.values()), 30_333, 23_000)
    yield Measure("lines of code, without imports", sum(map(_lines_of_code, texts, trees.values())), 19_499, 13_000)
    yield Measure("modules", len(texts), 135, 140)
    yield Measure("rooms and modules at the top", len(rooms), 16, 16)
    yield Measure("class names of several modules", len(_ambiguous(trees.values())), 0, 0)
    yield Measure("circles of imports", len(_circles(_imports(trees))), 0, 0)
    tests = {path: path.read_text(encoding="utf-8") for path in sorted(TESTS.rglob("*.py"))}
    nodes = [node for text in tests.values() for node in ast.walk(ast.parse(text))]
    yield Measure("lines of tests", sum(text.count("\n") for text in tests.values()), 47_970, 36_000)
    yield Measure("private attributes that tests touch", sum(map(_is_private, nodes)), 28, 80)
    yield Measure("monkeypatch.setattr in tests", sum(map(_is_patch, nodes)), 80, 120)
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    yield Measure("words of documentation", sum(map(_words, pages)), 19_999, 20_000)


def measures_of_log() -> Iterator[Measure]:
    """Yield the measures of a job of two ranks."""
    crossed, loaded = _played()
    yield Measure("functions that a log crosses on rank 0", crossed, 106, 80)
    yield Measure("modules that init loads", loaded, 96, 100)


def main() -> int:
    """Print the measures; return 1 if one exceeds its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", action="store_true", help="also measure a call of log, in a job of two ranks")
    found = [*measures(), *(measures_of_log() if parser.parse_args().log else ())]
    sys.stdout.write(f"{'':40}{'today':>8}{'limit':>8}{'goal':>8}\n")
    for one in found:
        mark = "  beyond its limit" if one.found > one.limit else ""
        sys.stdout.write(f"{one.name:40}{one.found:>8,}{one.limit:>8,}{one.goal:>8,}{mark}\n")
    return int(any(one.found > one.limit for one in found))


# --- files ------------------------------------------------------------------------------------------------------------


def _lines_of_code(path: Path, tree: ast.Module) -> int:
    """Return the number of lines with code and signatures: no imports, comments or docstrings."""
    with path.open("rb") as file:
        lines = {
            line
            for token in tokenize.tokenize(file.readline)
            if token.type not in _LAYOUT
            for line in range(token.start[0], token.end[0] + 1)
        }
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, owners) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(lines)


def _ambiguous(trees: Iterable[ast.Module]) -> list[str]:
    """Return the names of classes, apart from case and an underscore, that more than one module has."""
    classes = [
        {node.name.strip("_").lower() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)} for tree in trees
    ]
    return [name for name, modules in Counter(name for names in classes for name in names).items() if modules > 1]


def _imports(trees: dict[Path, ast.Module]) -> dict[str, set[str]]:
    """Return the modules of the package that each one imports when it runs, also in functions."""
    names = {_name(path) for path in trees}
    found: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for_types = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        imported: set[str] = set()
        for node in ast.walk(tree):
            if id(node) in for_types:
                continue
            if isinstance(node, ast.ImportFrom) and node.module:  # of modules of a package, or of what a module defines
                below = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= below if below <= names else {node.module, *below}
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
        found[_name(path)] = (imported & names) - {_name(path)}
    return found


def _name(path: Path) -> str:
    parts = path.relative_to(SOURCES.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def _circles(imports: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Return the sets of modules that import each other, directly or not."""
    reached: dict[str, set[str]] = {}
    for name in imports:
        seen, left = set[str](), [name]
        while left:
            new = imports[left.pop()] - seen
            seen |= new
            left += new
        reached[name] = seen
    circles = {
        tuple(sorted(other for other in seen if name in reached[other]))
        for name, seen in reached.items()
        if name in seen
    }
    return sorted(circles)


def _words(page: Path) -> int:
    """Return the number of words that a page shows, also in code and tables; bars and arrows are none."""
    return sum(any(map(str.isalnum, word)) for word in _UNSEEN.sub(" ", page.read_text(encoding="utf-8")).split())


def _is_private(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
        return False
    if node.attr in _DOCUMENTED:
        return False
    return not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))


def _is_patch(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "setattr"


# --- a job ------------------------------------------------------------------------------------------------------------


def _played() -> tuple[int, int]:
    """Run a job of two ranks; return the number of functions that a `log` crosses, and of modules that `init` loads."""
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory, "job.py")
        script.write_text(_JOB)
        launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
        always = {**os.environ, "WANDB_SILENT": "true", "OMP_NUM_THREADS": "1"}
        command = [*launcher, str(script), directory]
        done = subprocess.run(command, env=always, stdout=subprocess.PIPE, text=True, check=True, timeout=120)  # noqa: S603
    crossed, loaded = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    return crossed, loaded


if __name__ == "__main__":
    sys.exit(main())
