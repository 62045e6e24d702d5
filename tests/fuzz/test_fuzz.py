"""Parsers of untrusted bytes: a fixed number of inputs each, and earlier findings."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzzing import FINDINGS, MIB, FindingError, Target, check, fuzz, keep
from run_fuzz import TARGETS, named

_FOUND = sorted({path.parent.name for path in FINDINGS.glob("*/*.bin")})


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_inputs_cause_no_findings(target: Target) -> None:
    fuzz(target, target.examples)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_valid_inputs_are_read(target: Target) -> None:
    seeds = target.seeds()
    assert seeds
    for data in seeds:
        target.read(data)


@pytest.mark.parametrize("name", _FOUND)
def test_earlier_findings_stay_fixed(name: str) -> None:
    check(named(name), (path.read_bytes() for path in sorted((FINDINGS / name).glob("*.bin"))))


# --- fuzzing itself ---------------------------------------------------------------------------------------------------


def is_slow(data: bytes) -> None:
    began = time.thread_time()
    while b"[[" in data and time.thread_time() - began < 1.2:
        pass


def takes_memory(data: bytes) -> None:
    if b"[[" in data:
        bytes(20 * MIB)


@pytest.mark.parametrize(
    ("read", "message"),
    [(json.loads, "RecursionError"), (takes_memory, "MiB of memory"), (is_slow, r"took 1\.\d s")],
    ids=["raises", "takes memory", "is slow"],
)
def test_planted_faults_are_found_and_stored(
    read: Callable[[bytes], object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target("planted", read, lambda: [b'{"a": 1}'], (ValueError,))
    if read is is_slow:  # a tenth of a second of processor time passes with each look at the clock
        looks = itertools.count()
        monkeypatch.setattr(time, "thread_time", lambda: next(looks) / 10)
    with pytest.raises(FindingError, match=message) as found:
        fuzz(target, 2000)
    assert b"[" in keep(found.value, target, tmp_path).read_bytes()
