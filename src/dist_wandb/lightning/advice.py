"""Lightning's advice to log with `sync_dist=True`, where it contradicts ours: a room for a name that is not public."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.utilities.rank_zero import WarningCache

_ADVICE = re.compile(r"It is recommended to use `self\.log\((.+), \.\.\., sync_dist=True\)`")


class _Cache(WarningCache):
    """Lightning's own cache of what it has said, which has the advice that is not wanted as well."""

    is_wanted: Callable[[str], bool]

    def __contains__(self, message: object) -> bool:
        return super().__contains__(message) or self._is_unwanted(str(message))

    def _is_unwanted(self, message: str) -> bool:
        advice = _ADVICE.match(message)
        return advice is not None and not _Cache.is_wanted(str(ast.literal_eval(advice[1])))


def give_advice_only(is_wanted: Callable[[str], bool]) -> None:
    """Have Lightning say that a name should be logged with `sync_dist=True` only where that is wanted.

    Lightning keeps what it has said in a cache of its own, from 2.2.0 to 2.6.6 in the same place, and asks it first. So
    that cache gets a class derived from its own, and nobody's filters for warnings are touched. Should it go, Lightning
    says what it always says, and test_lightning_advice.py fails.

    Args:
        is_wanted: Tells it of a name, whenever Lightning is about to advise.
    """
    _Cache.is_wanted = staticmethod(is_wanted)
    cache = getattr(result, "warning_cache", None)
    if type(cache) is WarningCache:
        cache.__class__ = _Cache
