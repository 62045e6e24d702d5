"""Find the texts of all warnings and errors of the package in its source.

A text is the literal argument of an exception or a warning, with ``…`` for each inserted value. If the argument, or the
first value in it, is a variable, the literals that the surrounding function assigns to it are the texts. A message with
few words of its own passes on the text of another message, and is left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[2] / "src" / "dist_wandb"
ERRORS = {
    *("DistWandbError", "ConfigurationError", "TopologyError", "RendezvousError", "MissingExtraError"),
    *("UnsupportedVersionError", "UnavailableError", "ReadError", "UploadError", "Error", "WrongTypeError"),
}
WARNINGS = {"warn", "warning", "error", "exception", "rank_zero_warn", "warn_explicit", "_warn_once", "print_line"}
WARNINGS |= {"values", "say"}  # of `exchange.reports`; of uploads
_PLACEHOLDER = re.compile(r"%[srd%]|%\.?\d*[fgd]")
_FEWEST_WORDS = 3  # words of the text itself
_NO_TEXTS = {"it has ended", "Its repr is written", "It is left out"}
"""Parts of other texts, and keys under which a warning is given once."""
_NOT_ITS_OWN = re.compile(r"dist_wandb:|\b(on )?rank|[^\w\s]")


class Message(NamedTuple):
    """The text of one message."""

    text: str  # the text, with ``…`` for values
    place: str  # file and line


@cache
def messages() -> list[Message]:
    """Return all texts of warnings and errors."""
    return [message for path in sorted(SOURCE.rglob("*.py")) for message in _of_file(path)]


def _of_file(path: Path) -> Iterator[Message]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in ERRORS | WARNINGS:
            around = [one for one in functions if one.lineno <= node.lineno <= (one.end_lineno or 0)]
            for given in [*node.args, *(keyword.value for keyword in node.keywords)]:
                for text in _texts(given, around[-1] if around else tree):
                    if text not in _NO_TEXTS and len(_NOT_ITS_OWN.sub(" ", text).split()) >= _FEWEST_WORDS:
                        yield Message(text, f"{path.relative_to(SOURCE.parent)}:{node.lineno}")


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _texts(node: ast.expr, around: ast.AST) -> list[str]:
    """Return the texts that an expression may have."""
    if isinstance(node, ast.Constant):
        return [_PLACEHOLDER.sub("…", node.value)] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return _texts_of_f_string(node, around)
    if isinstance(node, (ast.IfExp, ast.Lambda)):
        return _texts(node.body, around) + (_texts(node.orelse, around) if isinstance(node, ast.IfExp) else [])
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = (_texts(side, around) or ["…"] for side in (node.left, node.right))
        return [one + other for one in left for other in right]
    if isinstance(node, ast.Name):
        given = [one for one in ast.walk(around) if isinstance(one, ast.Assign) and _assigns(one, node.id)]
        given = [one for one in given if not _has(one.value, node.id)]  # such as text = f"{text} ..."
        return [text for one in given for text in _texts(one.value, around)]
    return []


def _texts_of_f_string(node: ast.JoinedStr, around: ast.AST) -> list[str]:
    parts = [_PLACEHOLDER.sub("…", str(part.value)) if isinstance(part, ast.Constant) else "…" for part in node.values]
    first = node.values[0] if node.values else None
    starts = _texts(first.value, around) if isinstance(first, ast.FormattedValue) else []
    return ["".join([start, *parts[1:]]) for start in starts or parts[:1]]


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def _has(expression: ast.expr, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(expression))
