"""The ledger of a unit: contributors that are gone, and flags of cells that were finished by assumption."""

from __future__ import annotations

import pytest

from dist_wandb.exchange.protocol.aggregates import Totals
from dist_wandb.exchange.protocol.cells import Key, Position, total_of
from dist_wandb.exchange.protocol.ledger import Assumed, Ledger
from dist_wandb.exchange.protocol.names import Names

RANK_1 = -(1.0 * 2**32 + 7.0)  # the origin of rank 1's seventh call


def key(step: int, name: str = "loss") -> Key:
    return Key(Position(0, step), name, 0)


def contributed(ranks: int, number: int | None = None) -> Totals:
    """The totals of that many ranks, which all contributed 1."""
    count = ranks if number is None else number
    return Totals(
        weighted=count, weight=count, plain=count, contributors=ranks, number=count, largest=1.0, smallest=1.0
    )


@pytest.fixture
def ledger() -> Ledger:
    names = Names(())
    names.learn(["loss", "acc"])
    return Ledger(4, names, 100)


def test_total_of_adds_up_the_ranks_per_position() -> None:
    assert total_of([([0, 1], 2), ([1, 3], 1), ([1], 4)]) == {0: 2, 1: 7, 3: 1}


def test_a_recount_marks_departed_contributors_as_gone(ledger: Ledger) -> None:
    cells = [ledger.open_cell(key(step)) for step in range(4)]
    for cell, ranks in zip(cells, (3, 3, 1, 3), strict=True):
        cell.totals = contributed(ranks)
    cells[3].corrects = True
    ledger.recount([([0, 1, 2], 1), ([1, 2], 1), ([1], 1)])
    assert [cell.gone for cell in cells] == [2, 0, 0, 0]


@pytest.mark.parametrize(
    ("absent", "most", "missing"),
    [(0, 3, 1), (1, 3, 1), (2, 3, 1), (2, 4, 2), (1, 4, 1), (9, 4, 2)],
)
def test_a_flag_has_an_upper_bound_of_missing_ranks(ledger: Ledger, absent: int, most: int, missing: int) -> None:
    ledger.resize(3, absent, doubts=False)
    ledger.names["loss"].most = most
    ledger.finished[key(5)] = contributed(2), RANK_1
    ledger.assumed[key(5)] = Assumed(0, RANK_1, 2)
    flagged = ledger.flag(key(5))
    assert flagged == (key(5), contributed(2), 7, True, missing, None)
    assert key(5) not in ledger.assumed


def test_a_flag_of_a_forgotten_or_empty_cell_has_no_value(ledger: Ledger) -> None:
    ledger.assumed[key(5)] = Assumed(0, RANK_1, 2)
    ledger.assumed[key(6)] = Assumed(1, RANK_1, 2)
    ledger.finished[key(6)] = contributed(2, number=0), RANK_1
    for step in (5, 6):
        assert ledger.flag(key(step)).totals == Totals()


def test_has_lost_stays_true_after_a_lost_rank_returns(ledger: Ledger) -> None:
    ledger.resize(4, 0, doubts=False)
    assert not ledger.members.has_lost
    ledger.resize(3, 1, doubts=False)
    assert ledger.members.has_lost
    ledger.resize(4, 0, doubts=False)
    assert ledger.members.has_lost


def test_cells_that_all_ranks_have_passed_are_no_longer_assumed(ledger: Ledger) -> None:
    for number, name in enumerate(("loss", "acc", "loss")):
        ledger.assumed[key(number, name)] = Assumed(number, -1.0 - number, 2)
    ledger.assumed.prove(key(9), 2, -9.0)
    assert list(ledger.assumed) == [key(2)], "only cells that were opened before"
    assert ledger.names["loss"].proven
    assert ledger.names["acc"].proven


def test_a_cell_does_not_prove_others_of_the_same_row(ledger: Ledger) -> None:
    ledger.assumed[key(3, "acc")] = Assumed(0, RANK_1, 2)
    ledger.assumed.prove(key(3), 5, RANK_1)
    assert list(ledger.assumed) == [key(3, "acc")]
