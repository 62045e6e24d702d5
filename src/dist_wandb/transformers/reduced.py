"""The names of the Trainer's own numbers, which are the same on all ranks or already include all of them.

The Trainer gathers its loss and the predictions for its metrics, and its speeds count the samples of all ranks. The
mean of these numbers over ranks is right; a sum would count each of them once per rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from dist_wandb.settings.reduction import ALREADY_REDUCED, Reduce, Reduction


def without_second_sum(reduce: Reduce) -> Reduce:
    """Return the reductions, changed so that numbers that the Trainer has reduced are not summed over ranks.

    In a mapping, names and patterns other than ``"*"`` keep their reduction.
    """
    means: dict[str, Reduction] = dict.fromkeys(ALREADY_REDUCED, "mean")
    given: Mapping[str, Reduction] = reduce if isinstance(reduce, Mapping) else {}
    of_others = given.get("*") if isinstance(reduce, Mapping) else reduce
    if of_others not in ("sum", "nansum"):
        return reduce
    named = {name: kind for name, kind in given.items() if name != "*"}
    return {**named, **{name: kind for name, kind in means.items() if name not in named}, "*": of_others}
