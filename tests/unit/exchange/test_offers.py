"""What ranks tell each other before a round: as bytes and back, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_wandb.exchange.protocol.calls import MOST_VALUES, Block, Intent, Key, Offer, Outbox, blocks_of
from dist_wandb.exchange.protocol.contributors import NEVER

NAMES = [f"name {number}" for number in range(12)]
NUMBERS = {name: number for number, name in enumerate(NAMES)}

names = st.lists(st.sampled_from(NAMES), max_size=4, unique=True)
steps = st.none() | st.integers(-5, 5) | st.integers(-(10**20), 10**20)


def outbox_of(calls: list[tuple[list[str], int | None]]) -> Outbox:
    outbox = Outbox(100)
    for number, (those, step) in enumerate(calls):
        outbox.post(those, ([], []), step, number if step is None else step, 0.0)
    return outbox


def keys_of(block: Block, index: int) -> list[Key]:
    return [block.key(name, index) for name in range(len(block.names))]


offers = st.builds(
    Offer,
    blocks=st.lists(st.tuples(names, steps), max_size=20).map(lambda calls: blocks_of(outbox_of(calls).waiting)),
    old=st.integers(0, 20),
    more=st.integers(0, 10**6),
    intent=st.sampled_from(Intent),
    give_up_new=st.just(NEVER) | st.integers(0, 100),
    give_up_all=st.just(NEVER) | st.integers(0, 100),
    regroup=st.booleans(),
    interleaved=st.booleans(),
    published=st.integers(0, 5),
    new_names=st.lists(st.lists(st.text(), min_size=1), max_size=3),
    new_axes=st.lists(st.text(), max_size=2),
    counts=st.dictionaries(st.text(), st.integers(0, 9), max_size=3),
)


@given(offers)
@settings(deadline=None)
def test_an_offer_survives_encoding_and_decoding(offer: Offer) -> None:
    assert Offer.decoded(offer.encoded(NUMBERS), NAMES, {}) == offer


@given(st.lists(st.tuples(names, steps), max_size=30))
@settings(deadline=None)
def test_blocks_contain_the_cells_of_all_calls(calls: list[tuple[list[str], int | None]]) -> None:
    outbox = outbox_of(calls)
    blocks = blocks_of(outbox.waiting)
    rests = [(block, index) for block in blocks for index in range(block.number)]
    assert [keys_of(block, index) for block, index in rests] == [call.cells() for call in outbox.waiting]
    assert [block.x + index * block.x_stride for block, index in rests] == [call.x for call in outbox.waiting]
    for block, index in rests:
        assert keys_of(block.from_call(index), 0) == keys_of(block, index)


def test_a_burst_of_calls_is_short() -> None:
    outbox = outbox_of([(NAMES, step) for step in range(0, 3000, 3)])
    (block,) = blocks_of(outbox.waiting)
    assert (block.number, block.stride, block.key(0, 7)) == (1000, 3, Key(NAMES[0], 21, 0))
    assert len(Offer([block]).encoded(NUMBERS)) < 150


def test_equal_calls_are_decoded_once() -> None:
    blocks, known = blocks_of(outbox_of([(NAMES, 1)]).waiting), dict[bytes, Any]()
    first, second = (Offer.decoded(Offer(blocks, old=old).encoded(NUMBERS), NAMES, known) for old in (0, 1))
    assert first.blocks is second.blocks


STATE = [0, 0, 0, -1, -1, False, False, 0, [], [], {}]
WRONG = [0.5, 0.5, 7, None, 0.5, 0, 0, [], ["a"], 7, []]  # for each of its items


@pytest.mark.parametrize(
    "block",
    [
        [[0], [0], 0, 0, 1, 0],
        [[0], [0], 0, 0, 1, 0, 1, 0],
        [[0], [0], 0, 0, 1, 0, 0],
        [[0], [0], 0, 0, 1, 0, 1.5],
        [[0], [0], 0, 0, 1, 0, True],
        [[0], [0], 0, 0, 1, 0, MOST_VALUES + 2],
        [[0], [0], "0", 0, 1, 0, 1],
        [[0], [0], 0.5, 0, 1, 0, 1],
        [[0], [-1], 0, 0, 1, 0, 1],
        [[0], [0, 0], 0, 0, 1, 0, 1],
        [[0], [None], 0, 0, 1, 0, 1],
        [[0], 0, 0, 0, 1, 0, 1],
        [[12], [0], 0, 0, 1, 0, 1],
        [[-2], [0], 0, 0, 1, 0, 1],
        [[], [0], 0, 0, 1, 0, 1],
        [[0, 0], [0, 0], 0, 0, 1, 0, 1],
        [["0"], [0], 0, 0, 1, 0, 1],
        {},
        7,
    ],
)
def test_impossible_calls_are_refused(block: Any) -> None:
    assert Offer.decoded(f"{json.dumps(STATE)}\n[[[0], [0], 0, 0, 1, 0, 1]]".encode(), NAMES, {}).blocks
    with pytest.raises(ValueError, match="that are not an offer"):
        Offer.decoded(f"{json.dumps(STATE)}\n{json.dumps([block])}".encode(), NAMES, {})


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\n", b"[]\n[]", b"\xff", b"null\nnull", b"{}\n{}", b"[[]]\n[]", b"[" * 10**5,
        *(json.dumps([*STATE[:at], wrong, *STATE[at + 1 :]]).encode() + b"\n[]" for at, wrong in enumerate(WRONG)),
        *(json.dumps(state).encode() + b"\n[]" for state in ([*STATE, 0], STATE[:-1], [*STATE[:-1], {"a": "b"}])),
    ],
)  # fmt: skip
def test_other_bytes_are_refused(data: bytes) -> None:
    assert Offer.decoded(f"{json.dumps(STATE)}\n[]".encode(), NAMES, {}) == Offer([], new_names=[], new_axes=[])
    with pytest.raises(ValueError, match="that are not an offer"):
        Offer.decoded(data, NAMES, {})
