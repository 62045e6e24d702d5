"""The benchmark of an exchange's growth, which uses the exchange directly, unlike the other benchmarks."""

from __future__ import annotations

from benchmarks import growth


def test_collectives_and_bytes_of_a_row_are_counted() -> None:
    cost = growth.cost_of(2, names=20, rows=3)
    assert cost is not None
    assert cost.collectives == 2
    assert 20 * 8 < cost.bytes < 20 * 200
    assert 0 < cost.milliseconds < 5000
