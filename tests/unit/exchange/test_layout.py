"""Trees of groups: their groups, and that all members compute the same ones."""

from __future__ import annotations

import pytest

from dist_wandb.exchange.transport import FAN_OUT, tree_of


@pytest.mark.parametrize(
    ("ranks", "per_node", "sizes"),
    [
        (8, 4, [8]),
        (16, 8, [16]),
        (64, 8, [8, 8]),
        (1024, 8, [8, 11, 11]),
        (16384, 8, [8, 12, 12, 13]),
        (64, 64, [8, 8]),
    ],
)
def test_member_0_has_groups_of_the_expected_sizes(ranks: int, per_node: int, sizes: list[int]) -> None:
    path, levels = tree_of(range(ranks), [rank // per_node for rank in range(ranks)], 0, FAN_OUT)
    assert [len(group.members) for group in path] == sizes
    assert levels == len(sizes)


def test_groups_are_formed_within_nodes_and_then_between_their_first_ranks() -> None:
    nodes = [rank // 4 for rank in range(20)]
    path, _ = tree_of(range(20), nodes, 8, 5)
    assert [group.members for group in path] == [(8, 9, 10, 11), (0, 4, 8, 12, 16)]
    in_turns = [rank % 5 for rank in range(20)]
    path, _ = tree_of(range(20), in_turns, 2, 5)
    assert [group.members for group in path] == [(2, 7, 12, 17), (0, 1, 2, 3, 4)]
