"""What ranks agree on before they contribute to it: a number under a name, or an attachment. Pure.

An attachment is what the ranks bring together by an exchange of its own: states of a metric, a table, images. The
rounds have it as a series without numbers, to find out which ranks have one, and when all have. Ranks agree on series
as texts: that of a number is its name; that of an attachment has its kind and layout as well, because ranks whose
metrics have other states cannot bring these together.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

NUMBER = "number"
_SEPARATOR = "\0"  # in no name that a user may give


class Series(NamedTuple):
    """What contributions of all ranks belong to.

    Args:
        name: As the user gave it.
        kind: `NUMBER`, or of what kind the attachment is.
        layout: Of what it consists, where ranks have to agree on that.
    """

    name: str
    kind: str = NUMBER
    layout: str = ""

    @property
    def text(self) -> str:
        """By what ranks agree on it."""
        return self.name if self.kind == NUMBER else _SEPARATOR.join(self)

    @property
    def is_attached(self) -> bool:
        """Whether it is an attachment."""
        return self.kind != NUMBER


@lru_cache(maxsize=4096)
def series_of(text: str) -> Series:
    """The series that ranks have agreed on by a text; one that names no kind is a number's."""
    name, _, rest = text.partition(_SEPARATOR)
    kind, separator, layout = rest.partition(_SEPARATOR)
    return Series(name, kind, layout) if separator else Series(text)


def is_attached(text: str) -> bool:
    """Whether the series of a text is an attachment."""
    return _SEPARATOR in text
