"""Names of the numbers that the Trainer logs, which are the same on all ranks or count all of them already.

The Trainer gathers its loss and the predictions behind the metrics, and its speeds count the samples of all ranks.
Their mean over ranks is right, and a sum would count each number once for each rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from dist_wandb.settings.reduction import Reduce, Reduction

ALREADY_REDUCED = (
    *("train/loss", "train/grad_norm", "train/learning_rate", "train/epoch", "train/global_step"),
    *("train/num_input_tokens_seen", "train/train_*", "eval/*", "test/*"),
)


def without_second_sum(reduce: Reduce) -> Reduce:
    """The reductions, with which what the Trainer has brought together is not summed again.

    Args:
        reduce: As in `dist_wandb.init`. In a mapping what comes before ``"*"`` counts as it is.
    """
    means: dict[str, Reduction] = dict.fromkeys(ALREADY_REDUCED, "mean")
    given: Mapping[str, Reduction] = reduce if isinstance(reduce, Mapping) else {}
    of_others = given.get("*") if isinstance(reduce, Mapping) else reduce
    if of_others not in ("sum", "nansum"):
        return reduce
    named = {name: kind for name, kind in given.items() if name != "*"}
    return {**named, **{name: kind for name, kind in means.items() if name not in named}, "*": of_others}
