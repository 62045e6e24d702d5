"""Names of single ranks."""

from __future__ import annotations

from dist_wandb.reading.runs import by_rank


def test_names_of_ranks_follow_the_plain_name() -> None:
    names = ["rank-10/val/acc", "a", "worker-1-rank-2/a", "rank-2/val/acc", "val/acc", "rank-1/only", "z"]
    assert by_rank(names) == [
        "a", "worker-1-rank-2/a", "rank-1/only", "val/acc", "rank-2/val/acc", "rank-10/val/acc", "z"
    ]  # fmt: skip
