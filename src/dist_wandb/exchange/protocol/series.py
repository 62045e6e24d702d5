"""The series that ranks agree on before they contribute: a number under a name, or an attachment. Pure.

An attachment is a value that the ranks combine by an exchange of its own: states of a metric, a table, images. The
rounds treat it as a series without numbers, to find out which ranks have one, and when all of them do. Ranks agree on
series as texts. The text of a number is its name; the text of an attachment also contains its kind and layout, because
ranks whose metrics have different states cannot combine them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

NUMBER = "number"
_SEPARATOR = "\0"  # in no name that a user may give


class Series(NamedTuple):
    """The common series of the ranks' contributions."""

    name: str  # as the user gave it
    kind: str = NUMBER  # `NUMBER`, or the kind of the attachment
    layout: str = ""  # its structure, if ranks have to agree on it

    @property
    def text(self) -> str:
        """The text on which ranks agree."""
        return self.name if self.kind == NUMBER else _SEPARATOR.join(self)


@lru_cache(maxsize=4096)
def series_of(text: str) -> Series:
    """Return the series of a text; a text without a kind is the name of a number."""
    name, _, rest = text.partition(_SEPARATOR)
    kind, separator, layout = rest.partition(_SEPARATOR)
    return Series(name, kind, layout) if separator else Series(text)


def is_attached(text: str) -> bool:
    """Return whether the series of a text is an attachment."""
    return _SEPARATOR in text
