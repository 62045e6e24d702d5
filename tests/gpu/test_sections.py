"""Timed sections of work on a device: on a CUDA device by `make test-gpu`, else on a stand-in for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from devices import Device
from processes import wait_until

import dist_wandb

Rows = Callable[[], list[dict[str, Any]]]
WORK = 0.2  # seconds of the device


def test_the_time_of_the_device_counts(device: Device, session: dist_wandb.Session, rows: Rows) -> None:
    with device.no_waiting():
        with session.timed("host"):
            pass
        with session.timed("forward"):
            device.work(WORK)
        session.log({"loss": 1}, step=0)
    wait_until(device.is_idle, 60)
    session.log({"loss": 2}, step=1)
    first, second = rows()
    assert "time/forward" not in first
    assert WORK / 2 < second["time/forward"] < 20 * WORK
    assert {**first, **second}["time/host"] < WORK / 2


def test_a_section_that_ends_on_another_stream_is_counted(
    device: Device, session: dist_wandb.Session, rows: Rows
) -> None:
    with device.no_waiting():
        section = session.timed("forward")
        with device.occupied():
            section.__enter__()
            with device.stream():
                section.__exit__(None, None, None)
                session.log({"loss": 1}, step=0)
    wait_until(device.is_idle, 60)
    session.log({"loss": 2}, step=1)
    assert "time/forward" in rows()[1]
