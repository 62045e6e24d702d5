"""The tables of the stock classes' names are complete."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from lightning.pytorch.loggers import WandbLogger

PAGE = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """Return the text below a heading of the second level."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/compatibility.md has no section {title}"
    return found[1]


def named_in(text: str) -> set[str]:
    """Return the names in the first cells of its tables."""
    cells = re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`\**(\w+)", cell)}


ARGUMENTS = set(inspect.signature(WandbLogger).parameters)
PUBLIC = {name for name in dir(WandbLogger) if not name.startswith("_")}


@pytest.mark.parametrize("name", sorted(ARGUMENTS | PUBLIC))
def test_every_name_of_the_stock_logger_is_in_the_table(name: str) -> None:
    assert name in named_in(section("WandbLogger"))
