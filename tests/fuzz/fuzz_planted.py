"""Parsers with deliberate faults, which fuzzing must find."""

from __future__ import annotations

import json
import os
import signal
import time

from fuzzing import MIB, Target


def _seeds() -> list[bytes]:
    return [b'{"a": 1}']


def _crashes(data: bytes) -> None:
    if b"[[" in data:
        os.kill(os.getpid(), signal.SIGSEGV)
    json.loads(data)


def _hangs(data: bytes) -> None:
    if b"[[" in data:
        time.sleep(3600)


def _is_slow(data: bytes) -> None:
    if b"[[" in data:
        began = time.thread_time()
        while time.thread_time() - began < 1.2:
            pass


def _takes_memory(data: bytes) -> None:
    if b"[[" in data:
        bytes(20 * MIB)


TARGETS = (
    Target("raises", json.loads, _seeds, (ValueError,)),  # deep lists
    Target("crashes", _crashes, _seeds, (ValueError, RecursionError), is_native=True),
    Target("hangs", _hangs, _seeds, is_native=True),
    Target("is-slow", _is_slow, _seeds),
    Target("takes-memory", _takes_memory, _seeds),
)
