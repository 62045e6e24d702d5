"""An extension of griffe: converts docstrings for the site."""

from __future__ import annotations

from typing import Any

import griffe
import site_pages

_NOT_BUILT = {"Session", "NullRun"}  # classes that users do not instantiate


class SiteDocstrings(griffe.Extension):
    """Converts Google-style docstrings to the Markdown of the site."""

    def on_object(self, *, obj: griffe.Object, **_kwargs: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            has_arguments = obj.name not in _NOT_BUILT
            obj.docstring.value = site_pages.docstring_of(obj.docstring.value, has_arguments=has_arguments)
