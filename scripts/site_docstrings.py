"""An extension of griffe, which reads docstrings for the site: a block after ``::`` is code in Markdown, too."""

from __future__ import annotations

import re
from typing import Any

import griffe


class LiteralBlocks(griffe.Extension):
    """Takes one of the two colons away."""

    def on_object(self, *, obj: griffe.Object, **_kwargs: Any) -> None:
        """Rewrite the docstring of an object that was read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"::$", ":", obj.docstring.value, flags=re.MULTILINE)
