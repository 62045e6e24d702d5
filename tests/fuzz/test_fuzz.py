"""Parsers of untrusted bytes: a fixed number of inputs each, and earlier findings."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import fuzz_planted
import fuzzing
import pytest
from fuzz_targets import TARGETS, named
from fuzzing import FINDINGS, FindingError, Target, fuzz, judging, keep
from limits import Limit

_FOUND = sorted(FINDINGS.glob("*/*.bin"))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_inputs_cause_no_findings(target: Target) -> None:
    fuzz(target, target.examples)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_valid_inputs_are_read(target: Target) -> None:
    seeds = target.seeds()
    assert seeds
    for data in seeds:
        target.read(data)


@pytest.mark.parametrize("path", _FOUND, ids=[f"{path.parent.name}-{path.stem}" for path in _FOUND])
def test_earlier_findings_stay_fixed(path: Path) -> None:
    with judging(named(path.parent.name)) as judge:
        judge(path.read_bytes())


# --- fuzzing itself ---------------------------------------------------------------------------------------------------


def planted(name: str) -> Target:
    return next(target for target in fuzz_planted.TARGETS if target.name == name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "RecursionError"),
        ("crashes", "ended the process with -11"),
        ("takes-memory", "MiB of memory"),
    ],
)
def test_planted_faults_are_found_and_stored(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FindingError, match=message) as found:
        fuzz(planted(name), 2000)
    path = keep(found.value, planted(name), tmp_path)
    assert path.parent == tmp_path / name
    stored = path.read_bytes()
    assert b"[" in stored
    assert name != "takes-memory" or stored == b"[["  # made as small as possible


@pytest.fixture
def _quick_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a tenth of a second of processor time pass with each look at the clock: slow parsers take no real time."""
    looks = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: next(looks) / 10)


@pytest.mark.usefixtures("_quick_clock")
@pytest.mark.parametrize(("name", "message"), [("hangs", "was read for over"), ("is-slow", r"took 1\.\d s")])
def test_a_slow_input_is_a_finding(name: str, message: str, limit: Limit) -> None:
    limit(fuzzing, _SILENT=2.0)
    with judging(planted(name)) as judge, pytest.raises(FindingError, match=message):
        judge(b"[[")
