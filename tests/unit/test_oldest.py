"""The tests that `make test-oldest` leaves out."""

from __future__ import annotations

import re
from pathlib import Path

from oldest import DIFFERENT

UNIT = Path(__file__).parent


def versions(name: str) -> dict[str, str]:
    lines = (re.split("[ #;]", line)[0] for line in (UNIT.parents[1] / name).read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def test_packages_with_older_supported_versions_are_listed() -> None:
    newest, oldest = versions("constraints.txt"), versions("constraints-oldest.txt")
    different = {name for name in oldest if newest.get(name) not in (None, oldest[name])}
    assert {name.replace("-", "_") for name in different} == DIFFERENT
