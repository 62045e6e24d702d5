"""Which test files `make test-oldest` runs: those whose subject is a package of which it has another version.

Such a file imports one of these packages itself, or tests a room that is written against one. In all others, stand-ins
take the place of wandb, so they run the same code with either versions; whole jobs follow in `tests/contract`.
"""

from __future__ import annotations

import ast
from pathlib import Path

DIFFERENT = frozenset(
    {"accelerate", "lightning", "plotly", "pytorch_lightning", "torchmetrics", "transformers", "wandb"}
)
ROOMS = ("accelerate", "lightning", "runs", "transformers")
_UNIT = Path(__file__).parents[1] / "unit"


def shows_nothing_new(path: Path) -> bool:
    """Return whether a file of unit tests neither imports a package with other versions nor tests such a room."""
    if _UNIT not in path.parents or path.parent.name in ROOMS:
        return False
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in imports if isinstance(node, ast.ImportFrom)]
    return DIFFERENT.isdisjoint(name.partition(".")[0] for name in names)
