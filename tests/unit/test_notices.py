"""Warnings that are logged once each."""

from __future__ import annotations

import pytest

from dist_wandb.notices import Notices


def test_only_the_first_warning_of_each_kind_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    notices = Notices()
    for kind, message in (("a", "one"), ("b", "two"), ("a", "three")):
        notices.warn(kind, message)
    assert caplog.messages == ["dist_wandb: one", "dist_wandb: two"]
    assert [notices.is_first(kind) for kind in ("a", "c", "c")] == [False, True, False]
    assert Notices().is_first("a")
