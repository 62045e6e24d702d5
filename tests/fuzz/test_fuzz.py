"""Parsers of untrusted bytes: a fixed number of inputs each, and earlier findings.

``make fuzz MINUTES=10`` reads further ones, and stores what it finds in each target; CI tries that again.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzzing import FINDINGS, MIB, FindingError, Target, check, fuzz
from targets import TARGETS

_MINUTES = float(os.environ.get("MINUTES", "0"))  # of further inputs, which are others each time
_CHOSEN = os.environ.get("TARGETS", "").split() or list(TARGETS)
_BATCH = 500
_FOUND = sorted({path.parent.name for path in FINDINGS.glob("*/*.bin")})


@pytest.mark.parametrize("name", _CHOSEN)
def test_inputs_cause_no_findings(name: str) -> None:
    target = TARGETS[name]
    fuzz(target, target.examples)
    deadline = time.monotonic() + 60 * _MINUTES / len(_CHOSEN)
    while time.monotonic() < deadline:
        fuzz(target, _BATCH, number=secrets.randbits(32), findings=FINDINGS)


@pytest.mark.parametrize("name", TARGETS)
def test_valid_inputs_are_read(name: str) -> None:
    seeds = TARGETS[name].seeds()
    assert seeds
    for data in seeds:
        TARGETS[name].read(data)


@pytest.mark.parametrize("name", _FOUND)
def test_earlier_findings_stay_fixed(name: str) -> None:
    check(TARGETS[name], (path.read_bytes() for path in sorted((FINDINGS / name).glob("*.bin"))))


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
    with pytest.raises(FindingError, match=message):
        fuzz(target, 2000, findings=tmp_path)
    (path,) = tmp_path.glob("planted/*.bin")
    assert b"[" in path.read_bytes()
