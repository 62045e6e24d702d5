"""Descriptions of arguments in docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from dist_wandb.settings.options import OPTION_NAMES


def documented_options(integration: Callable[..., Any]) -> dict[str, str]:
    """Return the descriptions of the options that all integrations share, by name, in the order of the docstring."""
    arguments = str(inspect.getdoc(integration)).partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", arguments, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries if name in OPTION_NAMES}
