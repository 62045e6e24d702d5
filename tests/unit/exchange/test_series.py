"""The texts on which ranks agree: of numbers and of attachments."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dist_wandb.exchange.attachments import Attachments, FusedGathers
from dist_wandb.exchange.attachments.metrics import FusedMetrics
from dist_wandb.exchange.protocol.calls import NUMBER, Key, Series, is_attached, series_of
from dist_wandb.payloads.gathers import Gathered
from dist_wandb.payloads.metrics import Snapshot

NAMES = st.text(st.characters(exclude_characters="\0"))


def attachments() -> Attachments:
    return Attachments(1, Counter(), {Snapshot: FusedMetrics, Gathered: FusedGathers}, merges=True)


def key(series: Series) -> Key:
    return Key(series.text, 1, 0)


@given(NAMES)
def test_the_series_of_a_number_is_its_name(name: str) -> None:
    assert Series(name).text == name
    assert series_of(name) == Series(name, NUMBER)
    assert not is_attached(name)


def test_attachments_are_exchanged_by_kind() -> None:
    metric, table, images = (key(Series(kind[0], kind)) for kind in ("metric", "table", "images"))
    due = attachments().due([table, metric, key(Series("loss")), images])
    assert [keys for _, keys in due] == [[metric], [table, images]]


def test_only_a_metric_needs_the_primarys_own_part() -> None:
    needs, kinds = attachments().needs_primary, ("metric", "table", "images", NUMBER)
    assert [needs(Series("a", kind).text) for kind in kinds] == [True, False, False, False]
