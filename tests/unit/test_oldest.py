"""The tests that `make test-oldest` leaves out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from oldest import DIFFERENT, shows_nothing_new

UNIT = Path(__file__).parent


def versions(name: str) -> dict[str, str]:
    lines = (re.split("[ #;]", line)[0] for line in (UNIT.parents[1] / name).read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def test_packages_with_older_supported_versions_are_listed() -> None:
    newest, oldest = versions("constraints.txt"), versions("constraints-oldest.txt")
    different = {name for name in oldest if newest.get(name) not in (None, oldest[name])}
    assert {name.replace("-", "_") for name in different} == DIFFERENT


@pytest.mark.source
@pytest.mark.parametrize(
    ("file", "left_out"),
    [
        ("exchange/test_rounds.py", True),
        ("session/test_session.py", True),  # with a stand-in for wandb
        ("exchange/test_rows.py", False),  # uses torchmetrics' metrics
        ("runs/test_current_server.py", False),  # of the room that calls wandb
    ],
)
def test_tests_that_concern_none_of_these_packages_are_left_out(file: str, left_out: bool) -> None:
    assert (UNIT / file).exists()
    assert shows_nothing_new(UNIT / file) is left_out
