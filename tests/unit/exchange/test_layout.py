"""Trees of groups: their groups, and that all members compute the same ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_wandb.exchange.transport import FAN_OUT, Tree, tree_of

NODES = st.lists(st.integers(-1, 6), min_size=2, max_size=60)


def trees_of(members: list[int], nodes: list[int], fan_out: int) -> dict[int, Tree]:
    return {member: tree_of(members, nodes, member, fan_out) for member in members}


@given(NODES, st.integers(2, 8), st.integers(0, 5))
def test_each_member_is_connected_to_the_first_member(nodes: list[int], fan_out: int, gap: int) -> None:
    members = [index * (gap + 1) + gap for index in range(len(nodes))]
    trees = trees_of(members, nodes, fan_out)
    assert len({tree.levels for tree in trees.values()}) == 1
    for member, tree in trees.items():
        assert [group.members[group.group_rank] for group in tree.path] == [member] * len(tree.path)
        assert [group.level for group in tree.path] == sorted({group.level for group in tree.path})
        assert tree.path[-1].level < tree.levels
        assert [group.group_rank for group in tree.path[:-1]] == [0] * (len(tree.path) - 1)
        assert (tree.path[-1].group_rank == 0) == (member == members[0])
        for group in tree.path:  # all members of each group see the same group
            assert 2 <= len(group.members) <= fan_out
            for other in group.members:
                assert group.members in [seen.members for seen in trees[other].path if seen.name == group.name]


@given(st.integers(2, 3000), st.integers(2, 32))
def test_the_number_of_levels_is_logarithmic(size: int, fan_out: int) -> None:
    tree = tree_of(range(size), [0] * size, size - 1, fan_out)
    assert fan_out ** (tree.levels - 1) < size <= fan_out**tree.levels


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
